"""Which of a block's bits differ from the recorded ones: the cheapest set of flips that explains the difference of
two syndromes, in torch.

    minimise    sum over the flipped bits of c_j^2        c_j: an integer distance, so the sum is exact everywhere
    such that   XOR over the flipped bits of h_j = difference of the syndromes, and 1 .. max_flips bits are flipped

Flipped are only candidates: the first `num_candidates` of a block by (c, index) among those that the caller allows.
Ties go to the smaller set, then to the set whose ranks come first in lexicographic order. All sets of one size are
tried together, for the blocks in which the cheapest set of that size would beat what smaller sets have found. Only
blocks that differ come here. This module never knows what a bit means.
"""

from functools import lru_cache, reduce
from itertools import combinations
from operator import and_

import torch
from torch import Tensor

from tracefp4.coding import SyndromeCode
from tracefp4.ops.parity_checks import columns_of

_CHUNK = 1 << 21
"""Pairs of a block and a set that are tried at once: 16 MB a temporary."""
_CHUNK_ON_A_DEVICE = 1 << 25
"""The same on an accelerator: 256 MB a temporary, and few launches."""
_IMPOSSIBLE = 1 << 40
"""Above the cost of every set: at most 10 flips of (2^16)^2 each."""


def cheapest_flips(
    difference_F: Tensor, distance_FB: Tensor, is_allowed_FB: Tensor, code: SyndromeCode
) -> tuple[Tensor, Tensor]:
    """Return which bits of each of F blocks to flip.

    Args:
        difference_F: int64 [F], the XOR of the recorded and the own syndrome; not 0.
        distance_FB: int64 [F, code.length], c_j in [0, 2^16]; read where allowed.
        is_allowed_FB: bool [F, code.length].
        code: The code.

    Returns:
        (flips, found): bool [F, code.length], all False where no set explains the difference; and bool [F].
    """
    num_blocks, length = distance_FB.shape
    common = reduce(and_, code.columns)
    num_ranks = min(code.num_candidates, length)
    index_B = torch.arange(length, device=distance_FB.device)
    key_FB = (distance_FB * length + index_B).masked_fill_(~is_allowed_FB, _IMPOSSIBLE)
    key_FC, index_FC = key_FB.sort(1)
    key_FC, index_FC = key_FC[:, :num_ranks], index_FC[:, :num_ranks]
    cost_FC = torch.where(key_FC < _IMPOSSIBLE, (key_FC // length).square(), _IMPOSSIBLE)
    column_FC = columns_of(code, distance_FB.device)[index_FC]
    ranks_FM = torch.full((num_blocks, code.max_flips), num_ranks, device=distance_FB.device)
    best_F = torch.full_like(difference_F, _IMPOSSIBLE)
    at_once = _CHUNK if distance_FB.device.type == "cpu" else _CHUNK_ON_A_DEVICE
    for size in range(1, min(code.max_flips, num_ranks) + 1):
        is_open_F = cost_FC[:, :size].sum(1) < best_F
        if common:  # the bits that all columns have say whether the number of flips is odd
            is_open_F &= (difference_F & common != 0) == (size % 2 == 1)
        open_F = is_open_F.nonzero()[:, 0]
        sets_SM = _sets(num_ranks, size).to(distance_FB.device)
        for open_f in open_F.split(max(1, at_once // len(sets_SM))):
            set_f, best_f = _cheapest_set(difference_F[open_f], cost_FC[open_f], column_FC[open_f], sets_SM)
            is_better_f = best_f < best_F[open_f]
            better_f, set_f = open_f[is_better_f], set_f[is_better_f]
            best_F[better_f] = best_f[is_better_f]
            ranks_FM[better_f, :size] = sets_SM[set_f]
    nowhere_F1 = torch.full((num_blocks, 1), length, device=distance_FB.device)
    position_FM = torch.cat([index_FC, nowhere_F1], 1).gather(1, ranks_FM)
    flips = torch.zeros((num_blocks, length + 1), dtype=torch.bool, device=distance_FB.device)
    return flips.scatter_(1, position_FM, True)[:, :length], best_F < _IMPOSSIBLE


def _cheapest_set(
    difference_F: Tensor, cost_FC: Tensor, column_FC: Tensor, sets_SM: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the first of the cheapest sets of one size that explain each difference, and its cost."""
    cost_FS, column_FS = cost_FC[:, sets_SM[:, 0]], column_FC[:, sets_SM[:, 0]]
    for i in range(1, sets_SM.shape[1]):
        cost_FS += cost_FC[:, sets_SM[:, i]]
        column_FS ^= column_FC[:, sets_SM[:, i]]
    cost_FS.masked_fill_(column_FS != difference_F[:, None], _IMPOSSIBLE).clamp_(max=_IMPOSSIBLE)
    num_sets = len(sets_SM)
    best_F = (cost_FS * num_sets + torch.arange(num_sets, device=cost_FS.device)).amin(1)
    return best_F % num_sets, best_F // num_sets


@lru_cache(maxsize=64)
def _sets(num_ranks: int, size: int) -> Tensor:
    """Return all sets of `size` ranks in lexicographic order, int64 [S, size]."""
    return torch.tensor(list(combinations(range(num_ranks), size)), dtype=torch.int64, device="cpu")

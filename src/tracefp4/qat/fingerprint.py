"""A 64-bit fingerprint of a tensor's bits, to notice writes that torch's version counter does not see.

    h = sum_r b_r * sum_c a_c * mix(word_rc)  (mod 2^64),  mix(w) = w xor (w >> 29),  a and b odd, fixed, pseudo-random

word_rc are the bits of the tensor, eight bytes at a time, rows first. mix carries the upper bits (signs above all,
whose products with odd numbers are all 2^63) down to where they count. One changed word always changes h; any other
change keeps it with a probability of about 2^-63, moved rows and columns included. It is one integer matrix-vector
product, a few rows at a time. It guards caches within a process and is never stored.
"""

from functools import lru_cache

import torch
from torch import Tensor

WORDS_AT_ONCE = 1 << 17
"""A megabyte: what is mixed stays in the processor's cache."""
WORDS_AT_ONCE_ON_A_DEVICE = 1 << 24
"""128 megabytes: few launches, and no temporary as large as the weights of a large layer."""


def fingerprint(x: Tensor) -> int:
    """Return the fingerprint of a tensor's bits.

    Args:
        x: Any dtype, at least one dimension; a row (last dimension) must fill a whole number of 8 bytes, as the rows
            of every FP4 matrix do.

    Returns:
        An int64.
    """
    words = x.detach().contiguous().view(torch.int64)
    if words.numel() == 0:
        return 0
    rows = words.view(-1, words.shape[-1])
    by_column = _multipliers(rows.shape[1], 1, x.device)
    at_once = WORDS_AT_ONCE if x.device.type == "cpu" else WORDS_AT_ONCE_ON_A_DEVICE
    parts = rows.split(max(1, at_once // rows.shape[1]))
    by_row = torch.cat([_product((part >> 29).bitwise_xor_(part), by_column) for part in parts])
    return int(_product(by_row, _multipliers(rows.shape[0], 2, x.device)))


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b for int64, modulo 2^64; only a CPU has integer matrix products."""
    return a @ b if a.device.type == "cpu" else (a * b).sum(-1)


@lru_cache(maxsize=16)
def _multipliers(count: int, seed: int, device: torch.device) -> Tensor:
    """Return `count` fixed odd int64 numbers; another seed gives others."""
    generator = torch.Generator().manual_seed(seed)
    limits = torch.iinfo(torch.int64)
    found = torch.randint(limits.min, limits.max, (count,), generator=generator, dtype=torch.int64)
    return found.bitwise_or_(1).to(device)

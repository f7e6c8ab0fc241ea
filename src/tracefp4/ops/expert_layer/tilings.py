"""How the products of an expert layer are cut, and which of their three shapes runs.

`few.cu` while an expert has few tokens and time goes to the weights' bytes, `many.cu` beyond, and `piped.cu` for the
most tokens on GPUs of sm_90. It depends on shapes and on the GPU alone.
"""

from functools import lru_cache
from typing import NamedTuple

import torch


class Tiling(NamedTuple):
    """How the products are cut."""

    kind: str
    """`few`, `many` or `piped`: the file."""
    token_tiles: int
    """Tiles of 8 tokens that a block multiplies with what it has read of the weights."""
    row_tiles: int
    """Tiles of 16 rows of a warp (even: half gate, half up)."""
    warps: int
    """Warps of a block, at most: over K in `few`, over rows in the others."""
    stages: int
    """Groups of 64 columns under way at a time, at most."""
    blocks: int = 1
    """Thread blocks that a multiprocessor must have room for: it bounds the registers of a thread."""

    @property
    def in_steps(self) -> bool:
        """Whether products take activations in the order of steps of 16 columns; see `device.Rows`."""
        return self.kind == "piped"


TILINGS = (
    (1, Tiling("few", 1, 4, 4, 2, 2)),
    (5, Tiling("many", 1, 2, 4, 4, 4)),
    (11, Tiling("many", 2, 4, 4, 3, 2)),
    (18, Tiling("many", 3, 4, 4, 3, 2)),
    (30, Tiling("many", 4, 4, 4, 3, 2)),
    (36, Tiling("many", 5, 4, 4, 3, 2)),
    (46, Tiling("many", 6, 4, 4, 3, 2)),
)
"""The fastest tiling on an H200 up to a mean number of tokens per expert in use. In `few` every block of 64 rows reads
its tokens from the second-level cache; `many` shares them among 128 or 256 rows. One block for all tokens of an expert
costs less than two that both expand its weights, so the bounds lie where few experts have more (Poisson)."""
FEWEST, MOST = TILINGS[0][1], Tiling("many", 8, 4, 4, 3)
PIPED = Tiling("piped", 16, 2, 8, 8)
"""Of more tokens than the last bound, where a GPU has its instructions; elsewhere those are MOST."""


def tiling_of(num_pairs: int, num_experts: int, device: torch.device) -> Tiling:
    """Return how the products of so many pairs are cut."""
    in_use = min(num_pairs, num_experts)
    fitting = (tiling for most, tiling in TILINGS if num_pairs <= most * in_use)
    return next(fitting, PIPED if _has_warpgroups(device) else MOST)


@lru_cache(maxsize=64)
def _has_warpgroups(device: torch.device) -> bool:
    """Whether a device has the instructions of piped.cu."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def cut_of(tiling: Tiling, groups: int) -> tuple[int, int]:
    """Return the warps and stages of a product over so many groups of 64 columns."""
    if tiling.kind != "few":
        return tiling.warps, tiling.stages
    # as many warps as have about the same number of groups
    fitting = (n for n in (8, 4, 2, 1) if n <= tiling.warps and -(-groups // n) * n * 4 <= groups * 5)
    warps = next(fitting)
    return warps, min(tiling.stages, -(-groups // warps))


def fewest_groups(tiling: Tiling, groups: int) -> int:
    """Return the fewest groups that take the kernels of so many, and go around their stages where they do."""
    cut = cut_of(tiling, groups)
    around = (cut[0] if tiling.kind == "few" else 1) * cut[1] + 1
    return next(n for n in range(min(around, groups), groups + 1) if cut_of(tiling, n) == cut)

"""Which bf16 values lie near the cell of their alternative (`cells.py`), as kernel.cu looks it up for two at a time.

A magnitude x under a decode scale s = 2^e (1 + i / 8), over 2^e, is a bf16 number y. With z = min(y / (1 + i / 8), 6)
in float32, m its nearest code and `low`, `high` the ends of m's cell,

    x is near   <=>   z - low <= band or high - z <= band, in float32   <=>   y < below[i, m] or y > above[i, m]

since z grows with y. The cell of 0 has no lower end, that of 7 no upper one. This module never sees x.
"""

from functools import lru_cache

import torch
from torch import Tensor

_EDGES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_NUMBERS = 0x41C0
"""bf16 numbers below 24, from 0 on; the kernel takes larger ones for that, and z is 6 from 11.25 on."""
_NEVER_BELOW, _NEVER_ABOVE, _ALWAYS_ABOVE = 0, 0x7F80, 0xBF80
"""Bounds that no number is below, none is above, and all are above: 0, infinity, -1."""


@lru_cache(maxsize=1024)
def near_bounds(band: float, device: torch.device) -> Tensor:
    """Return the bounds between near values and others.

    Args:
        band: How near; finite, at least 0, rounded to float32.
        device: Where; the first call for a band and a device copies, later ones return the same tensor.

    Returns:
        int32 [8, 8], a row for each i: the bytes of below[i, 0..7], the low ones and then the high ones, and likewise
        those of `above`, four a number, m ascending from the lowest byte.
    """
    y = (
        torch.arange(_NUMBERS + 1, dtype=torch.int32, device="cpu")
        .to(torch.int16)
        .view(torch.bfloat16)
        .float()
    )
    scale_I1 = 1 + torch.arange(8, device="cpu").float()[:, None] / 8
    z_IY = (y / scale_I1).clamp_(max=6.0)
    limit = torch.tensor(band, dtype=torch.float32, device="cpu")
    below, above = [torch.full((8,), _NEVER_BELOW, device="cpu")], []
    for edge in _EDGES:  # between m - 1 and m
        below.append((z_IY - edge <= limit).sum(1))
        num_far = (edge - z_IY > limit).sum(1)
        above.append(torch.where(num_far > 0, num_far - 1, _ALWAYS_ABOVE))
    above.append(torch.full((8,), _NEVER_ABOVE, device="cpu"))
    bounds_ICM = torch.stack([torch.stack(below, 1), torch.stack(above, 1)], 1)
    bytes_ICHM = torch.stack([bounds_ICM & 0xFF, bounds_ICM >> 8], 2).to(torch.uint8)
    return bytes_ICHM.view(8, 32).view(torch.int32).to(device)

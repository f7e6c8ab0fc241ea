"""Noise without state: one uniform number from a key and a position, by hashing.

A generator's numbers depend on how many were drawn before, hence on the batch; a hash depends on its inputs alone.
Source: the splitmix64 sequence and finalizer (Steele, Lea, Flood 2014).
"""

import torch
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB


def uniform(keys: Tensor, positions: Tensor) -> Tensor:
    """Return one number in [0, 1) per row, float64 with 53 random bits.

    Args:
        keys: int64 [N], one per sequence.
        positions: int64 [N], position of the token to be drawn.

    int64 products wrap as unsigned ones do, so the bits are splitmix64's.
    """
    state = keys + positions * signed(GOLDEN)
    state = (state ^ _shift(state, 30)) * signed(MIX_1)
    state = (state ^ _shift(state, 27)) * signed(MIX_2)
    state = state ^ _shift(state, 31)
    return _shift(state, 11).to(torch.float64) * 2.0**-53


def signed(value: int) -> int:
    """Return the int64 with the bits of an unsigned 64-bit integer."""
    return value - (1 << 64) if value >> 63 else value


def _shift(state: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64."""
    return (state >> bits) & ((1 << (64 - bits)) - 1)

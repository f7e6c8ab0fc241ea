"""Noise without state: one uniform number from (seed, prompt index, sample index, position), by hashing.

A generator's numbers depend on how many were drawn before, hence on the batch; a hash depends on its inputs alone.
Source: the splitmix64 sequence and finalizer (Steele, Lea, Flood 2014).
"""

import torch
from torch import Tensor

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB


def noise_key(*, seed: int, prompt_index: int, sample_index: int) -> int:
    """Return the signed 64-bit key of one sequence's noise stream; equal inputs, equal key."""
    key = 0
    for part in (seed, prompt_index, sample_index):
        key = _mix((key ^ (part & MASK)) + GOLDEN & MASK)
    return _signed(key)


def uniform(keys: Tensor, positions: Tensor) -> Tensor:
    """Return one number in [0, 1) per row, float64 with 53 random bits.

    Args:
        keys: int64 [N], from `noise_key`.
        positions: int64 [N], position of the token to be drawn.

    int64 products wrap as unsigned ones do, so the bits are splitmix64's.
    """
    state = keys + positions * _signed(GOLDEN)
    state = (state ^ _shift(state, 30)) * _signed(MIX_1)
    state = (state ^ _shift(state, 27)) * _signed(MIX_2)
    state = state ^ _shift(state, 31)
    return _shift(state, 11).to(torch.float64) * 2.0**-53


def _mix(state: int) -> int:
    state = (state ^ (state >> 30)) * MIX_1 & MASK
    state = (state ^ (state >> 27)) * MIX_2 & MASK
    return state ^ (state >> 31)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _shift(state: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64."""
    return (state >> bits) & ((1 << (64 - bits)) - 1)

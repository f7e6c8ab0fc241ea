"""Keys of noise without state: one per sequence, of what identifies it. `ops/sample/noise.py` makes numbers."""

from tracefp4.ops.sample.noise import GOLDEN, MIX_1, MIX_2, signed

MASK = (1 << 64) - 1


def noise_key(*, seed: int, prompt_index: int, sample_index: int) -> int:
    """Return the signed 64-bit key of one sequence's noise stream; equal inputs, equal key."""
    key = 0
    for part in (seed, prompt_index, sample_index):
        key = _mix((key ^ (part & MASK)) + GOLDEN & MASK)
    return signed(key)


def _mix(state: int) -> int:
    state = (state ^ (state >> 30)) * MIX_1 & MASK
    state = (state ^ (state >> 27)) * MIX_2 & MASK
    return state ^ (state >> 31)

"""Outer exponents and block scales against exact arithmetic."""

import itertools
import math
from fractions import Fraction

import pytest
import torch
from tests.assertions import assert_bitwise
from tests.formats import rational
from tests.formats.test_grid import FINITE_BF16, neighbourhood

from tracefp4.formats.scaling import (
    block_amax,
    decode_scales,
    encode_block_scales,
    pow2_exponent,
    power_of_two,
)
from tracefp4.formats.schemes import NVFP4_ROW_POW2

MAGNITUDES = FINITE_BF16[~FINITE_BF16.signbit()]


def exact_exponent(amax: float) -> int:
    """Return k by comparing fractions, starting from a float guess."""
    if amax == 0:
        return 0
    k = math.frexp(amax)[1] - 14
    while Fraction(amax) > 2688 * Fraction(2) ** k:
        k += 1
    return max(-110, min(116, k))


def test_exponent_of_every_bf16_magnitude():
    expected = torch.tensor([exact_exponent(v) for v in MAGNITUDES.tolist()], dtype=torch.int8)
    assert_bitwise(pow2_exponent(MAGNITUDES), expected)


@pytest.mark.parametrize("power", [-110, -109, -1, 0, 1, 115, 116])
def test_exponent_around_its_boundaries(power):
    amax = neighbourhood(2688.0 * 2.0**power, 5)
    amax = amax[amax >= 0]
    assert_bitwise(
        pow2_exponent(amax), torch.tensor([exact_exponent(v) for v in amax.tolist()], dtype=torch.int8)
    )


def test_powers_of_two_are_exact():
    k = torch.arange(-126, 127, dtype=torch.int8)
    assert power_of_two(k).tolist() == [2.0**n for n in range(-126, 127)]
    assert power_of_two(k, negate=True).tolist() == [2.0**-n for n in range(-126, 127)]


def test_block_scale_of_every_bf16_magnitude_at_fixed_exponents():
    for k, every in ((0, 1), (-110, 19), (-3, 19), (5, 19), (116, 19)):
        amax, exponent = MAGNITUDES[::every], torch.tensor(k, dtype=torch.int8)
        expected = [rational.block_scale_byte([v], k) for v in amax.tolist()]
        assert_bitwise(
            encode_block_scales(amax, exponent, NVFP4_ROW_POW2), torch.tensor(expected, dtype=torch.uint8)
        )


def test_block_scales_around_ties_of_float32_maxima():
    """amax = 6 * (midpoint of two scales), and the float32 numbers next to it, for every pair of neighbours."""
    grid = rational.E4M3_GRID
    centre = torch.tensor([float(3 * (low + high)) for low, high in itertools.pairwise(grid)])
    amax = (centre.view(torch.int32)[:, None] + torch.arange(-3, 4, dtype=torch.int32)).view(torch.float32)
    expected = [[rational.block_scale_byte([v], 0) for v in row] for row in amax.tolist()]
    got = encode_block_scales(amax, torch.tensor(0, dtype=torch.int8), NVFP4_ROW_POW2)
    assert_bitwise(got, torch.tensor(expected, dtype=torch.uint8))


def test_decode_scales_is_exact_for_all_bytes_and_exponents():
    bytes_ = torch.arange(127, dtype=torch.uint8)
    exponent = torch.arange(-110, 117, dtype=torch.int8)
    got = decode_scales(bytes_.expand(len(exponent), -1), exponent, NVFP4_ROW_POW2)
    for k, row in zip(exponent.tolist(), got.tolist(), strict=True):
        assert row == [float(v * Fraction(2) ** k) for v in rational.E4M3_GRID]
    assert_bitwise(decode_scales(bytes_, exponent[0], NVFP4_ROW_POW2, torch.bfloat16).float(), got[0])
    assert_bitwise(decode_scales(bytes_, exponent[-1], NVFP4_ROW_POW2, torch.bfloat16).float(), got[-1])


def test_spc_1_block_maxima_find_the_blocks_that_are_not_finite():
    x = torch.ones(2, 64)
    x[0, 3], x[0, 20], x[1, 63] = float("nan"), float("inf"), -float("inf")
    amax, finite = block_amax(x.abs(), 16)
    assert finite.tolist() == [[False, False, True, True], [True, True, True, False]]
    assert amax.tolist() == finite.float().tolist()
    assert block_amax(torch.ones(2, 64), 16)[1] is None

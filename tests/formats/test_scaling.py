"""Outer exponents and block scales against exact arithmetic."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.assertions import assert_bitwise
from tests.formats import rational
from tests.formats.test_grid import FINITE_BF16, neighbourhood

from tracefp4.errors import FormatError
from tracefp4.formats.scaling import (
    KV_HEADROOM_EXPONENT,
    block_amax,
    calibrate_exponent,
    decode_scales,
    encode_block_scales,
    pow2_exponent,
    power_of_two,
)

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
        assert_bitwise(encode_block_scales(amax, exponent), torch.tensor(expected, dtype=torch.uint8))


@given(st.integers(0, 126), st.integers(-3, 3))
def test_block_scales_around_ties_of_float32_maxima(byte, steps):
    """amax = 6 * (midpoint of two scales), and the float32 numbers next to it."""
    low, high = rational.E4M3_GRID[max(0, byte - 1)], rational.E4M3_GRID[byte]
    centre = torch.tensor([float(3 * (low + high))])
    amax = (centre.view(torch.int32) + steps).clamp(min=0).view(torch.float32)
    expected = torch.tensor([rational.block_scale_byte(amax.tolist(), 0)], dtype=torch.uint8)
    assert_bitwise(encode_block_scales(amax, torch.tensor(0, dtype=torch.int8)), expected)


def test_decode_scales_is_exact_for_all_bytes_and_exponents():
    bytes_ = torch.arange(127, dtype=torch.uint8)
    exponent = torch.arange(-110, 117, dtype=torch.int8)
    got = decode_scales(bytes_.expand(len(exponent), -1), exponent)
    for k, row in zip(exponent.tolist(), got.tolist(), strict=True):
        assert row == [float(v * Fraction(2) ** k) for v in rational.E4M3_GRID]
    assert_bitwise(decode_scales(bytes_, exponent[0], torch.bfloat16).float(), got[0])
    assert_bitwise(decode_scales(bytes_, exponent[-1], torch.bfloat16).float(), got[-1])


def test_spc_1_block_maxima_find_the_blocks_that_are_not_finite():
    x = torch.ones(2, 64)
    x[0, 3], x[0, 20], x[1, 63] = float("nan"), float("inf"), -float("inf")
    amax, finite = block_amax(x.abs(), 16)
    assert finite.tolist() == [[False, False, True, True], [True, True, True, False]]
    assert amax.tolist() == finite.float().tolist()
    assert block_amax(torch.ones(2, 64), 16)[1] is None


def test_kvq_calibration_leaves_headroom_and_keeps_small_values_normal():
    x = torch.randn(64, 32) * 0.01
    k = calibrate_exponent(x)
    largest = x.abs().max().item() / 6 / 2.0**k
    assert 448 / 2 ** (KV_HEADROOM_EXPONENT + 1) < largest <= 448 / 2**KV_HEADROOM_EXPONENT
    assert x.abs().view(64, 2, 16).amax(-1).min().item() / 6 / 2.0**k > 2.0**-6
    assert calibrate_exponent(x.double()) == calibrate_exponent(x.bfloat16().float()) == k


@given(st.integers(-80, 80))
def test_calibration_follows_powers_of_two(power):
    x = torch.linspace(-1, 1, 32)
    assert calibrate_exponent(x * 2.0**power) == calibrate_exponent(x) + power


@pytest.mark.parametrize(
    ("sample", "message"), [(torch.zeros(0, 16), "empty"), (torch.tensor([float("nan"), 1]), "NaN")]
)
def test_calibration_refuses_what_it_cannot_measure(sample, message):
    with pytest.raises(FormatError, match=message):
        calibrate_exponent(sample)


def test_calibration_of_zeros_is_the_neutral_exponent():
    assert calibrate_exponent(torch.zeros(4, 16)) == 0

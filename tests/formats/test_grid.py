"""Rounding to E2M1 and E4M3: golden values, then every code, every byte and every bf16 number, then float32
boundaries."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.assertions import assert_bitwise
from tests.formats import rational
from tests.golden import spec_e2m1, spec_e4m3

from tracefp4.formats.element import E2M1, E4M3
from tracefp4.formats.grid import (
    bracket_e2m1,
    code_to_magnitude,
    decode_e2m1,
    decode_e4m3,
    encode_e4m3,
    magnitude_to_code,
    round_e2m1,
)

ALL_BF16 = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
FINITE_BF16 = ALL_BF16[ALL_BF16.isfinite()]
E2M1_BOUNDARIES = sorted({*(abs(v) for v in spec_e2m1.VALUES), *spec_e2m1.TIES, 2.125, 4.25})


def neighbourhood(centre: float, radius: int) -> torch.Tensor:
    """Return the float32 numbers within `radius` steps of a positive centre, both signs."""
    bits = torch.tensor(centre).view(torch.int32) + torch.arange(-radius, radius + 1, dtype=torch.int32)
    magnitude = bits.clamp(min=0).view(torch.float32)
    return torch.cat([magnitude, -magnitude])


Z_SAMPLES = torch.cat([neighbourhood(centre, 300) for centre in E2M1_BOUNDARIES if centre > 0])


def expected_code(value: float) -> int:
    """Return the E2M1 code of a finite value by exact arithmetic."""
    return rational.nearest_even(abs(Fraction(value)), rational.E2M1_GRID) + 8 * str(value).startswith("-")


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(("magnitude", "code"), [*spec_e2m1.TIES.items(), *spec_e2m1.ROUNDED.items()])
def test_rnd_1_and_rnd_5_golden_roundings(magnitude, code, sign):
    assert round_e2m1(torch.tensor([sign * magnitude])).item() == code + (8 if sign < 0 else 0)


def test_all_codes_decode_and_encode_to_themselves():
    codes = torch.arange(16, dtype=torch.uint8)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        values = decode_e2m1(codes, dtype)
        assert_bitwise(values, torch.tensor(spec_e2m1.VALUES, dtype=dtype))
        assert_bitwise(round_e2m1(values), codes)
    magnitudes = code_to_magnitude(torch.arange(8, dtype=torch.int8))
    assert_bitwise(magnitudes, torch.tensor(spec_e2m1.VALUES[:8]))
    assert_bitwise(magnitude_to_code(magnitudes), torch.arange(8, dtype=torch.int8))


def test_every_bf16_number_rounds_to_e2m1_exactly():
    expected = torch.tensor([expected_code(v) for v in FINITE_BF16.tolist()], dtype=torch.uint8)
    assert_bitwise(round_e2m1(FINITE_BF16), expected)


@pytest.mark.parametrize("centre", [v for v in E2M1_BOUNDARIES if v > 0])
def test_float32_numbers_around_every_boundary_round_exactly(centre):
    z = neighbourhood(centre, 300)
    expected = torch.tensor([expected_code(v) for v in z.tolist()], dtype=torch.uint8)
    assert_bitwise(round_e2m1(z), expected)


@pytest.mark.slow
def test_every_float32_magnitude_of_the_grid_range_rounds_like_thresholds():
    """All 2^23 numbers of each binade from 2^-4 to 8, against closed or open thresholds (0 and 2 own their
    ties)."""
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    for exponent in range(123, 130):
        z = ((exponent << 23) + torch.arange(2**23, dtype=torch.int32)).view(torch.float32)
        codes = torch.bucketize(z, ties)  # counts thresholds < z: a tie goes down
        for tie in (0.75, 1.75, 3.5):  # odd code below: the tie goes up
            codes += z == tie
        assert_bitwise(round_e2m1(z), codes.to(torch.uint8))


def test_special_values_stay_inside_the_format():
    z = torch.tensor([float("inf"), -float("inf"), float("nan"), 0.0, -0.0, -1e-45])
    assert round_e2m1(z).tolist()[:2] == [7, 15]
    assert round_e2m1(z)[2].item() & 7 == 0
    assert round_e2m1(z).tolist()[3:] == [0, 8, 8]


@given(st.floats(-8, 8, width=32), st.floats(-8, 8, width=32))
def test_rounding_is_monotone_and_odd(a, b):
    low, high = sorted((a, b))
    values = decode_e2m1(round_e2m1(torch.tensor([low, high, -low, -high])))
    assert values[0] <= values[1]
    assert_bitwise(values[2:], -values[:2])


@pytest.mark.parametrize("shape", [(0,), (1,), (3, 5), (0, 16)])
def test_any_shape_and_no_change_to_the_input(shape):
    z = torch.randn(shape) * 9
    kept = z.clone()
    assert round_e2m1(z).shape == shape
    assert_bitwise(z, kept)


def test_float64_rounds_through_its_float32_value():
    z = FINITE_BF16.double()
    assert_bitwise(round_e2m1(z), round_e2m1(FINITE_BF16))


@pytest.mark.parametrize(("value", "byte"), spec_e4m3.CASTS.items())
def test_ovf_2_e4m3_casts_saturate(value, byte):
    assert encode_e4m3(torch.tensor([value])).item() == byte


def test_ovf_2_the_cast_never_sees_a_value_above_448(monkeypatch):
    """Some versions saturate in the cast and some give NaN, so the bytes alone cannot show that we clamp."""
    seen, cast = [], torch.Tensor.to

    def watched(self, *args, **kwargs):
        if torch.float8_e4m3fn in args:
            seen.append(self.abs().max().item())
        return cast(self, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", watched)
    encode_e4m3(torch.tensor([1e6, -1e6, float("inf"), 449.0]))
    assert seen == [448.0]


def test_all_e4m3_bytes_decode_to_the_table_and_encode_to_themselves():
    bytes_ = torch.arange(256, dtype=torch.uint8)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        values = decode_e4m3(bytes_, dtype)
        expected = torch.tensor(E4M3.values(), dtype=dtype)
        keep = ~expected.isnan()
        assert values.isnan().tolist() == expected.isnan().tolist()
        assert_bitwise(values[keep], expected[keep])
        assert_bitwise(encode_e4m3(values)[keep], bytes_[keep])


def test_every_bf16_number_rounds_to_e4m3_exactly():
    expected = [
        rational.nearest_even(abs(Fraction(v)), rational.E4M3_GRID) + 128 * str(v).startswith("-")
        for v in FINITE_BF16.tolist()
    ]
    assert_bitwise(encode_e4m3(FINITE_BF16), torch.tensor(expected, dtype=torch.uint8))


def test_bracket_holds_the_value_for_every_bf16_number():
    lower, upper = bracket_e2m1(FINITE_BF16)
    expected = [rational.bracket(abs(Fraction(v))) for v in FINITE_BF16.tolist()]
    assert_bitwise(lower, torch.tensor([low for low, _ in expected], dtype=torch.int8))
    assert_bitwise(upper, torch.tensor([high for _, high in expected], dtype=torch.int8))


def test_neighbouring_codewords_differ_in_the_mantissa_bit():
    z = torch.linspace(-6, 6, 4097)
    lower, upper = bracket_e2m1(z)
    inside = lower != upper
    assert bool(((lower ^ upper)[inside] & 1).bool().all()) and int(inside.sum()) > 4000


def test_rational_grids_are_the_formats():
    assert [float(v) for v in rational.E2M1_GRID] == E2M1.values()[:8]
    assert [float(v) for v in rational.E4M3_GRID] == E4M3.values()[:127]

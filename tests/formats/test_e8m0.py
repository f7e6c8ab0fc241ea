"""E8M0 scales: the four rules against their definitions in exact arithmetic, for every bf16 number and around every
threshold in float32."""

import math
from fractions import Fraction

import pytest
import torch
from tests.assertions import assert_bitwise
from tests.formats.test_grid import FINITE_BF16, neighbourhood
from tests.golden import spec_e8m0

from tracefp4.formats.e8m0 import decode_e8m0, encode_e8m0_scales
from tracefp4.formats.element import E8M0
from tracefp4.formats.order import ScaleRule

RULES = [ScaleRule.FLOOR, ScaleRule.EVEN, ScaleRule.RCEIL, ScaleRule.CEIL]
MAGNITUDES = FINITE_BF16[~FINITE_BF16.signbit()]

# amax -> exponent e under FLOOR, EVEN, RCEIL, CEIL, from the definitions by hand.
GOLDEN = {
    1.0: (-2, -2, -2, -2),  # 1 / 6 = 2^-2.58
    1.0000001192092896: (-2, -2, -2, -1),
    1.5: (-2, -2, -2, -1),  # 1.5 / 6 = 2^-2 exactly
    1.5000001192092896: (-2, -2, -1, -1),
    1.7499998807907104: (-2, -2, -1, -1),
    1.75: (-2, -1, -1, -1),  # the tie between 1.5 and 2: even
    2.0: (-1, -1, -1, -1),
    6.0: (0, 0, 0, 1),
    7.0: (0, 1, 1, 1),
    448.0: (6, 7, 7, 7),
}


def exact_byte(amax: float, rule: ScaleRule) -> int:
    """Return the byte by the definition of the rule, on fractions."""
    if amax == 0:
        return 0
    value = Fraction(amax)
    floor = math.frexp(amax)[1] - 1
    if rule is ScaleRule.FLOOR:
        e = floor - 2
    elif rule is ScaleRule.EVEN:
        mantissa_steps = round(
            value / Fraction(2) ** (floor - 1)
        )  # 2, 3 or 4 halves; Python rounds half to even
        e = floor + (mantissa_steps == 4) - 2
    elif rule is ScaleRule.RCEIL:
        e = floor - 2 if value <= 6 * Fraction(2) ** (floor - 2) else floor - 1
    else:
        e = floor - 2 if value == Fraction(2) ** floor else floor - 1
    return max(-127, min(127, e)) + 127


@pytest.mark.parametrize("power", [-120, -1, 0, 5, 110])
@pytest.mark.parametrize(("amax", "exponents"), GOLDEN.items())
def test_ovf_4_golden_exponents(amax, exponents, power):
    got = [encode_e8m0_scales(torch.tensor([amax * 2.0**power]), rule).item() - 127 - power for rule in RULES]
    assert tuple(got) == exponents


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_every_bf16_magnitude(rule):
    expected = torch.tensor([exact_byte(v, rule) for v in MAGNITUDES.tolist()], dtype=torch.uint8)
    assert_bitwise(encode_e8m0_scales(MAGNITUDES, rule), expected)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
@pytest.mark.parametrize("power", [-126, -125, -124, -1, 0, 126])
def test_float32_numbers_around_every_threshold(rule, power):
    centres = [fraction * 2.0**power for fraction in (1.0, 1.25, 1.5, 1.75)]
    amax = torch.cat([neighbourhood(centre, 20) for centre in centres])
    amax = amax[~amax.signbit()]
    expected = torch.tensor([exact_byte(v, rule) for v in amax.tolist()], dtype=torch.uint8)
    assert_bitwise(encode_e8m0_scales(amax, rule), expected)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_ovf_6_the_ends_of_the_range_are_numbers(rule):
    amax = torch.tensor([0.0, 1e-45, 2.0**-126, 3.4028234663852886e38])
    assert encode_e8m0_scales(amax, rule).tolist() == [exact_byte(v, rule) for v in amax.tolist()]
    assert encode_e8m0_scales(amax, rule).tolist()[:3] == [0, 0, 0]


def test_all_bytes_decode_to_the_table():
    values = decode_e8m0(torch.arange(256, dtype=torch.uint8))
    assert values[:255].double().tolist() == E8M0.values()[:255] and bool(values[255].isnan())
    assert [values[byte].item() for byte in spec_e8m0.VALUES] == list(spec_e8m0.VALUES.values())

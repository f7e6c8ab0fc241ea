"""Four over six: which of two block scales wins, against exact arithmetic and on cases worked out by hand."""

from fractions import Fraction

import pytest
import torch
from tests.assertions import assert_bitwise
from tests.formats import rational

from tracefp4.formats.order import Candidates, Sign
from tracefp4.formats.scaling import block_amax, outer_scale
from tracefp4.formats.schemes import SCHEMES
from tracefp4.formats.selection import select_block_scales, signed_zeros

RULES = [Candidates.MSE, Candidates.MAE, Candidates.ABSMAX]
# Errors that differ by less than this (relative) may be ordered otherwise by float32 sums of 16 terms: 16 * 2^-24.
RELATIVE_GAP = Fraction(1, 10**6)


def exact_choice(block: list[float], k: int, rule: Candidates) -> tuple[int, bool]:
    """Return (byte, is_decided): the better scale by exact errors of the values under the rounded scales."""
    amax = max(abs(Fraction(v)) for v in block)
    found = []
    for target in (6, 4):
        byte = (
            0
            if amax == 0
            else max(1, rational.nearest_even(amax / target / Fraction(2) ** k, rational.E4M3_GRID))
        )
        decode_scale = rational.E4M3_GRID[byte] * Fraction(2) ** k
        gaps = []
        for value in block:
            magnitude = abs(Fraction(value))
            code = rational.nearest_even(magnitude / decode_scale, rational.E2M1_GRID) if byte else 0
            gaps.append(abs(magnitude - rational.E2M1_GRID[code] * decode_scale))
        error = {
            Candidates.MSE: sum(g * g for g in gaps),
            Candidates.MAE: sum(gaps),
            Candidates.ABSMAX: max(gaps),
        }[rule]
        found.append((byte, error))
    (six, error_six), (four, error_four) = found
    is_decided = error_six == error_four == 0 or abs(error_six - error_four) > RELATIVE_GAP * error_six
    return (four if error_four < error_six else six), is_decided


def choose(x: torch.Tensor, rule: Candidates) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (bytes, outer exponents) under our row scheme."""
    scheme = SCHEMES[f"NVFP4_ROW_POW2_4OVER6_{rule.name}"]
    magnitude = x.abs()
    amax, _ = block_amax(magnitude, 16)
    outer = outer_scale(amax, scheme)
    return select_block_scales(magnitude, amax, outer, scheme), outer


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_the_better_scale_wins_by_exact_arithmetic(rule):
    x = torch.randn(300, 32) * torch.exp2(torch.randint(-6, 7, (300, 1)).float())
    x[::7, :20] = 0.0
    got, outer = choose(x, rule)
    num_decided = 0
    for row, k, bytes_ in zip(x.tolist(), outer.tolist(), got.tolist(), strict=True):
        for index, byte in enumerate(bytes_):
            expected, is_decided = exact_choice(row[16 * index : 16 * index + 16], k, rule)
            num_decided += is_decided
            assert byte == expected or not is_decided
    assert num_decided > 560  # largest errors are sometimes equal


def test_the_rules_disagree_somewhere():
    x = torch.randn(300, 32)
    chosen = [choose(x, rule)[0] for rule in RULES]
    assert not torch.equal(chosen[0], chosen[1])
    assert not torch.equal(chosen[0], chosen[2])
    assert not torch.equal(chosen[1], chosen[2])


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_equal_errors_take_six(rule):
    # 1536 = 6 * 256, so k = 0. 6 * 4 = 4 * 6 = 24: both scales are E4M3 numbers, both errors are 0.
    x = torch.zeros(1, 48)
    x[0, 0], x[0, 16] = 1536.0, 24.0
    got, outer = choose(x, rule)
    assert outer.tolist() == [0] and got.tolist() == [[0x78, 0x48, 0x00]]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_four_wins_where_five_would_fall_between_codes(rule):
    # Under amax / 6 = 4 the values 24 and 20 are z = 6 and 5 (a tie, error 4); under amax / 4 = 6 they are 4 and
    # 3.33 (-> 3, error 2).
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 16], x[0, 17] = 1536.0, 24.0, 20.0
    assert choose(x, rule)[0].tolist() == [[0x78, 0x4C]]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_the_outer_scale_leaves_room_for_four(rule):
    # 256 * 1.5 = 384 is an E4M3 number; under 448 a block could not take amax / 4.
    _, outer = choose(torch.tensor([[1536.0] + [0.0] * 15, [1536.0 * (1 + 2.0**-20)] + [0.0] * 15]), rule)
    assert outer.tolist() == [0, 1]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_blocks_choice_does_not_depend_on_its_neighbours(rule):
    x = torch.randn(40, 64)
    x[:, 0] = 8.0  # one outer scale for all
    together, _ = choose(x, rule)
    for index in range(1, 4):
        alone = torch.cat([x[:, :16], x[:, 16 * index : 16 * index + 16]], dim=1)
        assert_bitwise(choose(alone, rule)[0][:, 1], together[:, index])


@pytest.mark.parametrize(
    ("sign", "zeros"),
    [(Sign.KEPT, [0.0, -0.0]), (Sign.ORDERED, [0.0, 0.0]), (Sign.NOT_POSITIVE, [-0.0, -0.0])],
)
def test_rnd_6_signs_of_zeros_by_rule(sign, zeros):
    x = torch.tensor([0.0, -0.0, 1.5, -2.0, 1e-45, -1e-45])
    assert_bitwise(signed_zeros(x, sign), torch.tensor([*zeros, 1.5, -2.0, 1e-45, -1e-45]))

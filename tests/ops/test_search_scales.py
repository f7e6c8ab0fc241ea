"""search_scales: bytes worked out by hand, the optimum by exact arithmetic, and what a search must never do.

Mutations that must die, and where: ties to the last candidate (`_equal_errors_keep`), importance ignored or of the
neighbouring channel (`_bytes_worked_out_by_hand`), a window of another width (`_the_optimum_of_the_window`), errors in
units of the scale (same), squares that vanish (`_powers_of_two`), importances that do (`_have_no_unit`), flushed blocks
searched (`_flushes`), bytes below the scheme's least (`_no_block_is_worse`), the outer scale of another matrix or row
(same).
"""

from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.assertions import assert_bitwise
from tests.formats import rational

from tracefp4.errors import BackendError, FormatError
from tracefp4.formats import (
    MXFP4_RCEIL,
    NVFP4_ROW_POW2,
    NVFP4_STATIC_POW2,
    NVFP4_TENSOR_POW2,
    SCHEMES,
)
from tracefp4.ops.dequantize import dequantize
from tracefp4.ops.quantize import quantize
from tracefp4.ops.search_scales import reference, search_scales

NVFP4_SCHEMES = [s for s in SCHEMES.values() if s.block_size == 16]
UP, DOWN = 6, 9
# Errors that differ by less than this (relative) may be ordered otherwise by float32 sums of 16 terms: 16 * 2^-24.
RELATIVE_GAP = Fraction(1, 10**6)


def assert_same_bytes(got, wanted):
    for part in ("packed", "block_scales", "outer"):
        assert_bitwise(getattr(got, part), getattr(wanted, part))


def arguments(scheme):
    return {"scheme": scheme, "exponent": -8 if scheme.outer == "static" else None}


def weights(*shape):
    """Values over many binades, with zero, tiny and non-finite blocks in the first two rows."""
    w = torch.randn(*shape) * torch.exp2(torch.randint(-8, 9, (*shape[:-1], 1)).float())
    w[..., 0, :16] = 0.0
    w[..., 0, 16:32] *= 2.0**-30
    w[..., 1, 3] = float("nan")
    return w


# Bytes near 1.0: 0x36 .875, 0x37 .9375, 0x38 1, 0x39 1.125, 0x3A 1.25, 0x3B 1.375, 0x3C 1.5, 0x3D 1.625, 0x3E 1.75.
# The block is 6 and fifteen times 5, static exponent 0; the byte of the maximum is 0x38 (6 / 6 = 1). Error of 6, of 5:
#   0x38  6 -> 6, 5 -> 4 (tie to the even code)   0,    1          0x3C  6 -> 4 * 1.5, 5 -> 3 * 1.5     0,      .25
#   0x39  6 -> 6.75, 5 -> 4.5                   .5625, .25         0x3D  6 -> 6.5, 5 -> 3 * 1.625     .25, .015625
#   0x3A  6 -> 5, 5 -> 4 * 1.25                   1,    0          0x3E  6 -> 5.25, 5 -> 5.25       .5625,   .0625
#   0x36  6 -> 5.25, 5 -> 5.25                .5625, .0625         0x35  6 -> 4.875, 5 -> 4.875 1.265625, .015625
HAND = {
    "all_alike": (None, 0x3D, [6, 5], [6.5, 4.875]),  # .25 + 15 * .015625 = .48; next 0x3A with 1
    "six_counts_little": (0.25, 0x3A, [6, 6], [5.0, 5.0]),  # .25; 0x3D has .0625 + .234
    "six_counts_a_lot": (16.0, 0x3C, [6, 5], [6.0, 4.5]),  # 3.75; 0x3D has 4 + .234, 0x38 has 15
    "six_does_not_count": (0.0, 0x3A, [6, 6], [5.0, 5.0]),
}


@pytest.mark.parametrize("case", HAND)
def test_bytes_worked_out_by_hand(case):
    of_six, byte, codes, values = HAND[case]
    w = torch.tensor([[6.0] + [5.0] * 15])
    h = None if of_six is None else torch.tensor([of_six] + [1.0] * 15)
    t = search_scales(w, importance=h, scheme=NVFP4_STATIC_POW2, exponent=0)
    assert t.block_scales.tolist() == [[byte]]
    assert t.codes().tolist() == [[codes[0]] + [codes[1]] * 15]
    assert dequantize(t).tolist() == [[values[0]] + [values[1]] * 15]


def exact_errors(block, h, k):
    """Return byte -> sum h (|w| - value)^2 for bytes 1..126, in exact arithmetic."""
    errors = {}
    for byte in range(1, 127):
        decode_scale = rational.E4M3_GRID[byte] * Fraction(2) ** k
        error = Fraction(0)
        for value, weight in zip(block, h, strict=True):
            magnitude = abs(Fraction(value))
            code = rational.nearest_even(magnitude / decode_scale, rational.E2M1_GRID)
            error += Fraction(weight) * (magnitude - rational.E2M1_GRID[code] * decode_scale) ** 2
        errors[byte] = error
    return errors


@pytest.mark.parametrize("importance", ["none", "channels"])
def test_the_optimum_of_the_window_by_exact_arithmetic(importance):
    w = torch.randn(24, 16) * torch.exp2(torch.randint(-3, 4, (24, 1)).float())
    h = None if importance == "none" else torch.rand(24, 16).square()
    default = quantize(w, scheme=NVFP4_STATIC_POW2, exponent=-6).block_scales
    got = search_scales(w, importance=h, scheme=NVFP4_STATIC_POW2, exponent=-6).block_scales
    num_global, offsets = 0, set()
    for row in range(24):
        first, byte = int(default[row]), int(got[row])
        errors = exact_errors(w[row].tolist(), [1.0] * 16 if h is None else h[row].tolist(), -6)
        window = range(max(1, first - DOWN), min(126, first + UP) + 1)
        least = min(errors[b] for b in window)
        assert byte in window
        assert errors[byte] <= least * (1 + RELATIVE_GAP)
        num_global += least == min(errors.values())
        offsets.add(byte - first)
    assert num_global > 18  # the window holds the optimum of all 126 scales almost always
    assert min(offsets) < 0 and max(offsets) > 2


def test_the_window_ends_6_up_and_9_down():
    assert sorted((0, *reference.OFFSETS)) == list(range(-DOWN, UP + 1))
    w, h = torch.randn(4000, 16), torch.rand(4000, 16).pow(16)  # one or two channels count: far scales win
    got = search_scales(w, importance=h, scheme=NVFP4_ROW_POW2).block_scales.int()
    offset = got - quantize(w, scheme=NVFP4_ROW_POW2).block_scales.int()
    assert (int(offset.min()), int(offset.max())) == (-DOWN, UP)


@pytest.mark.parametrize("scheme", NVFP4_SCHEMES, ids=lambda s: s.name)
def test_no_block_is_worse_than_under_quantize(scheme):
    w, h = weights(3, 8, 64), torch.rand(3, 1, 64).square()
    nearest = quantize(w, **arguments(scheme))
    for importance in (None, h):
        got = search_scales(w, importance=importance, **arguments(scheme))
        assert_bitwise(got.outer, nearest.outer)
        weight = 1.0 if importance is None else importance.double()
        errors = [
            ((dequantize(t).double() - w.double()).square() * weight).unflatten(-1, (-1, 16)).sum(-1)
            for t in (got, nearest)
        ]
        is_nan = errors[1].isnan()
        assert_bitwise(errors[0].isnan(), is_nan)
        is_worse = errors[0] > errors[1] * (1 + float(RELATIVE_GAP))
        assert not bool((is_worse & ~is_nan).any())
        changed = got.block_scales != nearest.block_scales
        assert bool(changed.any())
        changed_bytes = got.block_scales[changed]
        assert int(changed_bytes.min()) >= max(1, scheme.least_byte) and int(changed_bytes.max()) <= 0x7E


@pytest.mark.parametrize("scheme", NVFP4_SCHEMES, ids=lambda s: s.name)
def test_blocks_without_a_scale_are_as_the_scheme_stores_them(scheme):
    w = torch.zeros(2, 64)
    w[0, 20], w[0, 40], w[1, 0] = float("inf"), float("nan"), 3.0
    w[1, 20] = -0.0
    assert_same_bytes(
        search_scales(w[:1], importance=torch.rand(64), **arguments(scheme)),
        quantize(w[:1], **arguments(scheme)),
    )
    got = search_scales(w, importance=None, **arguments(scheme))
    assert_bitwise(got.block_scales[0], quantize(w, **arguments(scheme)).block_scales[0])
    assert bool(dequantize(got)[0, 16:48].isnan().all())


def test_a_block_that_the_scheme_flushes_stays_flushed():
    # .4 * 2^-9 rounds to the scale 0, and vLLM's scheme has no floor. Ours has 2^-9, from which the search goes on:
    # 2.4 * 2^-9 is nearest to .5 * 5 * 2^-9.
    w = torch.full((1, 16), 6 * 0.4 * 2.0**-9)
    for scheme, byte in ((SCHEMES["NVFP4_STATIC_VLLM"], 0x00), (NVFP4_STATIC_POW2, 0x05)):
        t = search_scales(w, importance=None, scheme=scheme, exponent=0)
        assert t.block_scales.item() == byte
        assert dequantize(t)[0, 0].item() == byte * 2.0**-10


def test_equal_errors_keep_the_byte_of_quantize():
    w = weights(4, 64)
    assert_same_bytes(
        search_scales(w, importance=torch.zeros(64), scheme=NVFP4_ROW_POW2),
        quantize(w, scheme=NVFP4_ROW_POW2),
    )
    codes = torch.tensor([[6.0, 3.0, 0.0, -1.0] * 4])  # exact under 1, and under .5 up to 3 only
    assert (
        search_scales(codes, importance=None, scheme=NVFP4_STATIC_POW2, exponent=0).block_scales.item()
        == 0x38
    )


def test_no_scale_above_448():
    w = torch.full((1, 16), 2688.0 * 2)  # saturates under a static exponent of 0: 448 is the best there is
    t = search_scales(w, importance=None, scheme=NVFP4_STATIC_POW2, exponent=0)
    assert t.block_scales.item() == 0x7E and dequantize(t)[0, 0].item() == 2688.0


@given(st.floats(2.0**-100, 2.0**100, width=32))
@settings(max_examples=20, deadline=None)
def test_equal_importances_are_none(of_each):
    w = weights(4, 64)
    got = search_scales(w, importance=torch.full((64,), of_each), scheme=NVFP4_ROW_POW2)
    assert_same_bytes(got, search_scales(w, importance=None, scheme=NVFP4_ROW_POW2))


@given(power=st.integers(-90, 90), unit=st.integers(-105, 120))
@settings(max_examples=20, deadline=None)
def test_powers_of_two_move_only_the_exponent(power, unit):
    w = torch.randn(3, 64).clamp(-4, 4).to(torch.bfloat16).float()
    w[w.abs() < 2.0**-6] = 0.0
    h = torch.rand(3, 64).clamp(min=2.0**-20)
    one = search_scales(w, importance=h, scheme=NVFP4_ROW_POW2)
    other = search_scales(w * 2.0**power, importance=h * 2.0**unit, scheme=NVFP4_ROW_POW2)
    assert_bitwise(other.packed, one.packed)
    assert_bitwise(other.block_scales, one.block_scales)
    assert_bitwise(other.outer, one.outer + power)


@pytest.mark.parametrize("unit", [-149, 121], ids=["smallest", "largest"])
def test_importances_have_no_unit(unit):
    w, h = weights(3, 64), torch.randint(1, 64, (3, 64)).float()
    one = search_scales(w, importance=h, scheme=NVFP4_ROW_POW2)
    assert_same_bytes(search_scales(w, importance=h * 2.0**unit, scheme=NVFP4_ROW_POW2), one)


@pytest.mark.parametrize(
    "scheme", [NVFP4_TENSOR_POW2, NVFP4_ROW_POW2, NVFP4_STATIC_POW2], ids=lambda s: s.name
)
def test_matrices_and_rows_do_not_depend_on_what_stands_beside_them(scheme, monkeypatch):
    w, h = weights(2, 3, 8, 64), torch.rand(3, 1, 64)
    whole = search_scales(w, importance=h, **arguments(scheme))
    monkeypatch.setattr(reference, "_SPAN_ELEMENTS", 3 * 64)
    assert_same_bytes(search_scales(w, importance=h, **arguments(scheme)), whole)
    for i in range(2):
        for j in range(3):
            one = search_scales(w[i, j], importance=h[j], **arguments(scheme))
            assert_bitwise(one.packed, whole.packed[i, j])
            assert_bitwise(one.block_scales, whole.block_scales[i, j])


@pytest.mark.parametrize("shape", [(64,), (1, 64), (8, 64), (3, 1, 64), (3, 8, 64), (1, 1, 64)], ids=str)
def test_importances_broadcast(shape):
    w, h = weights(3, 8, 64), torch.rand(shape)
    full = h.expand(3, 8, 64).contiguous()
    got = search_scales(w, importance=h, scheme=NVFP4_TENSOR_POW2)
    assert_same_bytes(got, search_scales(w, importance=full, scheme=NVFP4_TENSOR_POW2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_the_inputs_are_never_written_and_views_are_fine(dtype):
    w, h = weights(64, 8).T.to(dtype), torch.rand(64)
    before, h_before = w.clone(), h.clone()
    got = search_scales(w, importance=h, scheme=NVFP4_TENSOR_POW2)
    assert_bitwise(w, before)
    assert_bitwise(h, h_before)
    assert_same_bytes(got, search_scales(w.contiguous().float(), importance=h, scheme=NVFP4_TENSOR_POW2))


@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 64), (0, 4, 64)], ids=str)
def test_shp_4_empty_inputs(shape):
    t = search_scales(torch.empty(shape), importance=torch.ones(64), scheme=NVFP4_ROW_POW2)
    assert tuple(t.shape) == shape


W = torch.ones(4, 32)


@pytest.mark.parametrize(
    ("w", "options", "message"),
    [
        (W, {"scheme": MXFP4_RCEIL}, "factor of 2 apart"),
        (W[0], {}, r"\[..., N, K\]"),
        (torch.ones(4, 24), {}, "multiple of 16"),
        (W.int(), {}, "needs a float tensor"),
        (W, {"exponent": 1}, "finds its own scale"),
        (W, {"importance": torch.ones(16)}, r"shape \[32\]"),
        (W, {"importance": torch.ones(3, 32)}, "broadcasts"),
        (W, {"importance": torch.ones(1)}, r"shape \[32\]"),
        (W, {"importance": torch.ones(2, 4, 32)}, "broadcasts"),
        (W, {"importance": -torch.ones(32)}, "finite importances"),
        (W, {"importance": torch.full((32,), float("nan"))}, "finite importances"),
        (W, {"importance": torch.full((32,), float("inf"))}, "finite importances"),
        (W, {"importance": torch.ones(32, dtype=torch.int32)}, "finite importances"),
    ],
)
def test_shp_1_refusals(w, options, message):
    with pytest.raises(FormatError, match=message):
        search_scales(w, **{"importance": None, "scheme": NVFP4_ROW_POW2, **options})


def test_a_tensor_without_data_is_refused():
    with pytest.raises(BackendError, match="meta"):
        search_scales(torch.empty(4, 16, device="meta"), importance=None, scheme=NVFP4_ROW_POW2)


def test_the_search_starts_from_the_better_of_two_under_four_over_six():
    w = torch.randn(16, 64)
    scheme = SCHEMES["NVFP4_ROW_POW2_4OVER6_MSE"]
    got = search_scales(w, importance=torch.zeros(64), scheme=scheme)
    assert_same_bytes(got, quantize(w, scheme=scheme))
    six = quantize(w, scheme=replace(scheme, candidates=NVFP4_ROW_POW2.candidates))
    assert not torch.equal(got.block_scales, six.block_scales)

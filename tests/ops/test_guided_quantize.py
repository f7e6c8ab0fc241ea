"""guided_quantize: brute force over every bf16 number, every recorded decision; then the properties of
guidance."""

import dataclasses
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.assertions import assert_bitwise, assert_same_values
from tests.formats import rational
from tests.formats.test_grid import FINITE_BF16
from tests.ops.guides import (
    CODECS,
    ONE,
    Z,
    as_rows,
    expected_bracket,
    expected_full,
    guide_from,
    signed_ordinal,
    unit_guide,
)

from tracefp4.errors import FormatError
from tracefp4.formats.grid import bracket_e2m1, decode_e2m1, decode_e4m3, round_e2m1
from tracefp4.formats.packing import pack_codes
from tracefp4.formats.schemes import NVFP4_KV, NVFP4_ROW_POW2, NVFP4_TENSOR_POW2
from tracefp4.formats.tensor import BlockTensor
from tracefp4.ops.dequantize import dequantize
from tracefp4.ops.guided_quantize import Guide, guided_quantize
from tracefp4.ops.quantize import quantize


@pytest.mark.parametrize("recorded", range(16))
def test_full_codes_equal_brute_force_on_every_boundary(recorded):
    z = as_rows(Z)
    got = guided_quantize(z, scheme=NVFP4_ROW_POW2, guide=unit_guide(z, torch.full_like(z, recorded), "full"))
    expected = [expected_full(v, recorded) for v in z.flatten().tolist()]
    assert signed_ordinal(got.codes).flatten().tolist() == expected


@pytest.mark.parametrize("bit", [0, 1])
def test_bracket_equals_brute_force_on_every_boundary(bit):
    z = as_rows(Z)
    got = guided_quantize(z, scheme=NVFP4_ROW_POW2, guide=unit_guide(z, torch.full_like(z, bit), "bracket"))
    assert signed_ordinal(got.codes).flatten().tolist() == [
        expected_bracket(v, bit) for v in z.flatten().tolist()
    ]


@pytest.mark.parametrize("bit", [0, 1])
def test_nearest_cell_equals_a_search_over_15_codewords_on_every_boundary(bit):
    z = as_rows(Z)
    got = guided_quantize(
        z, scheme=NVFP4_ROW_POW2, guide=unit_guide(z, torch.full_like(z, bit), "nearest_cell")
    )
    assert_bitwise(got.values, decode_e2m1(got.codes))  # also at z = +-0, where a bit of 1 gives +-0.5
    expected = [rational.nearest_cell(Fraction(v), str(v).startswith("-"), bit) for v in z.flatten().tolist()]
    assert signed_ordinal(got.codes).flatten().tolist() == expected


@pytest.mark.parametrize("bit", [0, 1])
@pytest.mark.parametrize("decoder", ["bracket", "nearest_cell"])
def test_mantissa_bits_equal_brute_force_on_every_bf16_number(decoder, bit):
    """The numbers below 2^-9 and above 8 behave like their ends, so the search runs over the 6,656 between
    them."""
    magnitude = FINITE_BF16.abs()
    z = as_rows(FINITE_BF16[(magnitude >= 2.0**-9) & (magnitude <= 8)])
    got = guided_quantize(z, scheme=NVFP4_ROW_POW2, guide=unit_guide(z, torch.full_like(z, bit), decoder))
    expected = [
        expected_bracket(v, bit)
        if decoder == "bracket"
        else rational.nearest_cell(Fraction(v), str(v).startswith("-"), bit)
        for v in z.flatten().tolist()
    ]
    assert signed_ordinal(got.codes).flatten().tolist() == expected


@pytest.mark.parametrize("recorded", range(16))
def test_full_codes_on_every_bf16_number_are_never_worse_than_nearest(recorded):
    z = as_rows(FINITE_BF16)
    target = decode_e2m1(torch.tensor(recorded, dtype=torch.uint8))
    got = guided_quantize(z, scheme=NVFP4_ROW_POW2, guide=unit_guide(z, torch.full_like(z, recorded), "full"))
    nearest = decode_e2m1(round_e2m1(z))
    assert bool(((got.values - target).abs() <= (nearest - target).abs()).all())
    low, high = (decode_e2m1(code.view(torch.uint8)) for code in bracket_e2m1(z))
    assert bool(((got.values.abs() == low) | (got.values.abs() == high)).all())
    sign = torch.ones_like(z).copysign(z)
    is_inside = (target * sign >= low) & (target * sign <= high)
    assert_same_values(got.values[is_inside], target.expand_as(z)[is_inside])
    assert int(got.nearest_changed) == int((got.values != nearest).sum())


@pytest.mark.parametrize("bit", [0, 1])
@pytest.mark.parametrize("decoder", ["bracket", "nearest_cell"])
def test_bf16_numbers_beyond_the_searched_ones_behave_like_their_ends(decoder, bit):
    magnitude = FINITE_BF16.abs()
    for beyond, end in (
        (FINITE_BF16[(magnitude < 2.0**-9) & (magnitude > 0)], 2.0**-9),
        (FINITE_BF16[magnitude > 8], 8.0),
    ):
        z = as_rows(beyond)
        z_end = torch.full_like(z, end).copysign(z)
        got, expected = (
            guided_quantize(v, scheme=NVFP4_ROW_POW2, guide=unit_guide(v, torch.full_like(v, bit), decoder))
            for v in (z, z_end)
        )
        keep = z != 0  # padding
        assert_bitwise(got.codes[keep], expected.codes[keep])


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("scheme", [NVFP4_ROW_POW2, NVFP4_KV], ids=lambda s: s.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_the_same_input_makes_guidance_a_no_op(codec, scheme, dtype):
    x = (torch.randn(64, 64) * torch.exp2(torch.randint(-8, 8, (64, 1)).float())).to(dtype)
    x[3] = 0
    x[4, :16] = 0
    x[5, 7] = -0.0
    exponent = None if scheme is NVFP4_ROW_POW2 else -2
    live = guided_quantize(x, scheme=scheme, exponent=exponent)
    again = guided_quantize(x, scheme=scheme, exponent=exponent, guide=guide_from(live, codec))
    for name in ("values", "codes", "block_scales", "outer", "nearest_changed"):
        assert_bitwise(getattr(again, name), getattr(live, name))
    assert live.values.dtype == dtype and int(live.nearest_changed) == 0


@given(st.integers(0, 2**32 - 1), st.floats(0.0, 2.0))
@settings(max_examples=25, deadline=None)
def test_facts_of_guidance_under_noise(seed, noise):
    generator = torch.Generator().manual_seed(seed)
    x_rollout = torch.randn(8, 32, generator=generator)
    x = x_rollout + noise * torch.randn(8, 32, generator=generator)
    rollout = guided_quantize(x_rollout, scheme=NVFP4_ROW_POW2)
    decode_scale = quantize(x_rollout, scheme=NVFP4_ROW_POW2).scales().repeat_interleave(16, 1)
    q_rollout = decode_e2m1(rollout.codes)
    z = (x / decode_scale).clamp(-6, 6).double()
    guided = {c: guided_quantize(x, scheme=NVFP4_ROW_POW2, guide=guide_from(rollout, c)) for c in CODECS}
    own = guided_quantize(x, scheme=NVFP4_ROW_POW2, guide=guide_from(rollout, "full"))
    low, high = zip(*(rational.bracket(abs(Fraction(v))) for v in z.flatten().tolist()), strict=True)
    ordinal = signed_ordinal(rollout.codes).flatten()
    sign = torch.where(z.flatten().signbit(), -1, 1)
    is_inside = ((ordinal * sign >= torch.tensor(low)) & (ordinal * sign <= torch.tensor(high))).view(8, 32)
    for codec in ("full", "bracket"):
        assert_same_values(guided[codec].values[is_inside], (q_rollout * decode_scale)[is_inside])
        moved = (guided[codec].values.double() / decode_scale - z).abs()
        assert bool((moved < 2.0).all())
    is_open = is_inside & (torch.tensor(low) != torch.tensor(high)).view(8, 32)
    assert_same_values(guided["bracket"].values[is_open], (q_rollout * decode_scale)[is_open])
    nearest_codes = [
        rational.nearest_even(abs(Fraction(v)), rational.E2M1_GRID) for v in z.flatten().tolist()
    ]
    nearest = torch.tensor([float(rational.E2M1_GRID[c]) for c in nearest_codes]) * sign
    distance = (own.values / decode_scale - q_rollout).abs()
    assert bool((distance <= (nearest.view(8, 32) - q_rollout).abs()).all())
    changed = signed_ordinal(own.codes).flatten() != torch.tensor(nearest_codes) * sign
    assert int(own.nearest_changed) == int(changed.sum())


def test_nearest_cell_recovers_more_than_the_bracket():
    torch.manual_seed(1)
    x_rollout = torch.randn(400, 256)
    x = x_rollout + 0.1 * torch.randn_like(x_rollout)
    rollout = guided_quantize(x_rollout, scheme=NVFP4_ROW_POW2)
    error = {
        codec: float(
            (
                guided_quantize(x, scheme=NVFP4_ROW_POW2, guide=guide_from(rollout, codec)).values
                - rollout.values
            ).norm()
            / rollout.values.norm()
        )
        for codec in CODECS
    }
    # Reference values at 10% noise: full .048, bracket .101, nearest_cell .093; the sample leaves +-.003.
    assert error["full"] == pytest.approx(0.048, abs=0.004)
    assert error["bracket"] == pytest.approx(0.101, abs=0.004)
    assert error["nearest_cell"] == pytest.approx(0.093, abs=0.004)


@pytest.mark.parametrize("codec", ["full", "bracket"])  # nearest_cell may leave the bracket by definition
def test_a_codeword_or_a_clipped_value_stands_alone(codec):
    z = as_rows(
        torch.tensor([0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 9.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0, -1e9])
    )
    for decision in range(16 if codec == "full" else 2):
        got = guided_quantize(
            z, scheme=NVFP4_ROW_POW2, guide=unit_guide(z, torch.full_like(z, decision), codec)
        )
        assert_bitwise(got.values, z.clamp(-6, 6))


@pytest.mark.parametrize("codec", CODECS)
def test_a_recorded_zero_scale_gives_zero_and_no_code(codec):
    x = torch.randn(4, 32)
    guide = unit_guide(x[:, :16], torch.ones(4, 16), codec)
    widen = {"block_scales": torch.tensor([[0, ONE]] * 4, dtype=torch.uint8)}
    for name in ("codes", "bits"):
        part = getattr(guide, name)
        widen[name] = None if part is None else torch.ones(4, 32, dtype=torch.uint8)
    got = guided_quantize(x, scheme=NVFP4_ROW_POW2, guide=dataclasses.replace(guide, **widen))
    assert_bitwise(got.values[:, :16], torch.zeros(4, 16).copysign(x[:, :16]))
    assert int((got.codes[:, :16] & 7).max()) == 0
    assert bool((got.codes[:, 16:] & 1).bool().any())


@pytest.mark.parametrize("codec", CODECS)
def test_rows_without_a_record_round_to_nearest_under_their_own_scales(codec):
    x_rollout, valid = torch.randn(9, 48), torch.arange(9) % 3 != 1
    x = 1.7 * (x_rollout + 0.2 * torch.randn(9, 48))  # other outer scales than the recorded ones in most rows
    guide = guide_from(guided_quantize(x_rollout, scheme=NVFP4_ROW_POW2), codec, valid)
    for part in (guide.codes, guide.bits, guide.block_scales, guide.outer):
        if part is not None:
            part[~valid] = (
                0x7F if part is guide.block_scales else 1
            )  # what an absent row holds must not matter
    mixed = guided_quantize(x, scheme=NVFP4_ROW_POW2, guide=guide)
    plain = guided_quantize(x, scheme=NVFP4_ROW_POW2)
    alone = guided_quantize(
        x[valid],
        scheme=NVFP4_ROW_POW2,
        guide=Guide(
            valid=valid[valid],
            outer=guide.outer[valid],
            block_scales=guide.block_scales[valid],
            codes=None if guide.codes is None else guide.codes[valid],
            bits=None if guide.bits is None else guide.bits[valid],
            decoder=guide.decoder,
        ),
    )
    for name in ("values", "codes", "block_scales", "outer"):
        assert_bitwise(getattr(mixed, name)[~valid], getattr(plain, name)[~valid])
        assert_bitwise(getattr(mixed, name)[valid], getattr(alone, name))
    assert int(mixed.nearest_changed) == int(alone.nearest_changed) > 0


@pytest.mark.parametrize("scheme", [NVFP4_ROW_POW2, NVFP4_TENSOR_POW2, NVFP4_KV], ids=lambda s: s.name)
def test_without_a_guide_it_is_quantize_then_dequantize(scheme):
    x = torch.randn(17, 64) * torch.exp2(torch.randint(-20, 20, (17, 1)).float())
    x[2], x[3, 5], x[4, 20] = 0.0, float("nan"), float("inf")
    exponent = 1 if scheme is NVFP4_KV else None
    t = quantize(x, scheme=scheme, exponent=exponent)
    got = guided_quantize(x, scheme=scheme, exponent=exponent)
    assert_bitwise(pack_codes(got.codes), t.packed)
    assert_bitwise(got.block_scales, t.block_scales)
    assert_bitwise(got.outer, t.outer)
    assert_same_values(got.values, dequantize(t))
    finite = got.values.isfinite()
    assert_bitwise(got.values[finite], dequantize(t)[finite])


@pytest.mark.parametrize("codec", [None, *CODECS])
def test_rnd_6_signed_zeros(codec):
    x = torch.tensor([[0.0, -0.0] * 8, [6.0, -0.1] * 8])
    expected = torch.tensor([[0.0, -0.0] * 8, [6.0, -0.0] * 8])
    guide = None if codec is None else guide_from(guided_quantize(x, scheme=NVFP4_ROW_POW2), codec)
    got = guided_quantize(x, scheme=NVFP4_ROW_POW2, guide=guide)
    assert_bitwise(got.values, expected)
    assert_bitwise(got.codes, round_e2m1(expected))


def test_rnd_3_every_tie_under_every_scale_byte_is_a_tie():
    """x = tie * scale exactly: a multiplication by a reciprocal misses some of these ties, one division misses none."""
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    scales = decode_e4m3(torch.arange(1, 127, dtype=torch.uint8))
    x = torch.nn.functional.pad(scales[:, None] * ties, (0, 9))
    block_scales = torch.arange(1, 127, dtype=torch.uint8)[:, None]
    guide = dataclasses.replace(
        unit_guide(x, torch.zeros_like(x), "bracket"),
        block_scales=block_scales,  # bit 0: the even end, nearest even
    )
    got = guided_quantize(x, scheme=NVFP4_ROW_POW2, guide=guide)
    assert int(got.nearest_changed) == 0
    assert got.codes[:, :7].tolist() == [[0, 2, 2, 4, 4, 6, 6]] * 126


@pytest.mark.parametrize("codec", CODECS)
def test_stored_scales_reproduce_the_bytes_of_dequantized_values(codec):
    x = torch.randn(33, 64) * torch.exp2(torch.randint(-100, 100, (33, 1)).float())
    live = guided_quantize(x, scheme=NVFP4_ROW_POW2)
    again = guided_quantize(live.values, scheme=NVFP4_ROW_POW2, guide=guide_from(live, codec))
    assert_bitwise(again.codes, live.codes)
    t = BlockTensor(
        packed=pack_codes(again.codes),
        block_scales=again.block_scales,
        outer=again.outer,
        scheme=NVFP4_ROW_POW2,
    )
    assert_bitwise(dequantize(t), live.values)


@pytest.mark.parametrize("codec", [None, *CODECS])
def test_skipping_the_codes_changes_nothing_else(codec):
    x_rollout = torch.randn(9, 32)
    guide = None if codec is None else guide_from(guided_quantize(x_rollout, scheme=NVFP4_ROW_POW2), codec)
    x = x_rollout * 1.1
    with_codes, without = (
        guided_quantize(x, scheme=NVFP4_ROW_POW2, guide=guide, with_codes=w) for w in (True, False)
    )
    assert without.codes is None
    for name in ("values", "block_scales", "outer", "nearest_changed"):
        assert_bitwise(getattr(without, name), getattr(with_codes, name))


@pytest.mark.parametrize("codec", [None, *CODECS])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_spc_1_guidance_never_hides_what_is_not_finite(codec, bad):
    x_rollout = torch.randn(3, 32)
    rollout = guided_quantize(x_rollout, scheme=NVFP4_ROW_POW2)
    guide = None if codec is None else guide_from(rollout, codec)
    x = x_rollout.clone()
    x[1, 20] = bad
    got = guided_quantize(x, scheme=NVFP4_ROW_POW2, guide=guide)
    assert bool(got.values[1, 16:].isnan().all()) and got.block_scales[1, 1] == 0x7F
    assert got.codes[1, 16:].tolist() == [0] * 16
    assert_bitwise(got.values[::2], rollout.values[::2])
    assert bool(got.values[1, :16].isfinite().all())


@pytest.mark.parametrize("codec", CODECS)
def test_spc_1_a_block_recorded_as_not_finite_reads_back_nan(codec):
    x = torch.randn(2, 32)
    rollout = guided_quantize(x, scheme=NVFP4_ROW_POW2)
    rollout.block_scales[0, 1] = 0x7F
    got = guided_quantize(x, scheme=NVFP4_ROW_POW2, guide=guide_from(rollout, codec))
    assert bool(got.values[0, 16:].isnan().all()) and bool(got.values[0, :16].isfinite().all())
    assert int((got.codes[0, 16:] & 7).max()) == 0


@pytest.mark.parametrize("codec", [None, *CODECS])
def test_shp_2_and_shp_4_views_empty_and_single_rows(codec):
    wide = torch.randn(6, 64)
    kept = wide.clone()
    for x in (wide[:, 16:48], wide[::2], wide.T[:48, :].reshape(6, 48), wide[:0], wide[:1], wide.T[16:48].T):
        copy = x.contiguous().clone()
        guide = (
            None if codec is None else guide_from(guided_quantize(copy * 1.05, scheme=NVFP4_ROW_POW2), codec)
        )
        view, dense = (guided_quantize(v, scheme=NVFP4_ROW_POW2, guide=guide) for v in (x, copy))
        for name in ("values", "codes", "block_scales", "outer", "nearest_changed"):
            assert_bitwise(getattr(view, name), getattr(dense, name))
        assert view.values.shape == x.shape
    assert_bitwise(wide, kept)


def test_values_carry_no_gradient():
    x = torch.randn(2, 16, requires_grad=True)
    assert not guided_quantize(x, scheme=NVFP4_ROW_POW2).values.requires_grad


def refusals():
    x = torch.randn(2, 32)
    good = guide_from(guided_quantize(x, scheme=NVFP4_ROW_POW2), "full")
    negative = good.block_scales.clone()
    negative[0, 0] = 0x81
    return [
        (x, {"scheme": NVFP4_TENSOR_POW2, "guide": good}, "cannot be guided"),
        (x, {"scheme": NVFP4_KV, "exponent": 0, "guide": good}, "no outer scale per row"),
        (
            x,
            {"scheme": NVFP4_ROW_POW2, "guide": dataclasses.replace(good, outer=None)},
            "one outer scale per row",
        ),
        (x[:1], {"scheme": NVFP4_ROW_POW2, "guide": good}, r"needs valid as torch.bool \(1,\)"),
        (torch.randn(2, 16), {"scheme": NVFP4_ROW_POW2, "guide": good}, "needs block_scales"),
        (
            x,
            {"scheme": NVFP4_ROW_POW2, "guide": dataclasses.replace(good, block_scales=negative)},
            "0x81, a negative",
        ),
        *(
            (
                x,
                {
                    "scheme": NVFP4_ROW_POW2,
                    "guide": dataclasses.replace(good, outer=torch.full_like(good.outer, k)),
                },
                m,
            )
            for k, m in ((117, r"exponents -110\.\.116; got 117"), (-111, "got -111"))
        ),
        (torch.randn(2, 2, 16), {"scheme": NVFP4_ROW_POW2}, r"needs x \[N, K\]"),
        (torch.randn(2, 24), {"scheme": NVFP4_ROW_POW2}, r"multiple of 16; got shape \(2, 24\)"),
        (x, {"scheme": NVFP4_KV}, "needs an exponent"),
        (x, {"scheme": NVFP4_ROW_POW2, "exponent": 2}, "finds its own scale"),
        (x.long(), {"scheme": NVFP4_ROW_POW2}, "float tensor"),
    ]


@pytest.mark.parametrize(
    ("x", "arguments", "message"), refusals(), ids=lambda v: v if isinstance(v, str) else ""
)
def test_refusals(x, arguments, message):
    with pytest.raises(FormatError, match=message):
        guided_quantize(x, **arguments)


def test_a_guide_holds_exactly_one_kind_of_decision():
    good = unit_guide(torch.zeros(1, 16), torch.zeros(1, 16), "full")
    for change in ({"codes": None}, {"bits": good.codes}, {"decoder": "nearest"}, {"band": float("inf")}):
        with pytest.raises(FormatError, match=r"exactly one|Decoders|finite number of 0 or more; got inf"):
            dataclasses.replace(good, **change)

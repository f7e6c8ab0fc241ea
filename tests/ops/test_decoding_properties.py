"""What a code, a coset and a gate promise, on both backends; and what is refused."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.assertions import assert_bitwise
from tests.ops import brute_force as brute
from tests.ops.guides import EVERY_CODEC, coded_guide, held
from tests.ops.scheme_inputs import FOUR_OVER_SIX, GUIDED, SEEDS, by_name

from tracefp4.coding import ScaleCoding, codec_by_name
from tracefp4.errors import FormatError
from tracefp4.formats.grid import decode_e4m3
from tracefp4.formats.order import ScaleRule
from tracefp4.formats.packing import pack_codes, unpack_codes
from tracefp4.formats.schemes import MXFP4_RCEIL, NVFP4_ROW_FP32, NVFP4_ROW_POW2, NVFP4_STATIC_POW2
from tracefp4.formats.tensor import BlockTensor
from tracefp4.ops.backend import Backend
from tracefp4.ops.guided_quantize import Guide, boundary_distance, guided_quantize
from tracefp4.ops.quantize import quantize_with_scales

FEW = settings(max_examples=6, deadline=None)
BACKENDS = [Backend.REFERENCE, Backend.AUTO]
every_backend = pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.value)


def near_rows(seed, noise, rows=16, width=256):
    generator = torch.Generator().manual_seed(seed)
    x_rollout = torch.randn(rows, width, generator=generator)
    return x_rollout, x_rollout + noise * torch.randn(rows, width, generator=generator)


def rounded(x, **arguments):
    return guided_quantize(x, scheme=NVFP4_ROW_POW2, **arguments)


def nearest_under(x, recorded):
    """Nearest codes under the recorded scales, and how far each value is from being another; 0 at a tie."""
    scales = {"scheme": NVFP4_ROW_POW2, "block_scales": recorded.block_scales, "outer": recorded.outer}
    return unpack_codes(quantize_with_scales(x, **scales).packed), boundary_distance(x, **scales)


@every_backend
@pytest.mark.parametrize("name", ["full", "low2", "mantissa", "secded+raw", "bch32_2+raw"])
@given(SEEDS, st.floats(0.0005, 0.3), st.floats(0.001, 0.6))
@FEW
def test_no_value_outside_the_band_moves(name, backend, seed, noise, band):
    x_rollout, x = near_rows(seed, noise)
    recorded = rounded(x_rollout)
    nearest, distance = nearest_under(x, recorded)
    got = rounded(x, guide=coded_guide(recorded, name, band=band), backend=backend)
    is_moved = got.codes != nearest
    is_near = distance <= torch.tensor(band, dtype=torch.float32)
    assert not bool((is_moved & ~is_near).any())
    assert int(got.nearest_changed) == int(is_moved.sum())
    assert int(got.in_band) == int(is_near.sum())


@pytest.mark.parametrize(
    ("name", "decoder"),
    [("full", "bracket"), ("low2", "bracket"), ("mantissa", "bracket"), ("mantissa", "nearest_cell")],
)
def test_inside_the_band_the_gate_changes_nothing(name, decoder):
    x_rollout, x = near_rows(5, 0.05)
    recorded = rounded(x_rollout)
    free = rounded(x, guide=coded_guide(recorded, name, decoder=decoder))
    gated = rounded(x, guide=coded_guide(recorded, name, decoder=decoder, band=0.1))
    nearest, distance = nearest_under(x, recorded)
    is_near = distance <= 0.1
    assert_bitwise(gated.codes[is_near], free.codes[is_near])
    assert_bitwise(gated.codes[~is_near], nearest[~is_near])
    assert 0 < int(gated.nearest_changed) < int(free.nearest_changed)


@every_backend
@pytest.mark.parametrize(
    ("name", "num_errors"), [("secded", 1), ("bch32_2", 2), ("bch64_3", 3), ("bch128_3", 3)]
)
@given(SEEDS, st.data())
@FEW
def test_what_the_code_can_correct_is_recovered_exactly(name, num_errors, backend, seed, data):
    """Up to t values of a block cross a boundary by a hair, the others stay: every code comes back."""
    x_rollout, _ = near_rows(seed, 0.0, rows=2, width=128)
    recorded = rounded(x_rollout)
    length = min(128, codec_by_name(name).code.length)
    distance = boundary_distance(
        x_rollout, scheme=NVFP4_ROW_POW2, block_scales=recorded.block_scales, outer=recorded.outer
    )
    x = x_rollout.clone()
    flipped = guided_other(x_rollout, recorded)
    for row in range(2):
        for first in range(0, 128, length):
            order = distance[row, first : first + length].argsort()
            for j in order[: data.draw(st.integers(0, num_errors))].tolist():
                x[row, first + j] = flipped[row, first + j]
    got = rounded(x, guide=coded_guide(recorded, f"{name}+raw"), backend=backend)
    assert_bitwise(got.codes, recorded.codes)
    assert int(got.undecoded) == 0


def guided_other(x, recorded):
    """x moved just over the nearest boundary of its cell, under the recorded scales."""
    opposite = coded_guide(recorded, "mantissa", bits=(recorded.codes & 1) ^ 1)
    other = rounded(x, guide=opposite).codes
    scale = scales_of(recorded)
    grid = torch.tensor([float(m) for m in brute.MAGNITUDES])
    edge = (grid[(recorded.codes & 7).long()] + grid[(other & 7).long()]) / 2
    beyond = torch.where((other & 7) > (recorded.codes & 7), 1.001, 0.999)
    return torch.copysign(edge * beyond * scale, x)


def scales_of(recorded):
    outer = torch.exp2(recorded.outer.float())[:, None]
    return (decode_e4m3(recorded.block_scales) * outer).repeat_interleave(16, 1)


@every_backend
def test_more_differences_than_a_code_explains_leave_the_block_nearest_and_are_counted(backend):
    x_rollout, _ = near_rows(3, 0.0, rows=4, width=16)
    recorded = rounded(x_rollout)
    guide = coded_guide(recorded, "secded+raw", band=1e-7)  # no candidate
    guide.syndromes[2] ^= 1 << 3
    got = rounded(x_rollout, guide=guide, backend=backend)
    assert_bitwise(got.codes, recorded.codes)
    assert (int(got.undecoded), int(got.nearest_changed)) == (1, 0)


@every_backend
@pytest.mark.parametrize(("name", "num_errors"), [("mantissa_lean", None), ("mantissa+bch32_2", 2)])
def test_scales_are_recovered_from_less_than_their_bytes(name, num_errors, backend):
    x_rollout, x = near_rows(11, 0.004, rows=64, width=512)
    recorded = rounded(x_rollout)
    guide = coded_guide(recorded, name)
    own = rounded(x)
    got = rounded(x, guide=guide, backend=backend)
    differs = own.block_scales != recorded.block_scales
    assert int(differs.sum()) > 10
    if num_errors is None:
        assert_bitwise(got.block_scales, recorded.block_scales)
    else:
        few = differs.sum(1) <= num_errors
        assert_bitwise(got.block_scales[few], recorded.block_scales[few])


@every_backend
def test_cosets_are_decoded_by_the_unrounded_scale_not_by_the_own_byte(backend):
    """0x36 is 0.875, 0x38 is 1.0, 0x3A is 1.25: the bytes 0x36 and 0x3A are equally far from the own byte 0x38 or 0x39
    by count or nearly so, but not by value."""
    x = torch.zeros(1, 16)
    x[0, 0] = 6 * 1.0624
    guide = Guide(
        valid=torch.ones(1, dtype=torch.bool),
        outer=torch.zeros(1, dtype=torch.int8),
        block_scales=torch.tensor([[2]], dtype=torch.uint8),
        scale_coding=ScaleCoding.COSET2,
        codes=torch.zeros(1, 16, dtype=torch.uint8),
    )
    assert rounded(x, guide=guide, backend=backend).block_scales.tolist() == [[0x36]]
    x[0, 0] = 6 * 1.07  # own byte 0x39; 0x3A = 1.25 is .18 away, 0x36 = .875 is .195 away
    assert rounded(x, guide=guide, backend=backend).block_scales.tolist() == [[0x3A]]


@every_backend
@pytest.mark.parametrize("name", ["mantissa_lean", "full+coset1", "full+bch32_2"])
def test_scales_that_a_scheme_stores_instead_of_the_rounded_one_are_recovered(name, backend):
    """Bytes of all-zero, tiny and small blocks that lie far from their raw scales, and saturated ones."""
    scheme = dataclasses.replace(
        NVFP4_STATIC_POW2, name="FLOORS", zero_byte=0x3A, underflow_byte=0x21, least_byte=0x0B
    )
    x, _ = near_rows(4, 0.0, rows=4, width=64)
    x[0, :16], x[1, 16:32], x[2, 32:48], x[3, 48:] = 0.0, 2.0**-14, 2.0**-5, 5000.0
    live = guided_quantize(x, scheme=scheme, exponent=0)
    assert {0x3A, 0x21, 0x0B, 0x7E} <= set(live.block_scales.flatten().tolist())
    got = guided_quantize(x, scheme=scheme, exponent=0, guide=coded_guide(live, name), backend=backend)
    assert_bitwise(got.block_scales, live.block_scales)
    assert_bitwise(got.codes, live.codes)
    # A block that now lies under the floor 0x0B, where the rollout's lay one byte above it.
    low, high = x.clone(), x.clone()
    low[:, 0], high[:, 0] = 6 * 6 * 2.0**-9, 6 * 12 * 2.0**-9
    low[:, 1:16], high[:, 1:16] = 0.0, 0.0
    live = guided_quantize(high, scheme=scheme, exponent=0)
    got = guided_quantize(low, scheme=scheme, exponent=0, guide=coded_guide(live, name), backend=backend)
    assert live.block_scales[:, 0].tolist() == [0x0C] * 4
    if name == "mantissa_lean":  # one bit leaves a tie between the bytes next to the floor
        assert_bitwise(got.block_scales, live.block_scales)


@every_backend
@pytest.mark.parametrize("coding", [ScaleCoding.COSET2, ScaleCoding.COSET1], ids=lambda c: c.value)
@pytest.mark.parametrize("scheme", [s for s in GUIDED if s.scale_rule is not ScaleRule.E4M3], ids=by_name)
def test_cosets_of_e8m0_recover_a_neighbouring_exponent(scheme, coding, backend):
    """Just over the threshold of the rule the rollout's exponent is one less, or one more, and found: over the whole
    range."""
    thresholds = {"FLOOR": 1.0, "EVEN": 1.75, "RCEIL": 1.5, "CEIL": 1.0}
    threshold = thresholds[scheme.scale_rule.name]
    exponents = torch.arange(-130.0, 127.0)
    below = torch.exp2(exponents)[:, None] * threshold * torch.tensor([0.999, 1.0, 1.0, 1.001])
    x_rollout, x = torch.zeros(len(below), 64), torch.zeros(len(below), 64)
    x_rollout[:, 0], x_rollout[:, 32] = below[:, 0], below[:, 3]
    x[:, 0], x[:, 32] = below[:, 3], below[:, 0]
    recorded = guided_quantize(x_rollout, scheme=scheme, backend=Backend.REFERENCE)
    guide = coded_guide(recorded, f"full+{coding.value}")
    got = guided_quantize(x, scheme=scheme, guide=guide, backend=backend)
    assert_bitwise(got.block_scales, recorded.block_scales)
    own = guided_quantize(x, scheme=scheme)
    assert int((own.block_scales != recorded.block_scales).sum()) > 490


@every_backend
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_spc_1_a_bad_block_disturbs_only_the_blocks_of_the_code_that_hold_it(bad, backend):
    x_rollout, _ = near_rows(7, 0.0, rows=3, width=256)
    x_rollout[1, 32:48] = 0.0  # what the trainer cannot know: these bits are 0
    recorded = rounded(x_rollout)
    x = guided_other_in(x_rollout, recorded, 1, [20, 70, 150])
    x[1, 40] = bad
    got = rounded(x, guide=coded_guide(recorded, "bch64_2"), backend=backend)
    assert got.block_scales[1, 2] == 0x7F and bool(got.values[1, 32:48].isnan().all())
    assert_bitwise(got.codes[::2], recorded.codes[::2])
    assert_bitwise(got.codes[1, 64:], recorded.codes[1, 64:])  # 70 and 150 were found
    assert int(got.undecoded) == 1
    assert got.codes[1, 20] != recorded.codes[1, 20]  # its block holds bits that nobody knows


def guided_other_in(x_rollout, recorded, row, columns):
    x, moved = x_rollout.clone(), guided_other(x_rollout, recorded)
    x[row, columns] = moved[row, columns]
    return x


@every_backend
def test_spc_1_a_bad_block_of_the_rollout_is_bad_in_the_replay_of_the_same_x(backend):
    x, _ = near_rows(8, 0.0, rows=2, width=128)
    x[0, 5] = float("nan")
    live = rounded(x)
    for name in ("bch32_2", "bch32_2+raw", "bch32_2+secded", "mantissa_lean"):
        got = rounded(x, guide=coded_guide(live, name), backend=backend)
        assert_bitwise(got.codes, live.codes)
        assert_bitwise(got.block_scales, live.block_scales)
        assert int(got.undecoded) == 0


@every_backend
def test_a_bad_block_of_scales_is_an_erasure(backend):
    """Its unknown bit is flipped for nothing, and the other differences of the row are still found."""
    x_rollout, x = near_rows(11, 0.004, rows=64, width=512)
    recorded = rounded(x_rollout)
    differs = rounded(x).block_scales != recorded.block_scales
    rows = (differs[:, 1:].sum(1) == 1).nonzero()[:, 0]
    x = x.clone()
    x[rows, 3] = float("nan")
    got = rounded(x, guide=coded_guide(recorded, "mantissa+bch32_2"), backend=backend)
    assert len(rows) > 5
    assert_bitwise(got.block_scales[rows, 1:], recorded.block_scales[rows, 1:])


@every_backend
def test_shp_2_guides_may_be_views(backend):
    x_rollout, x = near_rows(2, 0.01, rows=6, width=64)
    recorded = rounded(x_rollout)
    for name in EVERY_CODEC:
        guide = coded_guide(recorded, name, band=0.1)
        wanted = rounded(x, guide=guide, backend=backend)
        views = {
            part: getattr(guide, part).t().contiguous().t()
            for part in ("block_scales", "codes", "bits", "syndromes")
            if getattr(guide, part) is not None
        }
        got = rounded(x, guide=Guide(**{**held(guide), **views}), backend=backend)
        assert_bitwise(got.codes, wanted.codes)
        assert_bitwise(got.block_scales, wanted.block_scales)
        parts = [rounded(x[a:b], guide=guide.rows(a, b), backend=backend) for a, b in ((0, 2), (2, 6))]
        assert_bitwise(torch.cat([part.codes for part in parts]), wanted.codes)
        assert int(parts[0].in_band + parts[1].in_band) == int(wanted.in_band)


def refusals():
    x = torch.randn(2, 64)
    secded = coded_guide(rounded(x), "secded")
    both = coded_guide(rounded(x), "bch32_2+secded")
    mx = guided_quantize(x, scheme=MXFP4_RCEIL)
    far = secded.outer.clone()
    far[1] = 120
    return [
        (
            NVFP4_ROW_POW2,
            {**held(secded), "syndromes": secded.syndromes[:, :2]},
            r"syndromes as torch.uint8 \(2, 3\)",
        ),
        (
            NVFP4_ROW_POW2,
            {**held(both), "block_scales": secded.block_scales},
            r"block_scales as torch.uint8 \(2, 1\)",
        ),
        (NVFP4_ROW_POW2, {**held(secded), "outer": far}, r"exponents -110\.\.116; got 120"),
        (MXFP4_RCEIL, held(coded_guide(mx, "bch32_2+secded")), "'raw', 'coset2' and 'coset1' are allowed"),
        (FOUR_OVER_SIX[0], held(secded), r"lets two scales compete .* got scales coded as 'coset2'"),
    ]


@pytest.mark.parametrize("index", range(5))
def test_refusals(index):
    scheme, parts, message = refusals()[index]
    with pytest.raises(FormatError, match=message):
        guided_quantize(torch.randn(2, 64), scheme=scheme, guide=Guide(**parts))


def test_a_damaged_outer_scale_is_refused_where_scales_are_decoded_under_it():
    x = torch.randn(2, 64)
    recorded = guided_quantize(x, scheme=NVFP4_ROW_FP32)
    guide = coded_guide(recorded, "secded")
    for bad in (-1.0, float("nan"), float("inf")):
        guide.outer[0] = bad
        with pytest.raises(FormatError, match="finite numbers of 0 or more"):
            guided_quantize(x, scheme=NVFP4_ROW_FP32, guide=guide)
    absent = Guide(**{**held(guide), "valid": torch.tensor([False, True])})
    assert guided_quantize(x, scheme=NVFP4_ROW_FP32, guide=absent).codes is not None


def test_two_bits_or_one():
    guide = coded_guide(rounded(torch.randn(1, 16)), "low2")
    with pytest.raises(FormatError, match="one or two of every code"):
        Guide(**{**held(guide), "num_bits": 3})


def test_the_distance_is_infinite_where_no_scale_can_be_used():
    x, _ = near_rows(1, 0.0, rows=2, width=64)
    x[0, :16], x[1, 20] = 0.0, float("nan")
    recorded = rounded(x)
    given = {"scheme": NVFP4_ROW_POW2, "block_scales": recorded.block_scales, "outer": recorded.outer}
    found = boundary_distance(x, **given)
    is_far = torch.zeros(2, 64, dtype=torch.bool)
    is_far[0, :16] = is_far[1, 16:32] = True
    assert_bitwise(found.isinf(), is_far)
    assert bool((found[~is_far] >= 0).all()) and bool((found[~is_far] <= 1).all())
    assert found.dtype == torch.float32 and boundary_distance(x.bfloat16(), **given).dtype == torch.float32


@pytest.mark.parametrize("scheme", GUIDED, ids=by_name)
def test_the_distance_is_what_moves_a_value_over_the_boundary(scheme):
    """Moved by a little less the code stays, by a little more it becomes the alternative."""
    exponent = 0 if scheme.outer == "static" else None
    x = near_rows(9, 0.0, rows=4, width=64)[0]
    live = guided_quantize(x, scheme=scheme, exponent=exponent)
    distance = boundary_distance(x, scheme=scheme, block_scales=live.block_scales, outer=live.outer)
    opposite = coded_guide(live, "mantissa", bits=(live.codes & 1) ^ 1)
    other = guided_quantize(x, scheme=scheme, exponent=exponent, guide=opposite)
    unit = scale_of_values(live, scheme)
    # from its cell the alternative lies outwards or inwards, and at code 0 on the value's own side
    outwards = torch.where((other.codes & 7) > (live.codes & 7), 1.0, -1.0) * torch.ones_like(x).copysign(x)
    for share, wanted in ((0.99, live), (1.01, other)):
        moved = x + outwards * distance * share * unit
        inside = moved.abs() < 5.99 * unit  # beyond 6 a value is clipped, and its distance counts from 6
        inside &= x.abs() < 5.99 * unit
        guide = coded_guide(live, "mantissa", bits=wanted.codes & 1, band=1e-3)
        got = guided_quantize(moved, scheme=scheme, exponent=exponent, guide=guide)
        assert_bitwise(got.codes[inside] & 7, wanted.codes[inside] & 7)
        assert float(inside.float().mean()) > 0.9


def scale_of_values(rounded_rows, scheme):
    t = BlockTensor(
        packed=pack_codes(rounded_rows.codes),
        block_scales=rounded_rows.block_scales,
        outer=rounded_rows.outer,
        scheme=scheme,
    )
    return t.scales().repeat_interleave(scheme.block_size, 1)


@pytest.mark.parametrize("fault", ["shape", "scales", "outer"])
def test_a_distance_under_scales_that_do_not_fit_is_refused(fault):
    x, _ = near_rows(1, 0.0, rows=2, width=64)
    recorded = rounded(x)
    given = {"block_scales": recorded.block_scales, "outer": recorded.outer}
    if fault == "scales":
        given["block_scales"] = recorded.block_scales[:, :3]
    if fault == "outer":
        given["outer"] = recorded.outer[0]
    with pytest.raises(
        FormatError, match=r"boundary_distance with NVFP4_ROW_POW2 needs .*; got .*\. Pass the"
    ):
        boundary_distance(x[0] if fault == "shape" else x, scheme=NVFP4_ROW_POW2, **given)

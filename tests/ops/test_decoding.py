"""Guides that hold less than codes and bytes: against brute force, and the properties that make them usable."""

from fractions import Fraction

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.assertions import assert_bitwise
from tests.ops import brute_force as brute
from tests.ops.guides import (
    EVERY_CODEC,
    Z,
    as_rows,
    coded_guide,
    held,
    is_decodable,
    signed_ordinal,
    tied_flips,
    unit_guide,
)
from tests.ops.scheme_inputs import (
    GUIDED,
    SEEDS,
    by_name,
    exponent_of,
    hard_matrices,
    random_matrix,
)

from tracefp4.coding import ScaleCoding, codec_by_name
from tracefp4.formats.schemes import NVFP4_ROW_POW2
from tracefp4.ops.backend import Backend
from tracefp4.ops.guided_quantize import Guide, boundary_distance, guided_quantize
from tracefp4.ops.guided_quantize.decoding import PLAUSIBLE_DISTANCE
from tracefp4.ops.guided_quantize.scale_decoding import PLAUSIBLE_SCALE_DISTANCE

FEW = settings(max_examples=6, deadline=None)
BACKENDS = [Backend.REFERENCE, Backend.AUTO]
every_backend = pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.value)
every_guided = pytest.mark.parametrize("scheme", GUIDED, ids=by_name)


def signs_of(z):
    return [str(v).startswith("-") for v in z.flatten().tolist()]


@every_backend
@pytest.mark.parametrize("low", range(4))
def test_two_bits_equal_a_search_over_15_codewords_on_every_boundary(low, backend):
    middles = torch.tensor([1.0, 1.625, 2.375, 3.375])
    z = as_rows(torch.cat([Z, middles, torch.nextafter(middles, middles + 1), -middles]))
    guide = unit_guide(z, torch.full_like(z, low), "nearest_cell")
    guide = Guide(**{**held(guide), "num_bits": 2})
    got = guided_quantize(z, scheme=NVFP4_ROW_POW2, guide=guide, backend=backend)
    clipped = [Fraction(v) for v in z.clamp(-6, 6).flatten().tolist()]
    wanted = [brute.with_low_bits(v, s, low) for v, s in zip(clipped, signs_of(z), strict=True)]
    assert signed_ordinal(got.codes).flatten().tolist() == wanted


@every_backend
@pytest.mark.parametrize("low", range(4))
def test_two_bits_in_the_bracket_name_an_end_or_nothing(low, backend):
    z = as_rows(Z)
    guide = Guide(**{**held(unit_guide(z, torch.full_like(z, low), "bracket")), "num_bits": 2})
    got = guided_quantize(z, scheme=NVFP4_ROW_POW2, guide=guide, backend=backend)
    plain = guided_quantize(z, scheme=NVFP4_ROW_POW2, guide=unit_guide(z, got.codes, "full"))
    nearest = guided_quantize(z, scheme=NVFP4_ROW_POW2, guide=unit_guide(z, got.codes & 0, "full"))
    assert_bitwise(plain.codes, got.codes)  # never outside the bracket
    for code, value in zip(
        (got.codes & 7).flatten().tolist(), z.abs().clamp(max=6).flatten().tolist(), strict=True
    ):
        below = max(m for m in range(8) if brute.MAGNITUDES[m] <= Fraction(value))
        ends = {below} if brute.MAGNITUDES[below] == Fraction(value) else {below, below + 1}
        wanted = [m for m in ends if m & 3 == low]
        assert code in ends and (not wanted or code == wanted[0])
    assert nearest.codes is not None


@every_backend
def test_the_distance_is_that_to_the_nearest_cell_of_the_other_parity(backend):
    z = as_rows(Z[Z.abs() <= 6])
    guide = unit_guide(z, torch.zeros_like(z), "nearest_cell")
    got = boundary_distance(z, scheme=NVFP4_ROW_POW2, block_scales=guide.block_scales, outer=guide.outer)
    nearest = guided_quantize(z, scheme=NVFP4_ROW_POW2, guide=unit_guide(z, torch.zeros_like(z), "bracket"))
    assert nearest.codes is not None
    for d, v, negative in zip(got.flatten().tolist(), z.flatten().tolist(), signs_of(z), strict=True):
        z_here = Fraction(v)
        ordinal = brute.nearest_with(z_here, negative, set(range(-7, 8)))
        other = brute.alternative(z_here, negative, ordinal)
        wanted = float(numpy.float32(float(brute.distance_to_cell(z_here, other))))
        assert d == pytest.approx(wanted, rel=2e-7)


def rows_for_brute_force(seed, noise):
    """Rollout and trainer, [3, 96]: coarse numbers, so that distances tie; tiny, zero and saturating blocks."""
    generator = torch.Generator().manual_seed(seed)
    x_rollout = (torch.randn(3, 96, generator=generator) * 64).round() / 64
    x_rollout[0, 16:32], x_rollout[1, :16] = 0.0, x_rollout[1, :16] * 2.0**-13
    x = x_rollout + (noise * 64 * torch.randn(3, 96, generator=generator)).round() / 64
    x[2, 32:48] = 0.0
    return x_rollout, x


@every_backend
@pytest.mark.parametrize("band", [None, 0.0, 0.03, 0.25])
@pytest.mark.parametrize("name", ["secded", "parity3+coset1", "bch32_2+secded", "bch64_2+parity4"])
@given(SEEDS, st.sampled_from([0.004, 0.02, 0.1]))
@settings(max_examples=3, deadline=None)
def test_syndromes_equal_brute_force(name, band, backend, seed, noise):
    x_rollout, x = rows_for_brute_force(seed, noise)
    rollout = guided_quantize(x_rollout, scheme=NVFP4_ROW_POW2, backend=Backend.REFERENCE)
    guide = coded_guide(rollout, name, band=band)
    got = guided_quantize(x, scheme=NVFP4_ROW_POW2, guide=guide, backend=backend)
    codec = codec_by_name(name)
    num_near = num_undecoded = 0
    for row in range(len(x)):
        own = brute.Row(x[row].numpy(), int(rollout.outer[row]))
        recorded = guide.block_scales[row].tolist()
        if codec.scale_code is None:
            scales = own.scales_of_cosets(recorded, 4 if codec.scale_coding is ScaleCoding.COSET2 else 2)
        else:
            assert recorded == brute.packed(
                brute.syndromes(rollout.block_scales[row].tolist(), codec.scale_code),
                codec.scale_code.num_bits,
            )
            scales, lost = own.scales_of_syndromes(recorded, codec.scale_code, PLAUSIBLE_SCALE_DISTANCE)
            num_undecoded += lost
        assert got.block_scales[row].tolist() == scales
        assert guide.syndromes is not None and codec.code is not None
        limits = (PLAUSIBLE_DISTANCE, float("inf")) if band is None else (band, band)
        wanted, near, lost = own.codes_of_syndromes(scales, guide.syndromes[row].tolist(), codec.code, limits)
        assert signed_ordinal(got.codes[row]).tolist() == wanted
        num_near, num_undecoded = num_near + near, num_undecoded + lost
    assert int(got.in_band) == num_near
    assert int(got.undecoded) == num_undecoded


@every_backend
def test_of_two_sets_of_one_cost_the_smaller_one_and_then_the_first_is_flipped(backend):
    x, guide, wanted = tied_flips()
    got = guided_quantize(x, scheme=NVFP4_ROW_POW2, guide=guide, backend=backend)
    assert [row.nonzero()[:, 0].tolist() for row in got.codes] == wanted
    assert guide.code is not None and guide.syndromes is not None
    for row, positions in zip(x, wanted, strict=True):
        # the definition's own order of sets: by cost, then size, then ranks
        distances = {j: brute.units(0.25 - float(z), 4096) for j, z in enumerate(row)}
        difference = brute.syndromes([int(j in positions) for j in range(16)], guide.code)[0]
        assert sorted(brute.cheapest_set(difference, distances, guide.code) or ()) == positions


@every_backend
@every_guided
def test_the_rollouts_own_x_gives_its_codes_and_scales(scheme, backend):
    """Hard rows as one matrix each way; gates in turn."""
    padded = [torch.nn.functional.pad(x, (0, 128 - x.shape[1])) for x in hard_matrices()]
    x, exponent = torch.cat(padded), exponent_of(scheme)
    live = guided_quantize(x, scheme=scheme, exponent=exponent, backend=Backend.REFERENCE)
    for index, name in enumerate(EVERY_CODEC):
        if not is_decodable(name, scheme):
            continue
        guide = coded_guide(live, name, band=(None, 0.0, 0.05)[index % 3])
        got = guided_quantize(x, scheme=scheme, exponent=exponent, guide=guide, backend=backend)
        assert_bitwise(got.block_scales, live.block_scales)
        assert_bitwise(got.codes, live.codes)
        assert_bitwise(got.values.nan_to_num(9e9), live.values.nan_to_num(9e9))
        assert int(got.nearest_changed) == int(got.undecoded) == 0


@every_guided
@given(SEEDS, st.sampled_from(EVERY_CODEC))
@settings(max_examples=10, deadline=None)
def test_the_rollouts_own_random_x_gives_its_codes_and_scales(scheme, seed, name):
    if not is_decodable(name, scheme):
        return
    x = random_matrix(seed) * 2.0 ** (seed % 40 - 20)
    x[0, :32] *= 2.0**-30
    live = guided_quantize(x, scheme=scheme, exponent=exponent_of(scheme))
    got = guided_quantize(x, scheme=scheme, exponent=exponent_of(scheme), guide=coded_guide(live, name))
    assert_bitwise(got.block_scales, live.block_scales)
    assert_bitwise(got.codes, live.codes)

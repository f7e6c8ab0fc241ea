"""Guided rounding under every scheme that can be guided: all but those with one outer scale per matrix."""

import dataclasses

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.assertions import assert_bitwise, assert_same_values
from tests.formats import emulation
from tests.ops.guides import CODECS, guide_from
from tests.ops.scheme_inputs import GUIDED, SEEDS, by_name, exponent_of, hard_matrices, random_matrix

from tracefp4.formats.grid import round_e2m1
from tracefp4.formats.packing import pack_codes
from tracefp4.formats.scheme import Scheme
from tracefp4.formats.schemes import NVFP4_ROW_FP32
from tracefp4.ops.backend import Backend
from tracefp4.ops.dequantize import dequantize
from tracefp4.ops.guided_quantize import Guide, Rounded, guided_quantize
from tracefp4.ops.quantize import quantize

FEW = settings(max_examples=6, deadline=None)
BACKENDS = [Backend.REFERENCE, Backend.AUTO]
FIELDS = [field.name for field in dataclasses.fields(Rounded)]

every_guided = pytest.mark.parametrize("scheme", GUIDED, ids=by_name)
every_backend = pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.value)


def rounded(x: torch.Tensor, scheme: Scheme, **arguments) -> Rounded:
    return guided_quantize(x, scheme=scheme, exponent=exponent_of(scheme), **arguments)


def grid_position(x: torch.Tensor, recorded: Rounded, scheme: Scheme) -> torch.Tensor:
    """z = clip(|x| scaled by the recorded scales) by the second implementation, [N, K]."""
    s = emulation.decoded_scales(recorded.block_scales.numpy(), scheme)[..., None]
    outer = recorded.outer.float().reshape(-1, 1, 1).numpy()
    blocks = x.abs().view(len(x), -1, scheme.block_size).numpy()
    with numpy.errstate(**emulation.SILENT):
        z = emulation.scaled(blocks, s, outer, scheme)
    return torch.from_numpy(z).view(x.shape).clamp(max=6.0)


def assert_equal(got: Rounded, expected: Rounded) -> None:
    """Bit for bit; NaN is NaN."""
    for name in FIELDS:
        one, two = getattr(got, name), getattr(expected, name)
        if two is None:  # counted only with a guide
            continue
        if name == "values":
            assert one.isnan().tolist() == two.isnan().tolist()
            one, two = one[~one.isnan()], two[~two.isnan()]
        assert_bitwise(one, two)


@every_backend
def test_dty_1_bf16_values_are_rounded_once_ties_to_even(backend):
    """code * s * g with s = 1 and g = 1 + 2^-8: a tie of bf16 for codes with one significant bit."""
    x = torch.tensor([[0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 0.0] * 2]).bfloat16()
    guide = Guide(
        valid=torch.ones(1, dtype=torch.bool),
        outer=torch.full((1,), 1 + 2.0**-8),
        block_scales=torch.full((1, 1), 0x38, dtype=torch.uint8),
        codes=round_e2m1(x),
        bits=None,
        decoder="bracket",
    )
    got = guided_quantize(x, scheme=NVFP4_ROW_FP32, guide=guide, backend=backend).values
    # 1.5 * g = 1.505859375 lies between the bf16 numbers 1.5 and 1.5078125, nearer to the upper one.
    assert_bitwise(
        got, torch.tensor([[0.5, 1.0, 1.5078125, 2.0, 3.015625, 4.0, 6.03125, 0.0] * 2]).bfloat16()
    )


@every_backend
@every_guided
def test_without_a_guide_it_is_quantize_then_dequantize(scheme, backend):
    for x in hard_matrices():
        t = quantize(x, scheme=scheme, exponent=exponent_of(scheme))
        got = rounded(x, scheme, backend=backend)
        assert_bitwise(pack_codes(got.codes), t.packed)
        assert_bitwise(got.block_scales, t.block_scales)
        assert_bitwise(got.outer, t.outer)
        assert_same_values(got.values, dequantize(t))


@every_backend
@pytest.mark.parametrize("codec", CODECS)
@every_guided
def test_the_own_record_makes_guidance_a_no_op(scheme, codec, backend):
    for x in hard_matrices():
        live = rounded(x, scheme)
        assert_equal(rounded(x, scheme, guide=guide_from(live, codec), backend=backend), live)
        assert int(live.nearest_changed) == 0


@pytest.mark.parametrize("codec", CODECS)
@every_guided
@given(SEEDS, st.floats(0.01, 1.0))
@FEW
def test_a_guided_code_is_a_neighbour_of_the_value(scheme, codec, seed, noise):
    x_rollout = random_matrix(seed)
    x = x_rollout + noise * random_matrix(seed + 1)
    recorded = rounded(x_rollout, scheme)
    got = rounded(x, scheme, guide=guide_from(recorded, codec))
    assert_bitwise(got.block_scales, recorded.block_scales)
    assert_bitwise(got.outer, recorded.outer)
    z = grid_position(x, recorded, scheme)
    grid = torch.tensor(emulation.E2M1)
    above = torch.searchsorted(grid, z.double())
    below = torch.where(grid[above] == z, above, above - 1)
    code = (got.codes & 7).long()
    if codec == "nearest_cell":  # by definition it may step over an end of the bracket, by one code
        nearest = torch.from_numpy(emulation.nearest(z.numpy(), emulation.E2M1, scheme.tie.value))
        assert int((code - nearest).abs().max()) <= 1
        assert_bitwise(code & 1, (recorded.codes & 1).long())
    else:
        assert bool(((code == below) | (code == above)).all())
    holds = code > 0
    assert_bitwise(got.codes[holds] > 7, (x < 0)[holds])


@every_guided
@given(SEEDS)
@FEW
def test_full_codes_bring_the_values_nearer_to_the_rollout(scheme, seed):
    x_rollout = random_matrix(seed, rows=16)
    x = x_rollout + 0.05 * random_matrix(seed + 1, rows=16)
    recorded = rounded(x_rollout, scheme)
    guided = rounded(x, scheme, guide=guide_from(recorded, "full"))
    live = rounded(x, scheme)
    assert (guided.values - recorded.values).norm() < (live.values - recorded.values).norm()
    assert int(guided.nearest_changed) > 0


@every_backend
@pytest.mark.parametrize("codec", CODECS)
@every_guided
def test_spc_1_guidance_hides_nothing_that_is_not_finite(scheme, codec, backend):
    x_rollout = random_matrix(3)
    recorded = rounded(x_rollout, scheme)
    x = x_rollout.clone()
    x[1, 40], x[2, 0] = float("nan"), float("inf")
    got = rounded(x, scheme, guide=guide_from(recorded, codec), backend=backend)
    size = scheme.block_size
    is_bad = torch.zeros(x.shape[0], x.shape[1] // size, dtype=torch.bool)
    is_bad[1, 40 // size] = is_bad[2, 0] = True
    spread = is_bad.repeat_interleave(size, 1)
    assert_bitwise(got.values.isnan(), spread)
    assert got.block_scales[is_bad].tolist() == [scheme.nan_byte] * 2
    assert got.codes[spread].count_nonzero() == 0
    assert_bitwise(got.values[~spread], recorded.values[~spread])

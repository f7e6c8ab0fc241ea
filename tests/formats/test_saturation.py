"""What a rounding could not represent, counted: by hand for the cases, against the definition for random tensors."""

import pytest
import torch

from tracefp4.formats.order import Candidates
from tracefp4.formats.saturation import saturation
from tracefp4.formats.scaling import block_amax, decode_scales, outer_scale, raw_block_scale
from tracefp4.formats.schemes import SCHEMES
from tracefp4.ops.dequantize import dequantize
from tracefp4.ops.quantize import quantize


def counts(x, scheme, *, exponent=None, stored=None, **options):
    t = quantize(x if stored is None else stored, scheme=scheme, exponent=exponent)
    found = saturation(x, t.block_scales, t.outer, scheme, is_recorded=stored is not None, **options)
    return int(found.values_clipped), int(found.blocks_clamped), int(found.blocks_floored)


def block(*values):
    return torch.tensor([[*values, *[0.0] * (16 - len(values))]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_ovf_1_a_value_above_the_calibrated_range_saturates_and_is_counted(dtype):
    # g = 6 / 2688, so that a value of 6 is the largest that keeps its scale; the exponent of a scheme is an integer,
    # hence the same case times 448 / 6 under k = 0. Mutations: a NaN byte; no counter; a count of every clipped bit.
    x = block(12.0, 6.0, 3.0, 1.5).to(dtype) * 448
    scheme = SCHEMES["NVFP4_STATIC_POW2"]
    t = quantize(x, scheme=scheme, exponent=0)
    assert t.block_scales.item() == 0x7E
    assert t.codes()[0, :4].tolist() == [7, 7, 5, 3]
    assert dequantize(t)[0, :4].tolist() == [6 * 448.0, 6 * 448.0, 3 * 448.0, 1.5 * 448]
    assert counts(x, scheme, exponent=0) == (1, 1, 0)
    assert counts(x, scheme, exponent=1) == (0, 0, 0)
    assert counts(x, SCHEMES["NVFP4_STATIC_VLLM"], exponent=0) == (1, 1, 0)


def test_und_1_a_tiny_block_next_to_a_large_one_is_floored_and_counted():
    # Mutations: a check on the unrounded scale; a count of blocks that hold 2^-9 by right; zero blocks counted.
    large, zero = block(2688.0), block(0.0)
    tiny = block(6 * 2.0**-11, 3 * 2.0**-11)
    x = torch.cat([large, tiny, zero, block(6 * 2.0**-9)], dim=1)
    kept = SCHEMES["NVFP4_TENSOR_FP32"]
    t = quantize(x, scheme=kept)
    assert t.block_scales.tolist() == [[0x7E, 0x01, 0x00, 0x01]]
    assert t.codes()[0, 16:18].tolist() == [3, 2]
    assert dequantize(t)[0, 16:18].tolist() == [0.0029296875, 0.001953125]
    assert counts(x, kept) == counts(x, SCHEMES["NVFP4_ROW_POW2"]) == (0, 0, 1)
    flushed = SCHEMES["NVFP4_VLLM"]
    t = quantize(x, scheme=flushed)
    assert t.block_scales[0, 1] == 0 and not t.codes()[0, 16:32].any()
    assert counts(x, flushed) == (0, 0, 1)


def test_a_scheme_with_a_least_byte_floors_every_smaller_scale():
    x = torch.cat([block(2688.0), block(6 * 2.0**-8), block(6 * 2.0**-6)], dim=1)
    assert counts(x, SCHEMES["NVFP4_TORCHAO"]) == (0, 0, 1)


@pytest.mark.parametrize(("top", "clipped"), [(6.9, 0), (7.0, 1), (7.9, 1)])
def test_the_floor_rule_of_mxfp4_saturates_from_seven(top, clipped):
    x = torch.cat([block(top, 6.4), block(0.0)], dim=1)
    assert counts(x, SCHEMES["MXFP4_FLOOR"]) == (clipped, 0, 0)
    assert all(counts(x, SCHEMES[f"MXFP4_{rule}"]) == (0, 0, 0) for rule in ("EVEN", "RCEIL", "CEIL"))


def test_recorded_scales_may_be_too_small_for_todays_values():
    scheme = SCHEMES["NVFP4_ROW_POW2"]
    then = block(1.0, 0.5, 6.0)
    assert counts(then * 1.1, scheme, stored=then) == (0, 0, 0)
    assert counts(then * torch.tensor([1.0, 1.0, 2.0, *[1.0] * 13]), scheme, stored=then) == (1, 0, 0)
    assert counts(then * 20, scheme, stored=then) == (3, 0, 0)


def test_rows_that_do_not_count_are_left_out():
    x = torch.cat([block(9000.0)] * 3)
    rows = torch.tensor([True, False, True])
    assert counts(x, SCHEMES["NVFP4_STATIC_POW2"], exponent=0, rows=rows) == (2, 2, 0)


def test_blocks_that_are_not_finite_count_nowhere():
    x = torch.cat([block(9000.0, torch.nan), block(torch.inf), block(9000.0)], dim=1)
    assert counts(x, SCHEMES["NVFP4_STATIC_POW2"], exponent=0) == (1, 1, 0)
    assert counts(x, SCHEMES["NVFP4_STATIC_POW2"], exponent=0, stored=x) == (1, 1, 0)
    assert counts(torch.empty(0, 16), SCHEMES["NVFP4_STATIC_POW2"], exponent=0) == (0, 0, 0)


# with two candidates a block's scale may come from the other one's raw number
@pytest.mark.parametrize("name", [name for name, s in SCHEMES.items() if s.candidates is Candidates.SIX])
def test_counts_are_those_of_the_definition(name):
    scheme, generator = SCHEMES[name], torch.Generator().manual_seed(0)
    sizes = torch.exp2(torch.randint(-18, 14, (64, 4, 1), generator=generator).float())
    x = (torch.randn(64, 4, 32, generator=generator) * sizes).flatten(1)
    exponent = 1 if scheme.outer == "static" else None
    t = quantize(x, scheme=scheme, exponent=exponent)
    amax, _ = block_amax(x.abs(), scheme.block_size)
    decode_scale = decode_scales(t.block_scales, t.outer, scheme)[..., None]
    z = x.abs().unflatten(-1, (-1, scheme.block_size)) / decode_scale
    clamped = floored = torch.zeros(())
    if scheme.outer != "none":
        outer = outer_scale(amax, scheme, exponent)
        outer = outer[:, None] if scheme.outer == "row" else outer
        raw = raw_block_scale(amax, outer, scheme)
        clamped = ((raw > 464) & (t.block_scales == 0x7E)).sum()
        least = {0x08: 7.5 * 2.0**-9}.get(scheme.least_byte, 2.0**-10)  # midpoints below byte 8 and byte 1
        floored = ((amax > 0) & (raw < least if scheme.least_byte else raw <= least)).sum()
    expected = (int(((z >= 7) & (decode_scale > 0)).sum()), int(clamped), int(floored))
    assert counts(x, scheme, exponent=exponent) == expected
    assert sum(expected) > 0 or (name.startswith("MXFP4") and name != "MXFP4_FLOOR")

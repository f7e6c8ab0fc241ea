"""Cases of degenerate scales, overflow, underflow, rounding, special values, dtypes and shapes, with the inputs and
answers of docs/cases.md. Answers that assume g = amax / 2688 hold under NVFP4_TENSOR_FP32 and NVFP4_ROW_FP32; what our
power-of-two schemes store for the same input stands beside them."""

import pytest
import torch
from tests.assertions import assert_bitwise, assert_same_values
from tests.ops.scheme_inputs import ALL, GUIDED, by_name, exponent_of

from tracefp4.errors import FormatError
from tracefp4.formats.packing import unpack_codes
from tracefp4.formats.saturation import saturation
from tracefp4.formats.scaling import encode_block_scales
from tracefp4.formats.scheme import Scheme
from tracefp4.formats.schemes import (
    MXFP4_CEIL,
    MXFP4_FLOOR,
    NVFP4_KV,
    NVFP4_ROW_FP32,
    NVFP4_ROW_POW2,
    NVFP4_STATIC_POW2,
    NVFP4_TENSOR_FP32,
    NVFP4_TENSOR_POW2,
    SCHEMES,
)
from tracefp4.formats.tensor import BlockTensor
from tracefp4.ops.dequantize import dequantize
from tracefp4.ops.guided_quantize import Guide, guided_quantize
from tracefp4.ops.quantize import quantize, quantize_with_scales

BY_ROW = [scheme for scheme in ALL if scheme.outer == "row"]
every_scheme = pytest.mark.parametrize("scheme", ALL, ids=by_name)


def blocks(*leading: list[float], size: int = 16) -> torch.Tensor:
    """One row of blocks given by their leading values."""
    return torch.tensor([[*block, *[0.0] * (size - len(block))] for block in leading]).reshape(1, -1)


def quantized(x: torch.Tensor, scheme: Scheme) -> BlockTensor:
    return quantize(x, scheme=scheme, exponent=exponent_of(scheme))


def codes(t: BlockTensor, block: int, count: int) -> list[int]:
    return t.codes()[0, 16 * block : 16 * block + count].tolist()


def test_zer_1_a_zero_block_beside_a_small_one():
    w = blocks([], [3.0, 1.0, 0.5])
    for scheme, byte in ((NVFP4_TENSOR_FP32, 0x7E), (NVFP4_TENSOR_POW2, 0x78)):
        t = quantize(w, scheme=scheme)
        assert t.block_scales.tolist() == [[0x00, byte]]
        assert codes(t, 1, 3) == [7, 4, 2]
        assert_bitwise(dequantize(t), w)


@every_scheme
def test_zer_1_no_scheme_stores_nan_for_a_zero_block(scheme):
    t = quantized(torch.cat([torch.zeros(1, 32), blocks([3.0, 1.0, 0.5], size=32)], dim=1), scheme)
    zero_blocks = 32 // scheme.block_size
    assert scheme.nan_byte not in t.block_scales.tolist()[0]
    assert t.block_scales[0, :zero_blocks].tolist() == [scheme.zero_byte] * zero_blocks
    assert (t.codes()[0, :32] & 7).count_nonzero() == 0
    assert dequantize(t)[0, :32].tolist() == [0.0] * 32
    assert dequantize(t)[0, 32].item() == pytest.approx(3.0, rel=1 / 16)


@every_scheme
def test_zer_2_a_tensor_of_zeros(scheme):
    t = quantized(torch.zeros(2, 32), scheme)
    assert bool(t.scales().isfinite().all()) and bool(t.outer.float().isfinite().all())
    values = dequantize(t)
    assert (t.codes() & 7).count_nonzero() == 0 and (values == 0).all()
    assert ((values @ torch.randn(32, 5)) == 0).all()


@pytest.mark.parametrize("scheme", BY_ROW, ids=by_name)
def test_zer_2_a_zero_row_between_others(scheme):
    x = torch.randn(3, 32)
    x[1] = 0.0
    t = quantize(x, scheme=scheme)
    for index in (0, 2):
        alone = quantize(x[index : index + 1], scheme=scheme)
        assert_bitwise(t.packed[index : index + 1], alone.packed)
        assert_bitwise(t.block_scales[index : index + 1], alone.block_scales)
        assert_bitwise(t.outer[index : index + 1], alone.outer)
    assert bool(t.outer.float().isfinite().all()) and (dequantize(t)[1] == 0).all()


@every_scheme
def test_zer_3_a_tiny_maximum_makes_no_zero_a_nan(scheme):
    t = quantized(blocks([1e-36], size=32), scheme)
    values = dequantize(t)
    assert bool(t.scales().isfinite().all()) and bool(t.outer.float().isfinite().all())
    assert (values[0, 1:] == 0).all()
    # An outer scale is no smaller than 2^-116, or 2^-110 as a power of two: half a code's step may be lost.
    assert values[0, 0].item() in (0.0, pytest.approx(1e-36, rel=0.3))


def test_zer_3_ours_keep_the_tiny_value():
    x = blocks([1e-36])
    assert dequantize(quantize(x, scheme=NVFP4_ROW_POW2))[0, 0].item() == 0.5 * 2.0**-119
    assert dequantize(quantize(x, scheme=NVFP4_ROW_FP32))[0, 0].item() == pytest.approx(1e-36, rel=1 / 8)


def test_ovf_1_a_static_scale_that_is_too_small_saturates():
    x, outer = blocks([12.0, 6.0, 3.0, 1.5]), torch.tensor(6 / 2688)
    scheme = NVFP4_TENSOR_FP32
    block_scales = encode_block_scales(torch.tensor([[12.0]]), outer, scheme)
    assert block_scales.tolist() == [[0x7E]]
    t = quantize_with_scales(x, block_scales=block_scales, outer=outer, scheme=scheme)
    assert codes(t, 0, 4) == [7, 7, 5, 3] and dequantize(t)[0, :4].tolist() == [6.0, 6.0, 3.0, 1.5]
    t = quantize(
        blocks([5376.0, 2688.0, 1344.0, 672.0]), scheme=NVFP4_KV, exponent=0
    )  # the same in powers of two
    assert t.block_scales.tolist() == [[0x7E]] and codes(t, 0, 4) == [7, 7, 5, 3]
    assert dequantize(t)[0, :4].tolist() == [2688.0, 2688.0, 1344.0, 672.0]


def test_rft_5_activations_that_grew_fourfold_saturate_under_the_first_policys_scale():
    # Mutation: a static scale that follows its input, or no count of what it cuts.
    x, scheme = blocks([24.0, 12.0, 6.0, 2.0]), NVFP4_TENSOR_FP32
    outer = torch.tensor(6 / 2688)  # calibrated on a maximum of 6
    t = quantize_with_scales(
        x, block_scales=encode_block_scales(torch.tensor([[24.0]]), outer, scheme), outer=outer, scheme=scheme
    )
    assert dequantize(t)[0, :4].tolist() == [6.0, 6.0, 6.0, 2.0]
    lost = saturation(x, t.block_scales, t.outer, scheme, is_recorded=True)
    assert (int(lost.values_clipped), int(lost.blocks_clamped)) == (2, 1)
    assert dequantize(quantize(x, scheme=scheme))[0, :4].tolist() == [24.0, 12.0, 6.0, 2.0]  # dynamic
    x = 448 * x  # the same in powers of two: calibrated on 2688
    t = quantize(x, scheme=NVFP4_STATIC_POW2, exponent=0)
    assert dequantize(t)[0, :4].tolist() == [2688.0, 2688.0, 2688.0, 896.0]
    lost = saturation(x, t.block_scales, t.outer, NVFP4_STATIC_POW2)
    assert (int(lost.values_clipped), int(lost.blocks_clamped)) == (2, 1)


@pytest.mark.parametrize(("byte", "value"), [(0, 2.0**-127), (127, 1.0), (254, 2.0**127)])
def test_ovf_6_the_ends_of_e8m0_decode(byte, value):
    packed = torch.full((1, 16), 0x22, dtype=torch.uint8)  # code 2 is 1.0
    block_scales = torch.tensor([[byte]], dtype=torch.uint8)
    t = BlockTensor(
        packed=packed, block_scales=block_scales, outer=torch.zeros((), dtype=torch.int8), scheme=MXFP4_FLOOR
    )
    assert dequantize(t).tolist() == [[value] * 32]
    nan = BlockTensor(
        packed=packed, block_scales=torch.full_like(block_scales, 255), outer=t.outer, scheme=MXFP4_FLOOR
    )
    assert bool(dequantize(nan).isnan().all())


def test_ovf_6_the_smallest_blocks_are_numbers():
    x = torch.cat([blocks([2.0**-126], size=32), blocks([2.0**-130], size=32)])
    t = quantize(x, scheme=MXFP4_FLOOR)
    assert t.block_scales.tolist() == [[0], [0]] and t.codes()[:, 0].tolist() == [4, 0]
    assert dequantize(t)[:, 0].tolist() == [2.0**-126, 0.0]


UND_1 = blocks([2688.0], [6 * 2.0**-11, 3 * 2.0**-11])


@pytest.mark.parametrize(
    "name", ["NVFP4_TENSOR_FP32", "NVFP4_ROW_FP32", "NVFP4_ROW_POW2", "NVFP4_TENSOR_POW2"]
)
def test_und_1_ours_keep_a_small_block_at_the_smallest_scale(name):
    t = quantize(UND_1, scheme=SCHEMES[name])
    assert t.block_scales.tolist() == [[0x7E, 0x01]] and codes(t, 1, 2) == [3, 2]
    assert dequantize(t)[0, 16:18].tolist() == [0.0029296875, 0.001953125]


@pytest.mark.parametrize("scheme", [s for s in ALL if s.outer in ("row", "tensor")], ids=by_name)
def test_und_1_no_code_under_a_scale_of_zero(scheme):
    t = quantized(UND_1, scheme)
    byte = t.block_scales[0, 1].item()
    assert byte == max(scheme.underflow_byte, scheme.least_byte)
    assert byte or (t.codes()[0, 16:] & 7).count_nonzero() == 0
    assert bool(dequantize(t).isfinite().all())


@pytest.mark.parametrize("name", ["NVFP4_TENSOR_FP32", "NVFP4_ROW_POW2"])
def test_rnd_1_ties_go_to_the_even_code(name):
    above = torch.nextafter(torch.tensor(0.25), torch.tensor(1.0)).item()
    ties = [6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5.0, above]
    t = quantize(blocks([2688.0], ties), scheme=SCHEMES[name])
    assert t.block_scales.tolist() == [[0x7E, 0x38]]
    assert codes(t, 1, 16) == [7, 0, 2, 2, 4, 4, 6, 6, 8, 10, 10, 12, 12, 14, 14, 1]
    assert bytes(t.packed[0, 8:].tolist()) == bytes.fromhex("07224466A8CAEC1E")


@pytest.mark.parametrize(("name", "byte"), [("NVFP4_ROW_FP32", 0x7E), ("NVFP4_ROW_POW2", 0x78)])
def test_rnd_3_packer_and_fake_quantization_give_one_pair(name, byte):
    x = blocks([6.0, 0.75])
    t, fake = quantize(x, scheme=SCHEMES[name]), guided_quantize(x, scheme=SCHEMES[name])
    assert t.block_scales.tolist() == fake.block_scales.tolist() == [[byte]]
    assert codes(t, 0, 2) == fake.codes[0, :2].tolist() == [7, 2]


def test_rnd_3_the_double_reciprocal_has_a_name_of_its_own():
    assert codes(quantize(blocks([6.0, 0.75]), scheme=SCHEMES["NVFP4_TORCHAO"]), 0, 2) == [7, 1]


def test_rnd_5_codes_decode_and_encode_to_themselves():
    t = quantize(blocks([6.0, 0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]),
                 scheme=NVFP4_KV, exponent=0)  # fmt: skip
    assert codes(t, 0, 16) == [7, 0, 1, 2, 3, 4, 5, 6, 8, 9, 10, 11, 12, 13, 14, 15]


def test_rnd_6_a_recorded_minus_zero_is_no_flip():
    x = blocks([6.0, 0.1, -0.1])
    live = guided_quantize(x, scheme=NVFP4_ROW_POW2)
    assert live.codes[0, :3].tolist() == [7, 0, 8]
    recorded = torch.where(live.codes == 0, 8, torch.where(live.codes == 8, 0, live.codes)).to(torch.uint8)
    guide = Guide(
        valid=torch.tensor([True]),
        outer=live.outer,
        block_scales=live.block_scales,
        codes=recorded,
        bits=None,
    )
    got = guided_quantize(x, scheme=NVFP4_ROW_POW2, guide=guide)
    assert int(got.nearest_changed) == 0
    assert_same_values(got.values, live.values)


@pytest.mark.parametrize("scheme", [s for s in ALL if s.outer == "none" and s is not MXFP4_CEIL], ids=by_name)
def test_rnd_7_mxfp4_rounds_once(scheme):
    x = blocks([6.0, 1.2509765625], size=32)
    assert quantize(x, scheme=scheme).codes()[0, :2].tolist() == [7, 3]
    assert quantize(x.bfloat16(), scheme=scheme).codes()[0, :2].tolist() == [7, 2]


@pytest.mark.parametrize("scheme", [s for s in ALL if s.outer in ("row", "tensor")], ids=by_name)
def test_rnd_7_float32_is_not_rounded_to_bf16_first(scheme):
    # a float32 value above a tie and its bf16 value, the tie itself; scale 1 (or 1.5 for the 4: then both are one code)
    x = blocks([6 * scheme.scale_max], [6.0, 1.2509765625, *[6.0] * 14])
    t, coarse = quantize(x, scheme=scheme), quantize(x.bfloat16(), scheme=scheme)
    assert t.block_scales[0, 1].item() == coarse.block_scales[0, 1].item() == 0x38
    assert codes(t, 1, 2) == [7, 3] and codes(coarse, 1, 2) == [7, 2]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@every_scheme
def test_spc_1_a_block_with_nan_or_inf_reads_back_nan(scheme, bad):
    x = torch.ones(1, 64)
    x[0, 3] = bad
    t = quantized(x, scheme)
    values = dequantize(t)
    assert bool(values[0, : scheme.block_size].isnan().all())
    assert t.block_scales[0, 0].item() == scheme.nan_byte and codes(t, 0, 16) == [0] * 16
    assert values[0, scheme.block_size :].tolist() == [pytest.approx(1.0, rel=1 / 8)] * (
        64 - scheme.block_size
    )


def test_dty_4_the_outer_scale_is_float32():
    t = quantize(blocks([5.0]), scheme=NVFP4_TENSOR_FP32)
    assert t.outer.dtype == torch.float32 and t.outer.item() == 0.0018601190531626344
    with pytest.raises(FormatError, match=r"needs outer as torch.float32 \(\); got torch.bfloat16"):
        BlockTensor(
            packed=t.packed, block_scales=t.block_scales, outer=t.outer.bfloat16(), scheme=NVFP4_TENSOR_FP32
        )


@every_scheme
def test_shp_1_a_width_that_is_no_multiple_is_refused(scheme):
    for width in (60, 33):
        with pytest.raises(
            FormatError, match=rf"multiple of {scheme.block_size}; got x of shape \(3, {width}\)"
        ):
            quantized(torch.ones(3, width), scheme)


def test_shp_1_padding_by_the_caller_changes_no_real_value():
    x = torch.ones(3, 60)
    x[:, 59] = 3.0
    t = quantize(torch.nn.functional.pad(x, (0, 4)), scheme=NVFP4_TENSOR_FP32)
    assert t.block_scales.tolist() == [[0x71, 0x71, 0x71, 0x7E]] * 3
    assert unpack_codes(t.packed)[:, 60:].count_nonzero() == 0
    values = dequantize(t)[:, :60]
    assert values[0].tolist() == [pytest.approx(27 / 28, rel=1e-6)] * 48 + [1.0] * 11 + [3.0]


@every_scheme
def test_shp_2_views_give_the_bytes_of_their_copies(scheme):
    big = (64 * torch.arange(64)[:, None] + torch.arange(64)).float()
    negated = torch._neg_view(big)  # what `z.conj().imag` is: a sign that memory does not hold
    for view in (big[:4, 16:48], big.T[:32, :], big[::2], big[:, ::2], big[:4].expand(4, 64), negated):
        t, dense = quantized(view, scheme), quantized(view.resolve_neg().contiguous().clone(), scheme)
        assert_bitwise(t.packed, dense.packed)
        assert_bitwise(t.block_scales, dense.block_scales)
        assert_bitwise(t.outer, dense.outer)


@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 64)])
@every_scheme
def test_shp_4_tensors_without_rows(scheme, shape):
    t = quantized(torch.zeros(shape, dtype=torch.bfloat16, requires_grad=True), scheme)
    assert t.packed.shape == (*shape[:-1], 32) and t.block_scales.shape == (
        *shape[:-1],
        64 // scheme.block_size,
    )
    assert bool(t.outer.float().isfinite().all())
    assert dequantize(t).shape == shape


@pytest.mark.parametrize("scheme", GUIDED, ids=by_name)
def test_shp_4_guided_rounding_of_no_rows(scheme):
    got = guided_quantize(torch.zeros(0, 64), scheme=scheme, exponent=exponent_of(scheme))
    assert got.values.shape == (0, 64) and int(got.nearest_changed) == 0

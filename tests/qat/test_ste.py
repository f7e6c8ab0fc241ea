"""Straight-through estimators: the gradient is written down, so no clamp convention can zero it."""

import pytest
import torch
from tests.assertions import assert_bitwise

from tracefp4.errors import FormatError
from tracefp4.formats import MXFP4_FLOOR, NVFP4_KV, NVFP4_ROW_POW2
from tracefp4.formats.scaling import decode_scales
from tracefp4.ops.guided_quantize import guided_quantize
from tracefp4.qat.ste import clip_mask, round_bf16_through, straight_through


def gradient(x, x_hat, keep=None):
    """Gradient of the sum of the straight-through output."""
    x = x.clone().requires_grad_()
    straight_through(x, x_hat, keep=keep).sum().backward()
    return x.grad


def test_ste_1_values_on_the_bound_keep_their_gradient():
    # MXFP4 floor rule, block maximum 7, scale 1. Mutation: STE from round() and clamp() gives 0 or .5 at 6.0.
    x = torch.tensor([[6.0, 7.0, -6.0, 1.2, 0.1, *[0.0] * 27]])
    rounded = guided_quantize(x, scheme=MXFP4_FLOOR)
    x_hat, scales = rounded.values, decode_scales(rounded.block_scales, rounded.outer, MXFP4_FLOOR)
    assert x_hat[0, :5].tolist() == [6.0, 6.0, -6.0, 1.0, 0.0] and scales.tolist() == [[1.0]]
    assert gradient(x, x_hat).tolist() == [[1.0] * 32]
    keep = clip_mask(x, scales, block_size=32)
    assert gradient(x, x_hat, keep).tolist() == [[1.0, 0.0, *[1.0] * 30]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_ste_3_gradient_is_ones_in_the_dtype_of_x_and_nothing_else_gets_one(dtype):
    x = torch.randn(2, 32).to(dtype).requires_grad_()
    x_hat = torch.randn(2, 32).to(dtype).requires_grad_()
    y = straight_through(x, x_hat)
    assert_bitwise(y, x_hat)
    y.sum().backward()
    assert_bitwise(x.grad, torch.ones(2, 32, dtype=dtype))
    assert x_hat.grad is None


@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 64)])
def test_shp_4_no_rows_have_an_empty_gradient(shape):
    x = torch.zeros(shape, dtype=torch.bfloat16, requires_grad=True)
    straight_through(x, torch.zeros(shape, dtype=torch.bfloat16)).sum().backward()
    assert x.grad.shape == shape and x.grad.dtype == torch.bfloat16


def test_ste_3_wrong_sizes_are_refused():
    x = torch.randn(2, 32)
    with pytest.raises(FormatError, match=r"equal shapes; got x \(2, 32\)"):
        straight_through(x, torch.randn(2, 16))
    with pytest.raises(FormatError, match=r"one scale per 16 values; got x \(2, 32\) and scales \(2,\)"):
        clip_mask(x, torch.ones(2))
    with pytest.raises(FormatError, match="one scale per 16"):
        clip_mask(x, torch.ones(2, 1))  # would broadcast one scale over two blocks


def test_ste_4_a_static_scale_that_saturates_blocks_the_gradient_above_it_only():
    # OVF-1: the static outer scale is 2^-9, and 12 / 6 needs a block scale of 1024 * 2^-9: clipped to 448.
    x = torch.tensor([[6.0, 5.25, 3.0, 1.5, *[0.0] * 12]])
    rounded = guided_quantize(x, scheme=NVFP4_KV, exponent=-9)
    decode_scale = decode_scales(rounded.block_scales, rounded.outer, NVFP4_KV)
    assert decode_scale.tolist() == [[0.875]]  # 6 * .875 = 5.25 is the largest value in range
    keep = clip_mask(x, decode_scale)
    assert gradient(x, rounded.values, keep).tolist() == [[0.0, *[1.0] * 15]]
    assert gradient(x, rounded.values).tolist() == [[1.0] * 16]


def test_clip_mask_of_zero_and_non_finite_blocks():
    x = torch.zeros(1, 32)
    x[0, 20] = float("nan")
    rounded = guided_quantize(x, scheme=NVFP4_ROW_POW2)
    keep = clip_mask(x, decode_scales(rounded.block_scales, rounded.outer, NVFP4_KV))
    assert keep.tolist() == [[True] * 16 + [False] * 16]


def test_a_masked_gradient_is_the_incoming_one_elsewhere():
    x, keep = torch.randn(4, 16, requires_grad=True), torch.rand(4, 16) > 0.5
    incoming = torch.randn(4, 16)
    straight_through(x, torch.randn(4, 16), keep=keep).backward(incoming)
    assert torch.equal(x.grad, incoming * keep)


def test_bf16_rounding_is_straight_through():
    x = torch.randn(64, requires_grad=True)
    y = round_bf16_through(x)
    y.backward(torch.arange(64.0))
    assert_bitwise(y, x.detach().bfloat16().float())
    assert_bitwise(x.grad, torch.arange(64.0))


def test_second_use_of_the_same_output_adds_up():
    x = torch.randn(3, 16, requires_grad=True)
    y = straight_through(x, x.detach().round())
    (y * 2 + y * y).sum().backward()
    assert torch.equal(x.grad, 2 + 2 * x.detach().round())

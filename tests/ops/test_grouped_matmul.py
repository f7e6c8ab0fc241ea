"""grouped_matmul: against a loop over experts, forward and both gradients, with empty experts and empty
batches."""

import pytest
import torch
from tests.assertions import assert_bitwise

from tracefp4.errors import FormatError
from tracefp4.ops.grouped_matmul import grouped_matmul, reference

# Sums of 32 float32 products of unit Gaussians: a few units of 2^-23 * 32 apart when the order of summation
# differs.
FLOAT32_TOLERANCE = 2e-5
SIZES = [[3, 0, 5, 0], [0, 0, 0, 8], [8, 0, 0, 0], [2, 2, 2, 2], [0, 0, 0, 0], [1, 0, 0, 0]]


def by_loop(x, w, sizes):
    parts, start = [], 0
    for expert, size in enumerate(sizes):
        parts.append(x[start : start + size] @ w[expert].T)
        start += size
    return torch.cat(parts)


def operands(sizes, dtype, width=32, out=24):
    x = torch.randn(sum(sizes), width, dtype=dtype, requires_grad=True)
    w = torch.randn(len(sizes), out, width, dtype=dtype, requires_grad=True)
    return x, w


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("expanded_gradient", [False, True], ids=["dense", "expanded"])
def test_moe_5_equals_a_loop_with_full_gradients(sizes, dtype, expanded_gradient):
    x, w = operands(sizes, dtype)
    x_loop, w_loop = x.detach().clone().requires_grad_(), w.detach().clone().requires_grad_()
    y, expected = grouped_matmul(x, w, torch.tensor(sizes)), by_loop(x_loop, w_loop, sizes)
    gradient = torch.ones(()).to(dtype).expand_as(y) if expanded_gradient else torch.randn_like(y)
    y.backward(gradient)
    expected.backward(gradient)
    for got, want in ((y, expected), (x.grad, x_loop.grad), (w.grad, w_loop.grad)):
        torch.testing.assert_close(
            got, want, rtol=0, atol=FLOAT32_TOLERANCE if dtype == torch.float32 else 1e-12
        )
    for expert, size in enumerate(sizes):
        if size == 0:
            assert_bitwise(w.grad[expert], torch.zeros_like(w[expert]))


def test_the_grouped_product_of_bf16_has_the_loops_gradients(monkeypatch):
    # The path of bf16 on CUDA, taken here on the CPU. Mutation: groups of the gradient along the wrong dimension.
    monkeypatch.setattr(reference, "_has_grouped_product", lambda x, w: True)
    sizes = [3, 0, 5, 0]
    x, w = operands(sizes, torch.bfloat16)
    x_loop, w_loop = x.detach().clone().requires_grad_(), w.detach().clone().requires_grad_()
    y, expected = grouped_matmul(x, w, torch.tensor(sizes)), by_loop(x_loop, w_loop, sizes)
    gradient = torch.randn_like(y)
    y.backward(gradient)
    expected.backward(gradient)
    for got, want in ((y, expected), (x.grad, x_loop.grad), (w.grad, w_loop.grad)):
        # one rounding to bf16 of sums up to about 20
        torch.testing.assert_close(got, want, rtol=2**-7, atol=2**-4)


@pytest.mark.parametrize(("width", "out"), [(30, 24), (32, 7), (5, 3)])
def test_widths_that_the_grouped_product_cannot_take(width, out):
    x, w = operands([2, 0, 3], torch.float32, width, out)
    y = grouped_matmul(x, w, torch.tensor([2, 0, 3]))
    torch.testing.assert_close(y, by_loop(x, w, [2, 0, 3]), rtol=0, atol=FLOAT32_TOLERANCE)


def test_views_and_partial_gradients():
    wide = torch.randn(8, 64)
    w = torch.randn(2, 32, 16).transpose(1, 2).requires_grad_()
    x = wide[:, 16:48]
    y = grouped_matmul(x, w, torch.tensor([5, 3]))
    torch.testing.assert_close(y, by_loop(x, w, [5, 3]), rtol=0, atol=FLOAT32_TOLERANCE)
    y.sum().backward()
    assert w.grad.shape == w.shape
    x_only = x.clone().requires_grad_()
    grouped_matmul(x_only, w.detach(), torch.tensor([5, 3])).sum().backward()
    assert x_only.grad.shape == x.shape


def test_gradients_by_finite_differences():
    x, w = operands([2, 0, 1], torch.float64, width=4, out=3)
    assert torch.autograd.gradcheck(lambda a, b: grouped_matmul(a, b, torch.tensor([2, 0, 1])), (x, w))


def test_bat_4_padding_outputs_do_not_change_the_kept_ones():
    x, w = torch.randn(4, 256), torch.randn(1, 32, 256)
    padded = torch.cat([w, 1e4 * torch.randn(1, 32, 256)], 1)
    sizes = torch.tensor([4])
    kept = grouped_matmul(x, padded, sizes)[:, :32]
    # 256 products: another blocking of the sum may differ by a few float32 units of the largest partial sum
    torch.testing.assert_close(kept, grouped_matmul(x, w, sizes), rtol=0, atol=256 * 2.0**-23 * 16)


@pytest.mark.parametrize(
    ("x_shape", "w_shape", "sizes", "message"),
    [
        ((4, 16), (2, 8, 32), [2, 2], "of one dtype and group_sizes"),
        ((4, 16), (2, 8, 16), [2, 2, 0], "of one dtype and group_sizes"),
        ((4, 16), (2, 8, 16), [2, 1], r"sum 4; got torch.int64 \[2, 1\]"),
        ((4, 16), (2, 8, 16), [5, -1], ">= 0"),
    ],
)
def test_refusals(x_shape, w_shape, sizes, message):
    with pytest.raises(FormatError, match=message):
        grouped_matmul(torch.randn(x_shape), torch.randn(w_shape), torch.tensor(sizes))
    with pytest.raises(FormatError, match="of one dtype"):
        grouped_matmul(torch.randn(4, 16).double(), torch.randn(1, 8, 16), torch.tensor([4]))

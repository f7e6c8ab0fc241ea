"""The definition of grouped_matmul: torch's grouped product for float32, and for bf16 on CUDA; a loop over the
non-empty experts otherwise.

y = x w^T per group;   dx = dy w per group;   dw = dy^T x per group (zeros for an empty group)
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm


def grouped_matmul_reference(x: Tensor, w: Tensor, group_sizes: Tensor) -> Tensor:
    """Multiply checked groups; see `grouped_matmul`."""
    if x.shape[0] > 0 and _has_grouped_product(x, w):
        offsets = group_sizes.cumsum(0, dtype=torch.int32)
        product: Tensor = _GroupedProduct.apply(x.contiguous(), w.contiguous(), offsets)
        return product
    return grouped_matmul_loop(x, w, group_sizes)


def _has_grouped_product(x: Tensor, w: Tensor) -> bool:
    """Whether torch multiplies all groups at once: rows of 16 bytes, and a kernel (bf16 on a CPU is a slow loop)."""
    if x.dtype != torch.float32 and not (x.dtype == torch.bfloat16 and x.is_cuda):
        return False
    numbers = 16 // x.element_size()
    return x.shape[1] % numbers == 0 and w.shape[1] % numbers == 0


def grouped_matmul_loop(x: Tensor, w: Tensor, group_sizes: Tensor) -> Tensor:
    """Multiply checked groups one expert at a time; any dtype, any strides."""
    sizes = group_sizes.tolist()
    if x.shape[0] == 0:
        return (
            x @ w.sum(0).T
        )  # [0, M], still connected to both operands, so that their gradients are zeros, not None
    parts = [rows @ w[e].T for e, rows in enumerate(x.split(sizes)) if sizes[e]]
    return torch.cat(parts)


class _GroupedProduct(torch.autograd.Function):
    """torch's grouped product with its three matrix products spelled out; it refuses strides that are not
    multiples of 16 bytes and gradients that were expanded (torch 2.13), hence the size condition above and
    `contiguous` below."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, offsets: Tensor) -> Tensor:
        ctx.save_for_backward(x, w, offsets)
        return grouped_mm(x, w.transpose(1, 2), offs=offsets)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, w, offsets = ctx.saved_tensors
        dy = grads[0].contiguous()
        dx = grouped_mm(dy, w, offs=offsets) if ctx.needs_input_grad[0] else None
        dw = grouped_mm(dy.T, x, offs=offsets) if ctx.needs_input_grad[1] else None
        return dx, dw, None

"""Straight-through estimators: forward takes a rounded value, backward pretends that nothing was rounded.

With y = Q(x) the estimator sets dL/dx := dL/dy (identity, also where a value was clipped), or, with a mask,
dL/dx := dL/dy * keep. Nothing here is built from round() and clamp(), whose subgradient at a bound is a
convention that changed between framework versions and silenced every saturated value (a clamp has gradient 0
or 1 exactly at 6); the gradient below is written down, not derived.
"""

from typing import Any

import torch
from torch import Tensor

from tracefp4.errors import FormatError
from tracefp4.formats.arithmetic import round_bf16


class QuantizedForwardStraightThrough(torch.autograd.Function):
    """Forward: the given quantized values. Backward: the incoming gradient, masked if a mask was given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, x_hat: Tensor, keep: Tensor | None) -> Tensor:
        ctx.save_for_backward(*(() if keep is None else (keep,)))
        return x_hat.view_as(x_hat)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        grad = grads[0]
        return (grad * ctx.saved_tensors[0] if ctx.saved_tensors else grad), None, None


class RoundedForwardStraightThrough(torch.autograd.Function):
    """Forward: bf16 rounding in the storage dtype. Backward: identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return round_bf16(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def straight_through(x: Tensor, x_hat: Tensor, *, keep: Tensor | None = None) -> Tensor:
    """Return `x_hat` with the gradient of `x`.

    Equation: y = x_hat; dL/dx = dL/dy, or dL/dy * keep.

    Args:
        x: the differentiable input, any shape.
        x_hat: its quantized values, same shape and dtype, no gradient of their own.
        keep: optional boolean of the same shape; False blocks the gradient (clipped STE, see `clip_mask`).

    Raises:
        FormatError: the shapes differ.
    """
    if x.shape != x_hat.shape:
        raise FormatError(
            f"straight_through needs equal shapes; got x {tuple(x.shape)} and x_hat {tuple(x_hat.shape)}. "
            "Pass the dequantized values of the same tensor."
        )
    return QuantizedForwardStraightThrough.apply(x, x_hat.detach(), keep)


def clip_mask(x: Tensor, scales: Tensor, *, block_size: int = 16, limit: float = 6.0) -> Tensor:
    """Say which values were inside the range of their block: |x| <= limit * scale (True at the bound itself).

    Args:
        x: values [..., K].
        scales: decoded block scales [..., K / block_size]; a NaN scale (a block with NaN or Inf) keeps nothing.
        block_size: values that share a scale.
        limit: the largest element value; 6 for E2M1.

    Raises:
        FormatError: the scales do not have one entry per block.
    """
    if (*scales.shape[:-1], scales.shape[-1] * block_size) != tuple(x.shape):
        raise FormatError(
            f"clip_mask needs one scale per {block_size} values; got x {tuple(x.shape)} and scales "
            f"{tuple(scales.shape)}. Pass the decoded block scales of the same tensor."
        )
    bound = (scales * limit).repeat_interleave(block_size, dim=-1)
    return x.detach().abs() <= bound


def round_bf16_through(x: Tensor) -> Tensor:
    """Round to bf16 in the storage dtype with an identity gradient (for outputs that their producer saves)."""
    return RoundedForwardStraightThrough.apply(x)

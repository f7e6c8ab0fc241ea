"""search_scales: quantize weights under the block scales that keep the layer's output, not under those of the maxima.

    y_n = sum_j w_nj x_j,   E[(y_n - y^_n)^2] ~ sum_j h_j (w_nj - w^_nj)^2,   h_j = E[x_j^2]
    s_block = argmin over s of sum_{j in block} h_j (w_j - w^_j(s))^2

s runs over the E4M3 byte that `quantize` stores and its neighbours, 6 bytes up to 9 bytes down; w^ are the float32
values that the stored bytes stand for. h, the importance, is the diagonal of X^T X: it drops the products of
different channels, and with them the cross terms of the true error. Larger scales give up the block's small values,
smaller ones saturate its largest. Without an importance every channel counts alike, which lowers the error of the
weights and is reported to make models worse: it is here as the baseline that it is.
Source: H-Scale, arXiv 2608.28113. This op knows nothing of calibration (`checkpoints.statistics`).
"""

import torch
from torch import Tensor

from tracefp4.errors import FormatError
from tracefp4.formats.calibration import check_operand
from tracefp4.formats.order import Order
from tracefp4.formats.scheme import Scheme
from tracefp4.formats.tensor import BlockTensor
from tracefp4.ops.backend import Backend, choose
from tracefp4.ops.search_scales.compiled import search_scales_compiled
from tracefp4.ops.search_scales.reference import search_scales_reference


def search_scales(
    w: Tensor,
    *,
    importance: Tensor | None,
    scheme: Scheme,
    exponent: int | None = None,
    backend: Backend = Backend.AUTO,
) -> BlockTensor:
    """Quantize a weight under searched block scales.

    Args:
        w: Float tensor [..., N, K], K a positive multiple of 16; any strides. Arithmetic is float32, as in
            `quantize`.
        importance: Float tensor of shape [K], [..., 1, K] or [..., N, K] that broadcasts to w: the weight of each
            channel's squared error, >= 0, in any unit. None weighs all alike.
        scheme: An NVFP4 scheme. The search starts from the bytes that `quantize` stores under it.
        exponent: Outer exponent of a static scheme, in [-110, 116]; must be None for the others.
        backend: Implementation.

    Returns:
        The bytes. The outer scale is `quantize`'s. No block has a larger weighted error than under `quantize`; equal
        errors keep its byte, so a block whose importance is 0 does, and so do blocks of zeros, blocks that the
        scheme flushes to zero, and blocks with NaN or Inf. Other bytes lie in [max(1, least byte), 0x7E]. A
        block's byte depends on its own values, importances and outer scale alone.

    Raises:
        FormatError: When dtype, shape, exponent or importance do not fit, or the scheme is MXFP4: neighbouring E8M0
            scales are a factor of 2 apart, and a search among them only trades saturation for flushed values.
        BackendError: When the backend cannot run here.

    Example:
        >>> from tracefp4.formats import NVFP4_ROW_POW2
        >>> w = torch.tensor([[6.0] + [5.0] * 15])
        >>> h = torch.ones(16).index_fill(0, torch.tensor([0]), 0.0)
        >>> t = search_scales(w, importance=h, scheme=NVFP4_ROW_POW2)
        >>> t.scales().item(), t.codes()[0, 1].item()  # 5 = 4 * 1.25, as 6 does not count; code 6 is 4
        (1.25, 6)
    """
    chosen = choose("search_scales", w.device, backend)
    check_operand(w, scheme, exponent)
    if scheme.order is Order.MX:
        raise FormatError(
            f"search_scales needs E4M3 block scales; got {scheme.name}, whose neighbouring scales are a factor of 2 "
            "apart. Pass an NVFP4 scheme, or use ops.quantize with the MXFP4 rule of your choice."
        )
    if w.dim() < 2 or w.shape[-1] == 0 or w.shape[-1] % scheme.block_size:
        raise FormatError(
            f"search_scales needs w of shape [..., N, K], K a positive multiple of {scheme.block_size}; got "
            f"{tuple(w.shape)}. Pad it or keep this tensor in bf16."
        )
    if importance is not None:
        _check_importance(importance, w)
        importance = importance.detach().to(device=w.device, dtype=torch.float32)
    run = search_scales_compiled if chosen is Backend.COMPILED else search_scales_reference
    return run(w, importance, scheme, exponent)


def _check_importance(importance: Tensor, w: Tensor) -> None:
    shape, wanted = importance.shape, w.shape
    padded = (1,) * (len(wanted) - len(shape)) + tuple(shape)
    fits = len(padded) == len(wanted) and padded[-1] == wanted[-1]
    if not fits or not all(got in (1, want) for got, want in zip(padded, wanted, strict=True)):
        raise FormatError(
            f"search_scales needs importances of shape [{wanted[-1]}] or one that broadcasts to {tuple(wanted)}; got "
            f"{tuple(shape)}. One number per input channel belongs to every row."
        )
    is_good = importance.dtype.is_floating_point and bool(((importance >= 0) & importance.isfinite()).all())
    if not is_good:
        raise FormatError(
            f"search_scales needs finite importances >= 0; got {importance.dtype} with others among them. Pass mean "
            "squares of activations, or None to weigh all channels alike."
        )

"""dequantize: stored bytes become values.

    value = E2M1(code) * decode_scale,  decode_scale = s_block * 2^k, fl(s_block * g), fl(s_block / G) or 2^e

Under a power-of-two outer scale, and in MXFP4, every product is exact in float32 and in bfloat16 (at most six
significant bits). Under a float32 outer scale the decode scale and the product are each rounded once to float32,
and bfloat16 is refused: it would round a third time.
"""

import torch
from torch import Tensor

from tracefp4.errors import FormatError
from tracefp4.formats.tensor import BlockTensor
from tracefp4.ops.backend import Backend, choose
from tracefp4.ops.dequantize.compiled import dequantize_compiled
from tracefp4.ops.dequantize.device import case_of, dequantize_on_device
from tracefp4.ops.dequantize.reference import dequantize_reference

_WIDE_DTYPES = (torch.float32, torch.float64)


def dequantize(
    t: BlockTensor,
    *,
    dtype: torch.dtype = torch.float32,
    out: Tensor | None = None,
    backend: Backend = Backend.AUTO,
) -> Tensor:
    """Return the values of a quantized tensor.

    Args:
        t: The bytes.
        dtype: float32 or float64 (the same numbers); bfloat16 when `t.scheme.is_exact_in_bf16`.
        out: Where the values are written: contiguous, of this dtype, device and shape. Memory that exists already
            spares the system from clearing pages, which costs more than decoding. None makes a new tensor.
        backend: Implementation.

    Returns:
        `dtype` [..., K]; `out` if it was given. A block with the NaN byte gives NaN in all of its elements; code 8
        gives -0.0.

    Raises:
        FormatError: When the dtype cannot hold the values exactly, or `out` does not fit.
        BackendError: When the backend cannot run here.
    """
    if dtype not in _WIDE_DTYPES and not (dtype is torch.bfloat16 and t.scheme.is_exact_in_bf16):
        raise FormatError(
            f"dequantize of {t.scheme.name} cannot give {dtype} exactly. Allowed: float32 and float64, and bfloat16 "
            "for schemes whose outer scale is a power of two. Ask for float32 and cast where rounding is meant."
        )
    if out is not None:
        _check_out(out, t, dtype)
    chosen = choose("dequantize", t.packed.device, backend, case_of(t, dtype))
    if chosen is Backend.CUDA:
        return dequantize_on_device(t, dtype, out)
    if chosen is Backend.COMPILED:
        return dequantize_compiled(t, dtype, out)
    values = dequantize_reference(t, dtype)
    return values if out is None else out.copy_(values)


def _check_out(out: Tensor, t: BlockTensor, dtype: torch.dtype) -> None:
    fits = out.shape == t.shape and out.dtype == dtype and out.device == t.packed.device
    if not fits or not out.is_contiguous() or out.requires_grad:
        raise FormatError(
            f"dequantize writes to a contiguous {dtype} tensor of shape {tuple(t.shape)} on {t.packed.device} that "
            f"needs no gradient; got {out.dtype} {tuple(out.shape)} on {out.device}, strides {out.stride()}, "
            f"requires_grad {out.requires_grad}. Pass torch.empty of that shape, or leave it out."
        )

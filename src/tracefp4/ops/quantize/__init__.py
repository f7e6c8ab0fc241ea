"""quantize: a float tensor becomes packed E2M1 codes, block scales and an outer scale.

    value = code * s_block * s_outer,  code = E2M1(x / (s_block * s_outer)),  s_block from the block's maximum

Where the outer scale lives, the order of the operations, floors and ties are the scheme's (formats/scheme.py).
This op rounds to nearest even only; following recorded decisions is `guided_quantize`. `quantize_with_scales` keeps
scales that were found elsewhere and only chooses codes.
"""

import torch
from torch import Tensor

from tracefp4.errors import FormatError
from tracefp4.formats.calibration import check_operand
from tracefp4.formats.scheme import MAX_EXPONENT, MIN_EXPONENT, Scheme
from tracefp4.formats.tensor import BlockTensor
from tracefp4.ops.backend import Backend, choose
from tracefp4.ops.quantize.compiled import quantize_compiled, quantize_with_scales_compiled
from tracefp4.ops.quantize.device import quantize_on_device, quantize_with_scales_on_device
from tracefp4.ops.quantize.reference import quantize_reference, quantize_with_scales_reference
from tracefp4.ops.rules import case_of

_FLOAT32_MAX = torch.finfo(torch.float32).max
_QUANTIZE = {
    Backend.CUDA: quantize_on_device,
    Backend.COMPILED: quantize_compiled,
    Backend.REFERENCE: quantize_reference,
}
_QUANTIZE_WITH_SCALES = {
    Backend.CUDA: quantize_with_scales_on_device,
    Backend.COMPILED: quantize_with_scales_compiled,
    Backend.REFERENCE: quantize_with_scales_reference,
}


def quantize(
    x: Tensor, *, scheme: Scheme, exponent: int | None = None, backend: Backend = Backend.AUTO
) -> BlockTensor:
    """Quantize a tensor along its last dimension, rounding to nearest even.

    Args:
        x: Float tensor [..., K], K a positive multiple of the block size; any strides. Arithmetic is
            float32: bfloat16 and float16 are widened exactly, float64 is rounded to float32 first (beyond
                its range: Inf).
        scheme: The scheme; a "tensor" scheme needs at least two dimensions and takes one outer scale per matrix.
        exponent: Outer exponent of a static scheme, in [-110, 116]; must be None for the others.
        backend: Implementation.

    Returns:
        The bytes. All-zero block: the scheme's zero byte (0x00 in ours) and zero codes. Block with NaN or Inf: the
        NaN byte, codes 0, reads back NaN; the outer scale comes from the finite blocks. Negatives that round to
        zero keep code 8, and so does -0.0 in our schemes. Empty leading dimensions are fine. No autograd.

    Raises:
        FormatError: When dtype, shape or exponent do not fit the scheme.
        BackendError: When the backend cannot run here.

    Example:
        >>> import torch
        >>> from tracefp4.formats import NVFP4_ROW_POW2
        >>> t = quantize(torch.full((1, 16), 3.0), scheme=NVFP4_ROW_POW2)
        >>> hex(t.block_scales.item()), t.outer.item(), t.codes()[0, 0].item()
        ('0x78', -9, 7)
    """
    _check(x, scheme, exponent)
    chosen = choose("quantize", x.device, backend, case_of(x, scheme))
    return _QUANTIZE[chosen](x, scheme, exponent)


def quantize_with_scales(
    x: Tensor, *, block_scales: Tensor, outer: Tensor, scheme: Scheme, backend: Backend = Backend.AUTO
) -> BlockTensor:
    """Choose codes against stored scales, as `quantize` does against its own: code = E2M1(x / (s_block * s_outer)).

    Values above 6 times their scale saturate, and nothing raises a scale that is too small. With the scales that
    `quantize` found for the same x, the bytes are the same. Values that `dequantize` made come back as the same
    values; under schemes whose sign rule is not KEPT, zeros may change the sign bit of their code.

    Args:
        x: Float tensor [..., K], as for `quantize`.
        block_scales: uint8 [..., K / block size]; bytes of the scheme's scale format without a sign.
        outer: The outer scale as the scheme stores it, of the shape that `BlockTensor` asks for.
        scheme: The scheme that the scales belong to; also a static one, whose exponent `outer` is.
        backend: Implementation.

    Returns:
        The bytes. A block of x with NaN or Inf takes the NaN byte whatever its given byte; blocks given the byte 0
        or the NaN byte take zero codes. No autograd.

    Raises:
        FormatError: When dtypes or shapes do not fit the scheme, or a scale is negative, not finite or a k out of
            range.
        BackendError: When the backend cannot run here.

    Example:
        >>> import torch
        >>> from tracefp4.formats import NVFP4_ROW_POW2
        >>> one = torch.tensor([[0x38]], dtype=torch.uint8)  # 1.0
        >>> t = quantize_with_scales(
        ...     torch.full((1, 16), 2.6),
        ...     block_scales=one,
        ...     outer=torch.zeros(1, dtype=torch.int8),
        ...     scheme=NVFP4_ROW_POW2,
        ... )
        >>> t.codes()[0, 0].item()
        5
    """
    _check(
        x, scheme, 0 if scheme.outer == "static" else None
    )  # the exponent of a static scheme is in `outer`
    _check_scales(x, block_scales, outer, scheme)
    chosen = choose("quantize", x.device, backend, case_of(x, scheme))
    return _QUANTIZE_WITH_SCALES[chosen](x, block_scales, outer, scheme)


def _check(x: Tensor, scheme: Scheme, exponent: int | None) -> None:
    check_operand(x, scheme, exponent)
    least = 2 if scheme.outer == "tensor" else 1
    if x.dim() < least or x.shape[-1] == 0 or x.shape[-1] % scheme.block_size:
        raise FormatError(
            f"{scheme.name} needs at least {least} dimension(s), the last a positive multiple of "
            f"{scheme.block_size}; got x of shape {tuple(x.shape)}. Pad it or keep this tensor in bf16."
        )


def _check_scales(x: Tensor, block_scales: Tensor, outer: Tensor, scheme: Scheme) -> None:
    # codes without data: the constructor compares dtypes and shapes, and nothing is computed before it has
    codes = torch.empty((*x.shape[:-1], x.shape[-1] // 2), dtype=torch.uint8, device="meta")
    BlockTensor(packed=codes, block_scales=block_scales, outer=outer, scheme=scheme)
    if block_scales.numel() and int(block_scales.max()) > scheme.nan_byte:
        raise FormatError(
            f"quantize_with_scales needs scale bytes up to {scheme.nan_byte:#04x}; got {int(block_scales.max()):#04x}, "
            "a negative scale. Take the bytes of a BlockTensor, unchanged."
        )
    least, most = (MIN_EXPONENT, MAX_EXPONENT) if scheme.outer_kind == "exponent" else (0.0, _FLOAT32_MAX)
    if not bool(((outer >= least) & (outer <= most)).all()):
        raise FormatError(
            f"quantize_with_scales needs outer scales in [{least}, {most}] under {scheme.name}; got others, or NaN, "
            f"among the {outer.numel()}. Take the outer scale of a BlockTensor, unchanged."
        )

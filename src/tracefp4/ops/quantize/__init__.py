"""quantize: a float tensor becomes packed E2M1 codes, E4M3 block scales and an outer power of two.

    value = code * s_block * 2^k,   code = E2M1(x / (s_block * 2^k)),   s_block = E4M3(amax_block / 6 / 2^k)

The outer exponent k, the floor and the rule for non-finite blocks are the scheme's (formats/scheme.py).
This op rounds to nearest even only; following recorded decisions is `guided_quantize`.
"""

from torch import Tensor

from tracefp4.errors import FormatError
from tracefp4.formats.scaling import check_operand
from tracefp4.formats.scheme import Scheme
from tracefp4.formats.tensor import BlockTensor
from tracefp4.ops.backend import Backend, choose
from tracefp4.ops.quantize.reference import quantize_reference


def quantize(
    x: Tensor, *, scheme: Scheme, exponent: int | None = None, backend: Backend = Backend.AUTO
) -> BlockTensor:
    """Quantize a tensor along its last dimension, rounding to nearest even.

    Args:
        x: Float tensor [..., K], K a positive multiple of the block size; any strides. Arithmetic is
            float32: bfloat16 and float16 are widened exactly, float64 is rounded to float32 first (beyond
                its range: Inf).
        scheme: The scheme; a "tensor" scheme needs at least two dimensions and takes one exponent per matrix.
        exponent: Outer exponent of a static scheme, in [-110, 116]; must be None for the others.
        backend: Implementation.

    Returns:
        The bytes. All-zero block: scale byte 0 and zero codes. Block with NaN or Inf: scale byte 0x7F,
        codes 0, reads back NaN; the outer exponent comes from the finite blocks. -0.0 and negatives that
        round to zero keep code 8. Empty leading dimensions are fine. No autograd.

    Raises:
        FormatError: When dtype, shape or exponent do not fit the scheme.
        BackendError: When the backend cannot run here.

    Example:
        >>> import torch
        >>> from tracefp4.formats.scheme import NVFP4_ROW_POW2
        >>> t = quantize(torch.full((1, 16), 3.0), scheme=NVFP4_ROW_POW2)
        >>> hex(t.block_scales.item()), t.exponent.item(), t.codes()[0, 0].item()
        ('0x78', -9, 7)
    """
    choose("quantize", x.device, backend)
    _check(x, scheme, exponent)
    return quantize_reference(x, scheme, exponent)


def _check(x: Tensor, scheme: Scheme, exponent: int | None) -> None:
    check_operand(x, scheme, exponent)
    least = 2 if scheme.outer == "tensor" else 1
    if x.dim() < least or x.shape[-1] == 0 or x.shape[-1] % scheme.block_size:
        raise FormatError(
            f"{scheme.name} needs at least {least} dimension(s), the last a positive multiple of "
            f"{scheme.block_size}; got x of shape {tuple(x.shape)}. Pad it or keep this tensor in bf16."
        )

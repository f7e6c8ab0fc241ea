"""From maxima to scales: the outer power of two, the E4M3 block scale, and what multiplies a decoded code.

    k            = smallest integer with amax <= 2688 * 2^k, in [-110, 116]; 0 when amax = 0 (2688 = 6 * 448)
    s_block      = E4M3_nearest_even(min(amax_block / 6 / 2^k, 448)); 0 for an all-zero block, 2^-9 for a
                   non-zero block that would round to 0, NaN for a block with NaN or Inf
    decode_scale = s_block * 2^k

k comes from the exponent bits of amax, never from a floating-point logarithm. Block maxima are taken on the
bit patterns of magnitudes, whose integer order is their numeric order with Inf and NaN on top, so one integer
reduction also finds the blocks that are not finite. Shapes: N rows, K columns, G = K / 16 blocks. This module
never rounds elements (`grid.py`).
"""

import torch
from torch import Tensor

from tracefp4.errors import FormatError
from tracefp4.formats.grid import decode_e4m3, encode_e4m3
from tracefp4.formats.scheme import MAX_EXPONENT, MIN_EXPONENT, Scheme

NAN_BYTE = 0x7F
"""The E4M3 byte that marks a block with NaN or Inf inside."""
FLOOR_BYTE = 0x01
"""The smallest positive E4M3 number, 2^-9: the scale of a block that is not zero but would round to zero."""
KV_HEADROOM_EXPONENT = 3
"""A calibrated static exponent leaves room for values 2^3 times the largest one seen before a block scale
saturates; block scales stay normal (no E4M3 subnormals) for blocks down to 1/3584 of that largest value."""

_INF_BITS = 0x7F800000
_ROUND_UP_ABOVE = 0x7FFFFF - 0x280000  # 2688 = 1.3125 * 2^11, and 0x280000 is the fraction field of 1.3125


def block_amax(magnitude: Tensor, block_size: int) -> tuple[Tensor, Tensor | None]:
    """Return the largest magnitude of every block, and which blocks are finite.

    Args:
        magnitude: Contiguous float32 [..., K], sign bits clear (`abs`), NaN and Inf allowed, K a multiple of
            `block_size`.
        block_size: Elements per block.

    Returns:
        (amax, finite): float32 [..., G], with 0 in blocks that are not finite; and bool [..., G] that is True
        for finite blocks, or None when all of them are.
    """
    bits = magnitude.view(torch.int32).unflatten(-1, (-1, block_size)).amax(-1)
    if bits.numel() == 0 or int(bits.max()) < _INF_BITS:
        return bits.view(torch.float32), None
    finite = bits < _INF_BITS
    return bits.masked_fill_(~finite, 0).view(torch.float32), finite


def pow2_exponent(amax: Tensor) -> Tensor:
    """Return the smallest k with amax <= 2688 * 2^k, clamped to [-110, 116]; 0 where amax is 0.

    Args:
        amax: Finite float32, any shape, >= 0.

    Returns:
        int8, same shape.
    """
    bits = amax.contiguous().view(torch.int32)
    exponent = ((bits + _ROUND_UP_ABOVE) >> 23).sub_(127 + 11).clamp_(MIN_EXPONENT, MAX_EXPONENT)
    return exponent.mul_(bits != 0).to(torch.int8)


def outer_exponent(amax: Tensor, *, outer: str, exponent: int | None) -> Tensor:
    """Return the outer exponent of a tensor from its block maxima.

    Args:
        amax: Finite float32 [..., G], the maxima of finite blocks.
        outer: "row" (one per amax[..., :]), "tensor" (one per matrix of the last two dimensions), "static".
        exponent: The given exponent of a static scheme, in [-110, 116]; None for the others.

    Returns:
        int8 of shape amax.shape[:-1], amax.shape[:-2] or ().
    """
    if outer == "static":
        assert exponent is not None
        return torch.tensor(exponent, dtype=torch.int8, device=amax.device)
    dims = (-1,) if outer == "row" else (-2, -1)
    if amax.numel() == 0:
        return torch.zeros(amax.shape[: amax.dim() - len(dims)], dtype=torch.int8, device=amax.device)
    return pow2_exponent(amax.amax(dims))


def align_exponent(exponent: Tensor, block_scales: Tensor) -> Tensor:
    """View an outer exponent so that it broadcasts against block scales of shape [..., G]."""
    return exponent.reshape(exponent.shape + (1,) * (block_scales.dim() - exponent.dim()))


def power_of_two(exponent: Tensor, *, negate: bool = False) -> Tensor:
    """Return 2^k (or 2^-k with `negate`) as float32, exactly, for int8 k in [-126, 126], from its bits."""
    wide = exponent.to(torch.int32)
    return ((127 - wide if negate else wide + 127) << 23).view(torch.float32)


def encode_block_scales(amax: Tensor, exponent: Tensor, finite: Tensor | None = None) -> Tensor:
    """Return the E4M3 bytes of the block scales.

        byte = E4M3(min(amax * 2^-k / 6, 448)); 0x01 where that is 0 but amax > 0; 0x7F where not finite

    The multiplication by 2^-k is exact (a power of two, in range), so the one rounded float32 operation
    before the E4M3 rounding is the division by 6; it cannot turn a non-tie into a tie.

    Args:
        amax: Finite float32 [..., G], 0 in blocks that are not finite.
        exponent: int8, the outer exponent; its shape must be a prefix of amax.shape.
        finite: bool [..., G] that is True for finite blocks, or None when all are.

    Returns:
        uint8 [..., G].
    """
    unit = amax * power_of_two(align_exponent(exponent, amax), negate=True)
    block_scales = encode_e4m3(unit.div_(6.0))
    # The floor: FLOOR_BYTE is 1, the byte of "True", so the larger byte is the floored one.
    block_scales = torch.maximum(block_scales, (amax != 0).view(torch.uint8))
    if finite is not None:
        block_scales = block_scales.masked_fill_(~finite, NAN_BYTE)
    return block_scales


def decode_scales(block_scales: Tensor, exponent: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return decode_scale = s_block * 2^k, exactly.

    Args:
        block_scales: uint8 [..., G].
        exponent: int8; its shape must be a prefix of block_scales.shape. Values in [-110, 116].
        dtype: float32 or float64 (exact), or bfloat16 (exact as well: four significant bits).

    Returns:
        `dtype` [..., G]; 0 for byte 0, NaN for byte 0x7F.
    """
    unit = decode_e4m3(block_scales)
    return unit.mul_(power_of_two(align_exponent(exponent, block_scales))).to(dtype)


def divisor_of(decode_scale: Tensor) -> Tensor:
    """Return the decode scale as a divisor: infinity where it is 0 or NaN, so that x / divisor is 0 there.

    Callers set values in non-finite blocks to 0 first.
    """
    return torch.where(decode_scale > 0, decode_scale, torch.inf)


def calibrate_exponent(x: Tensor) -> int:
    """Return the static exponent of a KV scheme from a sample of keys or values.

        k = smallest integer with amax <= 2688 / 2^3 * 2^k, so the largest block scale of the sample is <= 56

    Three binades of headroom remain before a block scale saturates, and blocks down to 1/3584 of the largest
    value keep a normal E4M3 scale.

    Args:
        x: Float tensor, any shape, not empty.

    Returns:
        k in [-110, 116]; 0 for a sample of zeros.

    Raises:
        FormatError: When the sample is empty or holds NaN or Inf.
    """
    if x.numel() == 0:
        raise FormatError(
            "calibrate_exponent needs values; got an empty tensor. Calibrate on a batch with tokens in it."
        )
    amax = x.detach().abs().amax().to(torch.float32).reshape(1)
    if not bool(torch.isfinite(amax).all()):
        raise FormatError(
            f"calibrate_exponent needs finite values; got x of shape {tuple(x.shape)} with NaN or Inf. "
            "Find the layer that produced them before calibrating."
        )
    if float(amax) == 0.0:
        return 0
    return min(int(pow2_exponent(amax)) + KV_HEADROOM_EXPONENT, MAX_EXPONENT)


def check_operand(x: Tensor, scheme: Scheme, exponent: int | None) -> None:
    """Refuse a tensor or an exponent that the scheme cannot quantize (the shape is the op's own check).

    Raises:
        FormatError: An integer or 8-bit tensor; an exponent for a scheme that finds its own, or none for a
            static one; an exponent outside [MIN_EXPONENT, MAX_EXPONENT].
    """
    if not x.dtype.is_floating_point or x.dtype.itemsize < 2:
        raise FormatError(
            f"{scheme.name} needs a float tensor of 16 bits or more; got {x.dtype}. Cast it first."
        )
    if (exponent is None) == (scheme.outer == "static"):
        needs = (
            "needs an exponent (calibrate_exponent)" if scheme.outer == "static" else "finds its own exponent"
        )
        raise FormatError(
            f"{scheme.name} {needs}; got exponent={exponent}. Pass it exactly when the scheme is static."
        )
    if exponent is not None and not MIN_EXPONENT <= exponent <= MAX_EXPONENT:
        raise FormatError(
            f"exponent must lie in [{MIN_EXPONENT}, {MAX_EXPONENT}]; got {exponent}. Calibrate it again."
        )

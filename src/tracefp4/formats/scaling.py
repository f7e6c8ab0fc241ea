"""From maxima to scales: the outer scale, the block scale, and what a value is divided by before it is rounded.

    outer        2^k with k the smallest integer such that amax <= 6 * scale_max * 2^k   (kind "exponent")
                 g = amax / (6 * scale_max)                                              (kind "multiplier")
                 G = (6 * scale_max) * (1 / amax)                                        (kind "divisor")
                 A = amax, from which G = (6 * scale_max) / A                            (kind "amax")
    s_block      E4M3_nearest_even(min(raw, 448)), raw as `Order` says; or 2^e as `e8m0.py` finds it
    decode_scale s * 2^k, s * g, s / G, (s * A) / (6 * scale_max), or 2^e

Numbers divide as tensors on the data's device (`divided`): a CUDA tensor divided by a Python number is multiplied
by its reciprocal. k comes from the exponent bits of amax, never from a floating-point logarithm. Block maxima are
taken on the bit patterns of magnitudes, whose integer order is their numeric order with Inf and NaN on top, so one
integer reduction also finds the blocks that are not finite. Shapes: [..., K] elements, G = K / block size blocks.
This module never rounds elements (`grid.py`) and never compares candidates (`selection.py`).
"""

import torch
from torch import Tensor

from tracefp4.formats.e8m0 import decode_e8m0, encode_e8m0_scales
from tracefp4.formats.grid import decode_e4m3, encode_e4m3
from tracefp4.formats.order import Order, ScaleRule
from tracefp4.formats.scheme import MAX_EXPONENT, MIN_EXPONENT, MIN_MULTIPLIER, Scheme

_INF_BITS = 0x7F800000
_SIXTH = 1.0 / 6.0
"""Rounded to float32 when it meets a float32 tensor."""


def divided(numerator: Tensor | float, denominator: Tensor | float) -> Tensor:
    """Return numerator / denominator in float32, one correctly rounded division on every device.

    torch multiplies by a rounded reciprocal where a Python number stands below the line (on CUDA) or above it (on
    every device). One of the two must be a tensor.
    """
    device = (denominator if isinstance(denominator, Tensor) else numerator).device  # type: ignore[union-attr]
    top, bottom = (
        n.to(torch.float32)
        if isinstance(n, Tensor)
        else torch.full((), n, dtype=torch.float32, device=device)
        for n in (numerator, denominator)
    )
    return top / bottom


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


def pow2_exponent(amax: Tensor, scale_max: float = 448.0) -> Tensor:
    """Return the smallest k with amax <= 6 * scale_max * 2^k, clamped to [-110, 116]; 0 where amax is 0.

    Args:
        amax: Finite float32, any shape, >= 0.
        scale_max: Largest block scale to be used; 6 * scale_max must be a normal float32 number.

    Returns:
        int8, same shape.
    """
    limit = int(torch.tensor(6.0 * scale_max, dtype=torch.float32, device="cpu").view(torch.int32))
    exponent_field, fraction = limit >> 23, limit & 0x7FFFFF
    bits = amax.contiguous().view(torch.int32)
    # Carries into the exponent exactly when the fraction of amax is above the limit's.
    exponent = (bits + (0x7FFFFF - fraction) >> 23).sub_(exponent_field)
    return exponent.clamp_(MIN_EXPONENT, MAX_EXPONENT).mul_(bits != 0).to(torch.int8)


def outer_scale(amax: Tensor, scheme: Scheme, exponent: int | None = None) -> Tensor:
    """Return the outer scale of a tensor from its block maxima, as the scheme stores it.

    Args:
        amax: Finite float32 [..., G], the maxima of finite blocks.
        scheme: Its `outer` says how many there are, its `outer_kind` what is stored.
        exponent: The given exponent of a static scheme, in [-110, 116]; None for the others.

    Returns:
        int8 (exponents) or float32 (all others) of shape amax.shape[:-1] (row), amax.shape[:-2] (tensor) or ()
        (static). Zeros give k = 0, g = G = 1, A = 0. Multipliers below 2^-116 are raised to it, divisors above
        2^116 lowered, and maxima likewise. A scheme without an outer scale gives an int8 zero of shape ().
    """
    if scheme.outer in ("static", "none"):
        return _given_outer(scheme, exponent or 0, amax.device)
    dims = (-1,) if scheme.outer == "row" else (-2, -1)
    if amax.numel():
        largest = amax.amax(dims)
    else:
        largest = torch.zeros(amax.shape[: amax.dim() - len(dims)], device=amax.device)
    if scheme.outer_kind == "exponent":
        return pow2_exponent(largest, scheme.scale_max)
    limit = 6.0 * scheme.scale_max
    is_zero = largest == 0
    if scheme.outer_kind == "multiplier":
        return divided(largest, limit).clamp_(min=MIN_MULTIPLIER).masked_fill_(is_zero, 1.0)
    if scheme.outer_kind == "amax":
        return largest.clamp(min=limit * MIN_MULTIPLIER).masked_fill_(is_zero, 0.0)
    # compressed-tensors 0.20 writes `limit / tensor`, which torch computes as a reciprocal and a product
    found = divided(1.0, largest).mul_(limit).clamp_(max=1.0 / MIN_MULTIPLIER)
    return found.masked_fill_(is_zero, 1.0)


def _given_outer(scheme: Scheme, exponent: int, device: torch.device) -> Tensor:
    # filled where it lives: a copy from the host could not be captured in a CUDA graph
    if scheme.is_exact_in_bf16:
        return torch.full((), exponent, dtype=torch.int8, device=device)
    values = {"multiplier": 2.0**exponent, "divisor": 2.0**-exponent}
    value = values.get(scheme.outer_kind, 6.0 * scheme.scale_max * 2.0**exponent)
    return torch.full((), value, dtype=torch.float32, device=device)


def align_outer(outer: Tensor, block_scales: Tensor) -> Tensor:
    """View an outer scale so that it broadcasts against block scales of shape [..., G]."""
    return outer.reshape(outer.shape + (1,) * (block_scales.dim() - outer.dim()))


def power_of_two(exponent: Tensor, *, negate: bool = False) -> Tensor:
    """Return 2^k (or 2^-k with `negate`) as float32, exactly, for int8 k in [-126, 126], from its bits."""
    wide = exponent.to(torch.int32)
    return ((127 - wide if negate else wide + 127) << 23).view(torch.float32)


def divisor_outer(outer: Tensor, scheme: Scheme) -> Tensor:
    """Return the divisor G of kinds "divisor" and "amax" (1 where A = 0), float32, the shape of `outer`."""
    if scheme.outer_kind == "divisor":
        return outer
    return divided(6.0 * scheme.scale_max, outer).masked_fill_(outer == 0, 1.0)


def raw_block_scale(amax: Tensor, outer: Tensor, scheme: Scheme) -> Tensor:
    """Return the number that is rounded to E4M3, by the formula of the scheme's order (not MX).

    Args:
        amax: Finite float32 [..., G].
        outer: The outer scale as stored, already broadcastable against amax (`align_outer`).
        scheme: Whose order.

    Returns:
        float32 [..., G], a new tensor.
    """
    order = scheme.order
    if order is Order.POW2:
        return divided(amax * power_of_two(outer, negate=True), 6.0)
    if order is Order.MODELOPT:
        return amax / (outer * 6.0)
    if order is Order.TORCHAO:
        return divided(amax, 6.0).div_(outer)
    divisor = divisor_outer(outer, scheme)
    if order is Order.VLLM:
        return divisor * (amax * _SIXTH)
    if order is Order.TRANSFORMER_ENGINE:
        return amax * (divisor * _SIXTH)
    assert order in (Order.COMPRESSED_TENSORS, Order.FOUROVERSIX)
    return divided(amax, 6.0).mul_(divisor)  # a product of two floats does not depend on their order


def encode_block_scales(
    amax: Tensor, outer: Tensor, scheme: Scheme, finite: Tensor | None = None, *, stretch: float = 1.0
) -> Tensor:
    """Return the bytes of the block scales.

        byte = E4M3(min(raw * stretch, 448)), not below least_byte; underflow_byte where that is 0 but amax > 0;
        zero_byte where amax = 0; the NaN byte where not finite

    Args:
        amax: Finite float32 [..., G], 0 in blocks that are not finite.
        outer: The outer scale; its shape must be a prefix of amax.shape.
        scheme: The rules.
        finite: bool [..., G] that is True for finite blocks, or None when all are.
        stretch: 1, or 1.5 for the candidate under which the block maximum becomes 4.

    Returns:
        uint8 [..., G].
    """
    if scheme.scale_rule is ScaleRule.E4M3:
        raw = raw_block_scale(amax, align_outer(outer, amax), scheme)
        raw = raw if stretch == 1.0 else raw.mul_(stretch)
        block_scales = _floored(encode_e4m3(raw), amax, scheme)
    else:
        block_scales = encode_e8m0_scales(amax, scheme.scale_rule)
    if finite is not None:
        block_scales = block_scales.masked_fill(~finite, scheme.nan_byte)
    return block_scales


def _floored(block_scales: Tensor, amax: Tensor, scheme: Scheme) -> Tensor:
    """Put in the bytes of zero, tiny and small blocks."""
    is_zero = amax == 0
    if (scheme.zero_byte, scheme.underflow_byte, scheme.least_byte) == (0x00, 0x01, 0x00):
        # The floor is 0x01, the byte of "True", so the larger byte is the floored one.
        return torch.maximum(block_scales, is_zero.logical_not_().view(torch.uint8))
    floored = block_scales.masked_fill(block_scales == 0, scheme.underflow_byte)
    return floored.clamp_(min=scheme.least_byte).masked_fill_(is_zero, scheme.zero_byte)


def decode_block_scales(block_scales: Tensor, scheme: Scheme) -> Tensor:
    """Return s_block as float32, exact: E4M3 or E8M0 by the scheme's format; NaN bytes give NaN."""
    return decode_e4m3(block_scales) if scheme.scale_rule is ScaleRule.E4M3 else decode_e8m0(block_scales)


def decode_scales(
    block_scales: Tensor, outer: Tensor, scheme: Scheme, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return what multiplies a decoded code: s * 2^k, fl(s * g), fl(s / G), fl(fl(s * A) / M) or 2^e.

    Args:
        block_scales: uint8 [..., G].
        outer: The outer scale; its shape must be a prefix of block_scales.shape.
        scheme: The scheme that made both.
        dtype: float32 or float64; bfloat16 is exact as well where `scheme.is_exact_in_bf16`.

    Returns:
        `dtype` [..., G]; 0 for an E4M3 byte 0, NaN for a NaN byte. The roundings of float32 outer scales are to
        float32, whatever the dtype.
    """
    unit = decode_block_scales(block_scales, scheme)
    if scheme.outer_kind == "none":
        return unit.to(dtype)
    aligned = align_outer(outer, block_scales)
    if scheme.outer_kind == "divisor":
        return unit.div_(aligned).to(dtype)
    if scheme.outer_kind == "amax":
        return divided(unit.mul_(aligned), 6.0 * scheme.scale_max).to(dtype)
    return unit.mul_(power_of_two(aligned) if scheme.outer_kind == "exponent" else aligned).to(dtype)


def element_factor(block_scales: Tensor, outer: Tensor, scheme: Scheme) -> tuple[Tensor, bool]:
    """Return what an element is divided or multiplied by before it is rounded to E2M1.

    Args:
        block_scales: uint8 [..., G].
        outer: The outer scale; its shape must be a prefix of block_scales.shape.
        scheme: The rules.

    Returns:
        (factor, multiplies): float32 [..., G], and True when z = x * factor, False when z = x / factor. Blocks
        whose scale is 0 or NaN have a factor that makes every finite x a zero: infinity, or 0 when multiplying.
    """
    if not scheme.order.multiplies:
        return divisor_of(decode_scales(block_scales, outer, scheme)), False
    unit, aligned = decode_block_scales(block_scales, scheme), align_outer(outer, block_scales)
    if scheme.order is Order.TORCHAO:
        factor = divided(1.0, aligned) / unit
    else:  # s * (1 / G) and (1 / G) * s are the same float32 number
        factor = divided(1.0, unit * divided(1.0, divisor_outer(aligned, scheme)))
    return torch.where(unit > 0, factor, 0.0), True


def divisor_of(decode_scale: Tensor) -> Tensor:
    """Return the decode scale as a divisor: infinity where it is 0 or NaN, so that x / divisor is 0 there.

    Callers set values in non-finite blocks to 0 first.
    """
    return torch.where(decode_scale > 0, decode_scale, torch.inf)

"""From values and stored scales to codes: the first and the last step of everything that quantizes.

    x, amax    signed float32 values and block maxima, blocks with NaN or Inf set to 0
    code     = E2M1(x / (s_block * s_outer))      under the *stored* scales, in the scheme's order of operations

Between the two, an op finds its scales: from maxima (quantize), by a search (search_scales), or as they were
stored elsewhere. Everything is float32. This module never chooses a scale.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tracefp4.formats.grid import magnitude_to_code, round_magnitude_, sign_of
from tracefp4.formats.packing import pack_codes
from tracefp4.formats.scaling import block_amax
from tracefp4.formats.scheme import Scheme
from tracefp4.formats.selection import scaled, signed_zeros
from tracefp4.formats.tensor import BlockTensor


class Operand(NamedTuple):
    """A tensor as the arithmetic reads it."""

    x: Tensor
    """float32 [..., K], contiguous; zeros signed as the scheme stores them, blocks that are not finite 0."""
    magnitude: Tensor
    """float32 [..., K], |x|."""
    amax: Tensor
    """float32 [..., G], the largest magnitude of every block."""
    finite: Tensor | None
    """bool [..., G], True for blocks that were finite; None when all were."""


def read_operand(x: Tensor, scheme: Scheme) -> Operand:
    """Return a tensor as the arithmetic reads it; bf16 and fp16 are widened, float64 is rounded, once.

    Args:
        x: Float tensor [..., K], K a multiple of the block size; any strides. Never written.
        scheme: Its block size and sign rule.
    """
    x = signed_zeros(x.detach().resolve_neg().to(torch.float32).contiguous(), scheme.sign)
    magnitude = x.abs()
    amax, finite = block_amax(magnitude, scheme.block_size)
    if finite is not None:
        keep = finite.repeat_interleave(scheme.block_size, -1)
        x, magnitude = x.masked_fill(~keep, 0.0), magnitude.masked_fill(~keep, 0.0)
    return Operand(x, magnitude, amax, finite)


def packed_codes(operand: Operand, block_scales: Tensor, outer: Tensor, scheme: Scheme) -> Tensor:
    """Round every value to the nearest code under the stored scales, and pack.

    Args:
        operand: The values.
        block_scales: uint8 [..., G]. Under a byte 0 and under the NaN byte every code is a zero.
        outer: The outer scale as the scheme stores it; its shape must be a prefix of block_scales.shape.
        scheme: The rules.

    Returns:
        uint8 [..., K / 2].
    """
    x, magnitude, _, _ = operand
    _, rounded = round_magnitude_(scaled(magnitude, block_scales, outer, scheme), scheme.tie)
    return pack_codes(magnitude_to_code(rounded).bitwise_or_(sign_of(x).bitwise_and_(8)).view(torch.uint8))


def encode(operand: Operand, block_scales: Tensor, outer: Tensor, scheme: Scheme) -> BlockTensor:
    """Return the values under these scales as a BlockTensor; see `packed_codes`."""
    packed = packed_codes(operand, block_scales, outer, scheme)
    return BlockTensor(packed=packed, block_scales=block_scales, outer=outer, scheme=scheme)

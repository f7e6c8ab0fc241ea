"""Which block scales a tensor gets under a scheme: the one, or the better of two candidates ("four over six").

    six  = scale byte of raw, under which the block maximum becomes 6
    four = scale byte of raw * 1.5, under which it becomes 4, so that the wide step between 4 and 6 is not used
    error(s) = sum (x - value)^2, sum |x - value| or max |x - value| over the block, with value the dequantized
    float32 value under the *stored* scale
    s_block  = four where error(four) < error(six), else six

The order of a sum is the scheme's (`ErrorSum`), so a block's choice does not depend on shapes, threads or other
blocks. A value is code * decode_scale; under kind "amax" it is ((code * s) * A) / M, as those libraries write it.
Source: Cook et al., "Four Over Six", arXiv 2512.02010. This module
never packs and never follows records.
"""

import torch
from torch import Tensor

from tracefp4.formats.grid import round_magnitude_
from tracefp4.formats.order import Candidates, ErrorSum, Sign
from tracefp4.formats.scaling import (
    align_outer,
    decode_block_scales,
    decode_scales,
    divided,
    element_factor,
    encode_block_scales,
)
from tracefp4.formats.scheme import Scheme


def select_block_scales(
    magnitude: Tensor, amax: Tensor, outer: Tensor, scheme: Scheme, finite: Tensor | None = None
) -> Tensor:
    """Return the scale bytes of every block.

    Args:
        magnitude: float32 [..., K], |x| with non-finite blocks set to 0; not changed.
        amax: float32 [..., G], its block maxima.
        outer: The outer scale; its shape must be a prefix of amax.shape.
        scheme: The rules.
        finite: bool [..., G] that is True for finite blocks, or None when all are.

    Returns:
        uint8 [..., G].
    """
    six = encode_block_scales(amax, outer, scheme, finite)
    if scheme.candidates is Candidates.SIX:
        return six
    four = encode_block_scales(amax, outer, scheme, finite, stretch=1.5)
    is_better = _error(magnitude, four, outer, scheme) < _error(magnitude, six, outer, scheme)
    return torch.where(is_better, four, six)


def signed_zeros(x: Tensor, sign: Sign) -> Tensor:
    """Give the zeros of a float32 tensor the sign that the scheme stores for them; nothing else changes."""
    if sign is Sign.KEPT:
        return x
    return x + 0.0 if sign is Sign.ORDERED else torch.where(x == 0, -0.0, x)  # -0.0 + 0.0 is +0.0


def scaled(magnitude: Tensor, block_scales: Tensor, outer: Tensor, scheme: Scheme) -> Tensor:
    """Return z, a new tensor: |x| divided (or multiplied) as the scheme's order says, ready to be rounded."""
    factor, multiplies = element_factor(block_scales, outer, scheme)
    blocks = magnitude.unflatten(-1, (-1, scheme.block_size))
    z = blocks * factor.unsqueeze(-1) if multiplies else blocks / factor.unsqueeze(-1)
    return z.flatten(-2)


def _error(magnitude: Tensor, block_scales: Tensor, outer: Tensor, scheme: Scheme) -> Tensor:
    _, rounded = round_magnitude_(scaled(magnitude, block_scales, outer, scheme), scheme.tie)
    blocks = rounded.unflatten(-1, (-1, scheme.block_size))
    if scheme.outer_kind == "amax":
        unit = blocks * decode_block_scales(block_scales, scheme).unsqueeze(-1)
        largest = align_outer(outer, block_scales).unsqueeze(-1)
        values = divided(unit.mul_(largest), 6.0 * scheme.scale_max)
    else:
        values = blocks * decode_scales(block_scales, outer, scheme).unsqueeze(-1)
    difference = values.sub_(magnitude.unflatten(-1, (-1, scheme.block_size)))
    if scheme.candidates is Candidates.ABSMAX:
        return difference.abs_().amax(-1)
    terms = difference.square_() if scheme.candidates is Candidates.MSE else difference.abs_()
    return sum_last(terms, scheme.error_sum)


def sum_last(terms: Tensor, order: ErrorSum) -> Tensor:
    """Return the sum over the last dimension, whose width is a power of two, in the given order."""
    until = {ErrorSum.TREE: 1, ErrorSum.FOLDED: 8, ErrorSum.SEQUENTIAL: terms.shape[-1]}[order]
    while terms.shape[-1] > until:
        half = terms.shape[-1] // 2
        terms = terms[..., :half] + terms[..., half:]
    total = terms[..., 0]
    for j in range(1, terms.shape[-1]):
        total = total + terms[..., j]
    return total

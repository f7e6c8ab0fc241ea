"""The definition of search_scales, in plain torch. Shapes: [n, K] a span of rows, G = K / 16 blocks.

    error(b) = sum_j (h_j / max h) (v w_j - v w^_j(b))^2,   w^ = code * decode_scale as `dequantize` gives it

v is the power of two that brings the block's largest weight into (.5, 1]: multiplying by it is exact, and squares of
tiny or huge weights neither vanish nor overflow. Importances are divided by the block's largest for the same
reason, and equal ones become 1. The sum has the order of the scheme
(`formats.selection`). Candidates come in a fixed order, the byte of `quantize` first and then the nearest, up
before down; a later one must be strictly better. The loop over candidates works on some rows at a time:
its temporaries grow neither with the tensor nor with the number of candidates.
"""

from itertools import product

import torch
from torch import Tensor

from tracefp4.formats.encoding import encode, read_operand
from tracefp4.formats.grid import round_magnitude_
from tracefp4.formats.scaling import decode_scales, outer_scale, pow2_exponent, power_of_two
from tracefp4.formats.scheme import Scheme
from tracefp4.formats.selection import scaled, select_block_scales, sum_last
from tracefp4.formats.tensor import BlockTensor

OFFSETS = (1, -1, 2, -2, 3, -3, 4, -4, 5, -5, 6, -6, -7, -8, -9)
"""Bytes above and below the default that compete with it, in the order in which they are tried."""
LARGEST_BYTE = 0x7E
"""448: the largest E4M3 number, and the last byte before NaN."""
_SPAN_ELEMENTS = 1 << 20
"""About 4 MiB a temporary."""


def search_scales_reference(
    w: Tensor, importance: Tensor | None, scheme: Scheme, exponent: int | None
) -> BlockTensor:
    """Search the scales of a checked tensor; importance is float32 and broadcasts to w, or is None."""
    importance = None if importance is None else importance.expand(w.shape)
    operand = read_operand(w, scheme)
    magnitude = operand.magnitude
    outer = outer_scale(operand.amax, scheme, exponent)
    block_scales = select_block_scales(magnitude, operand.amax, outer, scheme, operand.finite)
    span = max(1, _SPAN_ELEMENTS // w.shape[-1])
    for matrix in product(*(range(size) for size in w.shape[:-2])):
        for start in range(0, w.shape[-2], span):
            rows: tuple[int | slice, ...] = (*matrix, slice(start, start + span))
            block_scales[rows] = _search(
                magnitude[rows],
                None if importance is None else importance[rows],
                block_scales[rows],
                _outer_of(outer, rows),
                scheme,
            )
    return encode(operand, block_scales, outer, scheme)


def _outer_of(outer: Tensor, rows: tuple[int | slice, ...]) -> Tensor:
    """Return the outer scale of some rows of one matrix: one for each (row schemes) or a scalar."""
    return outer[rows[: outer.dim()]]


def _search(
    magnitude: Tensor, importance: Tensor | None, default: Tensor, outer: Tensor, scheme: Scheme
) -> Tensor:
    """Return the best bytes [n, G] of a span of rows."""
    blocks = magnitude.unflatten(-1, (-1, scheme.block_size))
    unit = _unit(blocks)
    weight = None if importance is None else _relative(importance.unflatten(-1, (-1, scheme.block_size)))

    def error(block_scales: Tensor) -> Tensor:
        _, rounded = round_magnitude_(scaled(magnitude, block_scales, outer, scheme), scheme.tie)
        decode_scale = decode_scales(block_scales, outer, scheme).unsqueeze(-1)
        values = rounded.unflatten(-1, (-1, scheme.block_size)).mul_(decode_scale)
        squares = values.sub_(blocks).mul_(unit).square_()
        return sum_last(squares if weight is None else squares.mul_(weight), scheme.error_sum)

    best, least = default, error(default)
    is_searched = default > 0  # a byte of 0 stands for zeros: it is no scale to search around
    lowest = max(1, scheme.least_byte)
    for offset in OFFSETS:
        candidate = (default.to(torch.int16) + offset).clamp_(lowest, LARGEST_BYTE).to(torch.uint8)
        candidate = torch.where(is_searched, candidate, default)
        found = error(candidate)
        is_better = found < least  # never under the NaN byte: its error is NaN
        best, least = torch.where(is_better, candidate, best), torch.where(is_better, found, least)
    return best


def _relative(importance: Tensor) -> Tensor:
    """Return the importances [n, G, 16] over the largest of their block; zeros where all are."""
    largest = importance.amax(-1, keepdim=True)
    return importance / largest.masked_fill(largest == 0, 1.0)


def _unit(blocks: Tensor) -> Tensor:
    """Return the power of two [n, G, 1] that brings a block's largest value into (.5, 1]."""
    return power_of_two(pow2_exponent(blocks.amax(-1, keepdim=True), scale_max=1.0 / 6.0), negate=True)

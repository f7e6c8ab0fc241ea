"""The definition of quantize, in plain torch. Shapes: [..., K] elements, G = K / block size blocks.

Everything is float32: x is widened (bf16, fp16) or rounded (float64) once, the block scales are found and rounded
to bytes, and the codes are chosen against the stored bytes, in the order of operations that the scheme names. Rows
are taken in spans that stay in cache (`ops/spans.py`); an outer scale per tensor is found in a sweep before.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tracefp4.formats.encoding import encode, packed_codes, read_operand
from tracefp4.formats.scaling import outer_scale
from tracefp4.formats.scheme import Scheme
from tracefp4.formats.selection import select_block_scales
from tracefp4.formats.tensor import BlockTensor
from tracefp4.ops.spans import row_spans


class _Rows(NamedTuple):
    """What a span of rows becomes; `outer` as it was given or found for the span."""

    packed: Tensor
    block_scales: Tensor
    outer: Tensor


def quantize_reference(x: Tensor, scheme: Scheme, exponent: int | None) -> BlockTensor:
    """Quantize a checked tensor; see `quantize`."""
    lead, width = x.shape[:-1], x.shape[-1]
    rows = x.reshape(-1, width)
    spans = row_spans(rows.shape[0], width, x.device)
    outer, outer_of_rows = None, None
    if scheme.outer == "tensor":
        amax = torch.cat([read_operand(rows[first:last], scheme).amax.amax(-1) for first, last in spans])
        outer = outer_scale(amax.view(*lead, 1), scheme)
        outer_of_rows = outer.unsqueeze(-1).expand(lead).reshape(-1)
    parts = []
    for first, last in spans:
        given = None if outer_of_rows is None else outer_of_rows[first:last]
        parts.append(_quantize_rows(rows[first:last], given, scheme, exponent))
    if outer is None:
        per_row = scheme.outer == "row"
        outer = torch.cat([part.outer for part in parts]).view(lead) if per_row else parts[0].outer
    return BlockTensor(
        packed=torch.cat([part.packed for part in parts]).view(*lead, width // 2),
        block_scales=torch.cat([part.block_scales for part in parts]).view(*lead, width // scheme.block_size),
        outer=outer,
        scheme=scheme,
    )


def _quantize_rows(x: Tensor, outer: Tensor | None, scheme: Scheme, exponent: int | None) -> _Rows:
    operand = read_operand(x, scheme)
    if outer is None:
        outer = outer_scale(operand.amax, scheme, exponent)
    block_scales = select_block_scales(operand.magnitude, operand.amax, outer, scheme, operand.finite)
    return _Rows(packed_codes(operand, block_scales, outer, scheme), block_scales, outer)


def quantize_with_scales_reference(
    x: Tensor, block_scales: Tensor, outer: Tensor, scheme: Scheme
) -> BlockTensor:
    """Choose the codes of a checked tensor under given scales; see `quantize_with_scales`."""
    operand = read_operand(x, scheme)
    if operand.finite is not None:
        block_scales = block_scales.masked_fill(~operand.finite, scheme.nan_byte)
    return encode(operand, block_scales, outer, scheme)

"""The definition of kv_append: indexed copies of bytes that are never looked at; and of kv_quantize_append."""

import torch
from torch import Tensor

from tracefp4.formats.encoding import encode, read_operand
from tracefp4.formats.fragments import TILE_TOKENS, byte_places, paired
from tracefp4.formats.selection import select_block_scales
from tracefp4.formats.tensor import BlockTensor
from tracefp4.ops.pages import Pages, QuantizedPages


def append_reference(pages: Pages, rows: BlockTensor | Tensor, slots: Tensor) -> None:
    """Store checked rows; see `kv_append`."""
    (stored,) = torch.where(slots >= 0)
    slots = slots[stored]
    if isinstance(pages, Tensor):
        assert isinstance(rows, Tensor)
        _append(pages, rows[stored].to(pages.dtype), slots)
        return
    assert isinstance(rows, BlockTensor)
    packed, block_scales = rows.packed[stored], rows.block_scales[stored]
    if isinstance(pages, BlockTensor):
        _append(pages.packed, packed, slots)
        _append(pages.block_scales, block_scales, slots)
        return
    places = byte_places(pages.kind, rows.shape[-1], slots.device)
    parts = ((pages.packed, paired(packed)), (pages.block_scales, block_scales))
    for (to, new), at in zip(parts, places, strict=True):
        begin = slots // TILE_TOKENS * at.numel()
        to.view(to.shape[0], -1)[:, begin[:, None] + at[slots % TILE_TOKENS]] = new.transpose(0, 1)


def quantize_append_reference(
    keys: QuantizedPages, values: QuantizedPages, k: Tensor, v: Tensor, slots: Tensor
) -> tuple[BlockTensor, BlockTensor]:
    """Quantize and store checked rows; see `kv_quantize_append`."""
    rows = _quantized(k, keys), _quantized(v, values)
    for pages, new in zip((keys, values), rows, strict=True):
        append_reference(pages, new, slots)
    return rows


def _quantized(x: Tensor, pages: QuantizedPages) -> BlockTensor:
    """Rows as `ops.quantize` makes them under the scheme and the static outer scale of pages."""
    scheme, outer = pages.scheme, pages.outer.to(x.device)
    operand = read_operand(x, scheme)
    block_scales = select_block_scales(operand.magnitude, operand.amax, outer, scheme, operand.finite)
    found = encode(operand, block_scales, outer, scheme)
    return BlockTensor(packed=found.packed, block_scales=found.block_scales, outer=pages.outer, scheme=scheme)


def _append(pages: Tensor, rows: Tensor, slots: Tensor) -> None:
    """Copy rows [T, C, W] to slots [T] of pages [C, F, S, W]; W is bytes or values of one head's row."""
    num_heads, num_frames, page_size, width = pages.shape
    by_slot = pages.view(num_heads, num_frames * page_size, width)
    by_slot.index_copy_(1, slots, rows.transpose(0, 1))

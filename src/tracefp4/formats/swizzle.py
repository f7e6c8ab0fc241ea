"""The order in which block-scaled matrix products of NVIDIA's tensor cores read scale bytes: tiles of 128 rows by 4
blocks, each a run of 512 bytes.

    tile(row, block)   = row // 128 * ceil(G / 4) + block // 4
    offset(row, block) = tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + block % 4

Shapes: N rows, G blocks a row. Rows and blocks that fill up the last tiles are zero bytes, never uninitialized memory,
so equal scales give equal bytes and padding reads back as nothing. Checkpoints hold the plain [N, G] order; this one
belongs to a kernel's operands only, and it is one-dimensional so that neither is taken for the other.
Source: cuBLAS library documentation, "1D Block Scaling Factors Layout".
"""

import torch
from torch import Tensor

from tracefp4.errors import FormatError

TILE_ROWS = 128
TILE_BLOCKS = 4
_LANES = 32
"""Rows between two rows that lie side by side in a tile."""


def swizzled_size(rows: int, blocks: int) -> int:
    """Return the number of bytes of swizzled scales: whole tiles of 512."""
    return -(-rows // TILE_ROWS) * -(-blocks // TILE_BLOCKS) * TILE_ROWS * TILE_BLOCKS


def swizzle_block_scales(block_scales: Tensor) -> Tensor:
    """Put scale bytes into tile order.

    Args:
        block_scales: uint8 [..., N, G], E4M3 or E8M0 bytes.

    Returns:
        uint8 [..., swizzled_size(N, G)]: one flat run per matrix, padding zero.

    Raises:
        FormatError: When the dtype is not uint8 or there are fewer than two dimensions.
    """
    if block_scales.dtype != torch.uint8 or block_scales.dim() < 2:
        raise FormatError(
            f"swizzle_block_scales needs uint8 [..., N, G]; got {block_scales.dtype} {tuple(block_scales.shape)}. "
            "Pass BlockTensor.block_scales of a matrix."
        )
    *lead, rows, blocks = block_scales.shape
    padding = (0, -blocks % TILE_BLOCKS, 0, -rows % TILE_ROWS)
    tiled = torch.nn.functional.pad(block_scales, padding).unflatten(-1, (-1, TILE_BLOCKS))
    tiled = tiled.unflatten(
        -3, (-1, TILE_ROWS // _LANES, _LANES)
    )  # [..., tile row, group, lane, tile column, 4]
    return tiled.movedim((-2, -3), (-4, -3)).reshape(*lead, swizzled_size(rows, blocks))


def unswizzle_block_scales(swizzled: Tensor, *, rows: int, blocks: int) -> Tensor:
    """Return scale bytes to plain order: the inverse of `swizzle_block_scales`. Padding is dropped unread.

    Args:
        swizzled: uint8 [..., swizzled_size(rows, blocks)].
        rows: N.
        blocks: G.

    Returns:
        uint8 [..., N, G], a new tensor.

    Raises:
        FormatError: When dtype or length do not fit, as they do not for plain [N, G] scales.
    """
    size = swizzled_size(rows, blocks)
    if swizzled.dtype != torch.uint8 or swizzled.dim() == 0 or swizzled.shape[-1] != size:
        raise FormatError(
            f"Swizzled scales of {rows} rows of {blocks} blocks are uint8 [..., {size}]; got {swizzled.dtype} "
            f"{tuple(swizzled.shape)}. Scales in plain order need no unswizzling."
        )
    lead = swizzled.shape[:-1]
    columns = -(-blocks // TILE_BLOCKS)
    tiled = swizzled.reshape(*lead, -(-rows // TILE_ROWS), columns, _LANES, TILE_ROWS // _LANES, TILE_BLOCKS)
    plain = tiled.movedim((-4, -3), (-2, -3)).reshape(
        *lead, -(-rows // TILE_ROWS) * TILE_ROWS, columns * TILE_BLOCKS
    )
    return plain[..., :rows, :blocks].clone()

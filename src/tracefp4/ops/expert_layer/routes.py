"""Pairs (token, slot) sorted by expert, by the kernels of routes.cu: one launch, or two where pairs are many."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from tracefp4.ops.device import KernelFile, Launch

LIST_THREADS = 256
"""Of a thread block."""
_CHUNK, _MAX_CHUNKS = 1024, 128
"""Pairs that a thread block sorts, or a multiple of them where there would be more chunks than that: each block adds up
the counts of all."""


class Routes(NamedTuple):
    """Pairs sorted by expert; int32."""

    order: Tensor
    """[P]."""
    offsets: Tensor
    """[E + 1]."""
    tiles: Tensor
    """[most tiles there can be, 2]: expert and first pair."""


def sort_pairs(ids: Tensor, num_experts: int, tile_tokens: int) -> Routes:
    """Sort pairs by expert, stably, and cut every expert's list into tiles of so many.

    Args:
        ids: int64, contiguous, one for every pair; pairs with an id that is no expert's are left out.
        num_experts: E.
        tile_tokens: Pairs of a tile, at most.
    """
    num_pairs, device = ids.numel(), ids.device
    in_use = min(num_experts, num_pairs)
    # a tile that is not full ends an expert's list; the others are full
    most_tiles = in_use + (num_pairs - in_use) // tile_tokens
    order = torch.empty(num_pairs, dtype=torch.int32, device=device)
    offsets = torch.empty(num_experts + 1, dtype=torch.int32, device=device)
    tiles = torch.empty((most_tiles, 2), dtype=torch.int32, device=device)
    chunk = max(_CHUNK, -(-num_pairs // (_MAX_CHUNKS * _CHUNK)) * _CHUNK)
    grid, counts = (max(1, -(-num_pairs // chunk)),), None
    pairs = (ids, num_pairs, chunk, num_experts)
    if grid[0] > 1:
        counts = torch.empty((*grid, num_experts), dtype=torch.int32, device=device)
        launch = Launch("count_pairs", grid, LIST_THREADS, {}, 4 * num_experts)
        LISTS.launch(launch, *pairs, counts, device=device)
    shared_bytes = 4 * num_experts * (LIST_THREADS // 32 + 3)
    launch = Launch("place_pairs", grid, LIST_THREADS, {}, shared_bytes)
    LISTS.launch(launch, *pairs, counts, tile_tokens, most_tiles, order, offsets, tiles, device=device)
    return Routes(order, offsets, tiles)


def sorted_pairs(device: torch.device) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Sort pairs in two chunks, for the check at first use, whose layers have fewer."""
    ids = torch.arange(2 * _CHUNK - 1, device=device) ** 2 % 11
    order, offsets, _ = sort_pairs(ids, 11, 16)
    wanted_ids, wanted = torch.sort(ids, stable=True)
    ends = torch.searchsorted(wanted_ids, torch.arange(1, 12, device=device))
    yield "sorted pairs", order.long(), wanted
    yield "lists of experts", offsets[1:].long(), ends


LISTS = KernelFile(Path(__file__).with_name("routes.cu"))
"""The kernels of routes.cu."""

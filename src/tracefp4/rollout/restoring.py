"""Recorded codes and pages: the reverse of what recording K and V is.

A record's whole codes and scale bytes of K and V are the bytes that the pages held, so writing them gives the same
pages, bit for bit, and comparing them tells whether a page that is already there will do. Layers that the record lacks,
or holds in fewer bits, can be neither written nor compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from tracefp4.formats.tensor import BlockTensor
from tracefp4.guidance.record import Record, Site, SiteKind
from tracefp4.guidance.site_record import SiteRecord
from tracefp4.kvcache.pool import KVPool, frame_of
from tracefp4.ops.kv_append import kv_append
from tracefp4.ops.pages import Pages, QuantizedPages


class Restorer:
    """Moves K and V from records, with whole codes of every layer, to the pages of a pool.

    Args:
        pool: its layers hold FP4 wherever a method is called, but for those that keep a state.
    """

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool

    def write(self, record: Record, positions: Sequence[int], frames: Sequence[int]) -> None:
        """Write K and V of recorded positions into their frames, all layers.

        Args:
            record: from position 0 on.
            positions: which of its positions to write; each below record.length.
            frames: of the sequence's page table, in order.
        """
        pool, size = self._pool, self._pool.shape.page_size
        pool.flush()
        slots = torch.tensor([frames[p // size] * size + p % size for p in positions], device="cpu")
        slots = slots.to(pool.device)
        rows = torch.tensor(list(positions), device="cpu")
        for stored, part in self._parts(record):
            packed, block_scales = (found.to(pool.device) for found in _bytes(part, rows, stored))
            new = BlockTensor(
                packed=packed, block_scales=block_scales, outer=stored.outer, scheme=stored.scheme
            )
            kv_append(stored, new, slots=slots)

    def holds(self, record: Record, start: int, frame: int) -> bool:
        """Say whether a frame holds exactly the K and V of a page of recorded positions, all layers.

        Args:
            record: from position 0 on.
            start: first position of the page; all of its positions are below record.length.
            frame: where the page is.
        """
        self._pool.flush()
        rows = torch.arange(start, start + self._pool.shape.page_size, device="cpu")
        for stored, part in self._parts(record):
            packed, block_scales = _bytes(part, rows, stored)
            held = frame_of(stored, frame)
            if not (
                torch.equal(held.packed.cpu(), packed.transpose(0, 1))
                and torch.equal(held.block_scales.cpu(), block_scales.transpose(0, 1))
            ):
                return False
        return True

    def _parts(self, record: Record) -> Iterator[tuple[QuantizedPages, SiteRecord]]:
        """Every layer's pages of K and of V, with what the record has of them."""
        for layer, pages in enumerate(self._pool.layers):
            if self._pool.states is not None and layer in self._pool.states.layers:
                continue
            found: tuple[tuple[SiteKind, Pages], ...] = (
                ("k", pages.keys),
                ("v", pages.values),
            )
            for kind, stored in found:
                part = record.sites[Site(kind, layer)]
                assert not isinstance(stored, Tensor) and part.is_whole, "the caller asks keeps_cache first"
                yield stored, part


def _bytes(part: SiteRecord, rows: Tensor, stored: QuantizedPages) -> tuple[Tensor, Tensor]:
    """Code bytes [T, C, D/2] and scale bytes [T, C, G] of some rows, in host memory."""
    heads = stored.packed.shape[0]
    return (
        part.payload[rows].view(len(rows), heads, -1),
        part.block_scales[rows].view(len(rows), heads, -1),
    )

"""Whole steps in stored form: bytes that kernels wrote, all layers in one tensor per part, copied into large blocks.

A step is a handful of tensors whatever the number of layers, and keeping it a handful of copies; what each layer's site
saw is cut out once, when records are built. A block has room for many steps, because memory that is asked for step by
step costs more than the copy. Nothing here knows sequences or positions, and nothing looks at a value.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from tracefp4.errors import RecordError
from tracefp4.guidance.record import SiteKind

BLOCK_TOKENS = 4096
"""Tokens of a block; memory that no step has filled is asked for and never touched."""


class StackedRows(Protocol):
    """One kind of site of a whole step: S layers, R rows, as many for every token."""

    @property
    def layers(self) -> tuple[int, ...]:
        """Decoder layer of each of the S entries."""

    @property
    def packed(self) -> Tensor:
        """uint8 [S, R, W / 2], payload of codec `full`."""

    @property
    def block_scales(self) -> Tensor:
        """uint8 [S, R, G], raw scale bytes."""

    @property
    def exponents(self) -> Tensor | None:
        """int8 [S, R], power of two of every row; None for schemes with a static outer scale or none."""

    @property
    def static_exponents(self) -> tuple[int, ...] | None:
        """Power of two of every layer, 0 for schemes without one; None for row schemes."""


class Layout(NamedTuple):
    """How the rows of one kind look; the same in every step of a log."""

    layers: tuple[int, ...]
    """Decoder layers."""
    width: int
    """W, values per row."""
    num_blocks: int
    """G, block scales per row."""
    rows_per_token: int
    """Rows of one token."""
    is_static: bool
    """True where the outer scale is static, so that rows have no exponents."""


def layout_of(kind: SiteKind, rows: StackedRows, *, num_tokens: int) -> Layout:
    """Return the layout of a step of `num_tokens` tokens, at least 1.

    Raises: RecordError if the rows are no multiple of the tokens, or the parts do not belong together.
    """
    layers, num_rows, half_width = rows.packed.shape
    expected = [(len(rows.layers), num_rows), (layers, num_rows)]
    found = [tuple(rows.packed.shape[:2]), tuple(rows.block_scales.shape[:2])]
    if rows.exponents is not None:
        expected.append((layers, num_rows))
        found.append(tuple(rows.exponents.shape))
    if num_rows % num_tokens or found != expected:
        raise RecordError(
            f"Bytes of {kind} do not fit a step of {num_tokens} tokens; got layers and rows {found}. Every part has "
            f"{len(rows.layers)} layers, and rows that are a multiple of the tokens. Tap the pass whose tokens are "
            "counted."
        )
    return Layout(
        rows.layers,
        2 * half_width,
        rows.block_scales.shape[2],
        num_rows // num_tokens,
        rows.exponents is None,
    )


class StackedBlock:
    """Consecutive whole steps of a log.

    Args:
        sites: of the first step, by kind; only shapes and static exponents are read.
        ids: likewise, [routed layers, N, top_k].
        num_tokens: N of that step.
        capacity: tokens that the block has room for.
    """

    def __init__(
        self, sites: Mapping[SiteKind, StackedRows], ids: Tensor | None, *, num_tokens: int, capacity: int
    ) -> None:
        self.layouts = {kind: layout_of(kind, rows, num_tokens=num_tokens) for kind, rows in sites.items()}
        self.static_exponents = {kind: rows.static_exponents for kind, rows in sites.items()}
        self.num_tokens = 0
        """Tokens that steps have filled."""
        self._capacity = capacity
        self._parts = [
            torch.empty(
                (part.shape[0], part.shape[1] // num_tokens * capacity, *part.shape[2:]),
                dtype=part.dtype,
                device="cpu",
            )
            for part in _parts(sites, ids)
        ]
        self._has_ids = ids is not None

    def fits(self, sites: Mapping[SiteKind, StackedRows], *, num_tokens: int) -> bool:
        """True if a step of the block's layout has room and the same static exponents."""
        static = {kind: rows.static_exponents for kind, rows in sites.items()}
        return self.num_tokens + num_tokens <= self._capacity and static == self.static_exponents

    def copy(self, sites: Mapping[SiteKind, StackedRows], ids: Tensor | None, *, num_tokens: int) -> None:
        """Add a step that fits."""
        for kept, part in zip(self._parts, _parts(sites, ids), strict=True):
            per_token = kept.shape[1] // self._capacity
            begin = self.num_tokens * per_token
            kept[:, begin : begin + part.shape[1]].copy_(part)
        self.num_tokens += num_tokens

    def filled(self) -> tuple[dict[SiteKind, tuple[Tensor, ...]], Tensor | None]:
        """Return the parts of every kind (packed, block scales, and exponents of rows) and the ids; views."""
        parts = iter([kept[:, : kept.shape[1] // self._capacity * self.num_tokens] for kept in self._parts])
        found = {
            kind: tuple(next(parts) for _ in range(2 if layout.is_static else 3))
            for kind, layout in self.layouts.items()
        }
        return found, next(parts) if self._has_ids else None


def _parts(sites: Mapping[SiteKind, StackedRows], ids: Tensor | None) -> list[Tensor]:
    """All tensors of a step, in one order."""
    found: list[Tensor] = []
    for rows in sites.values():
        found += [rows.packed, rows.block_scales]
        found += [] if rows.exponents is None else [rows.exponents]
    return found if ids is None else [*found, ids]

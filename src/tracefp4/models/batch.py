"""One pass's tokens as the model sees them: flat rows, and segments that say which rows attend to which
pages.

All index tensors are built once per pass and used by every layer. A segment is a rectangle: B sequences with
Q queries each. Decoding sequences form one with Q = 1; prefill chunks of similar length share one, padded to
the longest.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Segment:
    """A rectangle of queries; its rows lie side by side in the flat batch, sequence by sequence."""

    begin: int
    """First flat row."""
    end: int
    """One past the last flat row."""
    page_table: Tensor
    """int64 [B, N], frames of each sequence; padded with the null frame."""
    positions: Tensor
    """int64 [B, Q], position of each query; 0 at padding."""
    valid: Tensor | None
    """bool [B, Q], True where a query is real; None if all are."""

    def to(self, device: torch.device) -> Segment:
        """The same segment with its index tensors on a device."""
        return replace(
            self,
            page_table=self.page_table.to(device),
            positions=self.positions.to(device),
            valid=None if self.valid is None else self.valid.to(device),
        )

    def spread(self, rows: Tensor) -> Tensor:
        """Flat rows [T, ...] of the whole batch -> this segment's rectangle [B, Q, ...]; zeros at padding."""
        own = rows[self.begin : self.end]
        if self.valid is None:
            return own.view(*self.positions.shape, *rows.shape[1:])
        rectangle = rows.new_zeros(*self.positions.shape, *rows.shape[1:])
        rectangle[self.valid] = own
        return rectangle

    def flatten(self, rectangle: Tensor) -> Tensor:
        """The reverse of `spread`, for this segment's rows: [B, Q, ...] -> [end - begin, ...]."""
        return rectangle.flatten(0, 1) if self.valid is None else rectangle[self.valid]


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class TokenBatch:
    """Input of one forward pass over T tokens of any mixture of sequences."""

    token_ids: Tensor
    """int64 [T]."""
    positions: Tensor
    """int64 [T], position of each token in its sequence."""
    slots: Tensor
    """int64 [T], where K and V of each token go: frame * page_size + offset."""
    segments: list[Segment]
    """Cover the rows 0 .. T-1 in order."""
    logit_rows: Tensor
    """int64 [M], rows whose logits are wanted."""

    def to(self, device: torch.device) -> TokenBatch:
        """The same batch with its index tensors on a device; they are made on the host, where nothing waits."""
        return TokenBatch(
            token_ids=self.token_ids.to(device),
            positions=self.positions.to(device),
            slots=self.slots.to(device),
            segments=[segment.to(device) for segment in self.segments],
            logit_rows=self.logit_rows.to(device),
        )

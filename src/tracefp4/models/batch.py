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
    places: Tensor | None
    """int64 [end - begin], where each flat row lies in the rectangle read row by row; None if no cell is padding. Made
    on the host: a mask would have to be counted on the device, which makes the host wait."""

    state_slots: Tensor | None = None
    """int64 [B], where each sequence's state is in the pool of states; negative in rows that nobody reads. None for a
    model without states."""

    @property
    def lengths(self) -> Tensor:
        """int64 [B], queries of each sequence that are no padding."""
        num_queries = self.positions.shape[1]
        if self.places is None:
            return torch.full_like(self.positions[:, 0], num_queries)
        is_real = torch.zeros_like(self.positions).view(-1).index_fill_(0, self.places, 1)
        return is_real.view(-1, num_queries).sum(1)

    def to(self, device: torch.device) -> Segment:
        """The same segment with its index tensors on a device."""
        return replace(
            self,
            page_table=self.page_table.to(device),
            positions=self.positions.to(device),
            places=None if self.places is None else self.places.to(device),
            state_slots=None if self.state_slots is None else self.state_slots.to(device),
        )

    def spread(self, rows: Tensor) -> Tensor:
        """Flat rows [T, ...] of the whole batch -> this segment's rectangle [B, Q, ...]; zeros at padding."""
        own = rows[self.begin : self.end]
        if self.places is not None:
            own = own.new_zeros(self.positions.numel(), *own.shape[1:]).index_copy_(0, self.places, own)
        return own.view(*self.positions.shape, *rows.shape[1:])

    def flatten(self, rectangle: Tensor) -> Tensor:
        """The reverse of `spread`, for this segment's rows: [B, Q, ...] -> [end - begin, ...]."""
        flat = rectangle.flatten(0, 1)
        return flat if self.places is None else flat.index_select(0, self.places)


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

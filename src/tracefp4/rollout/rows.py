"""The decoding sequences, one row each: everything a pass needs of them, kept from step to step in one host buffer.

Lists of Python objects cost microseconds per sequence and step, so what stays the same from one decode step to the
next (pages, sampling parameters) is written once, when a sequence joins, and what counts up is counted for all rows
together. Only sequences that join, leave or come to a new page are looked at one by one. Columns and pages of a row
lie side by side, so the first rows are one block of memory: a captured pass gets its whole input in one copy. Rows
beyond the last sequence are padding that a pass computes and nobody reads: they store nothing (slot -1) and see the
null frame.

The order of rows means nothing. Sequences stay the truth: a row never knows what its sequence does not.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tracefp4.kvcache.pool import CacheShape
from tracefp4.models.batch import Segment, TokenBatch
from tracefp4.ops.sample import Draws
from tracefp4.rollout.sequence import Sequence

TOKEN, POSITION, SLOT, STATE, KEY, TEMPERATURE, TOP_K, TOP_P, FORCED = range(9)
NUM_COLUMNS = 9
"""Columns before the page table. All are 64 bits wide; TEMPERATURE and TOP_P hold the bits of a float64."""
NO_SLOT = -1
"""Slot of a row that stores nothing, and of one that has no state."""


class DecodeRows:
    """Rows of sequences that decode.

    Args:
        max_rows: most sequences.
        max_pages: most pages of one.
        shape: of the pool.
        is_pinned: keep the buffer where a GPU copies from without waiting.
    """

    def __init__(self, *, max_rows: int, max_pages: int, shape: CacheShape, is_pinned: bool) -> None:
        self.sequences: list[Sequence] = []
        """Sequence of every row."""
        self.buffer = torch.empty(
            (max_rows, NUM_COLUMNS + max_pages), dtype=torch.int64, device="cpu", pin_memory=is_pinned
        )
        """int64 [max_rows, NUM_COLUMNS + max_pages]."""
        self._numbers = self.buffer.numpy()
        self._floats = self._numbers.view(np.float64)
        self._pages = self._numbers[:, NUM_COLUMNS:]
        self._page_size = shape.page_size
        self._null_frame = shape.num_pages
        self._row_of: dict[Sequence, int] = {}
        self._joined: list[Sequence] = []
        self._looked_at_from = np.zeros(
            max_rows, dtype=np.int64
        )  # first position whose draw may end the sequence
        self.may_end = False
        """True if the token of the last pass may end a row by more than being a stop token: its sequence has to see
        it before it goes on."""
        self.padding = self._padding()
        """int64 [NUM_COLUMNS + max_pages], a row that stores nothing."""
        self.buffer[:] = self.padding

    def __len__(self) -> int:
        return len(self.sequences)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._row_of

    @property
    def max_length(self) -> int:
        """Positions that a row has pages for."""
        return self._pages.shape[1] * self._page_size

    @property
    def capacity(self) -> int:
        """Rows that there are, padding included."""
        return self.buffer.shape[0]

    def enter(self, sequence: Sequence) -> None:
        """Give a decoding sequence a row; its pages may still lack the one of its next position."""
        row, params = len(self.sequences), sequence.request.params
        self.sequences.append(sequence)
        self._row_of[sequence] = row
        self._joined.append(sequence)
        numbers, frames = self._numbers[row], sequence.table.frames
        numbers[TOKEN], numbers[POSITION] = sequence.ids[-1], sequence.num_cached
        numbers[STATE], numbers[KEY], numbers[TOP_K] = sequence.state_slot, sequence.noise_key, params.top_k
        self._floats[row, TEMPERATURE], self._floats[row, TOP_P] = params.temperature, params.top_p
        self._pages[row, : len(frames)] = frames
        self._set_forced(sequence)
        is_always_looked_at = bool(params.stop) or sequence.request.forced is not None
        left = params.max_tokens - len(sequence.logprobs)
        self._looked_at_from[row] = 0 if is_always_looked_at else sequence.num_cached + left - 1

    def leave(self, sequence: Sequence) -> None:
        """Take a sequence's row away, if it has one; the last row takes its place."""
        row = self._row_of.pop(sequence, None)
        if row is None:
            return
        last = self.sequences.pop()
        if last is not sequence:
            self.sequences[row] = last
            self._row_of[last] = row
            self._numbers[row] = self._numbers[len(self.sequences)]
            self._looked_at_from[row] = self._looked_at_from[len(self.sequences)]
        if sequence in self._joined:
            self._joined.remove(sequence)
        self.buffer[len(self.sequences)] = self.padding

    def clear(self) -> None:
        """Take all rows away."""
        self.buffer[: len(self.sequences)] = self.padding
        self.sequences, self._joined = [], []
        self._row_of.clear()

    def at_new_page(self, *, ahead: int = 0) -> list[Sequence]:
        """Sequences whose next position, or the one `ahead` of it, may lie on a page that they do not own yet: those
        that have none there, and those that have joined since the last `place`, whose last page may be shared."""
        rows = np.arange(len(self.sequences))
        indices = (self._numbers[: len(rows), POSITION] + ahead) // self._page_size
        frames = self._pages[rows, np.minimum(indices, self._pages.shape[1] - 1)]
        found = [self.sequences[row] for row in np.flatnonzero(frames == self._null_frame).tolist()]
        return list(dict.fromkeys(found) | dict.fromkeys(self._joined))

    def turn_page(self, sequence: Sequence) -> None:
        """Note the page of a sequence's next position, after it was made writable."""
        index = sequence.num_cached // self._page_size
        self._pages[self._row_of[sequence], index] = sequence.table.pages[index].frame

    def place(self) -> None:
        """Work out where K and V of every row's token go; all pages are there."""
        rows = np.arange(len(self.sequences))
        positions = self._numbers[: len(rows), POSITION]
        frames = self._pages[rows, positions // self._page_size]
        self._numbers[: len(rows), SLOT] = frames * self._page_size + positions % self._page_size
        self._joined.clear()

    def advance(self) -> None:
        """Go on by one position; what was drawn follows (`write`), and the sequences know it later still."""
        numbers = self._numbers[: len(self.sequences)]
        self.may_end = bool((numbers[:, POSITION] >= self._looked_at_from[: len(numbers)]).any())
        numbers[:, POSITION] += 1

    def write(self, sequences: list[Sequence], token_ids: list[int]) -> None:
        """Note what a pass drew; `sequences` were its rows, some of which may have left."""
        if sequences != self.sequences:
            drawn = dict(zip(sequences, token_ids, strict=False))
            token_ids = [drawn[sequence] for sequence in self.sequences]
        self._numbers[: len(self.sequences), TOKEN] = token_ids[: len(self.sequences)]

    def force_next(self) -> None:
        """Note the next tokens of sequences whose tokens are given, after they were given the last ones."""
        for row in np.flatnonzero(self._numbers[: len(self.sequences), FORCED] >= 0).tolist():
            self._set_forced(self.sequences[row])

    def draws(self) -> Draws:
        """Parameters of one draw per row, in host memory."""
        return draws_of(self.buffer[: len(self.sequences), :NUM_COLUMNS].t().contiguous())

    def batch(self) -> TokenBatch:
        """All rows as a pass, in host memory; the page table is as wide as the longest sequence needs."""
        count = len(self.sequences)
        columns = self.buffer[:count, :NUM_COLUMNS].t().contiguous()
        width = int(columns[POSITION].max()) // self._page_size + 1
        return batch_of(columns, self.buffer[:count, NUM_COLUMNS : NUM_COLUMNS + width].contiguous())

    def _set_forced(self, sequence: Sequence) -> None:
        token = None if sequence.finish_reason is not None else sequence.forced_token
        self._numbers[self._row_of[sequence], FORCED] = -1 if token is None else token

    def _padding(self) -> Tensor:
        row = torch.zeros_like(self.buffer[0], device="cpu")
        row[SLOT], row[STATE], row[FORCED] = NO_SLOT, NO_SLOT, -1
        row.view(torch.float64)[TOP_P] = 1.0
        row[NUM_COLUMNS:] = self._null_frame
        return row


def build_rows(shape: CacheShape, *, max_batch: int, max_length: int, device: torch.device) -> DecodeRows:
    """Return rows for sequences of up to `max_length` positions in a pool."""
    max_pages = min(shape.num_pages, -(-max_length // shape.page_size))
    return DecodeRows(max_rows=max_batch, max_pages=max_pages, shape=shape, is_pinned=device.type == "cuda")


def batch_of(columns: Tensor, page_table: Tensor) -> TokenBatch:
    """Return decode rows as a pass.

    Args:
        columns: int64 [NUM_COLUMNS, B], contiguous, on any device.
        page_table: int64 [B, pages], likewise.
    """
    count = columns.shape[1]
    segment = Segment(
        begin=0,
        end=count,
        page_table=page_table,
        positions=columns[POSITION][:, None],
        places=None,
        state_slots=columns[STATE],
    )
    return TokenBatch(
        token_ids=columns[TOKEN],
        positions=columns[POSITION],
        slots=columns[SLOT],
        segments=[segment],
        logit_rows=torch.arange(count, device=columns.device),
    )


def draws_of(columns: Tensor) -> Draws:
    """Return the draws of decode rows: the token after each row's own. Args: columns as for `batch_of`."""
    return Draws(
        keys=columns[KEY],
        positions=columns[POSITION] + 1,
        temperature=columns[TEMPERATURE].view(torch.float64),
        top_k=columns[TOP_K],
        top_p=columns[TOP_P].view(torch.float64),
        forced=columns[FORCED],
    )

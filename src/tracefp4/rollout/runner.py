"""Works to tensors to tokens: lays out one pass as a flat batch, runs the model over it and draws.

Index tensors (page tables, slots, positions) are made here once per pass; no layer makes any. Where decoding is
captured (`graphs.py`), a step is up to two passes: the decoding rows by a graph, and the chunks of prompts eagerly.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Works
from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tracefp4.kvcache.pool import KVPool
from tracefp4.models.batch import Segment, TokenBatch
from tracefp4.models.qwen3_moe import Qwen3MoeEngineModel
from tracefp4.ops.sample import Draws, Sampled, draw, sample
from tracefp4.rollout.completion import DecodePass
from tracefp4.rollout.graphs import DecodeGraphs, Started
from tracefp4.rollout.recorder import Recorder
from tracefp4.rollout.rows import NO_SLOT, DecodeRows
from tracefp4.rollout.sampler import columns, joined
from tracefp4.rollout.sequence import Draw, Sequence, Work


class Computed(NamedTuple):
    """What a step has computed; on a GPU, what it has been told to."""

    rows: list[Sequence]
    """The decoding rows; some may end, and leave, before the pass is over."""
    outputs: Tensor | None
    """One row for every decoding row, unless they have been drawn, and for every chunk that draws, in order: hidden
    states after the last norm of a native pass, else logits. None if there was no such row."""
    drawn: Started | Draws
    """What a captured pass draws for the decoding rows, or how to draw for them."""
    row_log: int | None
    """First log row of the decoding rows; None when nothing is recorded."""
    chunk_log: int | None
    """First log row of the chunks."""
    decode_pass: DecodePass | None
    """How the decoding rows were computed; None if there were none."""
    chunks: Works[Work]
    """What was computed beside them."""
    num_given: int
    """Given tokens that were computed for the first time."""

    def wait(self) -> None:
        """Wait until a captured pass has drawn."""
        if isinstance(self.drawn, Started):
            self.drawn.wait()


class Drawn(NamedTuple):
    """What a pass has drawn, for its decoding rows first."""

    rows: list[Sequence]
    """Those of the pass."""
    joining: list[Sequence]
    """Sequences whose chunk drew, and siblings that draw from the same."""
    token_ids: list[int]
    """One for each of both."""
    logprobs: list[float]
    """Likewise."""

    @property
    def num_wanted(self) -> int:
        """Tokens of sequences that have not ended yet."""
        return sum(sequence.finish_reason is None for sequence in self.rows + self.joining)

    def each(self) -> Iterator[tuple[Sequence, int, float]]:
        """Sequences with their token and its log-prob."""
        return zip(self.rows + self.joining, self.token_ids, self.logprobs, strict=True)


class Runner:
    """The model and its pages.

    Args:
        model: computes.
        pool: holds K and V.
        rows: the decoding sequences.
        recorder: logs every pass; None records nothing.
        graphs: captured passes over the rows; None: every pass runs eagerly.
    """

    def __init__(
        self,
        model: Qwen3MoeEngineModel,
        pool: KVPool,
        *,
        rows: DecodeRows,
        recorder: Recorder | None,
        graphs: DecodeGraphs | None,
    ) -> None:
        self._model = model
        self._pool = pool
        self._rows = rows
        self._recorder = recorder
        self._graphs = graphs

    @property
    def captures(self) -> bool:
        """True if decode passes are captured: `run` of rows alone returns at once."""
        return self._graphs is not None

    def follow(self) -> Computed:
        """Start the captured pass of the rows of the last one, with the tokens that it is drawing."""
        assert self._graphs is not None
        self._pool.flush()
        rows = list(self._rows.sequences)
        started = self._graphs.run(len(rows), follows=True)
        return Computed(rows, None, started, started.first_log_row, None, "graph", [], 0)

    def run(self, chunks: Works[Work]) -> Computed:
        """Compute all rows and some chunks, shortest first; at least one of either."""
        rows, count = list(self._rows.sequences), len(self._rows)
        num_given = sum(work.num_given_computed for work in chunks)
        self._pool.flush()
        started = self._graphs.run(count) if count and self._graphs is not None else None
        parts = [] if started is not None or not count else [self._rows.batch()]
        if chunks:
            parts.append(chunk_batch(chunks, pool=self._pool))
        outputs, first = self._forward(_side_by_side(parts)) if parts else (None, None)
        if started is not None:
            return Computed(rows, outputs, started, started.first_log_row, first, "graph", chunks, num_given)
        of_rows = self._rows.draws()  # before the rows go on
        chunk_log = None if first is None else first + count
        how: DecodePass | None = "eager" if count else None
        return Computed(rows, outputs, of_rows, first, chunk_log, how, chunks, num_given)

    def draw(self, computed: Computed, draws: Works[Draw]) -> Drawn:
        """Tokens and log-probs of all rows, then of `draws`; waits for them."""
        self._pool.flush()  # what the next pass needs clear; nothing waits for it
        started = computed.drawn if isinstance(computed.drawn, Started) else None
        of_rows = columns([]) if isinstance(computed.drawn, Started) else computed.drawn
        first = of_rows.keys.shape[0]
        token_ids: list[int] = []
        logprobs: list[float] = []
        found: Sampled | None = None
        if first or draws:
            assert computed.outputs is not None
            device = computed.outputs.device
            logit_rows = [*range(first), *(first + found.logit_row for found in draws)]
            outputs = computed.outputs[torch.tensor(logit_rows, device="cpu").to(device)]
            found = self._sampled(outputs, joined(of_rows, columns(draws), device=device))
        if started is not None:
            started.wait()
            token_ids, logprobs = started.sampled.tokens.tolist(), started.sampled.logprobs.tolist()
        if found is not None:
            token_ids = token_ids + found.tokens.tolist()
            logprobs = logprobs + found.logprobs.tolist()
        return Drawn(computed.rows, [draw.sequence for draw in draws], token_ids, logprobs)

    def _forward(self, batch: TokenBatch) -> tuple[Tensor, int | None]:
        """Outputs of an eager pass, and its first log row."""
        model, recorder, num_tokens = self._model, self._recorder, batch.token_ids.shape[0]
        if model.native is not None:
            model.native.reserve(int(batch.positions.max()) + 1)
            taps = None if recorder is None else recorder.new_taps(model)
            hidden = model.native.run(batch.to(self._pool.device), self._pool, taps)
            if recorder is None or taps is None:
                return hidden, None
            return hidden, recorder.take(taps.stacked(), num_tokens=num_tokens)
        batch = batch.to(self._pool.device)
        if recorder is None:
            return model.forward(batch, self._pool), None
        with recorder.step(num_tokens) as first_log_row:
            return model.forward(batch, self._pool), first_log_row

    def _sampled(self, outputs: Tensor, draws: Any) -> Sampled:
        if self._model.native is None:
            return draw(outputs, draws)
        return sample(outputs, self._model.weights.head, draws)


def chunk_batch(works: Works[Work], *, pool: KVPool) -> TokenBatch:
    """Lay works out side by side, on the host; works of similar length (same power of two) share a segment."""
    segments, slots, begin = [], [], 0
    for _, group in groupby(works, key=lambda work: (work.count - 1).bit_length()):
        segment, segment_slots = _segment(list(group), begin=begin, pool=pool)
        segments.append(segment)
        slots.append(segment_slots)
        begin = segment.end
    positions = [segment.flatten(segment.positions) for segment in segments]
    token_ids = [token for work in works for token in work.token_ids]
    ends = _host([work.count for work in works]).cumsum(0)
    return TokenBatch(
        token_ids=_host(token_ids),
        positions=torch.cat(positions),
        slots=torch.cat(slots),
        segments=segments,
        logit_rows=ends[_host([work.draws for work in works])] - 1,
    )


def _side_by_side(parts: Works[TokenBatch]) -> TokenBatch:
    """One or two batches as one."""
    if len(parts) == 1:
        return parts[0]
    first, second = parts
    moved = first.token_ids.shape[0]
    return TokenBatch(
        token_ids=torch.cat([first.token_ids, second.token_ids]),
        positions=torch.cat([first.positions, second.positions]),
        slots=torch.cat([first.slots, second.slots]),
        segments=[
            *first.segments,
            *(replace(s, begin=s.begin + moved, end=s.end + moved) for s in second.segments),
        ],
        logit_rows=torch.cat([first.logit_rows, second.logit_rows + moved]),
    )


def _segment(works: list[Work], *, begin: int, pool: KVPool) -> tuple[Segment, Tensor]:
    """One segment and the slots of its tokens."""
    page_size = pool.shape.page_size
    counts = _host([work.count for work in works])
    width = int(counts.max())
    steps = torch.arange(width, device="cpu")
    positions = _host([work.start for work in works])[:, None] + steps
    places = None
    if bool((counts != width).any()):
        is_real = steps < counts[:, None]
        positions = positions * is_real
        places = is_real.flatten().nonzero()[:, 0]
    num_pages = max((work.start + work.count - 1) // page_size for work in works) + 1
    frames = [work.sequence.table.frames[:num_pages] for work in works]
    page_table = _host([row + [pool.null_frame] * (num_pages - len(row)) for row in frames])
    slots = page_table.gather(1, positions // page_size) * page_size + positions % page_size
    slots = slots.masked_fill(positions < _host([work.stores_from for work in works])[:, None], NO_SLOT)
    segment = Segment(
        begin=begin,
        end=begin + int(counts.sum()),
        page_table=page_table,
        positions=positions,
        places=places,
        state_slots=_host([work.sequence.state_slot for work in works]),
    )
    return segment, segment.flatten(slots)


def _host(values: list[Any]) -> Tensor:
    """Numbers as a tensor in host memory, whatever the default device."""
    return torch.tensor(values, device="cpu")

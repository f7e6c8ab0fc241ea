"""Works to tensors to logits: lays out one pass as a flat batch and runs the model over it.

Index tensors (page tables, slots, positions) are built here once per pass; no layer builds any.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from tracefp4.kvcache.pool import KVPool
from tracefp4.models.batch import Segment, TokenBatch
from tracefp4.models.qwen3_moe import Qwen3MoeEngineModel
from tracefp4.rollout.recorder import Recorder
from tracefp4.rollout.sequence import Work


class Runner:
    """The model and its pages.

    Args:
        model: computes.
        pool: holds K and V.
        recorder: logs every pass; None records nothing.
    """

    def __init__(self, model: Qwen3MoeEngineModel, pool: KVPool, recorder: Recorder | None) -> None:
        self._model = model
        self._pool = pool
        self._recorder = recorder

    def run(self, works: Sequence[Work]) -> tuple[Tensor, int | None]:
        """Compute a pass.

        Args:
            works: at least one, shortest first.

        Returns:
            (logits, first log row): logits [M, V], one row for every work that draws, in order; the first
            log row is None when nothing is recorded.
        """
        batch = build_batch(works, pool=self._pool).to(self._pool.device)
        if self._recorder is None:
            return self._model.forward(batch, self._pool), None
        with self._recorder.step(batch.token_ids.shape[0]) as first_log_row:
            return self._model.forward(batch, self._pool), first_log_row


def build_batch(works: Sequence[Work], *, pool: KVPool) -> TokenBatch:
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
    segment = Segment(
        begin=begin, end=begin + int(counts.sum()), page_table=page_table, positions=positions, places=places
    )
    return segment, segment.flatten(slots)


def _host(values: list[Any]) -> Tensor:
    """Numbers as a tensor in host memory, whatever the default device."""
    return torch.tensor(values, device="cpu")

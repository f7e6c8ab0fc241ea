"""Decode passes as CUDA graphs: one for every size of batch, so that a step costs the host one copy and one launch.

A graph repeats the launches of one pass on fixed memory. Its input are the first rows of `DecodeRows`, copied as they
are; from there on everything happens on the device: the pass, the head, the draw, and the bytes that are recorded. A
batch takes the smallest graph that holds it; the rest are padding rows. Graphs are captured when they are first
needed, or all at the start, after an eager pass of the same size has compiled and chosen whatever there is to compile
and choose; they share one pool of memory, as they never run at the same time. New weights are written to the old
addresses, so graphs stay as they are; pages that were given back come again at other addresses, so graphs go with them.

What captures is a parameter, so that everything here but the capture itself runs without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from tracefp4.kvcache.pool import KVPool
from tracefp4.models.qwen3_moe import Qwen3MoeEngineModel
from tracefp4.models.taps import StackedTaps
from tracefp4.ops.backend import Backend, choose
from tracefp4.ops.sample import Sampled, sample
from tracefp4.rollout.recorder import Recorder
from tracefp4.rollout.rows import NUM_COLUMNS, TOKEN, DecodeRows, batch_of, draws_of


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Outputs:
    """What a captured pass leaves, on its device, at the same addresses each time."""

    drawn: Tensor
    """int64 [2, rows]: tokens, and the bits of their float64 log-probs."""
    taps: StackedTaps | None
    """What was recorded; None if nothing is."""


Body = Callable[[], Outputs]
"""A pass that asks the host nothing."""
Capture = Callable[[Body], tuple[Callable[[], None], Outputs]]
"""Runs a body once, so that all it needs is there, and captures it: how to repeat it, and where its outputs are."""


def buckets(max_batch: int) -> list[int]:
    """Sizes that are captured: 1, 2, 4, then steps of 8 to 64, of 16 to 256, of 32 beyond, and max_batch itself."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_batch, 32)]
    return [size for size in sizes if size < max_batch] + [max_batch]


class Started(NamedTuple):
    """A captured pass that is under way."""

    sampled: Sampled
    """What each row draws, in host memory once `wait` returns; overwritten by the next pass but one."""
    first_log_row: int | None
    """Log row of the first; None when nothing is recorded."""
    has_drawn: torch.cuda.Event | None
    """When it has drawn; None where nothing is under way behind the host's back."""

    def wait(self) -> None:
        """Wait until the pass has drawn; what it records may still be on its way."""
        if self.has_drawn is not None:
            self.has_drawn.synchronize()


class _Place:
    """Where in host memory a pass begins and ends; pinned beside a GPU."""

    def __init__(self, rows: Tensor, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self.rows = torch.empty_like(rows, device="cpu", pin_memory=is_cuda)
        self.drawn = torch.empty(2 * len(rows), dtype=torch.int64, device="cpu", pin_memory=is_cuda)
        self.has_drawn = torch.cuda.Event() if is_cuda else None


class DecodeGraphs:
    """Captured passes over the decoding rows of an engine.

    Args:
        model: computes; in bf16 storage.
        pool: holds K and V.
        rows: the decoding sequences; its buffer is what is copied.
        recorder: takes what passes record; None records nothing.
        capture: makes a graph; None: `cuda_capture`.
    """

    def __init__(
        self,
        model: Qwen3MoeEngineModel,
        pool: KVPool,
        rows: DecodeRows,
        recorder: Recorder | None,
        *,
        capture: Capture | None = None,
    ) -> None:
        assert model.native is not None, "graphs are of native passes"
        self._model = model
        self._native = model.native
        self._native.reserve(rows.max_length)
        self._pool = pool
        self._rows = rows
        self._recorder = recorder
        # one stream for good: cuBLAS keeps a workspace for every stream that it ever met
        stream = torch.cuda.Stream(model.device) if capture is None else None
        self._make_capture: Callable[[], Capture] = partial(_capture_of, capture, stream)
        self._capture: Capture = self._make_capture()
        self._graphs: dict[int, tuple[Callable[[], None], Outputs]] = {}
        self._sizes = buckets(rows.capacity)
        self._input = torch.empty_like(rows.buffer, device=model.device)
        # a pass may start while the one before it is under way: each has its own place in host memory
        self._places = [_Place(rows.buffer, model.device) for _ in range(2)]
        self._last: Outputs | None = None

    def capture_all(self) -> None:
        """Capture every size, the largest first: what it needs is enough for the others."""
        for size in reversed(self._sizes):
            self._graph(size)

    def drop(self) -> None:
        """Forget all captured passes with their memory, after the last one has ended: the addresses that they read and
        write are no longer those of the pages. Each is captured again when it is next needed."""
        self._graphs.clear()
        self._last = None
        self._capture = self._make_capture()  # with another pool of memory: this one goes with its last graph

    def run(self, count: int, *, follows: bool = False) -> Started:
        """Start the pass of the first `count` rows, at least 1; two passes may be under way at once.

        Args:
            count: rows.
            follows: they are those of the last pass, and what it drew is their token: it is taken from there, on the
                device, whatever the rows say.
        """
        size = next(size for size in self._sizes if size >= count)
        repeat, outputs = self._graph(size)
        place = self._places[0]
        self._places.reverse()
        place.rows[:size] = self._rows.buffer[:size]
        self._input[:size].copy_(place.rows[:size], non_blocking=True)
        if follows:
            assert self._last is not None
            self._input[:count, TOKEN] = self._last.drawn[0, :count]
        repeat()
        self._last = outputs
        # tokens before records: the host waits for the former alone
        drawn = place.drawn[: 2 * size].view(2, size)
        drawn.copy_(outputs.drawn, non_blocking=True)
        if place.has_drawn is not None:
            place.has_drawn.record(torch.cuda.current_stream(self._model.device))
        first_log_row = None
        if self._recorder is not None and outputs.taps is not None:
            first_log_row = self._recorder.take(outputs.taps, num_tokens=count, num_rows=size)
        tokens, logprobs = drawn[:, :count]
        return Started(Sampled(tokens, logprobs.view(torch.float64)), first_log_row, place.has_drawn)

    def _graph(self, size: int) -> tuple[Callable[[], None], Outputs]:
        if size not in self._graphs:
            if self._recorder is not None:
                self._recorder.ring.drain()  # nobody else may ask the device for anything meanwhile
            self._input.copy_(self._rows.padding)
            self._graphs[size] = self._capture(lambda: self._body(size))
        return self._graphs[size]

    def _body(self, size: int) -> Outputs:
        """One decode pass over `size` rows."""
        columns = self._input[:size, :NUM_COLUMNS].t().contiguous()
        batch = batch_of(columns, self._input[:size, NUM_COLUMNS:].contiguous())
        taps = None if self._recorder is None else self._recorder.new_taps(self._model)
        hidden = self._native.run(batch, self._pool, taps)
        found = sample(hidden, self._model.weights.head, draws_of(columns))
        drawn = torch.stack([found.tokens, found.logprobs.view(torch.int64)])
        return Outputs(drawn=drawn, taps=None if taps is None else taps.stacked())


def _capture_of(given: Capture | None, stream: torch.cuda.Stream | None) -> Capture:
    if given is not None:
        return given
    assert stream is not None
    return cuda_capture(stream)


def cuda_capture(stream: torch.cuda.Stream) -> Capture:
    """Return what captures on a stream, for graphs that share one pool of memory and never run at the same time."""
    pool, device = torch.cuda.graph_pool_handle(), stream.device

    def capture(body: Body) -> tuple[Callable[[], None], Outputs]:
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            body()
        torch.cuda.current_stream(device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            outputs = body()
        return graph.replay, outputs

    return capture


def why_eager(model: Qwen3MoeEngineModel, *, is_wanted: bool) -> str:
    """Say why decode passes are not captured; empty if they are."""
    if not is_wanted:
        return "graphs are switched off"
    if model.native is None:
        return f"{model.arithmetic.name} arithmetic is computed by the definition, which asks the host"
    if model.device.type != "cuda":
        return f"{model.device.type} has no graphs"
    ops = (*model.native.ops, "sample")
    missing = [op for op in ops if op in model.native.gaps or choose(op, model.device) is not Backend.CUDA]
    return f"there are no kernels here for {', '.join(missing)}" if missing else ""

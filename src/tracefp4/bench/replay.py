"""Time kernels on a GPU: contenders as captured graphs, replayed in turn; the median of the replays counts.

A call takes microseconds, so a graph holds many of them, over as many sets of operands as the second-level cache
cannot hold; launch gaps and warm caches then hide nothing and flatter nobody. The `Timer` is the GPU; tests put a
clock of their own in its place. After the timing every result is poisoned and the graph replayed once more, so that
what is compared was written by the calls that were timed.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

NUM_REPLAYS = 20
"""Turns of every contender."""
GRAPH_S = 2e-3
"""Seconds that a graph takes at least, by rough rates: launching it then costs less than 1% of it."""
MAX_CALLS = 512
"""Calls in a graph, at most, unless there are more sets of operands."""
CACHES = 8
"""All sets of operands together are so many times as large as the second-level cache."""
MAX_SETS = 64

Call = Callable[[], Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Contender:
    """One way to do a job."""

    calls: Sequence[Call]
    """The same call over different operands; each returns what it wrote."""
    least_s: float
    """What a call takes at least on a fast GPU, roughly, for the length of its graph."""


class Captured(NamedTuple):
    """A graph of calls."""

    replay: Callable[[], None]
    """Runs all of them."""
    outputs: list[Any]
    """What the last call over each set of operands returned; replaying writes there."""


class Timer(Protocol):
    """Where graphs are captured and timed."""

    def capture(self, calls: Sequence[Call], repeats: int) -> Captured:
        """Capture the calls, in order, so many times."""

    def seconds(self, replay: Callable[[], None]) -> float:
        """Return how long one replay takes."""


class Timing(NamedTuple):
    """How long one call takes, in seconds."""

    seconds: float
    """Median over the replays."""
    low: float
    """The shortest."""
    high: float
    """The longest."""
    num_calls: int
    """Calls in a graph."""


class Timed(NamedTuple):
    """All contenders of a job."""

    timings: dict[str, Timing]
    """By name, of those that ran."""
    outputs: list[Any]
    """Results of the first contender, poisoned and written again by a replay."""
    failures: dict[str, str]
    """Why others did not run."""


def num_sets(num_bytes: float, cache_bytes: int) -> int:
    """Return how many sets of operands of so many bytes no cache of a size can help with."""
    return max(1, min(MAX_SETS, math.ceil(CACHES * cache_bytes / num_bytes)))


def num_repeats(contender: Contender) -> int:
    """Return how often a graph goes through the sets of operands."""
    calls = min(MAX_CALLS, math.ceil(GRAPH_S / contender.least_s))
    return max(1, math.ceil(calls / len(contender.calls)))


def time_contenders(
    timer: Timer, contenders: Mapping[str, Contender], *, num_replays: int = NUM_REPLAYS
) -> Timed:
    """Capture every contender, and replay them in turn.

    Args:
        timer: Where they run.
        contenders: By name. The first is ours: if it fails, so does this call; others are left out with the reason.
        num_replays: Turns, at least 1.

    Returns:
        Timings per call, and what ours wrote over poison.
    """
    captured: dict[str, Captured] = {}
    failures: dict[str, str] = {}
    first = next(iter(contenders))
    for name, contender in contenders.items():
        try:
            captured[name] = timer.capture(contender.calls, num_repeats(contender))
        except Exception as problem:  # a peer may fail in any way, and ours must be measured all the same
            if name == first:
                raise
            failures[name] = (
                f"{type(problem).__name__}: {str(problem).splitlines()[0] if str(problem) else ''}"
            )
    seconds: dict[str, list[float]] = {name: [] for name in captured}
    for graph in captured.values():
        timer.seconds(graph.replay)
    for _ in range(num_replays):
        for name, graph in captured.items():
            seconds[name].append(timer.seconds(graph.replay))
    poison(captured[first].outputs)
    captured[first].replay()
    timings = {
        name: _timing(found, num_repeats(contenders[name]) * len(contenders[name].calls))
        for name, found in seconds.items()
    }
    return Timed(timings, captured[first].outputs, failures)


def _timing(seconds: Sequence[float], num_calls: int) -> Timing:
    middle, low, high = (
        part / num_calls for part in (statistics.median(seconds), min(seconds), max(seconds))
    )
    return Timing(middle, low, high, num_calls)


def tensors_of(found: Any) -> Iterator[Tensor]:
    """Return every tensor in a result: in tuples, lists and dataclasses, at any depth."""
    if isinstance(found, Tensor):
        yield found
    elif isinstance(found, tuple | list):
        for part in found:
            yield from tensors_of(part)
    elif is_dataclass(found):
        for field in fields(found):
            yield from tensors_of(getattr(found, field.name))


@torch.no_grad()
def poison(found: Any) -> None:
    """Fill every tensor of a result with NaN, or with the largest integer of its type."""
    for tensor in tensors_of(found):
        if tensor.is_floating_point():
            tensor.fill_(torch.nan)
        elif tensor.dtype != torch.bool:
            tensor.fill_(torch.iinfo(tensor.dtype).max)


class GraphTimer:
    """CUDA graphs on one GPU, timed by its events."""

    def __init__(self, device: torch.device) -> None:
        """Name the GPU."""
        self._device = device

    def capture(self, calls: Sequence[Call], repeats: int) -> Captured:
        """Run the first call twice outside (compilation, workspaces), then capture all of them."""
        with torch.cuda.device(self._device):
            current, aside = torch.cuda.current_stream(), torch.cuda.Stream()
            aside.wait_stream(current)
            with torch.cuda.stream(aside):
                for _ in range(2):
                    calls[0]()
            current.wait_stream(aside)
            torch.cuda.synchronize()
            graph, outputs = torch.cuda.CUDAGraph(), [None] * len(calls)
            with torch.cuda.graph(graph):
                for _ in range(repeats):
                    for index, call in enumerate(calls):
                        outputs[index] = None  # its memory may be used again
                        outputs[index] = call()
        return Captured(graph.replay, outputs)

    def seconds(self, replay: Callable[[], None]) -> float:
        """Replay between two events, and wait."""
        with torch.cuda.device(self._device):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            replay()
            end.record()
            end.synchronize()
        return begin.elapsed_time(end) * 1e-3

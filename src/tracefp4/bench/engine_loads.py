"""One load on one engine, timed: steps of a batch at its contexts, the experts they used, and whether they were right.

A load is placed, warmed up and then timed step by step on the clock of the wall: scheduling, launches, the pass, draws
and recording all count. Rates are of the mean step. Nothing here knows gates or peers.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tracefp4.bench.engine_decoding import DecodingEngine
from tracefp4.bench.engine_points import Load, StepBytes, step_bytes
from tracefp4.bench.engine_profile import StepProfile, profile_step
from tracefp4.bench.traffic import BF16
from tracefp4.models.qwen3_moe_config import Qwen3MoeSizes

COPIED = 1 << 29
"""bf16 values of the copy that measures bandwidth on a GPU: 1 GiB read and 1 GiB written."""
COPIED_ON_CPU = 1 << 20
NUM_COPIES = 20
CALLS_AT_ONCE = 8
"""Copies between two looks at the clock: waiting for the device is then no part of the figure."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Steps:
    """How many steps a load takes."""

    timed: int = 64
    """Steps on the clock."""
    warm: int = 16
    """Steps before them, the first of which places the sequences, and the last is compared; at least 2."""
    profiled: int = 0
    """Steps under the profiler, between the two: 0 or 1."""

    @property
    def total(self) -> int:
        """All of them."""
        return self.warm + self.profiled + self.timed


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadResult:
    """What one load took."""

    load: Load
    """Contexts and routing."""
    step_s: tuple[float, ...]
    """Seconds of every timed step."""
    moved: StepBytes
    """The fewest bytes of a timed step, in the mean."""
    distinct: tuple[int, ...]
    """Experts in use by layer, in the last warm step; of an engine that records nothing, all."""
    record_differences: int
    """Bytes of one sequence's record that are not those of its pages."""
    draw_differences: int
    """Sequences that drew another token in a captured pass than in the same pass launch by launch."""
    graph_passes: int
    """Timed steps whose pass was captured."""
    profile: StepProfile | None
    """Of one step, where it was asked for."""

    @property
    def batch(self) -> int:
        """Sequences."""
        return len(self.load.contexts)

    @property
    def mean_s(self) -> float:
        """Seconds of the mean step."""
        return statistics.fmean(self.step_s)


def time_load(engine: DecodingEngine, load: Load, *, sizes: Qwen3MoeSizes, steps: Steps) -> LoadResult:
    """Place a load and time its steps.

    Args:
        engine: Holds weights of the load's routing.
        load: What decodes.
        sizes: The engine's model.
        steps: How many.

    Raises:
        ConfigError: The load does not run all at once.
    """
    records = engine.records is not False
    engine.place(load.contexts, num_steps=steps.total)
    engine.take_steps(steps.warm - 2, stays=True)
    draw_differences = engine.count_draw_differences()
    distinct = engine.experts_in_use() if records else [sizes.num_experts] * sizes.num_layers
    # a step sees what is there before its token; the last one leaves a context as long as the load says
    middle = (steps.timed + 1) / 2
    moved = step_bytes(
        sizes,
        engine.precision,
        contexts=[context - middle for context in load.contexts],
        distinct=distinct,
        matrix_bytes=2.0 if engine.state_dtype == "bfloat16" else 4.0,
    )
    profile = None
    if steps.profiled:
        head_bytes = BF16 * sizes.vocab_size * sizes.hidden_size
        profile = profile_step(
            lambda: engine.take_steps(1, stays=True),
            device=engine.pool.device,
            moved=moved,
            head_bytes=head_bytes,
        )
    captured = engine.stats.graph_passes
    # no pass is under way when the clock starts, and none but those on it: as many passes as steps
    step_s = engine.take_steps(steps.timed, stays=True)
    captured = engine.stats.graph_passes - captured
    differences = engine.count_record_differences() if records else 0
    engine.drop()
    return LoadResult(
        load=load,
        step_s=tuple(step_s),
        moved=moved,
        distinct=tuple(distinct),
        record_differences=differences,
        draw_differences=draw_differences,
        graph_passes=captured,
        profile=profile,
    )


def copy_bandwidth(device: torch.device) -> float:
    """Return the bytes a second, read and written, of the faster of two bf16 copies that no cache holds.

    Args:
        device: Where; each copy is timed NUM_COPIES times, several calls at once, and the median counts.
    """
    is_gpu = device.type == "cuda"
    source = torch.zeros(COPIED if is_gpu else COPIED_ON_CPU, dtype=torch.bfloat16, device=device)
    target = torch.empty_like(source)

    def seconds(copy: Callable[[], object]) -> float:
        begun = time.perf_counter()
        for _ in range(CALLS_AT_ONCE):
            copy()
        if is_gpu:
            torch.cuda.synchronize(device)
        return (time.perf_counter() - begun) / CALLS_AT_ONCE

    copies: tuple[Callable[[], object], ...] = (
        lambda: target.copy_(source),
        lambda: torch.add(source, 0, out=target),
    )
    medians = [statistics.median([seconds(copy) for _ in range(NUM_COPIES + 1)][1:]) for copy in copies]
    return 2 * BF16 * source.numel() / min(medians)

"""`tracefp4 bench engine`: how fast the engine decodes whole models of random weights, in FP4 and in our own BF16 mode.

The run measures the copy bandwidth first. Then one engine is built after the other, each with all the pages that its
weights leave it: FP4, BF16, and FP4 once more without records. Every point is placed, warmed up and timed on it
(`engine_loads.py`); a load that two points share is timed once. A point that fails does not stop the others.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import torch

from tracefp4.bench.engine_build import Workshop
from tracefp4.bench.engine_decoding import DecodingEngine
from tracefp4.bench.engine_loads import LoadResult, Steps, copy_bandwidth, time_load
from tracefp4.bench.engine_points import (
    FIRST_CONTEXT,
    Load,
    Point,
    all_points,
    chosen_points,
    first_context,
    loads_of,
    side_by_side,
)
from tracefp4.bench.engine_rows import PEER_PLAN, PLAN, PointResult, RowMaker
from tracefp4.bench.engine_shapes import is_hybrid
from tracefp4.bench.row import BenchRow, describe_machine
from tracefp4.errors import ConfigError, TraceFP4Error
from tracefp4.ops.backend import choose
from tracefp4.patching.shapes import ModelShape
from tracefp4.rollout.options import StateDtype

USUAL_MEMORY = 0.90
USUAL_STEPS = Steps()
RECORDING = "recording"


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineOptions:
    """What is measured."""

    shape: ModelShape
    """The model."""
    contexts: tuple[int, ...] = (8192, 32768)
    """Lengths of completions."""
    only: tuple[str, ...] = ()
    """Groups of points; all without any."""
    memory: float = USUAL_MEMORY
    """Share of the card that weights, pages and reserve take together, in (0, 1]."""
    page_size: int = 16
    """Positions per page."""
    steps: Steps = USUAL_STEPS
    """Of every load."""
    state_dtype: StateDtype = "auto"
    """How states are stored; "auto" where the model has none, and for float32."""
    is_profiled: bool = False
    """Profile a step of every point of the group `full`."""

    def __post_init__(self) -> None:
        """Refuse groups that do not exist, and contexts that steps cannot reach."""
        if not self.contexts:
            raise ConfigError(
                "bench engine: nothing can be measured at no context; got no context. Allowed are one or more, such as "
                "8k. Correct --context."
            )
        chosen_points(self.only, self.contexts)
        allowed = get_args(StateDtype) if is_hybrid(self.shape) else ("auto",)
        if self.state_dtype not in allowed:
            raise ConfigError(
                f"bench engine: states of {self.shape.name} cannot be stored like that; got {self.state_dtype!r}. "
                f"Allowed is {' or '.join(allowed)}. Correct --state-dtype, or leave it out."
            )
        shortest = min(first_context(context) for context in self.contexts)
        if shortest <= self.steps.total:
            raise ConfigError(
                f"bench engine: a load takes {self.steps.total} steps, warm ones included, and the shortest context "
                f"that is timed has {shortest} tokens ({FIRST_CONTEXT}, or an eighth of a shorter --context). More "
                "tokens than steps are allowed. Raise --context, or lower --steps."
            )

    @property
    def points(self) -> list[Point]:
        """What is measured under both plans; recording alone needs the first point."""
        return chosen_points(self.only, self.contexts) or all_points(self.contexts)[:1]

    @property
    def has_silent(self) -> bool:
        """Whether the engine that records nothing is timed too."""
        return not self.only or RECORDING in self.only


@dataclass(kw_only=True, slots=True)
class EngineRun:
    """What a run of the suite found."""

    rows: list[BenchRow] = field(default_factory=list)
    """Measured figures."""
    unfit: dict[str, str] = field(default_factory=dict)
    """Points whose sequences the memory cannot hold, by plan and name, with the reason."""
    failed: dict[str, str] = field(default_factory=dict)
    """Points that ended with an error, by plan and name."""
    skipped: list[str] = field(default_factory=list)
    """Points that were not begun: no time was left."""
    profiles: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """Kernels of one step, by the id of the row that they explain."""
    built: dict[str, float] = field(default_factory=dict)
    """Seconds until an engine had its random weights, by plan."""
    seconds: float = 0.0
    """Of the run."""

    def more(self) -> dict[str, Any]:
        """Return what is stored beside the rows."""
        names = ("unfit", "failed", "skipped", "profiles", "built", "seconds")
        return {name: getattr(self, name) for name in names}


class EngineSuite:
    """One run.

    Args:
        options: What is measured.
        device: Where.
        on_event: Called with one line of text for everything that takes a while.
        on_point: Called with what was found so far, after every point.
    """

    def __init__(
        self,
        options: EngineOptions,
        *,
        device: torch.device,
        on_event: Callable[[str], None] = lambda text: None,
        on_point: Callable[[EngineRun], object] = lambda found: None,
    ) -> None:
        self._options = options
        self._on_event = on_event
        self._on_point = on_point
        self._found = EngineRun()
        self._results: list[PointResult] = []
        self._silent: dict[Point, LoadResult] = {}
        self._workshop = Workshop(
            shape=options.shape,
            device=device,
            memory=options.memory,
            page_size=options.page_size,
            longest=max(options.contexts),
            state_dtype=options.state_dtype,
        )
        self._maker = self._new_maker(device)
        self._begun = self._end = 0.0

    def run(self, *, seconds: float | None = None) -> EngineRun:
        """Measure all points.

        Args:
            seconds: No point begins after this time; None for no end.

        Raises:
            ConfigError: The weights of a plan leave no pages.
        """
        self._begun = time.monotonic()
        self._end = float("inf") if seconds is None else self._begun + seconds
        points = self._options.points
        for plan in (PLAN, PEER_PLAN):
            self._measure(plan, points)
        if self._options.has_silent:
            self._measure(PLAN, points[:1], records=False)
        return self._found

    def _new_maker(self, device: torch.device) -> RowMaker:
        share = self._options.memory
        bandwidth = copy_bandwidth(device)
        self._on_event(f"copy bandwidth {bandwidth / 1e9:,.0f} GB/s")
        return RowMaker(
            shape=self._options.shape.name.lower(),
            suffix=self._state_suffix() + ("" if share == USUAL_MEMORY else f".memory{100 * share:.0f}"),
            machine=describe_machine(device if device.type == "cuda" else None),
            bytes_per_s=bandwidth,
            backend=choose("kv_attention", device).value,
            facts={"memory": share, "page_size": float(self._options.page_size)},
        )

    def _state_suffix(self) -> str:
        """What ids say of states: those of models without any say nothing."""
        if not self._workshop.sizes.state_layers:
            return ""
        return ".bf16_state" if self._options.state_dtype == "bfloat16" else ".fp32_state"

    def _measure(self, plan: str, points: Sequence[Point], *, records: bool = True) -> None:
        """Time points, those that an engine can hold side by side on one, those of one routing after the other."""
        label = plan if records else f"{plan} without records"
        fitting = self._fitting(label, plan, points)
        for loads in side_by_side(fitting, has_states=self._workshop.state_pages(plan) > 0):
            self._measure_on_one(label, plan, loads, records=records)

    def _measure_on_one(
        self, label: str, plan: str, loads: Mapping[Point, list[Load]], *, records: bool
    ) -> None:
        if self._is_late([f"{label} {point.name}" for point in loads]):
            return
        max_batch = max(len(load.contexts) for found in loads.values() for load in found)
        begun, routing = time.monotonic(), next(iter(loads)).routing

        def work(engine: DecodingEngine) -> None:
            self._found.built[label] = round(time.monotonic() - begun, 1)
            self._on_event(
                f"{label}: engine of {engine.pool.shape.num_pages} pages built in {self._found.built[label]:.0f} s, "
                f"batches up to {max_batch}"
            )
            self._time_points(engine, label, plan, loads)

        self._workshop.use(work, plan, routing=routing, max_batch=max_batch, records=records)

    def _fitting(self, label: str, plan: str, points: Sequence[Point]) -> dict[Point, list[Load]]:
        """The loads of every point that fits; the others are named."""
        fitting = {}
        num_pages, state_pages = self._workshop.num_pages(plan), self._workshop.state_pages(plan)
        page_size = self._options.page_size
        for point in points:
            try:
                fitting[point] = loads_of(
                    point, num_pages=num_pages, page_size=page_size, state_pages=state_pages
                )
            except ConfigError as problem:
                self._found.unfit[f"{label} {point.name}"] = str(problem)
                self._on_event(f"{label} {point.name}: does not fit, {problem}")
        return fitting

    def _time_points(
        self, engine: DecodingEngine, label: str, plan: str, loads: Mapping[Point, list[Load]]
    ) -> None:
        """Time points whose loads fit; weights change where the routing does."""
        timed: dict[Load, LoadResult] = {}
        routing = next(iter(loads)).routing
        for point, found in loads.items():
            if self._is_late([f"{label} {point.name}"]):
                continue
            try:
                if point.routing != routing:
                    routing = point.routing
                    engine.update_weights(
                        self._workshop.state(plan, routing), version=engine.weight_version + 1
                    )
                for load in found:
                    if load not in timed:
                        timed[load] = self._time_load(engine, label, point, load)
            except TraceFP4Error as problem:
                self._fail(f"{label} {point.name}", str(problem))
            except Exception as problem:  # one point that fails must not cost the figures of the others
                self._fail(f"{label} {point.name}", f"{type(problem).__name__}: {problem}")
            else:
                self._keep(engine, plan, point, tuple(timed[load] for load in found))

    def _time_load(self, engine: DecodingEngine, label: str, point: Point, load: Load) -> LoadResult:
        is_profiled = self._options.is_profiled and point.accounting == "full" and engine.records is not False
        steps = replace(self._options.steps, profiled=int(is_profiled))
        result = time_load(engine, load, sizes=self._workshop.sizes, steps=steps)
        rate = result.moved.total / result.mean_s / 1e9
        self._on_event(
            f"{label} {point.name}: {result.batch} sequences at up to {max(load.contexts)} tokens, "
            f"{result.mean_s * 1e3:.2f} ms a step, {result.batch / result.mean_s:,.0f} tokens/s, {rate:,.0f} GB/s"
        )
        return result

    def _keep(self, engine: DecodingEngine, plan: str, point: Point, loads: tuple[LoadResult, ...]) -> None:
        """Make rows of a point that was timed, and tell them."""
        if engine.records is False:
            self._silent[point] = loads[0]
        else:
            result = PointResult(
                point=point,
                plan=plan,
                digest=engine.plan_digest,
                loads=loads,
                num_pages=engine.pool.shape.num_pages,
                peak_share=self._workshop.peak_share(),
            )
            self._results.append(result)
            profile = loads[0].profile
            if point.accounting == "full" and profile is not None:
                self._found.profiles[self._maker.id_of(result)] = profile.to_json()
        self._found.rows = self._maker.rows(self._results, self._silent)
        self._found.seconds = round(time.monotonic() - self._begun, 1)
        self._on_point(self._found)

    def _fail(self, name: str, reason: str) -> None:
        self._found.failed[name] = reason
        self._on_event(f"{name}: failed, {reason}")

    def _is_late(self, names: Sequence[str]) -> bool:
        """Whether the time is over; what is then not begun is named."""
        if time.monotonic() < self._end:
            return False
        self._found.skipped += names
        return True

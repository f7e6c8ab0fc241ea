"""From timed loads to rows: rates of points, FP4 beside our own BF16 mode, and what recording and waiting cost.

    rate = batch / mean step;   limit = batch / (least bytes of the mean step / copy bandwidth of the same run)

where the mean of a batch that starts together is over its range of contexts. A row can be made as soon as its own plan
was timed; its peer, the same point in BF16, is filled in when that one is there. A BF16 mode that fills the memory and
is far from its own floor is no peer. This module measures nothing.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tracefp4.bench.engine_loads import LoadResult
from tracefp4.bench.engine_points import LEAST_PEER_SHARE, Point, first_context, mean_over, shown_context
from tracefp4.bench.row import BenchRow, Check, Machine

PLAN, PEER_PLAN = "fp4", "bf16"
CHECK_TEXT = (
    "bytes of a sequence's recorded K and V unlike those of its pages, and draws of captured passes unlike those of "
    "the same passes launch by launch"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PointResult:
    """A point under one plan."""

    point: Point
    """What was measured."""
    plan: str
    """`fp4` or `bf16`."""
    digest: str
    """Of the plan."""
    loads: tuple[LoadResult, ...]
    """Shortest contexts first; several where the batch starts together."""
    num_pages: int
    """Of the pool."""
    peak_share: float | None
    """Largest share of the card's memory that was in use; None on a processor."""

    @property
    def batch(self) -> int:
        """Sequences."""
        return self.loads[0].batch

    @property
    def mean_s(self) -> float:
        """Seconds of a step, in the mean over the contexts."""
        return self._mean([load.mean_s for load in self.loads])

    @property
    def mean_bytes(self) -> float:
        """The fewest bytes of a step, in the mean over the contexts."""
        return self._mean([load.moved.total for load in self.loads])

    @property
    def check(self) -> Check:
        """Whether what was recorded is what lies in the pages, and captured passes are what was captured."""
        differences = sum(load.record_differences + load.draw_differences for load in self.loads)
        return Check(error=float(differences), allowed=0.0, text=CHECK_TEXT)

    def _mean(self, values: Sequence[float]) -> float:
        return mean_over([max(load.load.contexts) for load in self.loads], values)


@dataclass(frozen=True, kw_only=True, slots=True)
class RowMaker:
    """Names, bounds and describes rows of one run."""

    shape: str
    """Name of the model in ids."""
    suffix: str
    """End of every id where the run is no usual one, e.g. `.memory60`; empty else."""
    machine: Machine
    """Where it is measured."""
    bytes_per_s: float
    """Of a copy in this run."""
    backend: str
    """Which implementation of the ops runs."""
    facts: Mapping[str, float | str] = field(default_factory=dict)
    """What belongs to every row."""

    def rows(self, results: Sequence[PointResult], silent: Mapping[Point, LoadResult]) -> list[BenchRow]:
        """Return the rows of what was measured so far.

        Args:
            results: Points under either plan.
            silent: Loads of points on an FP4 engine that records nothing.
        """
        peers = {found.point: found for found in results if found.plan == PEER_PLAN}
        ours = [found for found in results if found.plan == PLAN]
        rows = [self._rate(found, peers.get(found.point)) for found in ours]
        rows += [self._rate(found, None) for found in peers.values()]
        for found in ours:
            rows += self._overheads(found) if found.point.accounting == "full" else []
        return rows + [self._recording(found, silent[found.point]) for found in ours if found.point in silent]

    def id_of(self, found: PointResult, end: str = "") -> str:
        """Return the id of a row of a point."""
        plan = "" if found.plan == PLAN else f".{found.plan}"
        return f"engine.{self.shape}.{found.point.name}{plan}{end}{self.suffix}"

    def _rate(self, found: PointResult, peer: PointResult | None) -> BenchRow:
        is_latency = found.batch == 1
        facts = self._facts(found)
        if peer is not None:
            facts["peer's share of its floor"] = self._share(peer)

        def figure(step_s: float, batch: int) -> float:
            return step_s * 1e3 if is_latency else batch / step_s

        return BenchRow(
            id=self.id_of(found),
            metric="time of a decode step" if is_latency else "decode rate, all sequences",
            value=figure(found.mean_s, found.batch),
            unit="ms" if is_latency else "tokens/s",
            backend=self.backend,
            peer="none" if peer is None else self._peer_text(peer),
            peer_value=None if peer is None or self._is_void(peer) else figure(peer.mean_s, peer.batch),
            limit=figure(found.mean_bytes / self.bytes_per_s, found.batch),
            machine=self.machine,
            better="less" if is_latency else "more",
            check=found.check,
            facts=facts,
        )

    def _share(self, found: PointResult) -> float:
        return found.mean_bytes / self.bytes_per_s / found.mean_s

    def _is_void(self, peer: PointResult) -> bool:
        """Whether a batch that fills the memory is too far from its floor to be compared with."""
        return peer.point.batch is None and self._share(peer) < LEAST_PEER_SHARE

    def _peer_text(self, peer: PointResult) -> str:
        text = f"the same engine in {PEER_PLAN}, batch {peer.batch}, {peer.batch / peer.mean_s:,.0f} tokens/s"
        if not self._is_void(peer):
            return text
        return f"void: {text} reach {self._share(peer):.0%} of the byte floor, below {LEAST_PEER_SHARE:.0%}"

    def _facts(self, found: PointResult) -> dict[str, float | str]:
        point, last = found.point, found.loads[-1]
        begin = first_context(point.context) if point.accounting in ("together", "steady") else point.context
        steps = [seconds * 1e3 for load in found.loads for seconds in load.step_s]
        facts: dict[str, float | str] = {
            "plan": found.plan,
            "plan_digest": found.digest,
            "context": f"{begin} to {point.context}" if begin != point.context else str(point.context),
            "accounting": point.accounting,
            "batch": found.batch,
            "routing": point.routing,
            "distinct_experts": statistics.fmean(last.distinct),
            "fewest_distinct_experts": min(last.distinct),
            "most_distinct_experts": max(last.distinct),
            "step_ms": found.mean_s * 1e3,
            "fastest_step_ms": min(steps),
            "slowest_step_ms": max(steps),
            "median_step_ms": statistics.median(steps),
            "timed_steps": len(steps),
            "captured_steps": sum(load.graph_passes for load in found.loads),
            "GB/s": found.mean_bytes / found.mean_s / 1e9,
            "GB of a step": found.mean_bytes / 1e9,
            "GB of experts": last.moved.experts / 1e9,
            "GB of K and V": last.moved.kv / 1e9,
            "pages": found.num_pages,
            "copy GB/s": self.bytes_per_s / 1e9,
        }
        if found.peak_share is not None:
            facts["peak share of the card"] = found.peak_share
        if len(found.loads) > 1:
            for load in found.loads:
                facts[f"step_ms at {shown_context(max(load.load.contexts))}"] = load.mean_s * 1e3
        return facts | dict(self.facts)

    def _overheads(self, found: PointResult) -> list[BenchRow]:
        """What a profile says of the step outside the forward pass; only a GPU's kernels overlap no host work."""
        profile = found.loads[-1].profile
        if profile is None or found.peak_share is None:
            return []
        step_s = found.loads[-1].mean_s
        outside = self._plain(
            found,
            "outside_forward",
            value=100 * max(0.0, 1 - profile.compute_s / step_s),
            unit="%",
            metric="share of a step in which no kernel runs",
            facts={"step_ms": step_s * 1e3, "kernels_ms": profile.compute_s * 1e3},
        )
        passes = self._plain(
            found,
            "dequantizing_passes",
            value=float(profile.dequantizing_launches),
            unit="launches",
            metric="launches in a step that only dequantize",
            facts={},
        )
        return [outside, passes]

    def _recording(self, found: PointResult, silent: LoadResult) -> BenchRow:
        with_s, without_s = (statistics.median(load.step_s) for load in (found.loads[0], silent))
        return self._plain(
            found,
            "recording",
            value=100 * (with_s / without_s - 1),
            unit="%",
            metric="time that recording adds to a step",
            facts={"step_ms with": with_s * 1e3, "step_ms without": without_s * 1e3, "batch": found.batch},
        )

    def _plain(
        self,
        found: PointResult,
        name: str,
        *,
        value: float,
        unit: str,
        metric: str,
        facts: Mapping[str, float],
    ) -> BenchRow:
        """A row without peer and limit, of which less is better."""
        return BenchRow(
            id=self.id_of(found, f".{name}"),
            metric=metric,
            value=value,
            unit=unit,
            backend=self.backend,
            peer="none",
            peer_value=None,
            limit=None,
            machine=self.machine,
            better="less",
            facts={**facts, **self.facts},
        )

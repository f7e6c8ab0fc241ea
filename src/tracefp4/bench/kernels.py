"""`tracefp4 bench kernels`: how long every kernel takes on this GPU, beside what one would use in bf16.

The run measures its own yardsticks first: the bandwidth of a copy and the rate of a bf16 product, from which every
row's limit follows. Then each case is timed as captured graphs (`replay.py`), and the result that was timed is compared
with the definition. A case whose op has no kernel here is named as missing; one that fails does not stop the others.
Compile times are reported by library.
"""

import gc
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tracefp4.bench.kernel_delta import delta_cases
from tracefp4.bench.kernel_elementwise import elementwise_cases
from tracefp4.bench.kernel_experts import expert_cases, routing_lists
from tracefp4.bench.kernel_guided import guided_cases
from tracefp4.bench.kernel_jobs import Bench, Case, Job, KernelSizes, contender
from tracefp4.bench.kernel_small import small_cases
from tracefp4.bench.kernel_steps import step_cases
from tracefp4.bench.replay import NUM_REPLAYS, Contender, GraphTimer, Timed, Timer, time_contenders
from tracefp4.bench.routing import draw_experts
from tracefp4.bench.row import BenchRow, Machine, describe_machine
from tracefp4.bench.traffic import BF16, Traffic, elementwise
from tracefp4.errors import BackendError, ConfigError, TraceFP4Error
from tracefp4.ops.backend import IMPLEMENTED, choose
from tracefp4.ops.expert_layer import Routing

_UNITS = {"us": 1e6, "ms": 1e3}
_COPIED = 1 << 29
"""Elements of the copy that measures bandwidth: 1 GiB read and 1 GiB written."""
_COMPILER = "tracefp4.ops.nvrtc"


class Rates(NamedTuple):
    """What the hardware reached in this run."""

    bytes_per_s: float
    """Read and written by a bf16 copy, the faster of two ways."""
    flops_per_s: float
    """Of a bf16 product."""

    def seconds(self, traffic: Traffic) -> float:
        """Return the least time that traffic takes."""
        return max(traffic.bytes / self.bytes_per_s, traffic.flops / self.flops_per_s)


@dataclass(kw_only=True, slots=True)
class KernelRun:
    """What a run of the suite found."""

    rows: list[BenchRow] = field(default_factory=list)
    """Measured figures."""
    missing: dict[str, str] = field(default_factory=dict)
    """Cases whose op has no kernel here, with the reason."""
    failed: dict[str, str] = field(default_factory=dict)
    """Cases that ended with an error."""
    skipped: list[str] = field(default_factory=list)
    """Cases that were not begun: no time was left, or the GPU was lost."""
    compiled: dict[str, dict[str, float]] = field(default_factory=dict)
    """Variants compiled, and their seconds, by source file; none that came from the cache."""
    first_use: dict[str, float] = field(default_factory=dict)
    """Seconds until an op was ready: compiled or loaded, and compared with the reference."""
    seconds: float = 0.0
    """Of the run."""

    def more(self) -> dict[str, Any]:
        """Return what is stored beside the rows."""
        names = ("missing", "failed", "skipped", "compiled", "first_use", "seconds")
        return {name: getattr(self, name) for name in names}


def all_cases(sizes: KernelSizes) -> list[Case]:
    """Return every case of the suite, in the order in which they are measured."""
    return [
        *_yardsticks(sizes),
        *elementwise_cases(),
        *guided_cases(),
        *small_cases(sizes),
        *delta_cases(sizes),
        *step_cases(sizes),
        *expert_cases(sizes),
    ]


def groups_of(cases: Sequence[Case]) -> list[str]:
    """Return what `--only` may name."""
    return list(dict.fromkeys(case.group for case in cases))


def chosen_cases(only: Sequence[str], sizes: KernelSizes) -> list[Case]:
    """Return the cases of some groups; without groups all of them.

    Raises:
        ConfigError: A group that does not exist.
    """
    cases = all_cases(sizes)
    groups = groups_of(cases)
    unknown = [name for name in only if name not in groups]
    if unknown:
        raise ConfigError(
            f"bench kernels: there is no group {unknown[0]!r}; groups: {', '.join(groups)}. Name some of them, with "
            "commas, or leave --only out."
        )
    return [case for case in cases if not only or case.group in only]


def this_gpu() -> torch.device:
    """Return the GPU that is measured.

    Raises:
        BackendError: There is none.
    """
    if not torch.cuda.is_available():
        raise BackendError(
            "bench kernels measures kernels on an NVIDIA GPU; this torch "
            f"({torch.__version__}) sees none. It runs on GPUs from sm_89 on, with the extra `cuda`. Run it there; "
            "`tracefp4 bench cpu` measures a processor."
        )
    return torch.device("cuda", torch.cuda.current_device())


def run_kernels(
    cases: Sequence[Case],
    *,
    seconds: float | None = None,
    on_event: Callable[[str], None] = lambda text: None,
    on_case: Callable[["KernelRun"], object] = lambda found: None,
) -> KernelRun:
    """Measure cases on this machine's GPU.

    Args:
        cases: What to measure.
        seconds: No case begins after this time; None for no end.
        on_event: Called with one line of text for every row, and for whatever has none.
        on_case: Called after every case with what was found so far.

    Returns:
        Rows, what is missing, and compile times.

    Raises:
        BackendError: There is no GPU.
    """
    device = this_gpu()
    cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    suite = Suite(
        bench=Bench(device=device, cache_bytes=cache_bytes),
        timer=GraphTimer(device),
        machine=describe_machine(device),
        on_event=on_event,
        on_case=on_case,
    )
    return suite.run(cases, seconds=seconds)


@dataclass(frozen=True, kw_only=True, slots=True)
class Suite:
    """Cases, where they run, and who keeps time; tests put their own in."""

    bench: Bench
    """Where and how large."""
    timer: Timer
    """Captures and times."""
    machine: Machine
    """What rows say about where they were measured."""
    on_event: Callable[[str], None] = lambda text: None
    """Called with one line of text for every row, and for whatever has none."""
    on_case: Callable[[KernelRun], object] = lambda found: None
    """Called after every case with what was found so far."""
    num_replays: int = NUM_REPLAYS
    """Turns of every contender."""

    def run(self, cases: Sequence[Case], *, seconds: float | None = None) -> KernelRun:
        """Measure cases in order; see `run_kernels`."""
        found, begun = KernelRun(), time.monotonic()
        with compile_log(found.compiled):
            rates = self._rates()
            for case in cases:
                if seconds is not None and time.monotonic() - begun > seconds:
                    found.skipped.append(case.id)
                    continue
                self._measure(case, rates, found)
                found.seconds = round(time.monotonic() - begun, 1)
                self.on_case(found)
                if not self._is_usable():
                    self.on_event("the GPU is lost to this process: nothing more is measured")
                    seconds = 0.0
        return found

    def _rates(self) -> Rates:
        seconds = []
        for build in (_copy, _matmul):
            job = build(self.bench)
            timings = self._timed({"ours": job.ours, **job.theirs}).timings.values()
            seconds.append((job.traffic, min(timing.seconds for timing in timings)))
        (copied, copy_s), (multiplied, matmul_s) = seconds
        return Rates(copied.bytes / copy_s, multiplied.flops / matmul_s)

    def _timed(self, contenders: dict[str, Contender]) -> Timed:
        return time_contenders(self.timer, contenders, num_replays=self.num_replays)

    def _measure(self, case: Case, rates: Rates, found: KernelRun) -> None:
        reason = self._missing(case, found)
        if reason is not None:
            found.missing[case.id] = reason
            self.on_event(f"{case.id}: no kernel, {reason}")
            return
        try:
            row = self._row(case, case.build(self.bench), rates)
        except TraceFP4Error as problem:
            found.failed[case.id] = str(problem)
        except Exception as problem:  # one kernel that fails must not cost the figures of the others
            found.failed[case.id] = f"{type(problem).__name__}: {problem}"
        else:
            found.rows.append(row)
            self.on_event(line_of(row))
            return
        self.on_event(f"{case.id}: failed, {found.failed[case.id]}")

    def _is_usable(self) -> bool:
        """Free the memory of graphs; say whether the GPU still answers, which it does not after an illegal access."""
        if self.bench.device.type != "cuda":
            return True
        gc.collect()
        try:
            torch.cuda.synchronize(self.bench.device)
            torch.cuda.empty_cache()
        except RuntimeError:
            return False
        return True

    def _missing(self, case: Case, found: KernelRun) -> str | None:
        """Say why an op cannot be measured; its first use is timed."""
        if not case.op:
            return None
        if self.bench.backend not in IMPLEMENTED.get(case.op, ()):
            return f"{case.op} has no backend {self.bench.backend.name}"
        begun = time.monotonic()
        try:
            choose(case.op, self.bench.device, self.bench.backend)
        except BackendError as problem:
            return str(problem)
        found.first_use.setdefault(case.op, round(time.monotonic() - begun, 2))
        return None

    def _row(self, case: Case, job: Job, rates: Rates) -> BenchRow:
        timed = self._timed({"ours": job.ours, **job.theirs})
        check = None if job.check is None else job.check(timed.outputs)
        scale = _UNITS[job.unit] * job.count
        ours, (peer, peer_s) = timed.timings["ours"], fastest_peer(timed)
        facts: dict[str, float | str] = {
            **job.facts,
            "GB/s": job.traffic.bytes / ours.seconds / 1e9,
            "TFLOP/s": job.traffic.flops / ours.seconds / 1e12,
            "bytes": job.traffic.bytes,
            "fastest": ours.low * scale,
            "slowest": ours.high * scale,
            "calls_in_a_graph": ours.num_calls,
        }
        others = {name: timing for name, timing in timed.timings.items() if name != "ours"}
        facts |= {f"peer {name}": timing.seconds * scale for name, timing in others.items()}
        facts |= {f"peer {name}": reason for name, reason in timed.failures.items()}
        return BenchRow(
            id=case.id,
            metric="time of a call" if job.count == 1 else f"time of {job.count} calls",
            value=ours.seconds * scale,
            unit=job.unit,
            backend=self.bench.backend.value if case.op else "torch",
            peer=peer,
            peer_value=None if peer_s is None else peer_s * scale,
            limit=rates.seconds(job.traffic) * scale,
            machine=self.machine,
            better="less",
            check=check,
            facts=facts,
        )


def fastest_peer(timed: Timed) -> tuple[str, float | None]:
    """Return the name and seconds of the fastest peer; or "none", or why nobody ran."""
    others = {name: timing.seconds for name, timing in timed.timings.items() if name != "ours"}
    if others:
        name = min(others, key=others.__getitem__)
        return name, others[name]
    failed = "; ".join(f"{name} failed ({reason})" for name, reason in timed.failures.items())
    return failed or "none", None


def line_of(row: BenchRow) -> str:
    """Return a row as one line of progress."""
    ratio = "" if row.ratio is None else f"   {row.ratio:6.2f}x {row.peer}"
    wrong = "" if row.check is None or row.check.holds else f"   WRONG: {row.check.error:g} {row.check.text}"
    share = "" if row.share is None else f"{100 * row.share:4.0f}%"
    return f"{row.id:52} {row.value:10.1f} {row.unit} {row.facts['GB/s']:6.0f} GB/s {share}{ratio}{wrong}"


@contextmanager
def compile_log(into: dict[str, dict[str, float]]) -> Iterator[None]:
    """Inside, count what the compiler compiles: variants and seconds by source file."""

    class Counter(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if isinstance(record.args, tuple) and len(record.args) == 4:
                folder, name, _, took_s = record.args
                entry = into.setdefault(f"{folder}/{name}", {"variants": 0, "seconds": 0.0})
                entry["variants"] += 1
                entry["seconds"] = round(entry["seconds"] + float(str(took_s)), 3)

    log, counter = logging.getLogger(_COMPILER), Counter(logging.INFO)
    level = log.level
    log.addHandler(counter)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(counter)
        log.setLevel(level)


def _yardsticks(sizes: KernelSizes) -> Iterator[Case]:
    yield Case(id="kernels.copy", op="", build=_copy)
    yield Case(id="kernels.matmul", op="", build=_matmul)
    for tokens in sizes.grouped_tokens:
        yield Case(id=f"kernels.grouped_mm.{tokens}", op="", build=_grouped(tokens))
    yield Case(id="kernels.sdpa", op="", build=_sdpa)


def _normal(bench: Bench, *shape: int) -> Tensor:
    generator = bench.generator(sum(shape))
    return torch.randn(shape, generator=generator, device=bench.device, dtype=torch.bfloat16)


def _copy(bench: Bench) -> Job:
    scale = bench.sizes.rows / KernelSizes().rows
    x = _normal(bench, max(1, int(_COPIED * scale)))
    target = torch.empty_like(x)
    traffic = elementwise(x.numel(), BF16, BF16)
    return Job(
        ours=contender([lambda: torch.add(x, 0, out=target)], traffic),
        theirs={
            "copy_": contender([lambda: target.copy_(x)], traffic)
        },  # in a graph no kernel, and not always slower
        traffic=traffic,
        check=None,
    )


def _matmul(bench: Bench) -> Job:
    n = bench.sizes.matmul
    a, b = _normal(bench, n, n), _normal(bench, n, n)
    traffic = Traffic(3 * BF16 * n * n, 2.0 * n**3)
    return Job(ours=contender([lambda: a @ b], traffic), theirs={}, traffic=traffic, check=None)


def _grouped(num_tokens: int) -> Callable[[Bench], Job]:
    def build(bench: Bench) -> Job:
        shape = bench.sizes.models[bench.sizes.sample_model]
        ids = draw_experts(num_tokens, num_experts=shape.experts, top_k=shape.top_k, skew="uniform", seed=0)
        distinct, pairs = int(ids.unique().numel()), ids.numel()
        *_, ends = routing_lists(Routing(ids.to(bench.device), ids.to(bench.device)), shape.experts)
        x, width = _normal(bench, pairs, shape.hidden), 2 * shape.moe_inter
        w = _normal(bench, shape.experts, width, shape.hidden).transpose(1, 2)
        traffic = Traffic(
            BF16 * (distinct * shape.hidden * width + pairs * (shape.hidden + width)),
            2.0 * pairs * shape.hidden * width,
        )
        calls = contender([lambda: torch._grouped_mm(x, w, offs=ends)], traffic)
        return Job(ours=calls, theirs={}, traffic=traffic, check=None, facts={"distinct_experts": distinct})

    return build


def _sdpa(bench: Bench) -> Job:
    model, num_seqs, context = bench.sizes.attention[0]
    shape = bench.sizes.models[model]
    q = _normal(bench, num_seqs, shape.q_heads, 1, shape.head_dim)
    k, v = (_normal(bench, num_seqs, shape.kv_heads, context, shape.head_dim) for _ in range(2))
    traffic = Traffic(2 * BF16 * k.numel(), 4.0 * num_seqs * context * shape.q_heads * shape.head_dim)

    def attend() -> Tensor:
        return scaled_dot_product_attention(q, k, v, enable_gqa=True)

    return Job(ours=contender([attend], traffic), theirs={}, traffic=traffic, check=None)

"""Where the time of one decode step goes: kernels by time, with the bandwidth of those whose bytes are known.

On a GPU these are the kernels and copies that the driver saw, whether a graph or a call launched them; on a processor
the operations of torch. A profile explains a figure, and is never the figure: profiling slows the host down.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from tracefp4.bench.engine_points import StepBytes

NUM_SHOWN = 15
_COPIES = ("Memcpy", "Memset")
_DEQUANTIZE = "dequantize"
_NAME_LENGTH = 80


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelTime:
    """One kernel in one step."""

    name: str
    """Of the kernel, cut to a line."""
    launches: int
    """How often it ran."""
    us: float
    """All of them together."""
    share: float
    """Of the time of all kernels."""
    gb_per_s: float | None
    """Least bytes over time; None where its bytes are not known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepProfile:
    """One decode step."""

    kernels: tuple[KernelTime, ...]
    """All of them, the longest first."""
    compute_s: float
    """Seconds in which at least one kernel was there, but no copies and fills. From sm_90 on a kernel may wait for the
    end of the one before it (`ops/device.py`), so their times add up to more."""

    @property
    def dequantizing_launches(self) -> int:
        """Launches of kernels that only dequantize."""
        return sum(kernel.launches for kernel in self.kernels if kernel.name == _DEQUANTIZE)

    def to_json(self) -> list[dict[str, Any]]:
        """Return the longest kernels, and all others in one line."""
        shown, others = self.kernels[:NUM_SHOWN], self.kernels[NUM_SHOWN:]
        lines = [asdict(kernel) for kernel in shown]
        if others:
            rest = KernelTime(
                name=f"{len(others)} others",
                launches=sum(kernel.launches for kernel in others),
                us=sum(kernel.us for kernel in others),
                share=sum(kernel.share for kernel in others),
                gb_per_s=None,
            )
            lines.append(asdict(rest))
        return lines


def profile_step(
    step: Callable[[], object], *, device: torch.device, moved: StepBytes, head_bytes: float
) -> StepProfile:
    """Run one step under torch's profiler.

    Args:
        step: Runs it, and starts no other; its tokens are on the host when it returns.
        device: Whose kernels are listed.
        moved: The fewest bytes of the step.
        head_bytes: Those of the output matrix.
    """
    from torch.profiler import ProfilerActivity, profile

    is_gpu = device.type == "cuda"
    activity = ProfilerActivity.CUDA if is_gpu else ProfilerActivity.CPU
    if is_gpu:
        torch.cuda.synchronize(device)
    with profile(activities=[activity]) as found:
        step()
        if is_gpu:
            torch.cuda.synchronize(device)
    times = [
        (str(event.key), int(event.count), float(_self_time(event, is_gpu))) for event in found.key_averages()
    ]
    known = {
        "attend": moved.kv,
        "gate_up_": moved.experts * 2 / 3,
        "down_": moved.experts / 3,
        "multiply_head": head_bytes,
        "step_heads": moved.states,
    }
    spans = [
        (float(event.time_range.start), float(event.time_range.end))
        for event in found.events() or ()
        if event.device_type.name == activity.name and not event.name.startswith(_COPIES)
    ]
    return make_profile(times, known, spans=spans)


def make_profile(
    times: list[tuple[str, int, float]],
    known: dict[str, float],
    *,
    spans: Sequence[tuple[float, float]],
) -> StepProfile:
    """Make a profile of (name, launches, microseconds), with bytes by the beginning of a name.

    Args:
        times: of every kernel.
        known: fewest bytes.
        spans: when each launch of a kernel began and ended, in microseconds.
    """
    total = sum(us for _, _, us in times)
    kernels = []
    for name, launches, us in sorted(times, key=lambda found: -found[2]):
        if us <= 0:
            continue
        num_bytes = next((size for start, size in known.items() if name.startswith(start)), None)
        kernels.append(
            KernelTime(
                name=name[:_NAME_LENGTH],
                launches=launches,
                us=us,
                share=us / total,
                gb_per_s=None if num_bytes is None else num_bytes / us / 1e3,
            )
        )
    return StepProfile(kernels=tuple(kernels), compute_s=_covered(spans) * 1e-6)


def _covered(spans: Sequence[tuple[float, float]]) -> float:
    """Length of the union of spans."""
    total, end = 0.0, -math.inf
    for begin, stop in sorted(spans):
        total += max(0.0, stop - max(begin, end))
        end = max(end, stop)
    return total


def _self_time(event: Any, is_gpu: bool) -> float:
    found: float = event.self_device_time_total if is_gpu else event.self_cpu_time_total
    return found

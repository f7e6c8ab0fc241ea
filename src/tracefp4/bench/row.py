"""One line of a benchmark: what was measured, against whom, what the hardware allows, and whether the result was right.

    ratio = how many times better than the peer;   share = how much of what the hardware allows

A figure stands beside the hardware, the versions and the commit that printed it. This module measures nothing and
judges nothing: gates are in `gates.py`.
"""

import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """What a figure depends on beside the code."""

    hardware: str
    """Processor, cores, threads in use, vector extension; or the GPU, its multiprocessors and memory."""
    versions: dict[str, str]
    """Versions of Python, torch, this package and the peers that are installed."""
    commit: str
    """Revision of the working tree, with "+changes" if it is not clean; "unknown" outside a repository."""
    date: str
    """UTC, ISO 8601."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """How far the result that was timed is from the definition's."""

    error: float
    """The largest error; NaN is never allowed."""
    allowed: float
    """The largest error of a right result; 0 for bytes."""
    text: str
    """What the error counts, e.g. "bytes that differ from the reference"."""

    @property
    def holds(self) -> bool:
        """Whether the result is right."""
        return self.error <= self.allowed


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchRow:
    """One measured figure."""

    id: str
    """Stable name, e.g. `cpu.quantize.NVFP4_ROW_POW2.float32`."""
    metric: str
    """What the value counts."""
    value: float
    """The figure: best of the rounds on a processor, median of the replays on a GPU."""
    unit: str
    """Unit of value, peer_value and limit."""
    backend: str
    """Which of our implementations ran."""
    peer: str
    """Who is compared, with version; "none", or why it could not run."""
    peer_value: float | None
    """The peer's figure from the same rounds; None when it did not run."""
    limit: float | None
    """What the hardware allows, from rates of the same run; None where nothing simple bounds it. A value beyond it
    says that operands stayed in a cache."""
    machine: Machine
    """Where it was measured."""
    better: Literal["more", "less"] = "more"
    """Whether a larger or a smaller value is the better one."""
    check: Check | None = None
    """Whether the timed result was right; None where another test holds that."""
    facts: Mapping[str, float | str] = field(default_factory=dict)
    """What else belongs to the figure, e.g. bytes moved, experts touched, spread."""

    @property
    def ratio(self) -> float | None:
        """How many times better than the peer; None without one."""
        return self._better_than(self.peer_value)

    @property
    def share(self) -> float | None:
        """How much of the limit is reached; None without one."""
        return self._better_than(self.limit)

    @property
    def excess(self) -> float | None:
        """value - peer_value, or None without a peer."""
        return None if self.peer_value is None else self.value - self.peer_value

    def _better_than(self, other: float | None) -> float | None:
        if other is None:
            return None
        above, below = (self.value, other) if self.better == "more" else (other, self.value)
        return above / below if below else None

    def to_json(self) -> dict[str, object]:
        """Every field with the derived ones, ready for JSON; the machine's fields stand beside the others."""
        own = {key: value for key, value in asdict(self).items() if key != "machine"}
        return own | {"ratio": self.ratio, "share": self.share} | asdict(self.machine)


PEERS = ("torchao", "compressed-tensors", "nvidia-modelopt")


def describe_machine(device: "torch.device | None" = None) -> Machine:
    """Describe this machine now.

    Args:
        device: The NVIDIA GPU that is measured; None for the processor.
    """
    import torch

    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("tracefp4", *PEERS):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    if device is not None:
        versions["cuda"] = str(torch.version.cuda)
    return Machine(
        hardware=_processor() if device is None else _gpu(device),
        versions=versions,
        commit=_commit(),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _processor() -> str:
    import torch

    cpu = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [
            line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line
        ]
        cpu = names[0] if names else cpu
    extension = torch.backends.cpu.get_cpu_capability()
    return f"{cpu}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, {extension}"


def _gpu(device: "torch.device") -> str:
    import torch

    found = torch.cuda.get_device_properties(device)
    memory, l2 = found.total_memory / 2**30, found.L2_cache_size / 2**20
    return (
        f"{found.name}, sm_{found.major}{found.minor}, {found.multi_processor_count} multiprocessors, "
        f"{memory:.0f} GiB, {l2:.0f} MiB of L2"
    )


def _commit() -> str:
    folder = Path(__file__).parent
    try:
        commands = (["git", "rev-parse", "--short=12", "HEAD"], ["git", "status", "--porcelain", "--", "."])
        commit, changes = (
            subprocess.run(
                c, cwd=folder, capture_output=True, text=True, check=True, timeout=30
            ).stdout.strip()
            for c in commands
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return commit + ("+changes" if changes else "")

"""What a writer knows of a trajectory that is not finished, and how it may behave; the rules of appending.

Rows of a column are appended once: a span that overlaps an earlier one with a column in common is refused, and so is
a column whose bytes per row change. Gaps are allowed: rows that never came are absent. Never touches a disk.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from tracefp4.errors import BackendError, ConfigError, RecordError, TraceFP4Error
from tracefp4.store.protocol import POLICIES, Policy, Segment
from tracefp4.store.refusals import ConflictError, DroppedError
from tracefp4.store.trajectory_log import Written


@dataclass(frozen=True, kw_only=True, slots=True)
class WriterOptions:
    """How a writer behaves."""

    policy: Policy = "wait"
    """What happens when the queue is full: "wait" or "drop_trajectory"."""
    max_queue_bytes: int = 256 << 20
    """Column and meta bytes that may be queued; the thread holds one frame (1 MiB or one row) more."""
    max_wait_s: float = 60.0
    """Longest wait of one append; then its trajectory is lost with a BackendError."""
    chunk_bytes: int = 64 << 20
    """Size at which a new chunk begins."""
    durable: bool = True
    """Sync to the medium before finish and flush return. False: they survive a killed process, not a loss of power."""

    def __post_init__(self) -> None:
        numbers = (self.max_queue_bytes, self.max_wait_s, self.chunk_bytes)
        if self.policy not in POLICIES or min(numbers) <= 0:
            raise ConfigError(
                f"Writer options refused; got policy {self.policy!r}, max_queue_bytes {self.max_queue_bytes}, "
                f"max_wait_s {self.max_wait_s}, chunk_bytes {self.chunk_bytes}. Policies are "
                f"{', '.join(POLICIES)}; numbers are above 0. Correct the recipe."
            )


@dataclass(kw_only=True, slots=True, eq=False)
class Pending:
    """An unfinished trajectory: what was appended, and what of it is written."""

    written: Written
    """What is on disk; the writing thread's."""
    spans: list[tuple[int, int, frozenset[str]]] = field(default_factory=list)
    """(start, stop, columns) of every segment appended; neighbours with the same columns are one."""
    row_bytes: dict[str, int] = field(default_factory=dict)
    """Column -> bytes per row."""
    is_finishing: bool = False
    """Whether finish was called."""
    refusal: TraceFP4Error | None = None
    """Why it was given up, if it was."""

    @property
    def name(self) -> str:
        """Its trajectory."""
        return self.written.trajectory

    def register(self, segment: Segment) -> None:
        """Note the rows of a segment. Raises: ConflictError for rows appended before, RecordError for a new width."""
        columns = frozenset(segment.columns)
        for start, stop, earlier in self.spans:
            if start < segment.stop and segment.start < stop and columns & earlier:
                raise ConflictError(
                    f"Segment of trajectory {self.name!r} refused: rows {segment.start}..{segment.stop - 1} of column "
                    f"{min(columns & earlier)!r} overlap rows {start}..{stop - 1}, which were appended before. Rows "
                    "of a column are appended once. Append later rows, or abandon the trajectory."
                )
        widths = {name: memoryview(data).nbytes // segment.num_rows for name, data in segment.columns.items()}
        for name, width in widths.items():
            if self.row_bytes.setdefault(name, width) != width:
                raise RecordError(
                    f"Segment of trajectory {self.name!r} refused: column {name!r} has {width} bytes per row. It had "
                    f"{self.row_bytes[name]} in earlier segments. Bytes per row are fixed: use another column."
                )
        if self.spans and self.spans[-1][1:] == (segment.start, columns):
            self.spans[-1] = (self.spans[-1][0], segment.stop, columns)
        else:
            self.spans.append((segment.start, segment.stop, columns))


def promise() -> Future[Any]:
    """A future that its owner cannot cancel, so that the thread that answers it always can."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


def complete(trajectory: str) -> ConflictError:
    """The error for a segment of a trajectory that is complete already."""
    return ConflictError(
        f"Trajectory {trajectory!r} refused: it is finished, or about to be. A finished trajectory takes nothing more "
        "and a name belongs to one writer. Give trajectories names of their own, or remove the old one."
    )


def dropped(trajectory: str) -> DroppedError:
    """The error for a trajectory that back-pressure gave up."""
    return DroppedError(
        f"Trajectory {trajectory!r} was dropped as a whole: the queue was full and the policy is drop_trajectory. "
        "Complete trajectories only are kept. Round its positions to nearest, or enlarge max_queue_bytes."
    )


def lost(trajectory: str, reason: str) -> BackendError:
    """The error for a trajectory that was lost on its way to the medium."""
    return BackendError(
        f"Trajectory {trajectory!r} was lost: {reason}. Every segment must reach the medium. Free the medium or "
        "enlarge the queue; round its positions to nearest."
    )

"""What a store is. A store keeps bytes, durable and checked, and never knows what the bytes mean.

A trajectory has rows (one per position) and columns. A column has a name (any short text) and a fixed number
of bytes per row. A Writer takes segments (spans of rows of some columns) and keeps them in the background;
`finish` makes a trajectory complete and gives a Handle, which is all that needs to travel with a completion. A
Reader gives back the bytes of (trajectory, columns, rows) and reads no others; what is absent or damaged is
named, never guessed: absent rows are not zeros. Order comes from counters, never from a clock. Errors are those
of `refusals.py`. Nothing here imports torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from typing import Literal, Protocol

from tracefp4.errors import RecordError
from tracefp4.store.refusals import (
    MAX_COLUMN_CHARACTERS,
    MAX_COLUMNS,
    MAX_META_BYTES,
    MAX_ROW,
    MAX_SEGMENT_BYTES,
    MAX_SEGMENT_ROWS,
    AbsentSpan,
    Buffer,
    checked_name,
    is_text,
)

# Version of everything below: the meaning of Segment, Handle and Stat, and of the bytes that stores keep.
STORE_SCHEMA = 1
# wait: append blocks while the queue is full; drop_trajectory: the trajectory is given up, whole.
Policy = Literal["wait", "drop_trajectory"]
POLICIES: tuple[Policy, ...] = ("wait", "drop_trajectory")


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """Rows start .. start + num_rows - 1 of some columns of one trajectory; what one append takes."""

    trajectory: str
    """Name, 1 to 160 characters of any text."""
    start: int
    """First row, from 0."""
    num_rows: int
    """Rows, at least 1."""
    columns: Mapping[str, Buffer]
    """Column name -> bytes of all rows, row-major; every column has len / num_rows bytes per row."""
    meta: bytes = b""
    """Opaque bytes of the owner, at most 64 KiB; `stat` gives back those of the trajectory's first segment."""
    generation: int = 0
    """Counter that retention goes by (the weight version that computed the rows), at least 0."""

    def __post_init__(self) -> None:
        checked_name(self.trajectory)
        problem = _segment_problem(self)
        if problem is not None:
            raise RecordError(
                f"Segment of trajectory {self.trajectory!r} refused: {problem}. A segment has 1 to "
                f"{MAX_SEGMENT_ROWS} rows from 0 on, 1 to {MAX_COLUMNS} columns with a whole number of bytes "
                f"per row, names of 1 to {MAX_COLUMN_CHARACTERS} characters, at most {MAX_SEGMENT_BYTES} "
                f"bytes, at most {MAX_META_BYTES} bytes of meta and a generation of at least 0. Append "
                "shorter spans."
            )

    @property
    def stop(self) -> int:
        """One past the last row."""
        return self.start + self.num_rows

    @property
    def num_bytes(self) -> int:
        """Bytes of all columns together."""
        return sum(memoryview(data).nbytes for data in self.columns.values())

    def owned(self) -> Segment:
        """The same segment with columns of type `bytes`: nothing of the caller's buffers stays alive or shared."""
        columns = {name: bytes(data) for name, data in self.columns.items()}
        return Segment(
            trajectory=self.trajectory,
            start=self.start,
            num_rows=self.num_rows,
            columns=columns,
            meta=bytes(self.meta),
            generation=self.generation,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Handle:
    """What travels with a completion in place of its record; a few hundred bytes of JSON."""

    store: str
    """URI of the store, which is `file:` and the directory, or what another backend answers to."""
    trajectory: str
    """Name of the trajectory."""
    num_rows: int
    """One past the last row that was written."""
    digest: str
    """32 hexadecimal digits of the manifest entry; a trajectory written anew under the same name has another."""
    generation: int
    """Largest generation of its segments."""
    schema: int = STORE_SCHEMA
    """Version of the store that made it."""

    def to_json(self) -> str:
        """One line of JSON. Inverse: from_json."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str | bytes) -> Handle:
        """The handle that `to_json` wrote. Raises: RecordError for other text or another schema."""
        try:
            fields = json.loads(text)
            handle = cls(**fields)
            kinds = {
                "store": str,
                "trajectory": str,
                "num_rows": int,
                "digest": str,
                "generation": int,
                "schema": int,
            }
            fits = all(type(fields[name]) is kind for name, kind in kinds.items())
        except (ValueError, TypeError, KeyError):
            fits = False
        if not fits or handle.schema != STORE_SCHEMA:
            raise RecordError(
                f"Handle refused; got {text[:200]!r}. A handle is the JSON that to_json wrote, with schema "
                f"{STORE_SCHEMA}. Use the tracefp4 that wrote it, or treat the record as missing."
            )
        return handle


@dataclass(frozen=True, kw_only=True, slots=True)
class Stat:
    """What a store knows of one trajectory without reading its columns."""

    trajectory: str
    """Name of the trajectory."""
    finished: bool
    """Whether its writer finished it; if not, rows may still come, or never."""
    num_rows: int
    """One past the last row that is there."""
    columns: Mapping[str, int]
    """Column name -> bytes per row."""
    meta: bytes
    """Meta of its first segment."""
    generation: int
    """Largest generation of its segments."""
    num_writers: int = 1
    """Writers that have unremoved rows under this name; only one of them is ever read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """Columns and rows start .. stop - 1 of one trajectory."""

    trajectory: Handle | str
    """Handle, or name."""
    columns: tuple[str, ...]
    """Columns wanted."""
    start: int
    """First row."""
    stop: int
    """One past the last row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Slices:
    """Answer to a Request."""

    data: Mapping[str, bytes]
    """Column -> (stop - start) * row_bytes bytes; absent rows are filled with zero bytes and named below. A
    column whose bytes per row are unknown, because none of it is there, is missing from this mapping."""
    absent: tuple[AbsentSpan, ...] = ()
    """Every absent span, by column (in the order asked for), then by row; neighbours of one reason are joined."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WriterStats:
    """Counters of one writer since it was opened."""

    bytes_queued: int = 0
    """Column bytes taken and not yet written; never above the bound."""
    bytes_written: int = 0
    """Column bytes written."""
    segments_written: int = 0
    """Segments written."""
    num_finished: int = 0
    """Trajectories finished."""
    num_dropped: int = 0
    """Trajectories given up: back-pressure, refusal by the medium, a conflict."""
    dropped: Mapping[str, str] = field(default_factory=dict)
    """Name -> reason of trajectories given up; the newest 10,000 of them."""
    num_waits: int = 0
    """Appends that had to wait."""
    wait_seconds: float = 0.0
    """Time that they waited, all together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Removed:
    """What a retention call did."""

    num_trajectories: int
    """Trajectories that can no longer be read."""
    trajectories: tuple[str, ...]
    """Their names, sorted; from a server the first 2,048 of what a rule removed."""
    num_bytes: int
    """Bytes given back to the medium; the rest of the space follows when its neighbours go."""


class Writer(Protocol):
    """Takes segments of many trajectories; may be called from several threads."""

    def append(self, segment: Segment) -> bool:
        """Take a segment (its bytes are copied unless they are of type `bytes`).

        Returns: True if taken; False if its trajectory was dropped by back-pressure (now or before).
        Raises: ConflictError for rows that were appended before; BackendError if the trajectory was lost to the
        medium, or if waiting took too long.
        """

    def finish(self, trajectory: str) -> Handle:
        """Wait until every segment is durable and the trajectory complete for readers.

        Raises: MissingTrajectoryError if nothing was appended, DroppedError, ConflictError, BackendError.
        """

    def finish_soon(self, trajectory: str) -> Future[Handle]:
        """`finish` without waiting; the future holds the handle or the error. Many together share one sync."""

    def abandon(self, trajectory: str) -> None:
        """Give up an unfinished trajectory; readers no longer see it, its name may be used again."""

    def flush(self) -> None:
        """Wait until all that was taken is durable. Raises: BackendError naming what was lost since the last call."""

    def close(self) -> None:
        """Flush and stop; a second call does nothing. Unfinished trajectories stay unfinished."""

    @property
    def stats(self) -> WriterStats:
        """Counters now."""


class Reader(Protocol):
    """Reads trajectories; sees what writers add meanwhile; may be called from several threads."""

    def trajectories(self) -> Mapping[str, bool]:
        """Every readable trajectory, sorted -> whether it is finished."""

    def stat(self, trajectory: Handle | str) -> Stat:
        """What is known of a trajectory. Raises: MissingTrajectoryError, GoneError."""

    def read(
        self, trajectory: Handle | str, columns: Iterable[str], start: int, stop: int
    ) -> Mapping[str, bytes]:
        """Bytes of rows start .. stop - 1 of some columns, verified.

        Raises: SpanError if any is absent or damaged, MissingTrajectoryError, GoneError, BackendError.
        """

    def read_available(self, request: Request) -> Slices:
        """What is there of a request, and exactly which spans are not; raises only for bad requests and media."""

    def close(self) -> None:
        """Give back files and memory; a second call does nothing."""


class Retention(Protocol):
    """Removes trajectories. A trajectory's generation is the largest of its segments'."""

    def forget(self, below: int) -> Removed:
        """Remove every trajectory whose generation is < `below`."""

    def keep_last(self, generations: int) -> Removed:
        """Remove all but the trajectories of the newest `generations` distinct generations."""

    def discard(self, from_generation: int) -> Removed:
        """Remove every trajectory whose generation is >= `from_generation`: a resumed run makes them again."""

    def remove(self, trajectories: Iterable[str]) -> Removed:
        """Remove trajectories by name; unknown names are ignored."""


def _segment_problem(segment: Segment) -> str | None:
    rows, columns = segment.num_rows, segment.columns
    if not (1 <= rows <= MAX_SEGMENT_ROWS and 0 <= segment.start <= MAX_ROW):
        return f"got start {segment.start} and num_rows {rows}"
    if not 1 <= len(columns) <= MAX_COLUMNS:
        return f"got {len(columns)} columns"
    if not 0 <= segment.generation <= MAX_ROW or len(segment.meta) > MAX_META_BYTES:
        return f"got generation {segment.generation} and {len(segment.meta)} bytes of meta"
    total = 0
    for name, data in columns.items():
        size = data.nbytes if isinstance(data, memoryview) else len(data)
        if not 1 <= len(name) <= MAX_COLUMN_CHARACTERS or size % rows or not is_text(name):
            return f"got column {name[:80]!r} of {size} bytes for {rows} rows"
        total += size
    return f"got {total} bytes" if total > MAX_SEGMENT_BYTES else None

"""What a store refuses and how it says so: limits, the kinds of error, and their texts, the same for every backend.

All kinds are RecordError: MissingTrajectoryError (nobody wrote it here), GoneError (it was removed), DroppedError
(its writer gave it up), ConflictError (somebody else holds this name or these rows), SpanError (rows are absent or
damaged). A medium that refuses is a BackendError. Nothing here touches a medium.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tracefp4.errors import RecordError

CHECKSUM_BYTES = 16
MAX_NAME_CHARACTERS = 160
MAX_COLUMN_CHARACTERS = 64
MAX_COLUMNS = 4096
MAX_META_BYTES = 1 << 16
# A segment is one append: rows and bytes of it stay far below what 32 bit counters and one buffer hold.
MAX_SEGMENT_ROWS = 1 << 20
MAX_SEGMENT_BYTES = 1 << 30
MAX_ROW = 1 << 40

Buffer = bytes | bytearray | memoryview
AbsentReason = Literal["never_written", "damaged", "gone"]


class MissingTrajectoryError(RecordError):
    """The store has never heard of this trajectory; not damage, because a missing record is allowed."""


class GoneError(RecordError):
    """The trajectory was removed (retention, or by name) after this handle was made."""


class DroppedError(RecordError):
    """The writer gave this trajectory up as a whole (back-pressure); none of it can be read."""


class ConflictError(RecordError):
    """Another writer finished this trajectory first, or these rows of these columns were appended before."""


class SpanError(RecordError):
    """Rows that were asked for are absent or damaged; `absent` names each."""

    def __init__(self, message: str, absent: Sequence[AbsentSpan] = ()) -> None:
        super().__init__(message)
        self.absent = tuple(absent)


@dataclass(frozen=True, kw_only=True, slots=True)
class AbsentSpan:
    """Rows of one column that a store cannot give."""

    trajectory: str
    """Name of the trajectory."""
    column: str
    """Name of the column."""
    start: int
    """First absent row."""
    stop: int
    """One past the last absent row."""
    reason: AbsentReason
    """Never written, written but damaged, or gone."""


def checked_name(trajectory: str) -> str:
    """The name itself, if a store may hold it. Raises: RecordError for an empty or overlong name."""
    if not 1 <= len(trajectory) <= MAX_NAME_CHARACTERS or not is_text(trajectory):
        raise RecordError(
            f"Trajectory name refused; got {len(trajectory)} characters ({trajectory[:40]!r}). Names have 1 to "
            f"{MAX_NAME_CHARACTERS} characters that UTF-8 can encode. Shorten the name."
        )
    return trajectory


def checksum(data: Buffer) -> bytes:
    """16-byte BLAKE2b digest of the bytes."""
    return hashlib.blake2b(data, digest_size=CHECKSUM_BYTES).digest()


def damaged(trajectory: str, place: str, *, found: str, expected: str) -> RecordError:
    """The error for a trajectory whose place in a store is not what was written."""
    return RecordError(
        f"What {place} says of trajectory {trajectory!r} is damaged: found {found}, expected {expected}. Both must "
        "be equal. Treat the record as missing (its positions then round to nearest) and check the disk."
    )


def span_error(place: str, absent: Sequence[AbsentSpan]) -> SpanError:
    """The error for a read that cannot be answered in full."""
    first = absent[0]
    return SpanError(
        f"Cannot read rows {first.start}..{first.stop - 1} of column {first.column!r} of trajectory "
        f"{first.trajectory!r} in {place}: {first.reason.replace('_', ' ')} ({len(absent)} such spans in this "
        "read). Every row asked for must be there and match its checksum. Use read_available and round the "
        "absent positions to nearest.",
        absent,
    )


def unknown_trajectory(trajectory: str, place: str) -> MissingTrajectoryError:
    """The error for a trajectory that `place` has never heard of."""
    return MissingTrajectoryError(
        f"No trajectory {trajectory!r} in {place}. Only those listed by trajectories() can be read or "
        "finished. Check the store's path, or treat the record as missing."
    )


def gone(trajectory: str, place: str) -> GoneError:
    """The error for a trajectory that was removed after the handle was made."""
    return GoneError(
        f"Trajectory {trajectory!r} is gone from {place}: it was removed after this handle was made. A handle "
        "is good until retention or a removal by name takes its trajectory. Keep more generations, or treat "
        "the record as missing."
    )


def is_text(text: str) -> bool:
    """Say whether UTF-8 can encode it (a lone surrogate cannot)."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True

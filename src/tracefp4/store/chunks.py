"""Chunks: files of about one size that hold segments of many trajectories, and say themselves what they hold.

A chunk belongs to one writer, which alone appends to it. Its frames: a layout (columns and bytes per row, before the
first segment that has it), a segment (head: trajectory, rows, generation, offset of its layout, meta, and one
BLAKE2b-128 digest per column; body: the columns one after the other), and a closing (this writer is done with that
trajectory: it is in the manifest, or given up). Any column of any segment can be read and verified alone. Never
decides which trajectories are complete.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tracefp4.errors import RecordError
from tracefp4.store import disk
from tracefp4.store.frames import (
    CHUNK_FILE,
    HEADER_BYTES,
    PREFIX_BYTES,
    FileIdentity,
    Frame,
    check_header,
    encode_frame,
    file_header,
    read_frame,
)
from tracefp4.store.manifest import SegmentRef, layout_from_bytes, layout_to_bytes
from tracefp4.store.protocol import Segment
from tracefp4.store.refusals import CHECKSUM_BYTES, checksum

LAYOUT, SEGMENT, CLOSED = 1, 2, 3
CHUNK_SUFFIX, RUNNING_SUFFIX = ".chunk", ".running"
_CHUNK_NAME = re.compile(r"(\d{8,})-(\d{8,})\.chunk")
_SEGMENT = struct.Struct("<QIQQHI")
_CLOSED = struct.Struct("<H")


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """The columns of segments, in the order of their bytes."""

    columns: Mapping[str, int]
    """Column -> bytes per row."""
    places: Mapping[str, tuple[int, int]]
    """Column -> (its index, bytes per row of all columns before it)."""

    @classmethod
    def of(cls, columns: Mapping[str, int]) -> Layout:
        """The layout of columns with their bytes per row."""
        places, before = {}, 0
        for index, (name, row_bytes) in enumerate(columns.items()):
            places[name] = (index, before)
            before += row_bytes
        return cls(columns=dict(columns), places=places)


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentHead:
    """The verified head of a segment's frame."""

    trajectory: str
    """Name of the trajectory."""
    start: int
    """First row."""
    num_rows: int
    """Rows."""
    generation: int
    """Its generation."""
    meta: bytes
    """Its owner's bytes."""
    layout: Layout
    """Its columns."""
    digests: bytes
    """16 bytes per column, in order."""
    body_offset: int
    """Where the first column starts."""

    @property
    def stop(self) -> int:
        """One past the last row."""
        return self.start + self.num_rows

    def column_span(self, column: str) -> tuple[int, int]:
        """Offset and length of a column in the chunk."""
        before = self.layout.places[column][1]
        return self.body_offset + before * self.num_rows, self.layout.columns[column] * self.num_rows

    def is_intact(self, column: str, data: bytes | memoryview) -> bool:
        """Whether bytes are those of a column that were appended."""
        index = self.layout.places[column][0] * CHECKSUM_BYTES
        return checksum(data) == self.digests[index : index + CHECKSUM_BYTES]


def chunk_path(directory: Path, writer: int, number: int) -> Path:
    """The file of a chunk."""
    return directory / f"{writer:08d}-{number:08d}{CHUNK_SUFFIX}"


def running_path(directory: Path, writer: int) -> Path:
    """The file that a writer holds locked while it lives."""
    return directory / f"{writer:08d}{RUNNING_SUFFIX}"


def chunk_numbers(directory: Path) -> list[tuple[int, int]]:
    """(writer, number) of every chunk, sorted; foreign files are no chunks."""
    found = (_CHUNK_NAME.fullmatch(entry.name) for entry in os.scandir(directory))
    return sorted((int(match[1]), int(match[2])) for match in found if match)


class ChunkAppender:
    """The writing side of one chunk."""

    def __init__(self, directory: Path, writer: int, number: int) -> None:
        """Create the file. Raises: OSError; nothing is then left."""
        self.path, self.number = chunk_path(directory, writer, number), number
        self._identity = FileIdentity(kind=CHUNK_FILE, writer=writer, number=number)
        self._layouts: dict[tuple[tuple[str, int], ...], int] = {}
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        # Synced bytes are of use only if the name of their file is: the directory is synced with them, once.
        self.size, self.is_dirty, self._is_listed = 0, True, False
        try:
            self._write(file_header(self._identity))
        except OSError:
            self.path.unlink(missing_ok=True)
            self.close()
            raise

    def append(self, piece: Segment) -> SegmentRef:
        """Append one segment, after its layout if that is new. Raises: OSError; no part of it is then there."""
        columns = {name: len(data) // piece.num_rows for name, data in piece.columns.items()}
        key = tuple(columns.items())
        if key not in self._layouts:
            # In a write of its own: a failed write is cut off, and must not take a whole frame with it.
            place = self.size
            self._write(encode_frame(self._identity, place, LAYOUT, layout_to_bytes(columns)))
            self._layouts[key] = place
        head, offset = _segment_head(piece, layout_offset=self._layouts[key]), self.size
        body_bytes = sum(len(part) for part in piece.columns.values())
        prefix = encode_frame(self._identity, offset, SEGMENT, head, body_bytes)
        self._write(b"".join([prefix, *piece.columns.values()]))
        return SegmentRef(
            chunk=self.number, offset=offset, head_bytes=len(head), start=piece.start, num_rows=piece.num_rows
        )

    def close_trajectory(self, trajectory: str, entry: bytes = b"") -> None:
        """Say that this writer adds nothing to a trajectory's segments so far. Raises: OSError.

        Args:
            trajectory: its name.
            entry: its manifest entry if it is complete, so that a lost manifest can be rebuilt.
        """
        name = trajectory.encode()
        head = _CLOSED.pack(len(name)) + name + entry
        self._write(encode_frame(self._identity, self.size, CLOSED, head))

    def sync(self) -> None:
        """Make everything appended survive a loss of power. Raises: OSError."""
        if self.is_dirty:
            disk.sync(self._descriptor)
            if not self._is_listed:
                disk.sync_directory(self.path.parent)
            self.is_dirty, self._is_listed = False, True

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def _write(self, data: bytes) -> None:
        self.is_dirty = True
        try:
            disk.write_all(self._descriptor, data, self.size)
        except OSError:
            # What was written of it is a torn frame, which no reader accepts; give its space back if possible.
            with suppress(OSError):
                os.ftruncate(self._descriptor, self.size)
            raise
        self.size += len(data)


class ChunkFile:
    """The reading side of one chunk. Thread-safe: it keeps no position."""

    def __init__(self, directory: Path, writer: int, number: int) -> None:
        """Open the file. Raises: FileNotFoundError; RecordError for a damaged header or another schema."""
        self.path = chunk_path(directory, writer, number)
        self.identity = FileIdentity(kind=CHUNK_FILE, writer=writer, number=number)
        self.descriptor = os.open(self.path, os.O_RDONLY)
        self._layouts: dict[int, Layout] = {}
        try:
            check_header(disk.read_at(self.descriptor, HEADER_BYTES, 0), self.identity, self.path)
        except RecordError:
            self.close()
            raise

    def head_at(self, ref: SegmentRef) -> SegmentHead | None:
        """The head of a segment, or None if it is damaged."""
        frame = read_frame(self.descriptor, self.identity, ref.offset, head_bytes=ref.head_bytes)
        return None if frame is None else self.head_of(frame)

    def head_of(self, frame: Frame) -> SegmentHead | None:
        """The head that a segment's frame holds, or None if it is no segment or its layout is damaged."""
        if frame.kind != SEGMENT:
            return None
        start, num_rows, generation, layout_offset, name_bytes, meta_bytes = _SEGMENT.unpack_from(frame.head)
        layout = self._layout(layout_offset)
        if layout is None:
            return None
        name_end = _SEGMENT.size + name_bytes
        return SegmentHead(
            trajectory=frame.head[_SEGMENT.size : name_end].decode(),
            start=start,
            num_rows=num_rows,
            generation=generation,
            meta=frame.head[name_end : name_end + meta_bytes],
            layout=layout,
            digests=frame.head[name_end + meta_bytes :],
            body_offset=frame.body_offset,
        )

    def _layout(self, offset: int) -> Layout | None:
        if offset not in self._layouts:
            frame = read_frame(self.descriptor, self.identity, offset)
            if frame is None or frame.kind != LAYOUT:
                return None
            self._layouts[offset] = Layout.of(layout_from_bytes(frame.head))
        return self._layouts[offset]

    def read(self, offset: int, num_bytes: int) -> bytes:
        """Raw bytes, fewer at the end of the file."""
        return disk.read_at(self.descriptor, num_bytes, offset)

    def close(self) -> None:
        """Close the file."""
        os.close(self.descriptor)


def pieces(segment: Segment, *, max_bytes: int) -> Iterator[Segment]:
    """A segment cut into spans of at most `max_bytes` column bytes (or one row), without copying."""
    row_bytes = sum(len(data) for data in segment.columns.values()) // segment.num_rows
    step = max(1, max_bytes // max(1, row_bytes))
    if step >= segment.num_rows:
        yield segment
        return
    views = {name: memoryview(data) for name, data in segment.columns.items()}
    for begin in range(0, segment.num_rows, step):
        rows = min(step, segment.num_rows - begin)
        columns = {
            name: view[begin * (len(view) // segment.num_rows) :][: rows * (len(view) // segment.num_rows)]
            for name, view in views.items()
        }
        yield Segment(
            trajectory=segment.trajectory,
            start=segment.start + begin,
            num_rows=rows,
            columns=columns,
            meta=segment.meta if begin == 0 else b"",
            generation=segment.generation,
        )


def trajectory_of(frame: Frame) -> str:
    """The trajectory that a segment's or a closing frame is about."""
    if frame.kind == CLOSED:
        return frame.head[_CLOSED.size : _CLOSED.size + _CLOSED.unpack_from(frame.head)[0]].decode()
    name_bytes = _SEGMENT.unpack_from(frame.head)[4]
    return frame.head[_SEGMENT.size : _SEGMENT.size + name_bytes].decode()


def entry_of(frame: Frame) -> bytes:
    """The manifest entry that a closing frame carries; empty if the trajectory was given up."""
    return frame.head[_CLOSED.size + _CLOSED.unpack_from(frame.head)[0] :]


def reference_to(frame: Frame, number: int) -> tuple[SegmentRef, int]:
    """Where a segment's frame lies, in chunk `number`, and its generation."""
    start, num_rows, generation = _SEGMENT.unpack_from(frame.head)[:3]
    ref = SegmentRef(
        chunk=number, offset=frame.offset, head_bytes=len(frame.head), start=start, num_rows=num_rows
    )
    return ref, generation


def segment_overhead(segment: Segment) -> int:
    """Bytes that a segment adds to its columns in a chunk, at most one layout not counted."""
    names = len(segment.trajectory.encode()) + len(segment.meta)
    return PREFIX_BYTES + _SEGMENT.size + names + CHECKSUM_BYTES * len(segment.columns)


def _segment_head(piece: Segment, *, layout_offset: int) -> bytes:
    name = piece.trajectory.encode()
    fixed = _SEGMENT.pack(
        piece.start, piece.num_rows, piece.generation, layout_offset, len(name), len(piece.meta)
    )
    return b"".join([fixed, name, piece.meta, *(checksum(data) for data in piece.columns.values())])

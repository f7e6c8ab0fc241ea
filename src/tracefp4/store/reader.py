"""The reader of a directory: the columns and rows asked for, verified, and exactly which spans are absent.

The manifest says where the segments of a complete trajectory lie; a read touches the heads of those that overlap the
rows, and of their bodies the columns asked for, nothing else. What its writer has not finished is found by scanning
chunks, and served as unfinished. A column of a segment whose digest does not match is damaged: absent, by name. Never
writes, never locks, and never takes one writer's rows for another's.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from tracefp4.errors import BackendError, RecordError
from tracefp4.store.assembly import Assembly, Piece, merged
from tracefp4.store.chunks import ChunkFile, SegmentHead, chunk_numbers
from tracefp4.store.manifest import Manifest, SegmentRef, no_manifest
from tracefp4.store.protocol import Handle, Request, Slices, Stat
from tracefp4.store.refusals import (
    MAX_ROW,
    AbsentReason,
    AbsentSpan,
    GoneError,
    MissingTrajectoryError,
    checksum,
    damaged,
    gone,
    span_error,
    unknown_trajectory,
)
from tracefp4.store.scanning import OpenIndex

MAX_OPEN_CHUNKS = 64
# Verified segment heads kept: a head has 16 bytes a column, so this is some ten MiB at hundreds of columns.
MAX_KEPT_HEADS = 2048
# Readings of one request while its trajectory is written anew again and again; then what was read is the answer.
MAX_READINGS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class _Located:
    """Where a trajectory lies."""

    trajectory: str
    writer: int
    generation: int
    num_rows: int
    segments: tuple[SegmentRef, ...]
    columns: Mapping[str, int] | None
    is_finished: bool
    num_writers: int


class DirectoryReader:
    """Reader of one directory; sees what others finish and remove meanwhile. Thread-safe."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open the store.

        Raises: BackendError if there is no such directory; RecordError for another schema, or for chunks without
        a manifest.
        """
        self.directory = Path(path)
        # Bytes read from chunks, for those who want to know what a read costs.
        self.bytes_read = 0
        self._store_id = b""
        self._lock = threading.RLock()
        self._manifest = Manifest(self.directory)
        self._index = OpenIndex(self.directory)
        self._chunks: OrderedDict[tuple[int, int], ChunkFile] = OrderedDict()
        self._heads: OrderedDict[tuple[int, int, int], SegmentHead] = OrderedDict()
        if not self.directory.is_dir():
            raise BackendError(
                f"Cannot read {self.directory} as a store: it is no directory. A reader needs the directory that a "
                "writer made. Check the path."
            )
        self._refresh()

    def _refresh(self) -> None:
        if not self._manifest.refresh() and chunk_numbers(self.directory):
            raise no_manifest(self.directory)
        if self._manifest.store_id != self._store_id:
            # The directory was deleted and made anew: nothing known of its files holds any more.
            self._forget_files()
            self._store_id = self._manifest.store_id

    def _forget_files(self) -> None:
        for chunk in self._chunks.values():
            chunk.close()
        self._chunks.clear()
        self._heads.clear()
        self._index = OpenIndex(self.directory)

    def trajectories(self) -> Mapping[str, bool]:
        """Every readable trajectory, sorted -> whether it is finished. Scans what was added to chunks."""
        with self._lock:
            self._index.refresh()
            self._refresh()
            found = dict.fromkeys(self._manifest.entries, True)
            found |= dict.fromkeys(self._index.visible(self._manifest), False)
            return dict(sorted(found.items()))

    def _locate(self, trajectory: Handle | str) -> _Located:
        name = trajectory if isinstance(trajectory, str) else trajectory.trajectory
        self._refresh()
        head = self._manifest.entries.get(name)
        if isinstance(trajectory, Handle) and (head is None or checksum(head).hex() != trajectory.digest):
            if self._manifest.damaged_bytes:
                raise damaged(
                    name, str(self._manifest.path), found="no such entry", expected=trajectory.digest
                )
            raise gone(name, str(self.directory))
        if head is None:
            # The scan comes first: a trajectory that is finished between the two is found finished.
            self._index.refresh()
            self._refresh()
        entry = self._manifest.entry(name)
        if entry is not None:
            return _Located(
                trajectory=name,
                writer=entry.writer,
                generation=entry.generation,
                num_rows=entry.num_rows,
                segments=entry.segments,
                columns=self._manifest.layouts.get(entry.layout),
                is_finished=True,
                num_writers=1,
            )
        found = self._index.visible(self._manifest).get(name)
        if found is None:
            raise unknown_trajectory(name, str(self.directory))
        return _Located(
            trajectory=name,
            writer=found.writer,
            generation=found.generation,
            num_rows=max(ref.stop for ref in found.segments),
            segments=tuple(found.segments),
            columns=None,
            is_finished=False,
            num_writers=self._index.num_writers(name, self._manifest),
        )

    def stat(self, trajectory: Handle | str) -> Stat:
        """What is known of a trajectory. Raises: MissingTrajectoryError, GoneError, RecordError for damage."""
        with self._lock:
            located = self._locate(trajectory)
            first = self._head(located, located.segments[0])
            if first is None:
                raise damaged(
                    located.trajectory,
                    str(self.directory),
                    found="a damaged segment",
                    expected="its first segment",
                )
            return Stat(
                trajectory=located.trajectory,
                finished=located.is_finished,
                num_rows=located.num_rows,
                columns=dict(self._columns(located)),
                meta=first.meta,
                generation=located.generation,
                num_writers=located.num_writers,
            )

    def columns(self, trajectory: Handle | str) -> Mapping[str, int]:
        """Column -> bytes per row, as far as the heads that verify say. Raises: what `stat` raises but for damage."""
        with self._lock:
            return dict(self._columns(self._locate(trajectory)))

    def spans(self, trajectory: Handle | str) -> list[tuple[int, int]]:
        """(start, stop) of every segment on disk, in the order of appending. Raises: as `columns`."""
        with self._lock:
            return [(ref.start, ref.stop) for ref in self._locate(trajectory).segments]

    def _columns(self, located: _Located) -> Mapping[str, int]:
        if located.columns is not None:
            return located.columns
        columns: dict[str, int] = {}
        for ref in located.segments:
            head = self._head(located, ref)
            if head is not None:
                columns |= head.layout.columns
        return columns

    def read(
        self, trajectory: Handle | str, columns: Iterable[str], start: int, stop: int
    ) -> Mapping[str, bytes]:
        """Bytes of rows start .. stop - 1, verified; see Reader.read. start == stop gives empty bytes."""
        slices = self._answer(Request(trajectory=trajectory, columns=tuple(columns), start=start, stop=stop))
        if slices.absent:
            raise span_error(str(self.directory), slices.absent)
        return slices.data

    def read_available(self, request: Request) -> Slices:
        """What is there of a request, and exactly which spans are not; see Reader.read_available."""
        _check_rows(request)
        try:
            return self._answer(request)
        except MissingTrajectoryError:
            return _nothing(request, "never_written")
        except GoneError:
            return _nothing(request, "gone")
        except RecordError:
            return _nothing(request, "damaged")

    def _answer(self, request: Request) -> Slices:
        """Locate and read; again if rows turn out damaged because the trajectory went, or came anew, meanwhile."""
        _check_rows(request)
        with self._lock:
            located = self._locate(request.trajectory)
            for _ in range(MAX_READINGS):
                slices = self._read(request, located)
                if all(span.reason != "damaged" for span in slices.absent):
                    break
                before, located = located, self._locate(request.trajectory)
                if located == before:
                    break
            return slices

    def _read(self, request: Request, located: _Located) -> Slices:
        assembly = Assembly(located.trajectory, request)
        for ref in located.segments:
            if ref.start < request.stop and request.start < ref.stop:
                head = self._head(located, ref)
                if head is None:
                    assembly.lose(ref.start, ref.stop)
                else:
                    self._read_columns(located, ref, head, assembly)
        if assembly.unknown_columns():
            assembly.learn(self._columns(located))
        return assembly.slices()

    def _read_columns(
        self, located: _Located, ref: SegmentRef, head: SegmentHead, assembly: Assembly
    ) -> None:
        chunk = self._chunk(located.writer, ref.chunk)
        wanted = [column for column in assembly.columns if column in head.layout.columns]
        for offset, num_bytes, columns in merged(head, wanted):
            data = b"" if chunk is None else _read_or_nothing(chunk, offset, num_bytes)
            self.bytes_read += len(data)
            view = memoryview(data)
            for column in columns:
                begin, size = head.column_span(column)
                part = view[begin - offset : begin - offset + size]
                row_bytes = head.layout.columns[column]
                if len(part) == size and head.is_intact(column, part):
                    assembly.add(
                        column, Piece(start=ref.start, stop=ref.stop, row_bytes=row_bytes, data=part)
                    )
                else:
                    assembly.lose(ref.start, ref.stop, column)

    def _head(self, located: _Located, ref: SegmentRef) -> SegmentHead | None:
        key = (located.writer, ref.chunk, ref.offset)
        if key in self._heads:
            self._heads.move_to_end(key)
            return self._heads[key]
        chunk = self._chunk(located.writer, ref.chunk)
        head = None if chunk is None else _head_or_nothing(chunk, ref)
        fits = head is not None and (head.trajectory, head.start, head.num_rows) == (
            located.trajectory,
            ref.start,
            ref.num_rows,
        )
        if head is None or not fits:
            return None
        self.bytes_read += ref.head_bytes
        self._heads[key] = head
        if len(self._heads) > MAX_KEPT_HEADS:
            self._heads.popitem(last=False)
        return head

    def _chunk(self, writer: int, number: int) -> ChunkFile | None:
        """A chunk, kept open; None if it is gone or its header is damaged."""
        key = (writer, number)
        if key in self._chunks:
            self._chunks.move_to_end(key)
            return self._chunks[key]
        try:
            chunk = ChunkFile(self.directory, writer, number)
        except (FileNotFoundError, RecordError):
            return None
        except OSError as error:
            raise BackendError(
                f"Cannot open chunk {number} of writer {writer} in {self.directory}: {error.strerror}. A reader opens "
                f"up to {MAX_OPEN_CHUNKS} files. Check permissions and the limit of open files."
            ) from error
        # A deleted file takes space as long as it is open; in shared memory that is memory.
        for old in [k for k, held in self._chunks.items() if os.fstat(held.descriptor).st_nlink == 0]:
            self._chunks.pop(old).close()
        self._chunks[key] = chunk
        if len(self._chunks) > MAX_OPEN_CHUNKS:
            self._chunks.popitem(last=False)[1].close()
        return chunk

    def close(self) -> None:
        """Give back files and memory; a second call does nothing."""
        with self._lock:
            self._forget_files()
            self._manifest.close()

    def __enter__(self) -> DirectoryReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _read_or_nothing(chunk: ChunkFile, offset: int, num_bytes: int) -> bytes:
    """Bytes of a chunk; none where the medium cannot read them, which is damage like any other."""
    try:
        return chunk.read(offset, num_bytes)
    except OSError:
        return b""


def _head_or_nothing(chunk: ChunkFile, ref: SegmentRef) -> SegmentHead | None:
    try:
        return chunk.head_at(ref)
    except OSError:
        return None


def _check_rows(request: Request) -> None:
    if not 0 <= request.start <= request.stop <= MAX_ROW:
        raise RecordError(
            f"Read of trajectory {request.trajectory!r} refused; got rows {request.start}..{request.stop}. Rows are "
            "0 <= start <= stop. Correct the span."
        )


def _nothing(request: Request, reason: AbsentReason) -> Slices:
    name = request.trajectory if isinstance(request.trajectory, str) else request.trajectory.trajectory
    absent = tuple(
        AbsentSpan(trajectory=name, column=column, start=request.start, stop=request.stop, reason=reason)
        for column in dict.fromkeys(request.columns)
        if request.start < request.stop
    )
    return Slices(data={}, absent=absent)

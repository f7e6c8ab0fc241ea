"""The manifest: which trajectories are complete and where their segments lie; written last, after the data.

One append-only file of frames that all writers share under one lock, so that "who finished first" has an answer
without any clock. Frames: the store's random name, a writer was opened (writers are numbered from 1), a layout
(columns and bytes per row, once for all trajectories that have it), an entry (a trajectory is complete), a removal.
What entries do not name does not exist for readers of handles. A manifest is rewritten, atomically, when most of it is
removed entries. Never opens a chunk.
"""

from __future__ import annotations

import json
import os
import secrets
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from tracefp4.errors import RecordError
from tracefp4.store import disk
from tracefp4.store.frames import (
    HEADER_BYTES,
    MANIFEST_FILE,
    FileIdentity,
    Frame,
    check_header,
    encode_frame,
    file_header,
    scan,
)
from tracefp4.store.refusals import CHECKSUM_BYTES, checksum

MANIFEST_NAME, LOCK_NAME = "manifest", "lock"
REWRITE_SUFFIX = ".rewrite"
OPENED, LAYOUT, ENTRY, REMOVED, NAMED = 1, 2, 3, 4, 5
# A manifest smaller than this is never rewritten.
MIN_REWRITE_BYTES = 1 << 16
IDENTITY = FileIdentity(kind=MANIFEST_FILE)

_ENTRY = struct.Struct(f"<QQQHI{CHECKSUM_BYTES}s")
_REFERENCE = struct.Struct("<IQIQI")
_NUMBER = struct.Struct("<Q")


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentRef:
    """Where a segment lies."""

    chunk: int
    """Number of the chunk among its writer's."""
    offset: int
    """Offset of its frame."""
    head_bytes: int
    """Length of the frame's head."""
    start: int
    """First row."""
    num_rows: int
    """Rows."""

    @property
    def stop(self) -> int:
        """One past the last row."""
        return self.start + self.num_rows


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One complete trajectory."""

    trajectory: str
    """Its name."""
    writer: int
    """Number of the writer whose chunks hold it."""
    generation: int
    """Largest generation of its segments."""
    num_rows: int
    """One past its last row."""
    layout: bytes
    """Digest of its columns, a key of the manifest's layouts."""
    segments: tuple[SegmentRef, ...]
    """Its segments in the order of appending."""

    def to_bytes(self) -> bytes:
        """The head of its frame. Inverse: from_bytes."""
        name = self.trajectory.encode()
        fixed = _ENTRY.pack(
            self.writer, self.generation, self.num_rows, len(name), len(self.segments), self.layout
        )
        references = (
            _REFERENCE.pack(ref.chunk, ref.offset, ref.head_bytes, ref.start, ref.num_rows)
            for ref in self.segments
        )
        return b"".join([fixed, name, *references])

    @classmethod
    def from_bytes(cls, head: bytes) -> Entry:
        """The entry of a verified frame."""
        writer, generation, num_rows, name_bytes, _, layout = _ENTRY.unpack_from(head)
        name = entry_name(head)
        references = _REFERENCE.iter_unpack(head[_ENTRY.size + name_bytes :])
        segments = tuple(
            SegmentRef(chunk=chunk, offset=offset, head_bytes=size, start=start, num_rows=rows)
            for chunk, offset, size, start, rows in references
        )
        return cls(
            trajectory=name,
            writer=writer,
            generation=generation,
            num_rows=num_rows,
            layout=layout,
            segments=segments,
        )


@lru_cache(maxsize=256)
def decoded(head: bytes) -> Entry:
    """The entry of a verified frame, the last ones kept: one with many segments takes milliseconds."""
    return Entry.from_bytes(head)


def entry_name(head: bytes) -> str:
    """The trajectory of an entry's bytes, without decoding the rest."""
    name_bytes = _ENTRY.unpack_from(head)[3]
    return head[_ENTRY.size : _ENTRY.size + name_bytes].decode()


def entry_generation(head: bytes) -> int:
    """The generation of an entry's bytes, without decoding the rest."""
    return int(_ENTRY.unpack_from(head)[1])


def entry_chunks(head: bytes) -> set[tuple[int, int]]:
    """(writer, chunk) of every segment of an entry's bytes, without making its segments."""
    writer, _, _, name_bytes, _, _ = _ENTRY.unpack_from(head)
    references = _REFERENCE.iter_unpack(memoryview(head)[_ENTRY.size + name_bytes :])
    return {(writer, reference[0]) for reference in references}


def layout_to_bytes(columns: Mapping[str, int]) -> bytes:
    """Columns and their bytes per row, in order."""
    return json.dumps(list(columns.items()), separators=(",", ":")).encode()


def layout_from_bytes(data: bytes) -> dict[str, int]:
    """Inverse of layout_to_bytes."""
    return dict(json.loads(data))


class Manifest:
    """One process's view of a manifest; follows what others append and rewrite.

    One thread may refresh and append; others may look at what it knows.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.path = directory / MANIFEST_NAME
        self._descriptor = -1
        self._clear()

    def _clear(self) -> None:
        self.entries: dict[str, bytes] = {}
        self.layouts: dict[bytes, Mapping[str, int]] = {}
        # (writer, trajectory): unfinished trajectories of dead writers that were removed.
        self.hidden: set[tuple[int, str]] = set()
        self.next_writer = 1
        # Of this store, random: a directory that was deleted and made anew is another store.
        self.store_id = b""
        self.damaged_bytes = 0
        self._removed_bytes = 0
        self._position = 0

    def entry(self, trajectory: str) -> Entry | None:
        """The entry of a trajectory, or None."""
        head = self.entries.get(trajectory)
        return None if head is None else decoded(head)

    def is_current(self) -> bool:
        """Say whether nothing was appended or rewritten since `refresh`."""
        try:
            found, mine = os.stat(self.path), os.fstat(self._descriptor)
        except OSError:
            return False
        return (mine.st_ino, mine.st_dev, found.st_size) == (found.st_ino, found.st_dev, self._position)

    def refresh(self) -> bool:
        """Take over what was appended or rewritten since the last call.

        Returns: False if the directory has no manifest.
        Raises: RecordError if its header is damaged or of another schema.
        """
        try:
            found = os.stat(self.path)
        except FileNotFoundError:
            self.close()
            self._clear()
            return False
        if self._descriptor >= 0:
            mine = os.fstat(self._descriptor)
            if (mine.st_ino, mine.st_dev) != (found.st_ino, found.st_dev):
                self._reload()
                return True
            if found.st_size == self._position:
                return True
        else:
            self._clear()
            self._descriptor = os.open(self.path, os.O_RDONLY)
        if self._position == 0:
            check_header(disk.read_at(self._descriptor, HEADER_BYTES, 0), IDENTITY, self.path)
            self._position = HEADER_BYTES
        for item in scan(self._descriptor, IDENTITY, self._position):
            if isinstance(item, Frame):
                self._apply(item)
                self._position = item.end
            elif not item.is_tail:
                self.damaged_bytes += item.stop - item.start
        return True

    def _reload(self) -> None:
        # Every attribute changes at once from one whole view to another, for threads that look without a lock.
        fresh = Manifest(self.directory)
        fresh.refresh()
        self.close()
        self.__dict__.update(fresh.__dict__)

    def _apply(self, frame: Frame) -> None:
        if frame.kind == ENTRY:
            name = entry_name(frame.head)
            # The lock makes a second entry impossible while the first is there; the first would win.
            self.entries.setdefault(name, frame.head)
        elif frame.kind == LAYOUT:
            self.layouts[checksum(frame.head)] = layout_from_bytes(frame.head)
        elif frame.kind == OPENED:
            self.next_writer = max(self.next_writer, _NUMBER.unpack(frame.head)[0] + 1)
        elif frame.kind == NAMED:
            self.store_id = frame.head
        elif frame.kind == REMOVED:
            removed = json.loads(frame.head)
            for name in removed["trajectories"]:
                self._removed_bytes += len(self.entries.pop(name, b""))
            self._removed_bytes += len(frame.head)
            self.hidden |= {(writer, name) for writer, name in removed["unfinished"]}

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the store's lock with a view that is up to date. Raises: BackendError, RecordError."""
        with disk.locked(self.directory / LOCK_NAME):
            if not self.refresh():
                if any(self.directory.glob("*.chunk")):
                    raise no_manifest(self.directory)
                header = file_header(IDENTITY)
                self._replace(header + encode_frame(IDENTITY, len(header), NAMED, secrets.token_bytes(16)))
                self.refresh()
            yield

    def append(self, frames: Sequence[tuple[int, bytes]], *, durable: bool = True) -> None:
        """Append frames and sync; only while `locked`.

        A torn tail that a dead or failed writer left is cut off first: no reader accepted it, and nobody else writes.

        Raises: OSError. The first frames of this call may then be there all the same, whole.
        """
        ends, data = [self._position], b""
        for kind, head in frames:
            data += encode_frame(IDENTITY, ends[-1], kind, head)
            ends.append(ends[0] + len(data))
        with open(self.path, "r+b", buffering=0) as file:
            file.truncate(ends[0])
            try:
                disk.write_all(file.fileno(), data, ends[0])
            except OSError:
                written = os.fstat(file.fileno()).st_size
                file.truncate(max(end for end in ends if end <= written))
                raise
            if durable:
                disk.sync(file.fileno())
        self.refresh()

    def remove(self, trajectories: Iterable[str], unfinished: Iterable[tuple[int, str]]) -> None:
        """Append a removal; only while `locked`. Raises: OSError."""
        fields = {"trajectories": list(trajectories), "unfinished": [list(pair) for pair in unfinished]}
        self.append([(REMOVED, json.dumps(fields, separators=(",", ":")).encode())])

    def rewrite_if_sparse(self, *, writers_with_chunks: set[int]) -> bool:
        """Rewrite the file without what was removed, if that is most of it; only while `locked`.

        A damaged manifest is left as it is: a rewrite would destroy what is left of its damaged frames.

        Args:
            writers_with_chunks: writers that still have chunks; hidden trajectories of others need no mention.

        Returns: whether it was rewritten. Raises: OSError; the old file is then untouched.
        """
        size = os.stat(self.path).st_size
        if size < MIN_REWRITE_BYTES or 2 * self._removed_bytes < size or self.damaged_bytes:
            return False
        self.rewrite(writers_with_chunks=writers_with_chunks)
        return True

    def rewrite(self, *, writers_with_chunks: set[int]) -> None:
        """Write what this view knows as a new file in the place of the old one. Raises: OSError."""
        used = {Entry.from_bytes(head).layout for head in self.entries.values()}
        hidden = [[writer, name] for writer, name in sorted(self.hidden) if writer in writers_with_chunks]
        removal = json.dumps({"trajectories": [], "unfinished": hidden}, separators=(",", ":")).encode()
        name = self.store_id or secrets.token_bytes(16)
        frames = [(NAMED, name), (OPENED, _NUMBER.pack(self.next_writer - 1)), (REMOVED, removal)]
        frames += [(LAYOUT, layout_to_bytes(self.layouts[key])) for key in sorted(used & self.layouts.keys())]
        frames += [(ENTRY, head) for head in self.entries.values()]
        data = bytearray(file_header(IDENTITY))
        for kind, head in frames:
            data += encode_frame(IDENTITY, len(data), kind, head)
        self._replace(bytes(data))
        self.refresh()

    def _replace(self, data: bytes) -> None:
        partial = self.path.with_name(MANIFEST_NAME + REWRITE_SUFFIX)
        try:
            with open(partial, "wb", buffering=0) as file:
                disk.write_all(file.fileno(), data, 0)
                disk.sync(file.fileno())
            partial.replace(self.path)
        except OSError:
            partial.unlink(missing_ok=True)
            raise
        disk.sync_directory(self.directory)

    def open_writer(self, *, at_least: int) -> int:
        """Number a new writer, at least `at_least`; only while `locked`. Raises: OSError."""
        number = max(self.next_writer, at_least)
        self.append([(OPENED, _NUMBER.pack(number))])
        return number

    def close(self) -> None:
        """Close the file; `refresh` opens it again."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def no_manifest(directory: Path) -> RecordError:
    """The error for a directory with chunks whose manifest is gone."""
    return RecordError(
        f"Store {directory} refused: it holds chunks and no file {MANIFEST_NAME!r}. Only the manifest says which "
        "trajectories are complete. Rebuild it with rebuild_manifest, or treat its records as missing."
    )

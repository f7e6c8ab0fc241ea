"""The disk side of one writer: puts segments into its chunks and complete trajectories into the manifest.

Data first, then a sync, then the manifest's entry, then its sync: an entry never points at bytes that are not there.
Many trajectories that finish together share both syncs. Used by one thread. Never waits for anybody but the disk
and the manifest's lock, never decides what to drop.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tracefp4.errors import BackendError, RecordError, TraceFP4Error
from tracefp4.store import disk
from tracefp4.store.chunks import (
    ChunkAppender,
    chunk_numbers,
    pieces,
    running_path,
    segment_overhead,
)
from tracefp4.store.manifest import (
    ENTRY,
    LAYOUT,
    Entry,
    Manifest,
    SegmentRef,
    layout_to_bytes,
)
from tracefp4.store.protocol import Handle, Segment
from tracefp4.store.refusals import ConflictError, checksum

# Longest frame; also what one read of a column has to verify at most, and the memory of the writing thread.
MAX_PIECE_BYTES = 1 << 20


@dataclass(kw_only=True, slots=True)
class Written:
    """What is on disk of one trajectory."""

    trajectory: str
    """Its name."""
    generation: int = 0
    """Largest generation so far."""
    num_rows: int = 0
    """One past the last row so far."""
    columns: dict[str, int] = field(default_factory=dict)
    """Column -> bytes per row."""
    segments: list[SegmentRef] = field(default_factory=list)
    """Where its segments lie."""


class TrajectoryLog:
    """The chunks of one writer, and its way into the manifest. Not thread-safe."""

    def __init__(self, directory: Path, *, chunk_bytes: int, durable: bool) -> None:
        """Number this writer.

        Args:
            directory: of the store, created if absent.
            chunk_bytes: size at which a new chunk begins.
            durable: sync before saying that something is durable.

        Raises: BackendError if the directory cannot be used; RecordError if it is of another schema.
        """
        self.directory, self.uri = directory, store_uri(directory)
        self._chunk_bytes, self._durable = chunk_bytes, durable
        self._chunk: ChunkAppender | None = None
        self._next_chunk = 0
        # Trajectories with segments that are not synced.
        self.unsynced: set[str] = set()
        self._sync_refusal: BackendError | None = None
        self._unclosed: dict[str, bytes] = {}
        self.manifest = Manifest(directory)
        try:
            made = [path for path in (directory, *directory.parents) if not path.exists()]
            directory.mkdir(parents=True, exist_ok=True)
            for path in made if durable else []:
                disk.sync_directory(path.parent)
            with self.manifest.locked():
                self._remove_leftovers()
                numbers = chunk_numbers(directory)
                self.writer = self.manifest.open_writer(at_least=max((w + 1 for w, _ in numbers), default=1))
                self._running = disk.hold(running_path(directory, self.writer))
        except OSError as error:
            raise BackendError(
                f"Cannot use {directory} as a store: {error.strerror}. A store needs a directory that it may "
                "write. Choose another path."
            ) from error

    def _remove_leftovers(self) -> None:
        # Of writers that died, and of a rewrite that did not end; those of the living are held.
        for path in self.directory.glob("*.running"):
            if not disk.is_held(path):
                path.unlink(missing_ok=True)
        for path in self.directory.glob("*.rewrite"):
            path.unlink(missing_ok=True)

    def append(self, segment: Segment, written: Written) -> None:
        """Write one segment and note it. Raises: BackendError; earlier pieces of it may then be on disk."""
        try:
            if written.trajectory in self._unclosed:
                # A closing that came after these segments would close them too.
                self._close_trajectories()
            for piece in pieces(segment, max_bytes=MAX_PIECE_BYTES):
                written.segments.append(self._open_chunk().append(piece))
        except OSError as error:
            path = self._chunk.path if self._chunk else self.directory
            needed = segment.num_bytes + segment_overhead(segment)
            raise disk.refused(path, error, needed=needed) from error
        if self._unclosed:
            with suppress(OSError):
                self._close_trajectories()
        self.unsynced.add(written.trajectory)
        written.generation = max(written.generation, segment.generation)
        written.num_rows = max(written.num_rows, segment.stop)
        for name, data in segment.columns.items():
            written.columns.setdefault(name, len(data) // segment.num_rows)

    def _open_chunk(self) -> ChunkAppender:
        if self._chunk is not None and self._chunk.size >= self._chunk_bytes:
            self._sync_chunk(self._chunk)
            self.seal()
        if self._chunk is None:
            self._chunk = ChunkAppender(self.directory, self.writer, self._next_chunk)
            self._next_chunk += 1
        return self._chunk

    def seal(self) -> None:
        """Close the chunk; what follows goes to a new one."""
        if self._chunk is not None:
            self._chunk.close()
            self._chunk = None

    def close_trajectory(self, trajectory: str, entry: bytes = b"") -> None:
        """Say in the chunk that segments so far are no longer open; what a full disk refuses is tried again later."""
        self._unclosed[trajectory] = entry
        with suppress(OSError):
            self._close_trajectories()

    def _close_trajectories(self) -> None:
        for trajectory, entry in list(self._unclosed.items()):
            self._open_chunk().close_trajectory(trajectory, entry)
            del self._unclosed[trajectory]

    def sync(self) -> None:
        """Make all segments survive a loss of power.

        Raises: BackendError, once, if any sync since the last call failed: which of the trajectories in
        `unsynced` survive is then unknown. A second sync of the same file would claim success, so none is tried.
        """
        if self._chunk is not None:
            self._sync_chunk(self._chunk)
        if self._sync_refusal is not None:
            refusal, self._sync_refusal = self._sync_refusal, None
            self.seal()
            raise refusal
        self.unsynced.clear()

    def _sync_chunk(self, chunk: ChunkAppender) -> None:
        try:
            if self._durable:
                chunk.sync()
        except OSError as error:
            self._sync_refusal = disk.refused(chunk.path, error, needed=chunk.size)

    def commit(self, finished: Sequence[Written]) -> Mapping[str, Handle | TraceFP4Error]:
        """Make trajectories complete, after `sync`.

        Returns: name -> handle, or why there is none (ConflictError: another writer was first; BackendError: the
        manifest could not be written, and readers may or may not see the trajectory).
        """
        try:
            with self.manifest.locked():
                results = self._commit_locked(finished)
        except OSError as error:
            needed = sum(len(self._entry(written, b"").to_bytes()) for written in finished)
            refusal = disk.refused(self.manifest.path, error, needed=needed)
            results = {written.trajectory: refusal for written in finished}
        except (BackendError, RecordError) as refused:
            results = {written.trajectory: refused for written in finished}
        for written in finished:
            entry = self.manifest.entries.get(written.trajectory, b"")
            is_mine = isinstance(results[written.trajectory], Handle)
            self.close_trajectory(written.trajectory, entry if is_mine else b"")
        return results

    def _commit_locked(self, finished: Sequence[Written]) -> dict[str, Handle | TraceFP4Error]:
        results: dict[str, Handle | TraceFP4Error] = {}
        frames: list[tuple[int, bytes]] = []
        layouts = set(self.manifest.layouts)
        for written in finished:
            if written.trajectory in self.manifest.entries:
                results[written.trajectory] = self._finished_by_another(written.trajectory)
                continue
            layout = layout_to_bytes(written.columns)
            key = checksum(layout)
            if key not in layouts:
                layouts.add(key)
                frames.append((LAYOUT, layout))
            entry = self._entry(written, key)
            frames.append((ENTRY, entry.to_bytes()))
            results[written.trajectory] = handle_of(entry, self.uri)
        if frames:
            self.manifest.append(frames, durable=self._durable)
        return results

    def _entry(self, written: Written, layout: bytes) -> Entry:
        return Entry(
            trajectory=written.trajectory,
            writer=self.writer,
            generation=written.generation,
            num_rows=written.num_rows,
            layout=layout,
            segments=tuple(written.segments),
        )

    def knows_complete(self, trajectory: str) -> bool:
        """Say whether a trajectory is complete, if this view of the manifest is not behind; commit decides."""
        return trajectory in self.manifest.entries and self.manifest.is_current()

    def finished(self, trajectory: str) -> Handle | None:
        """The handle of a trajectory that this writer finished and nobody removed, as far as it knows."""
        entry = self.manifest.entry(trajectory)
        return handle_of(entry, self.uri) if entry is not None and entry.writer == self.writer else None

    def _finished_by_another(self, trajectory: str) -> ConflictError:
        return ConflictError(
            f"Trajectory {trajectory!r} refused in {self.directory}: it is complete there already, and the first "
            "stays. A name belongs to one writer. Give trajectories names of their own, or remove the old one."
        )

    def close(self) -> None:
        """Give back the files; what is open stays unfinished."""
        with suppress(OSError):
            self._close_trajectories()
        self.seal()
        os.close(self._running)
        running_path(self.directory, self.writer).unlink(missing_ok=True)
        self.manifest.close()


def store_uri(directory: Path) -> str:
    """The name of a directory's store in its handles."""
    return f"file:{directory.resolve()}"


def handle_of(entry: Entry, uri: str) -> Handle:
    """The handle of a complete trajectory."""
    return Handle(
        store=uri,
        trajectory=entry.trajectory,
        num_rows=entry.num_rows,
        digest=checksum(entry.to_bytes()).hex(),
        generation=entry.generation,
    )

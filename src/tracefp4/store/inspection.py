"""Looking over a whole directory: check every checksum, and rebuild a manifest that was lost or damaged.

For people and tools, not for a running trainer: both read every chunk. A check changes nothing and names everything
that is damaged. A rebuild writes the manifest only, from the entries that writers also leave in their chunks.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tracefp4.errors import RecordError
from tracefp4.store import disk
from tracefp4.store.chunks import (
    CLOSED,
    SEGMENT,
    ChunkFile,
    chunk_numbers,
    chunk_path,
    entry_of,
    trajectory_of,
)
from tracefp4.store.frames import HEADER_BYTES, Frame, Gap, scan
from tracefp4.store.manifest import IDENTITY, LOCK_NAME, MANIFEST_NAME, Manifest, decoded, layout_to_bytes
from tracefp4.store.protocol import Request
from tracefp4.store.reader import DirectoryReader
from tracefp4.store.refusals import AbsentSpan, MissingTrajectoryError, checksum


@dataclass(frozen=True, kw_only=True, slots=True)
class DamagedBytes:
    """Bytes of one file that no frame accounts for."""

    file: str
    """Name of the file."""
    start: int
    """First byte."""
    stop: int
    """One past the last byte."""
    is_tail: bool
    """At the end of the file: being written just then, or torn by a death; no finished trajectory lies there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreReport:
    """What a check found."""

    num_finished: int
    """Complete trajectories."""
    unfinished: tuple[str, ...]
    """Names of readable trajectories that nobody finished."""
    lost: tuple[AbsentSpan, ...]
    """Every span of a readable trajectory that was written and does not verify."""
    damaged: tuple[DamagedBytes, ...]
    """Every gap inside or behind the frames of a file."""
    refused: tuple[str, ...]
    """Chunks none of which can be read, each with its reason."""
    num_bytes: int
    """Bytes of all chunks."""

    @property
    def is_intact(self) -> bool:
        """Whether all that was ever readable still is; torn tails are no loss of that."""
        return not (self.lost or self.refused or any(not gap.is_tail for gap in self.damaged))


def check_store(path: str | os.PathLike[str]) -> StoreReport:
    """Read and verify everything in a directory; changes nothing.

    Raises: BackendError if there is no such directory; RecordError for another schema, for a manifest that is
    missing or whose header is damaged, and for a directory that is no store.
    """
    directory = Path(path)
    _check_is_store(directory)
    damaged: list[DamagedBytes] = []
    refused: list[str] = []
    num_bytes = 0
    with DirectoryReader(directory) as reader:
        names = reader.trajectories()
        lost = [span for name in names for span in _lost_spans(reader, name)]
        for key in chunk_numbers(directory):
            # A chunk that retention removes meanwhile holds nothing that can be read.
            with suppress(FileNotFoundError):
                num_bytes += chunk_path(directory, *key).stat().st_size
                try:
                    damaged += _chunk_gaps(directory, key)
                except RecordError as refusal:
                    refused.append(str(refusal))
    manifest = directory / MANIFEST_NAME
    if manifest.exists():
        with open(manifest, "rb") as opened:
            damaged += [
                _gap(manifest, item)
                for item in scan(opened.fileno(), IDENTITY, HEADER_BYTES)
                if isinstance(item, Gap)
            ]
    return StoreReport(
        num_finished=sum(names.values()),
        unfinished=tuple(name for name, finished in names.items() if not finished),
        lost=tuple(lost),
        damaged=tuple(damaged),
        refused=tuple(refused),
        num_bytes=num_bytes,
    )


def _check_is_store(directory: Path) -> None:
    """Refuse a directory that holds nothing of a store: a wrong path is not an intact store."""
    if directory.is_dir() and not (directory / MANIFEST_NAME).exists() and not chunk_numbers(directory):
        raise RecordError(
            f"Directory {directory} refused: it holds neither a file {MANIFEST_NAME!r} nor chunks. A store has both. "
            "Check the path; a run keeps its records in RUN/records."
        )


def _chunk_gaps(directory: Path, key: tuple[int, int]) -> list[DamagedBytes]:
    """Gaps of one chunk. Raises: RecordError if none of it can be read; FileNotFoundError."""
    file = chunk_path(directory, *key)
    size = file.stat().st_size
    if size < HEADER_BYTES:
        # Its writer died between creating and heading it.
        return [DamagedBytes(file=file.name, start=0, stop=size, is_tail=True)]
    chunk = ChunkFile(directory, *key)
    try:
        found = scan(chunk.descriptor, chunk.identity, HEADER_BYTES)
        return [_gap(file, item) for item in found if isinstance(item, Gap)]
    finally:
        chunk.close()


def _gap(file: Path, gap: Gap) -> DamagedBytes:
    return DamagedBytes(file=file.name, start=gap.start, stop=gap.stop, is_tail=gap.is_tail)


def _lost_spans(reader: DirectoryReader, name: str) -> list[AbsentSpan]:
    """Damaged spans of one trajectory, segment by segment so that memory stays small."""
    lost: list[AbsentSpan] = []
    with suppress(MissingTrajectoryError):  # removed meanwhile
        columns = tuple(reader.columns(name))
        for start, stop in reader.spans(name):
            request = Request(trajectory=name, columns=columns, start=start, stop=stop)
            lost += [span for span in reader.read_available(request).absent if span.reason == "damaged"]
    return list(dict.fromkeys(lost))


def rebuild_manifest(path: str | os.PathLike[str]) -> tuple[str, ...]:
    """Write a manifest anew from what is left of it and from what chunks say of themselves.

    A trajectory comes back if its writer closed it as complete and all of its chunks are there. One that retention
    had removed comes back too if its chunks were not yet deleted; of several under one name the newest writer's does.

    Returns: names that the old manifest did not have.
    Raises: BackendError if the disk refuses; the old manifest is then untouched. RecordError for a directory that is
    no store; nothing is then written.
    """
    directory = Path(path)
    _check_is_store(directory)
    with disk.locked(directory / LOCK_NAME):
        manifest = Manifest(directory)
        with suppress(RecordError):
            manifest.refresh()
        known = set(manifest.entries)
        numbers = chunk_numbers(directory)
        for key in numbers:
            # A damaged header hides the whole chunk.
            with suppress(RecordError):
                _take_entries(directory, key, manifest, known)
        chunks = set(numbers)
        for name, head in list(manifest.entries.items()):
            entry = decoded(head)
            if name not in known and any((entry.writer, ref.chunk) not in chunks for ref in entry.segments):
                del manifest.entries[name]
        manifest.next_writer = max([manifest.next_writer, *(writer + 1 for writer, _ in numbers)])
        try:
            manifest.rewrite(writers_with_chunks={writer for writer, _ in numbers})
        except OSError as error:
            raise disk.refused(manifest.path, error, needed=1 << 16) from error
        restored = tuple(sorted(manifest.entries.keys() - known))
        manifest.close()
    return restored


def _take_entries(directory: Path, key: tuple[int, int], manifest: Manifest, known: set[str]) -> None:
    chunk = ChunkFile(directory, *key)
    try:
        for item in scan(chunk.descriptor, chunk.identity, HEADER_BYTES):
            if not isinstance(item, Frame):
                continue
            if item.kind == CLOSED and entry_of(item) and trajectory_of(item) not in known:
                manifest.entries[trajectory_of(item)] = entry_of(item)
            elif item.kind == SEGMENT:
                head = chunk.head_of(item)
                if head is not None:
                    layout = layout_to_bytes(head.layout.columns)
                    manifest.layouts[checksum(layout)] = dict(head.layout.columns)
    finally:
        chunk.close()

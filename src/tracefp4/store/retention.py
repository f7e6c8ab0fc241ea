"""Removing trajectories from a directory, beside readers and writers.

A removal is a frame in the manifest, synced before anything is deleted; from then on no reader finds the trajectory.
Chunks are deleted afterwards, whole, when nothing in them can be read any more, and for each writer in the order of
their numbers: a chunk says which earlier segments are closed, so no later one may go before an earlier one. A reader
that still has the file open reads right bytes or is told that they are gone. What a running writer has not finished
is never removed. Never rewrites a chunk.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

from tracefp4.errors import RecordError
from tracefp4.store import disk
from tracefp4.store.chunks import chunk_numbers, chunk_path, running_path
from tracefp4.store.manifest import Manifest, entry_chunks, entry_generation
from tracefp4.store.protocol import Removed
from tracefp4.store.scanning import OpenIndex


class DirectoryRetention:
    """Retention of one directory. Not thread-safe; several processes may each have one."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open the store; a directory that is absent or empty has nothing to remove."""
        self.directory = Path(path)
        self._manifest = Manifest(self.directory)
        self._index = OpenIndex(self.directory)

    def forget(self, below: int) -> Removed:
        """Remove every trajectory whose generation is < `below`; see Retention."""
        return self._remove(lambda name, generation: generation < below)

    def keep_last(self, generations: int) -> Removed:
        """Remove all but the trajectories of the newest `generations` (at least 1) distinct generations."""
        if generations < 1:
            raise RecordError(
                f"Retention refused; got {generations} generations to keep. At least 1 can be kept. To remove "
                "everything, delete the directory."
            )
        self._manifest.refresh()
        self._index.refresh()
        known = {entry_generation(head) for head in self._manifest.entries.values()}
        known |= {found.generation for found in self._index.visible(self._manifest).values()}
        return self.forget(min(sorted(known)[-generations:], default=0))

    def discard(self, from_generation: int) -> Removed:
        """Remove every trajectory whose generation is >= `from_generation`; see Retention."""
        return self._remove(lambda name, generation: generation >= from_generation)

    def remove(self, trajectories: Iterable[str]) -> Removed:
        """Remove trajectories by name; unknown ones are ignored."""
        names = set(trajectories)
        return self._remove(lambda name, generation: name in names)

    def _remove(self, is_removed: Callable[[str, int], bool]) -> Removed:
        """Remove what a rule says. Raises: BackendError if the manifest cannot be written; nothing is then removed."""
        if not self.directory.is_dir():
            return Removed(num_trajectories=0, trajectories=(), num_bytes=0)
        # The first scan of a large store takes long: it is done before the lock, which writers need, is taken.
        self._index.refresh()
        with self._manifest.locked():
            # Listed before the scan: a chunk that is begun and ended after the scan holds what the scan has not seen.
            numbers = chunk_numbers(self.directory)
            self._index.refresh()
            entries = self._manifest.entries
            finished = [name for name, head in entries.items() if is_removed(name, entry_generation(head))]
            unfinished = [
                (writer, name)
                for (writer, name), found in self._index.open.items()
                if (writer, name) not in self._manifest.hidden
                and is_removed(name, found.generation)
                and not self._is_running(writer)
            ]
            try:
                if finished or unfinished:
                    self._manifest.remove(finished, unfinished)
                num_bytes = self._delete_chunks(numbers)
                self._manifest.rewrite_if_sparse(
                    writers_with_chunks={writer for writer, _ in chunk_numbers(self.directory)}
                )
            except OSError as error:
                raise disk.refused(self._manifest.path, error, needed=1 << 16) from error
        names = sorted({*finished, *(name for _, name in unfinished)})
        return Removed(num_trajectories=len(names), trajectories=tuple(names), num_bytes=num_bytes)

    def _is_running(self, writer: int) -> bool:
        return disk.is_held(running_path(self.directory, writer))

    def _delete_chunks(self, numbers: list[tuple[int, int]]) -> int:
        """Delete those of some chunks that hold nothing readable; return their bytes."""
        used = {chunk for head in self._manifest.entries.values() for chunk in entry_chunks(head)}
        for (writer, name), found in self._index.open.items():
            if (writer, name) not in self._manifest.hidden:
                used |= {(writer, ref.chunk) for ref in found.segments}
        last = dict(numbers)
        num_bytes, blocked = 0, set[int]()
        for writer, number in numbers:
            is_growing = number == last[writer] and self._is_running(writer)
            if (writer, number) in used or is_growing or writer in blocked:
                blocked.add(writer)
                continue
            path = chunk_path(self.directory, writer, number)
            num_bytes += path.stat().st_size
            path.unlink()
        if num_bytes:
            disk.sync_directory(self.directory)
        return num_bytes

    def close(self) -> None:
        """Close the manifest; the next call opens it again."""
        self._manifest.close()

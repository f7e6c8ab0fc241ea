"""What chunks hold that the manifest does not name: segments of trajectories that are not, or never were, finished.

Reads frame heads only, in order, and remembers how far it came, so that a second look costs what was added since. A
trajectory that its writer closed (finished or given up) is forgotten at once, so memory follows what is open. Never
reads columns, never decides what to remove.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tracefp4.errors import RecordError
from tracefp4.store.chunks import (
    CLOSED,
    SEGMENT,
    ChunkFile,
    chunk_numbers,
    chunk_path,
    reference_to,
    trajectory_of,
)
from tracefp4.store.frames import HEADER_BYTES, Frame, Gap, scan
from tracefp4.store.manifest import Manifest, SegmentRef


@dataclass(kw_only=True, slots=True)
class OpenTrajectory:
    """Segments of a trajectory that its writer has not closed."""

    writer: int
    """Number of the writer."""
    generation: int = 0
    """Largest generation so far."""
    segments: list[SegmentRef] = field(default_factory=list)
    """Its segments in the order of appending."""


class OpenIndex:
    """The open trajectories of a directory. Not thread-safe."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.open: dict[tuple[int, str], OpenTrajectory] = {}
        # Damage found: (writer, chunk) -> gaps inside it, or the reason why none of it can be read.
        self.gaps: dict[tuple[int, int], list[Gap]] = {}
        self.refused: dict[tuple[int, int], str] = {}
        self._positions: dict[tuple[int, int], int] = {}

    def refresh(self) -> None:
        """Take over what was appended, created and removed since the last call."""
        while not self._is_settled():
            pass

    def _is_settled(self) -> bool:
        # Listing is not atomic. A listed chunk that is gone when it is opened may have been followed, in the listing,
        # by one that was gone already and said which of its trajectories are closed: list again.
        numbers = chunk_numbers(self.directory)
        for vanished in self._positions.keys() - set(numbers):
            self._drop_chunk(vanished)
        try:
            for key in numbers:
                self._scan(key)
        except FileNotFoundError:
            return False
        return True

    def _scan(self, key: tuple[int, int]) -> None:
        position = self._positions.get(key, HEADER_BYTES)
        size = os.stat(chunk_path(self.directory, *key)).st_size
        if size <= position or key in self.refused:
            return
        try:
            chunk = ChunkFile(self.directory, *key)
        except RecordError as refusal:
            self.refused[key] = str(refusal)
            self._positions[key] = position
            return
        try:
            for item in scan(chunk.descriptor, chunk.identity, position):
                if isinstance(item, Frame):
                    self._take(key, item)
                    self._positions[key] = item.end
                elif not item.is_tail:
                    self.gaps.setdefault(key, []).append(item)
        finally:
            chunk.close()

    def _take(self, key: tuple[int, int], frame: Frame) -> None:
        if frame.kind not in (SEGMENT, CLOSED):
            return
        writer, number = key
        pair = (writer, trajectory_of(frame))
        if frame.kind == CLOSED:
            self.open.pop(pair, None)
            return
        ref, generation = reference_to(frame, number)
        found = self.open.setdefault(pair, OpenTrajectory(writer=writer))
        found.segments.append(ref)
        found.generation = max(found.generation, generation)

    def _drop_chunk(self, key: tuple[int, int]) -> None:
        for known in (self._positions, self.gaps, self.refused):
            known.pop(key, None)
        for pair, found in list(self.open.items()):
            if pair[0] == key[0]:
                found.segments = [ref for ref in found.segments if ref.chunk != key[1]]
                if not found.segments:
                    del self.open[pair]

    def visible(self, manifest: Manifest) -> dict[str, OpenTrajectory]:
        """Name -> unfinished trajectory: not complete, not removed; of several writers the one opened last."""
        found: dict[str, OpenTrajectory] = {}
        for (writer, name), opened in sorted(self.open.items(), key=lambda item: item[0]):
            if name not in manifest.entries and (writer, name) not in manifest.hidden:
                found[name] = opened
        return found

    def num_writers(self, trajectory: str, manifest: Manifest) -> int:
        """Writers with open, unremoved segments under a name."""
        pairs: Iterable[tuple[int, str]] = self.open.keys() - manifest.hidden
        return sum(name == trajectory for _, name in pairs)

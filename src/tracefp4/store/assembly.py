"""Putting the answer to one request together from verified pieces, and saying which rows no piece covers.

Works for any backend that can name pieces (rows of a column with their bytes). Rows that no piece covers become zero
bytes and an absent span: damaged if a piece for them was there and did not verify, never written otherwise. Never
reads anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from tracefp4.store.chunks import SegmentHead
from tracefp4.store.protocol import Request, Slices
from tracefp4.store.refusals import AbsentReason, AbsentSpan


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Verified rows of one column."""

    start: int
    """First row."""
    stop: int
    """One past the last row."""
    row_bytes: int
    """Bytes per row."""
    data: bytes | memoryview
    """Bytes of all its rows."""


class Assembly:
    """One request's answer in the making."""

    def __init__(self, trajectory: str, request: Request) -> None:
        self.trajectory, self.start, self.stop = trajectory, request.start, request.stop
        self.columns = tuple(dict.fromkeys(request.columns))
        self._pieces: dict[str, list[Piece]] = {column: [] for column in self.columns}
        self._lost: dict[str, list[tuple[int, int]]] = {column: [] for column in self.columns}
        self._row_bytes: dict[str, int] = {}

    def add(self, column: str, piece: Piece) -> None:
        """Take verified rows."""
        self._pieces[column].append(piece)
        self._row_bytes[column] = piece.row_bytes

    def lose(self, start: int, stop: int, column: str | None = None) -> None:
        """Note rows that are there but damaged, of one column or, if its head is damaged, of any."""
        for name in self.columns if column is None else [column]:
            self._lost[name].append((start, stop))

    def unknown_columns(self) -> bool:
        """Say whether the bytes per row of some column are not known from its pieces."""
        return len(self._row_bytes) < len(self.columns)

    def learn(self, columns: Mapping[str, int]) -> None:
        """Take over bytes per row from elsewhere."""
        self._row_bytes = dict(columns) | self._row_bytes

    def slices(self) -> Slices:
        """The answer."""
        data: dict[str, bytes] = {}
        absent: list[AbsentSpan] = []
        for column in self.columns:
            pieces = sorted(self._pieces[column], key=lambda piece: piece.start)
            holes = list(self._holes(pieces))
            absent += (span for hole in holes for span in self._named(column, *hole))
            if column in self._row_bytes:
                data[column] = self._joined(pieces, holes, self._row_bytes[column])
        return Slices(data=data, absent=tuple(absent))

    def _holes(self, pieces: Sequence[Piece]) -> Iterator[tuple[int, int]]:
        row = self.start
        for piece in pieces:
            if row < piece.start:
                yield row, piece.start
            row = max(row, piece.stop)
        if row < self.stop:
            yield row, self.stop

    def _joined(self, pieces: Sequence[Piece], holes: Sequence[tuple[int, int]], row_bytes: int) -> bytes:
        parts: list[tuple[int, bytes | memoryview]] = [
            (start, bytes((stop - start) * row_bytes)) for start, stop in holes
        ]
        row = self.start
        for piece in pieces:
            # Pieces do not overlap, by the rule of appending; if they did, no row would come twice.
            begin, end = max(row, piece.start), min(self.stop, piece.stop)
            if begin < end:
                cut = memoryview(piece.data)[
                    (begin - piece.start) * row_bytes : (end - piece.start) * row_bytes
                ]
                parts.append((begin, cut))
                row = end
        parts.sort(key=lambda part: part[0])
        return b"".join(part for _, part in parts)

    def _named(self, column: str, start: int, stop: int) -> Iterator[AbsentSpan]:
        """A hole, cut where its reason changes."""
        lost = self._lost[column]
        edges = sorted({start, stop, *(min(max(edge, start), stop) for pair in lost for edge in pair)})
        spans: list[tuple[int, int, AbsentReason]] = []
        for begin, end in pairwise(edges):
            is_lost = any(first <= begin and end <= last for first, last in lost)
            reason: AbsentReason = "damaged" if is_lost else "never_written"
            if spans and spans[-1][2] == reason:
                spans[-1] = (spans[-1][0], end, reason)
            else:
                spans.append((begin, end, reason))
        for begin, end, reason in spans:
            yield AbsentSpan(trajectory=self.trajectory, column=column, start=begin, stop=end, reason=reason)


def merged(head: SegmentHead, columns: Sequence[str]) -> Iterator[tuple[int, int, list[str]]]:
    """Offset, length and columns of the reads that get some columns of a segment: neighbours come together."""
    places = sorted((*head.column_span(column), column) for column in columns)
    begin, end, names = 0, -1, list[str]()
    for offset, size, column in places:
        if names and offset == end:
            end, names = end + size, [*names, column]
            continue
        if names:
            yield begin, end - begin, names
        begin, end, names = offset, offset + size, [column]
    if names:
        yield begin, end - begin, names

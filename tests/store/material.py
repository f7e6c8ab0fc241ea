"""Segments whose every byte follows from its place, so that whoever reads one can tell whether it is right."""

import hashlib
from functools import lru_cache

from tracefp4.store import Handle, Request, Segment

WIDTHS = {"0.x": 24, "0.k": 7, "routed": 3, "valid": 1}


@lru_cache(maxsize=100_000)
def row(trajectory, column, index, width, salt=""):
    """The bytes of one row."""
    return hashlib.shake_128(f"{trajectory}|{column}|{index}|{salt}".encode()).digest(width)


def rows(trajectory, column, start, stop, *, salt="", width=None):
    """The bytes of some rows of one column."""
    width = WIDTHS[column] if width is None else width
    return b"".join(row(trajectory, column, index, width, salt) for index in range(start, stop))


def segment(trajectory, start, num_rows, *, columns=tuple(WIDTHS), salt="", generation=0, meta=b"m"):
    """A segment of right bytes; `salt` tells two authors apart."""
    stop = start + num_rows
    data = {column: rows(trajectory, column, start, stop, salt=salt) for column in columns}
    return Segment(
        trajectory=trajectory, start=start, num_rows=num_rows, columns=data, meta=meta, generation=generation
    )


def write(writer, trajectory, *, num_rows=12, span=5, columns=tuple(WIDTHS), salt="", generation=0):
    """Append a trajectory in spans and finish it."""
    for start in range(0, num_rows, span):
        part = segment(
            trajectory,
            start,
            min(span, num_rows - start),
            columns=columns,
            salt=salt,
            generation=generation,
            meta=b"meta",
        )
        assert writer.append(part)
    return writer.finish(trajectory)


def wrong_bytes(reader, target, num_rows, *, columns=tuple(WIDTHS), salts=("",)):
    """Read columns; return (columns with wrong bytes, absent spans). Right bytes are those of one author."""
    name = target.trajectory if isinstance(target, Handle) else target
    found = reader.read_available(Request(trajectory=target, columns=columns, start=0, stop=num_rows))
    absent = {column: set() for column in columns}
    for span in found.absent:
        absent[span.column] |= set(range(span.start, span.stop))
    wrong = []
    for salt in salts:
        wrong = [
            column
            for column, data in found.data.items()
            for index in range(num_rows)
            if index not in absent[column]
            and data[index * WIDTHS[column] : (index + 1) * WIDTHS[column]]
            != row(name, column, index, WIDTHS[column], salt)
        ]
        if not wrong:
            break
    assert all(len(found.data[column]) == num_rows * WIDTHS[column] for column in found.data)
    assert all(absent[column] == set(range(num_rows)) for column in set(columns) - found.data.keys())
    return wrong, found.absent

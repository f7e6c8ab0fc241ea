"""Where the rounding decisions of one sequence are: records already built, then rows of the running step log.

Positions 0 .. m-1 are described by records (of an earlier turn, of cached prefix pages, or of a log that was sealed),
positions m .. by one row each of the log. K and V of the first positions may have been computed once more under other
weights; `cache_rows` then names the rows that later tokens really read. Nothing here touches tensors of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tracefp4.guidance.record import Record


@dataclass(kw_only=True, eq=False, slots=True)
class History:
    """Sources of the record of one sequence, in order of position."""

    past: list[Record] = field(default_factory=list)
    """Adjacent records from position 0 on."""
    rows: list[int] = field(default_factory=list)
    """Log row of every position after them."""
    valid: list[bool] = field(default_factory=list)
    """For every entry of `rows`: False where the decisions must not be followed."""
    cache_rows: list[int] = field(default_factory=list)
    """Log rows whose K and V replace those of the positions 0, 1, ...; empty where nothing was computed again under
    other weights, else at least as long as `past`."""

    @property
    def num_past(self) -> int:
        """Positions that `past` describes."""
        return sum(record.length for record in self.past)

    @property
    def num_positions(self) -> int:
        """Positions described."""
        return self.num_past + len(self.rows)

    def append(self, rows: Sequence[int], *, valid: Sequence[bool]) -> None:
        """Add the next positions."""
        self.rows += rows
        self.valid += valid

    def fork(self) -> History:
        """Return a copy that grows on its own; records are shared, they never change."""
        return History(
            past=list(self.past),
            rows=list(self.rows),
            valid=list(self.valid),
            cache_rows=list(self.cache_rows),
        )

    def cache_rows_of_log(self) -> list[int]:
        """Log rows of K and V for the positions that `rows` describes."""
        replaced = self.cache_rows[self.num_past :]
        return replaced + self.rows[len(replaced) :]

    def seal(self, record: Record | None) -> None:
        """Replace everything by one record of all positions; no log row is named any more."""
        self.past = [] if record is None else [record]
        self.rows, self.valid, self.cache_rows = [], [], []


def joined(records: Sequence[Record]) -> Record:
    """Join adjacent records, at least one, in halves: every array is copied log2(count) times at most."""
    if len(records) == 1:
        return records[0]
    middle = len(records) // 2
    return joined(records[:middle]).concat(joined(records[middle:]))

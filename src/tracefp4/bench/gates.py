"""What a figure must reach before it is claimed, and how a measured row is judged by it.

    met = "ambition" if gate and aim hold, "gate" if the gate holds, "no" if it does not or the result was wrong

Every suite stores rows (`row.py`); `gate_table.py` says which figure of which row must be how large. This module reads
no file.
"""

from dataclasses import dataclass
from typing import Literal

from tracefp4.bench.row import BenchRow

Met = Literal["ambition", "gate", "no", "not judged"]
Figure = Literal["value", "ratio", "cost", "excess", "share"]
"""What of a row is judged: the value; how many times better than the peer; how many times the peer's value; how much
above the peer's value; how much of the limit."""
_UNIT = {"value": "", "ratio": "x", "cost": "x", "excess": "", "share": "%"}


def figure_of(row: BenchRow, figure: Figure) -> float | None:
    """Return a figure of a row; None where the row has no peer or no limit."""
    if figure == "cost":
        return row.value / row.peer_value if row.peer_value else None
    found: float | None = getattr(row, figure)
    return found


def shown(number: float, figure: Figure, unit: str = "") -> str:
    """Return a figure as people read it: shares in percent, three digits or whole numbers.

    Args:
        number: The figure.
        figure: Which one.
        unit: Of a value or an excess.
    """
    number = 100 * number if figure == "share" else number
    digits = f"{number:,.0f}" if abs(number) >= 100 else f"{number:.3g}"
    suffix = f" {unit}" if unit and figure in ("value", "excess") else _UNIT[figure]
    return digits + suffix


@dataclass(frozen=True, kw_only=True, slots=True)
class Bound:
    """A number that a figure must not miss."""

    figure: Figure
    """What is judged."""
    number: float
    """The bound itself, in the row's unit; a share as a fraction."""
    is_least: bool
    """Whether it is the smallest allowed figure; otherwise the largest."""
    unit: str = ""
    """Unit of a value or an excess."""

    def holds(self, row: BenchRow) -> bool | None:
        """Whether a row keeps the bound; None where it lacks the figure. NaN keeps none."""
        found = figure_of(row, self.figure)
        if found is None:
            return None
        return found >= self.number if self.is_least else found <= self.number

    def __str__(self) -> str:
        """The bound for people, e.g. `>= 3x`."""
        return f"{'>=' if self.is_least else '<='} {shown(self.number, self.figure, self.unit)}"


def at_least(number: float, figure: Figure = "value", unit: str = "") -> Bound:
    """Return a smallest allowed figure."""
    return Bound(figure=figure, number=number, is_least=True, unit=unit)


def at_most(number: float, figure: Figure = "value", unit: str = "") -> Bound:
    """Return a largest allowed figure."""
    return Bound(figure=figure, number=number, is_least=False, unit=unit)


@dataclass(frozen=True, kw_only=True, slots=True)
class Gate:
    """What one row must reach."""

    row: str
    """Id of the row; its part before the first dot is the suite."""
    text: str
    """What is claimed when the gate holds."""
    gate: Bound | None
    """Below it the claim is not made; None = the row has only an aim."""
    aim: Bound | None = None
    """What is aimed at; None = nothing beyond the gate."""
    hardware: str = ""
    """What the row's hardware must contain for the figure to count."""

    @property
    def suite(self) -> str:
        """The suite that measures the row."""
        return self.row.partition(".")[0]

    def met(self, row: BenchRow) -> Met:
        """Judge a row. A wrong result misses every gate; without the figure a gate cannot be judged."""
        if row.check is not None and not row.check.holds:
            return "no"
        passes = None if self.gate is None else self.gate.holds(row)
        aims = self.aim is not None and bool(self.aim.holds(row))
        if aims and (passes or self.gate is None):
            return "ambition"
        if passes is None:
            return "not judged"
        return "gate" if passes else "no"

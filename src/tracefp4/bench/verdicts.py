"""Every gate beside the newest stored figure that it judges: what holds, what is missed, and what nobody measured."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Literal

from tracefp4.bench.gates import Gate, Met, figure_of, shown
from tracefp4.bench.results import Results


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What is known of one gate, in words."""

    suite: str
    """Suite that measures it."""
    row: str
    """Id of the row."""
    text: str
    """The claim."""
    gate: str | None
    """The bound; None for a mere aim."""
    aim: str | None
    """What is aimed at."""
    figure: str | None
    """What was measured; None without a result, or where nobody was there to compare."""
    met: Met | Literal["no result"]
    """The verdict."""
    source: str | None
    """File, date, commit and hardware of the figure."""

    @property
    def is_missed(self) -> bool:
        """Whether there is a gate and nothing that shows that it holds."""
        return self.gate is not None and self.met not in ("gate", "ambition")

    def to_json(self) -> dict[str, object]:
        """Return every field."""
        return asdict(self)


def verdicts(gates: Iterable[Gate], results: Results) -> list[Verdict]:
    """Judge the newest stored row of every gate, on the gate's hardware.

    Args:
        gates: What is to be judged.
        results: What is stored.

    Returns:
        One verdict per gate, in order.
    """
    return [_verdict(gate, results) for gate in gates]


def _verdict(gate: Gate, results: Results) -> Verdict:
    figure = source = None
    met: Met | Literal["no result"] = "no result"
    stored = results.newest(gate.row, gate.hardware)
    if stored is not None:
        row, bound = stored.row, gate.gate or gate.aim
        assert bound is not None, "a gate has a bound or an aim"
        found, met = figure_of(row, bound.figure), gate.met(row)
        figure = None if found is None else shown(found, bound.figure, bound.unit)
        if row.check is not None and not row.check.holds:
            figure = f"wrong result: {row.check.error:g} {row.check.text}"
        machine = row.machine
        source = f"{stored.path.name}, {machine.date[:10]}, {machine.commit}, {machine.hardware}"
    return Verdict(
        suite=gate.suite,
        row=gate.row,
        text=gate.text,
        gate=None if gate.gate is None else str(gate.gate),
        aim=None if gate.aim is None else str(gate.aim),
        figure=figure,
        met=met,
        source=source,
    )

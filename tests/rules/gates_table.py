"""The table of docs/benchmarks.md, made from the gates and the stored results: `python -m tests.rules.gates_table`."""

import re
from pathlib import Path

from tracefp4.bench.gate_table import GATES, SUITES
from tracefp4.bench.results import read_results
from tracefp4.bench.verdicts import Verdict, verdicts

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "benchmarks.md"
SLOT = re.compile(r"(?<=<!-- gates:begin -->\n).*?(?=<!-- gates:end -->)", flags=re.S)


def _line(found: Verdict) -> str:
    date = found.source.split(", ")[1] if found.source else ""
    figure = f"{found.figure or '-'} ({date}): {found.met}" if found.source else found.met
    row = found.row.removeprefix(f"{found.suite}.")
    return f"| `{row}` | {found.text} | {found.gate or ''} | {found.aim or ''} | {figure} |"


def tables() -> str:
    """Return one table per suite."""
    judged = verdicts(GATES, read_results(ROOT / "benchmarks" / "results"))
    lines = []
    for suite in SUITES:
        lines += [f"### {suite}", "", "| row | claim | gate | aim | stored |", "|---|---|---|---|---|"]
        lines += [_line(found) for found in judged if found.suite == suite]
        lines.append("")
    return "\n".join(lines)


def write() -> None:
    """Put the tables between their markers."""
    text = DOCUMENT.read_text(encoding="utf-8")
    DOCUMENT.write_text(SLOT.sub(lambda _: tables(), text), encoding="utf-8")


if __name__ == "__main__":
    write()

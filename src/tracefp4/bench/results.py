"""Results on disk: rows of a suite with what they depend on, written whole, and the newest figure of every row.

A file is one JSON object with the keys "suite" and "rows". Suites may be measured in parts and kept in several files;
a row that occurs in several counts with its newest date. The suite of guidance has rows of its own, of which one
figure is judged. This module judges nothing.
"""

import json
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from tracefp4.bench.row import BenchRow, Check, Machine
from tracefp4.errors import ConfigError

SCHEMA_VERSION = 1
GUIDANCE_ROW = "guidance.bytes_at_the_floor"
_MACHINE = tuple(field.name for field in fields(Machine))
_ROW = tuple(field.name for field in fields(BenchRow) if field.name not in ("machine", "check"))


class Stored(NamedTuple):
    """A row and the file that holds it."""

    row: BenchRow
    """The row."""
    path: Path
    """Where it is."""


class Results(NamedTuple):
    """What a folder holds."""

    rows: list[Stored]
    """All rows, those of several files and hardware alike."""
    unread: list[Path]
    """JSON files without rows that a gate could judge."""

    def newest(self, row: str, hardware: str = "") -> Stored | None:
        """Return the newest row of an id.

        Args:
            row: Its id.
            hardware: What the row's hardware must contain.
        """
        found = [s for s in self.rows if s.row.id == row and hardware in s.row.machine.hardware]
        return max(found, key=lambda s: s.row.machine.date, default=None)


def write_rows(
    path: Path, rows: Sequence[BenchRow], *, suite: str, more: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Write the rows of a suite; the file appears whole or not at all.

    Args:
        path: The file.
        rows: What was measured; may be empty.
        suite: Name of the suite, the first part of every row's id.
        more: What else is stored beside the rows.

    Returns:
        What was written.
    """
    result = {"suite": suite, "schema_version": SCHEMA_VERSION, **(more or {})}
    result["rows"] = [row.to_json() for row in rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    # JSON has no NaN and no infinities; a figure that is none is stored as text
    text = json.dumps(_plain(result), indent=2, allow_nan=False) + "\n"
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
        file.write(text)
    os.replace(file.name, path)
    return result


def read_results(folder: Path) -> Results:
    """Read every JSON file of a folder.

    Raises:
        ConfigError: No such folder, a file that is no JSON, or a row that lacks a field.
    """
    if not folder.is_dir():
        raise ConfigError(
            f"bench gates: there is no folder {folder}; results are JSON files of the suites, by default in "
            "benchmarks/results. Pass --results DIR."
        )
    rows: list[Stored] = []
    unread: list[Path] = []
    for path in sorted(folder.glob("*.json")):
        found = [Stored(row, path) for row in _rows_of(path)]
        rows += found
        if not found:
            unread.append(path)
    return Results(rows, unread)


def _rows_of(path: Path) -> list[BenchRow]:
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        suite = result.get("suite") if isinstance(result, dict) else None
        if suite == "guidance":
            return _guidance_rows(result)
        if suite is None or result.get("schema_version") != SCHEMA_VERSION or "steps" in result:
            return []
        return [_row(found) for found in result["rows"]]
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise ConfigError(
            f"bench gates: {path} is no result of a suite ({type(problem).__name__}: {problem}). A result is JSON with "
            "a suite and rows, as `tracefp4 bench` writes it. Measure again, or move the file away."
        ) from problem


def _row(found: Mapping[str, Any]) -> BenchRow:
    own = {name: found[name] for name in _ROW}
    own["value"] = float(found["value"])
    check = found["check"]
    if check is not None:
        check = Check(error=float(check["error"]), allowed=check["allowed"], text=check["text"])
    machine = Machine(**{name: found[name] for name in _MACHINE})
    return BenchRow(**own, check=check, machine=machine)


def _guidance_rows(result: Mapping[str, Any]) -> list[BenchRow]:
    """The fewest activation bytes of a codec at or below the floor of BF16 beside BF16; none if no codec is."""
    best = next((row for row in result["rows"] if row["id"] == result["best"]), None)
    if best is None:
        return []
    machine = Machine(**{name: result[name] for name in _MACHINE})
    machine = replace(machine, hardware=f"{result['device']}; {machine.hardware}")
    return [
        BenchRow(
            id=GUIDANCE_ROW,
            metric="activation bytes per token of Qwen3.5-35B-A3B",
            value=float(best["activation_bytes"]),
            unit="bytes",
            backend=best["id"],
            peer="none",
            peer_value=None,
            limit=None,
            machine=machine,
            better="less",
            facts={"mean": best["mean"], "floor": result["floor"], "size": result["size"]},
        )
    ]


def _plain(found: Any) -> Any:
    """Replace numbers that JSON lacks by their names, which `float` reads back."""
    if isinstance(found, float) and not math.isfinite(found):
        return str(found)
    if isinstance(found, Mapping):
        return {key: _plain(value) for key, value in found.items()}
    if isinstance(found, list | tuple):
        return [_plain(value) for value in found]
    return found

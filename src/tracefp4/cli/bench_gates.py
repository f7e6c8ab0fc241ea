"""`tracefp4 bench gates`: which gates the stored results reach, and where each figure came from."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tracefp4.cli.options import JsonOption

if TYPE_CHECKING:
    from tracefp4.bench.verdicts import Verdict

EXIT_GATE_MISSED = 1
_COLORS = {"no": typer.colors.RED, "gate": typer.colors.GREEN, "ambition": typer.colors.GREEN}


def gates(
    results: Annotated[
        Path, typer.Option("--results", help="Folder with the stored results of the suites.", file_okay=False)
    ] = Path("benchmarks/results"),
    as_json: JsonOption = False,
) -> None:
    """Say which gates the stored results reach.

    Reads every JSON file of the folder; of a row in several files the newest
    counts. Nothing is measured. The exit code is 1 when a gate is missed,
    has no result, or cannot be judged because nobody was there to compare.
    """
    from tracefp4.bench.gate_table import GATES, SUITES
    from tracefp4.bench.results import read_results
    from tracefp4.bench.verdicts import verdicts

    found = read_results(results)
    judged = verdicts(GATES, found)
    missed = sum(verdict.is_missed for verdict in judged)
    if as_json:
        unread = [path.name for path in found.unread]
        lines = [verdict.to_json() for verdict in judged]
        typer.echo(json.dumps({"gates": lines, "missed": missed, "unread": unread}, indent=2))
    else:
        for suite in SUITES:
            _tell(suite, [verdict for verdict in judged if verdict.suite == suite])
        for path in found.unread:
            typer.echo(f"not read: {path}, no rows that a gate judges")
        gated = sum(verdict.gate is not None for verdict in judged)
        typer.echo(f"{gated - missed} of {gated} gates hold")
    if missed:
        raise typer.Exit(EXIT_GATE_MISSED)


def _tell(suite: str, judged: "list[Verdict]") -> None:
    """Print a line for every gate of a suite, and where its figures came from."""
    typer.secho(suite, bold=True)
    for found in judged:
        bounds = ", ".join(
            f"{name} {bound}" for name, bound in (("gate", found.gate), ("aim", found.aim)) if bound
        )
        figure = f" {found.figure}" if found.figure else ""
        typer.secho(f"  {found.met:10} ", fg=_COLORS.get(found.met), nl=False)
        typer.echo(f"{found.row.removeprefix(f'{suite}.')}:{figure} ({bounds}) {found.text}")
    for source in sorted({found.source for found in judged if found.source}):
        typer.echo(f"  from {source}")

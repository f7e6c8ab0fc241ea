"""`tracefp4 report`: render a run or a demo as one self-contained HTML file."""

from pathlib import Path
from typing import Annotated

import typer


def report(
    run: Annotated[Path, typer.Argument(help="A directory that `train` or `demo` wrote.")],
    out: Annotated[
        Path | None,
        typer.Option("--out", help="The file to write; by default report.html in the run directory."),
    ] = None,
) -> None:
    """Render a run directory as report.html."""
    from tracefp4.diagnostics.report import render

    typer.echo(f"report: {render(run, out=out)}")

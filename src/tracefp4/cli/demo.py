"""`tracefp4 demo`: the whole story on one CPU, from a fresh model to a table and a report."""

from pathlib import Path
from typing import Annotated

import typer

from tracefp4.cli.options import SeedOption


def demo(
    out: Annotated[
        Path, typer.Option("--out", help="Directory for checkpoints, metrics and the report.")
    ] = Path("runs/demo"),
    seed: SeedOption = 0,
    is_long: Annotated[
        bool, typer.Option("--long", help="The fifteen-minute form, with more training steps per arm.")
    ] = False,
) -> None:
    """Warm-start a small mixture of experts, train it in BF16, FP4 and guided FP4, and compare."""
    from tracefp4.cli.progress import DemoPrinter, print_table
    from tracefp4.diagnostics.report import render, summary_tables
    from tracefp4.rl.demo import run_demo

    result = run_demo(out, seed=seed, is_long=is_long, on_event=DemoPrinter())
    for table in summary_tables(result):
        print_table(table)
    typer.echo(f"report: {render(out)}")

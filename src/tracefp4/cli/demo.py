"""`tracefp4 demo`: the whole story on one CPU, from a fresh model to a table and a report."""

from pathlib import Path
from typing import Annotated

import typer

from tracefp4.cli.options import SeedOption

EXIT_CLAIM = 1
CLAIMS = {
    "closer_than_qat": "guided rounding is at least 4 times closer to the rollout than nearest rounding",
    "below_bf16": "guided rounding is no further from its rollout than BF16 is from BF16",
    "floor_is_real": "the BF16 pair differs as much as real engines do (.0005 to .004)",
    "bf16_learns": "the BF16 arm gains more than two standard errors of held-out accuracy",
    "guided_learns": "the guided FP4 arm gains more than two standard errors of held-out accuracy",
}


def demo(
    out: Annotated[
        Path, typer.Option("--out", help="Directory for checkpoints, metrics and the report.")
    ] = Path("runs/demo"),
    seed: SeedOption = 0,
) -> None:
    """Warm-start a small mixture of experts, train it in BF16, FP4 and guided FP4, and compare.

    Takes about four minutes on two CPU cores. Exit code 1: the run finished
    and one of its claims does not hold.
    """
    from tracefp4.cli.progress import DemoPrinter, print_table
    from tracefp4.diagnostics.report import render, summary_tables
    from tracefp4.study.demo import DemoSettings, run_demo

    result = run_demo(out, settings=DemoSettings(seed=seed), on_event=DemoPrinter())
    for table in summary_tables(result):
        print_table(table)
    for claim, holds in result["claims"].items():
        typer.echo(f"{'holds' if holds else 'DOES NOT HOLD'}: {CLAIMS[claim]}")
    typer.echo(f"\n{result['seconds']:.0f} s on {result['hardware']['cores']} cores; report: {render(out)}")
    if not all(result["claims"].values()):
        raise typer.Exit(EXIT_CLAIM)

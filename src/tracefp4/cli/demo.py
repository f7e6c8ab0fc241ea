"""`tracefp4 demo`: the whole story on one CPU or GPU, from a fresh model to a table and a report."""

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
    size: Annotated[
        str,
        typer.Option(
            "--size", metavar="tiny|large", help="tiny: on two CPU cores; large: 200M parameters, on one GPU."
        ),
    ] = "tiny",
    seconds: Annotated[
        float | None,
        typer.Option(
            "--seconds",
            help="Limit of time, kept by fewer steps; 0: none. By default 500 for large, none for tiny.",
            min=0.0,
        ),
    ] = None,
) -> None:
    """Warm-start a mixture of experts, train it in BF16, FP4 and guided FP4, and compare.

    Takes about four minutes on two CPU cores, and with `--size large` less
    than ten on a GPU. Exit code 1: the run finished and one of its claims
    does not hold.
    """
    from dataclasses import replace

    from tracefp4.cli.progress import DemoPrinter, print_table
    from tracefp4.diagnostics.report import render, summary_tables
    from tracefp4.errors import ConfigError
    from tracefp4.study.demo import SIZES, run_demo

    if size not in SIZES:
        raise ConfigError(f"--size: got {size!r}; allowed: {', '.join(SIZES)}. Name one of them.")
    settings = replace(SIZES[size], seed=seed)
    if seconds is not None:
        settings = replace(settings, time_limit_s=seconds)
    result = run_demo(out, settings=settings, on_event=DemoPrinter())
    for table in summary_tables(result):
        print_table(table)
    for claim, holds in result["claims"].items():
        typer.echo(f"{'holds' if holds else 'DOES NOT HOLD'}: {CLAIMS[claim]}")
    hardware, is_on_gpu = result["hardware"], result["placement"]["device"] == "cuda"
    machine = hardware["gpu"] if is_on_gpu else f"{hardware['cores']} cores"
    typer.echo(f"\n{result['seconds']:.0f} s on {machine}; report: {render(out)}")
    if not all(result["claims"].values()):
        raise typer.Exit(EXIT_CLAIM)

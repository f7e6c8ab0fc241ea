"""`tracefp4 bench trainer`: what following records costs a training step, beside the same step in BF16."""

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tracefp4.cli.options import JsonOption, SeedOption

if TYPE_CHECKING:
    from tracefp4.bench.row import BenchRow
    from tracefp4.diagnostics.report import Table

EXIT_GATE_MISSED = 1


def trainer(
    out: Annotated[
        Path, typer.Option("--out", help="Where the result is stored as JSON.", dir_okay=False)
    ] = Path("runs/bench_trainer.json"),
    model: Annotated[str, typer.Option("--model", help="A known shape, or tiny.")] = "qwen3-30b-a3b",
    layers: Annotated[int, typer.Option("--layers", help="Its first layers.", min=1)] = 4,
    device: Annotated[str, typer.Option("--device", help="cpu, cuda or auto.")] = "auto",
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Measure a training step on random weights of a real shape.

    BF16, FP4 rounded to nearest and FP4 following the records of our engine
    take turns on one model; a step is forward, backward and optimizer. The
    exit code is 1 when a gate was missed or a result was wrong.
    """
    from dataclasses import replace

    from tracefp4.bench.gate_table import is_missed
    from tracefp4.bench.results import write_rows
    from tracefp4.bench.trainer import default_sizes, run_trainer
    from tracefp4.cli.progress import DemoPrinter, print_table

    sizes = default_sizes(model, layers=layers)
    if model.lower() == "tiny":
        sizes = replace(sizes, tokens=(128,), micro_batch_tokens=64, length=32, turns=2)
    on_event = partial(typer.echo, err=True) if as_json else DemoPrinter()
    rows = run_trainer(sizes, device=device, seed=seed, on_event=on_event)
    result = write_rows(out, rows, suite="trainer")
    if as_json:
        typer.echo(json.dumps(result, indent=2))
    else:
        print_table(_table(rows))
        typer.echo(f"result stored in {out}")
    if any(is_missed(row) for row in rows):
        raise typer.Exit(EXIT_GATE_MISSED)


def _table(rows: "list[BenchRow]") -> "Table":
    from tracefp4.bench.gate_table import gates_of
    from tracefp4.diagnostics.report import Table

    lines = [
        (
            row.id.removeprefix("trainer."),
            f"{row.value:+.1f}%",
            f"{row.facts['nearest beyond BF16 %']:+.1f}%",
            f"{row.facts['bf16 ms']:,.1f}",
            f"{row.facts['guided ms']:,.1f}",
            f"{row.facts['guided peak GiB']:,.1f}",
            "yes" if row.check is not None and row.check.holds else "NO",
            ", ".join(gate.met(row) for gate in gates_of(row)) or "-",
        )
        for row in rows
    ]
    header = ("step", "guided", "nearest", "BF16 ms", "guided ms", "peak GiB", "right", "gate")
    caption = "guided, nearest: time beyond BF16's step. right: guidance leaves at most half of the differing codes."
    return Table(title="Training step", header=header, rows=tuple(lines), caption=caption)

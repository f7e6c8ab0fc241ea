"""`tracefp4 bench`: the group, and its suite `cpu`: how fast the ops are on this machine, beside other libraries."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from tracefp4.cli.bench_engine import engine
from tracefp4.cli.bench_gates import gates
from tracefp4.cli.bench_guidance import guidance
from tracefp4.cli.bench_kernels import kernels
from tracefp4.cli.bench_trainer import trainer
from tracefp4.cli.options import JsonOption

EXIT_GATE_MISSED = 1

bench = typer.Typer(
    no_args_is_help=True,
    help="Measure on this machine: the speed of the ops and of whole models, how close each guidance codec brings a "
    "trainer, and which figures reach their gates.",
)
bench.command("guidance")(guidance)
bench.command("kernels")(kernels)
bench.command("engine")(engine)
bench.command("trainer")(trainer)
bench.command("gates")(gates)


@bench.command("cpu")
def cpu(
    out: Annotated[
        Path, typer.Option("--out", help="Where the rows are stored as JSON.", dir_okay=False)
    ] = Path("runs/bench_cpu.json"),
    rows: Annotated[int, typer.Option("--rows", help="Rows of the matrix.", min=1)] = 4096,
    width: Annotated[int, typer.Option("--width", help="Its columns, a multiple of 32.", min=32)] = 4096,
    rounds: Annotated[
        int, typer.Option("--rounds", help="Turns of each contender; the best counts.", min=1)
    ] = 5,
    as_json: JsonOption = False,
) -> None:
    """Measure quantize+pack, dequantize, guided rounding and packing, in million elements a second.

    Libraries that are installed (torchao, compressed-tensors) run side by
    side in the same rounds; a missing one leaves its column empty and its
    gate unjudged. Gates are ratios to a peer in this run. The exit code is 1
    when a gate was missed. Close other programs first: two cores that are
    busy elsewhere measure the others.
    """
    from tracefp4.bench.cpu import run_cpu
    from tracefp4.bench.gate_table import is_missed
    from tracefp4.bench.results import write_rows
    from tracefp4.cli.progress import print_table
    from tracefp4.errors import ConfigError
    from tracefp4.ops.backend import explain

    if width % 32:
        raise ConfigError(
            f"--width must be a multiple of 32, the larger block size; got {width}. Try {width // 32 * 32}."
        )
    found = run_cpu(rows=rows, width=width, rounds=rounds, on_row=None if as_json else _announce)
    result = write_rows(out, found, suite="cpu")
    if as_json:
        typer.echo(json.dumps(result, indent=2))
    else:
        print_table(_table(found))
        for op in explain():
            if op["op"] in ("quantize", "dequantize", "guided_quantize"):
                typer.echo(f"{op['op']}: {op['backend']}, {op['reason']}")
        typer.echo(f"{found[0].machine.hardware}\nrows stored in {out}")
    if any(is_missed(row) for row in found):
        raise typer.Exit(EXIT_GATE_MISSED)


def _announce(row: Any) -> None:
    typer.echo(f"{row.id:62} {row.value:8.0f} {row.unit}", err=True)


def _label(name: str) -> str:
    """A job's stable name, short enough for a terminal: the peer has its own column."""
    short = {"float32": "fp32", "bfloat16": "bf16", "cpu": "", "torchao": "", "plain_torch": ""}
    short |= {"compressed_tensors": "", "guided_quantize": "guided", "nearest_cell": "cell"}
    words = [short.get(word, word.removeprefix("NVFP4_")) for word in name.split(".")]
    return " ".join(word for word in words if word)


def _table(found: list[Any]) -> Any:
    from tracefp4.bench.gate_table import gates_of
    from tracefp4.diagnostics.report import Table

    def shown(value: float | None, suffix: str = "") -> str:
        return "-" if value is None else f"{value:,.0f}{suffix}" if value >= 10 else f"{value:.1f}{suffix}"

    lines = [
        (
            _label(row.id),
            shown(row.value),
            row.peer.removesuffix(" torch").split(" ")[0] if row.peer_value else f"{row.peer}: not there",
            shown(row.peer_value),
            shown(row.ratio, "x"),
            ", ".join(str(gate.gate) for gate in gates_of(row) if gate.gate) or "-",
            ", ".join(gate.met(row) for gate in gates_of(row)) or "not judged",
        )
        for row in found
    ]
    header = ("job", "Melem/s", "peer", "Melem/s", "ratio", "gate", "met")
    caption = "The JSON has limits, hardware and versions; `tracefp4 bench gates` has the aims."
    return Table(title="CPU throughput", header=header, rows=tuple(lines), caption=caption)

"""`tracefp4 bench engine`: how fast whole models decode here, in FP4 beside our own BF16 mode."""

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from tracefp4.cli.options import JsonOption

if TYPE_CHECKING:
    from tracefp4.bench.engine_run import EngineRun
    from tracefp4.diagnostics.report import Table
    from tracefp4.rollout.options import StateDtype

EXIT_GATE_MISSED = 1


def engine(
    random_weights: Annotated[
        str,
        typer.Option(
            "--random-weights",
            metavar="SHAPE",
            help="Model whose shape gets random weights; tiny needs no GPU.",
        ),
    ] = "qwen3-30b-a3b",
    layers: Annotated[
        int | None, typer.Option("--layers", help="Only the first decoder layers, so many.", min=1)
    ] = None,
    context: Annotated[
        str, typer.Option("--context", help="Tokens of a finished sequence, with commas: 8k,32k.")
    ] = "8k,32k",
    only: Annotated[
        str,
        typer.Option(
            "--only",
            help="Groups, with commas: full, together, steady, batch, zipf, recording. Without it all.",
        ),
    ] = "",
    memory: Annotated[
        float, typer.Option("--memory", help="Share of the card for weights and pages.", min=0.01, max=1.0)
    ] = 0.90,
    page_size: Annotated[
        int, typer.Option("--page-size", help="Positions of a page of K and V.", min=1)
    ] = 16,
    state_dtype: Annotated[
        str, typer.Option("--state-dtype", help="Of gated delta layers: float32 or bfloat16.")
    ] = "auto",
    steps: Annotated[
        int, typer.Option("--steps", help="Timed steps of a load; a quarter more is warmed up with.", min=1)
    ] = 64,
    profile: Annotated[
        bool, typer.Option("--profile", help="List the kernels of a step at full context.")
    ] = False,
    seconds: Annotated[
        float | None, typer.Option("--seconds", help="Begin no point after this time.", min=1)
    ] = None,
    out: Annotated[
        Path, typer.Option("--out", help="Where the result is stored as JSON.", dir_okay=False)
    ] = Path("runs/bench_engine.json"),
    as_json: JsonOption = False,
) -> None:
    """Measure decode rates of a whole model, in tokens a second.

    No checkpoint is read: weights are random, experts random FP4 bytes, made
    on the device. Sequences begin in the middle, over pages of random bytes,
    and every step is the engine's own: scheduling, pass, draws, recording.
    Batches are as large as the memory allows, counted in three ways: all
    sequences at full context (full), all starting together and growing to it
    (together), or at ages spread evenly (steady); and fixed (batch), and with
    skewed routing (zipf). Limits are the fewest bytes of a step over the copy
    bandwidth of this run. A row in FP4 stands beside our BF16 mode on the
    same engine. The exit code is 1 when a gate was missed, a result was wrong
    or a point failed. `tracefp4 bench gates` judges the stored results.

    Examples: `tracefp4 bench engine --context 8k --profile`;
    `tracefp4 bench engine --layers 4 --only full,batch`;
    `tracefp4 bench engine --random-weights tiny --context 128 --steps 4`.
    """
    from tracefp4.bench.engine_build import engine_device
    from tracefp4.bench.engine_loads import Steps
    from tracefp4.bench.engine_points import read_context
    from tracefp4.bench.engine_run import EngineOptions, EngineSuite
    from tracefp4.bench.engine_shapes import measured_shape
    from tracefp4.bench.gate_table import is_missed
    from tracefp4.bench.results import write_rows
    from tracefp4.cli.progress import DemoPrinter, print_table

    shape = measured_shape(random_weights, layers=layers)
    options = EngineOptions(
        shape=shape,
        contexts=tuple(dict.fromkeys(read_context(text) for text in _parts(context))),
        only=tuple(_parts(only)),
        memory=memory,
        page_size=page_size,
        state_dtype=cast("StateDtype", state_dtype),
        steps=Steps(timed=steps, warm=max(2, steps // 4)),
        is_profiled=profile,
    )

    def store(found: "EngineRun") -> dict[str, Any]:
        return write_rows(out, found.rows, suite="engine", more=found.more())

    on_event = partial(typer.echo, err=True) if as_json else DemoPrinter()
    # after every point: a run that is ended from outside keeps what it measured
    suite = EngineSuite(options, device=engine_device(shape), on_event=on_event, on_point=store)
    found = suite.run(seconds=seconds)
    result = store(found)
    if as_json:
        typer.echo(json.dumps(result, indent=2, default=str))
    else:
        print_table(_table(found, prefix=f"engine.{shape.name.lower()}."))
        for row, kernels in found.profiles.items():
            print_table(_profile_table(row, kernels))
        for line in _left_out(found):
            typer.echo(line)
        typer.echo(f"{found.seconds:.0f} s, result stored in {out}")
    if found.failed or any(is_missed(row) for row in found.rows):
        raise typer.Exit(EXIT_GATE_MISSED)


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _table(found: "EngineRun", *, prefix: str) -> "Table":
    from tracefp4.bench.gate_table import gates_of
    from tracefp4.diagnostics.report import Table

    lines = [
        (
            row.id.removeprefix(prefix),
            str(row.facts.get("batch", "-")),
            f"{row.value:,.0f} {row.unit}" if abs(row.value) >= 100 else f"{row.value:.3g} {row.unit}",
            f"{row.facts['GB/s']:,.0f}" if "GB/s" in row.facts else "-",
            "-" if row.share is None else f"{100 * row.share:.0f}%",
            "-" if row.ratio is None else f"{row.ratio:.2f}x",
            {None: "-", True: "yes", False: "NO"}[None if row.check is None else row.check.holds],
            ", ".join(gate.met(row) for gate in gates_of(row)) or "-",
        )
        for row in found.rows
    ]
    header = ("row", "batch", "figure", "GB/s", "limit", "bf16", "right", "gate")
    caption = (
        "limit: share of what the copy bandwidth of this run allows. bf16: times faster than our BF16 mode; - where it "
        "is void or was not measured. right: recorded K and V are those of the pages. The JSON has contexts, routing, "
        "experts in use, spread and memory."
    )
    return Table(
        title=prefix.removesuffix(".").replace(".", " ", 1), header=header, rows=tuple(lines), caption=caption
    )


def _profile_table(row: str, kernels: list[dict[str, Any]]) -> "Table":
    from tracefp4.diagnostics.report import Table

    lines = [
        (
            kernel["name"],
            str(kernel["launches"]),
            f"{kernel['us']:,.0f}",
            f"{100 * kernel['share']:.1f}%",
            "-" if kernel["gb_per_s"] is None else f"{kernel['gb_per_s']:,.0f}",
        )
        for kernel in kernels
    ]
    header = ("kernel", "launches", "us", "share", "GB/s")
    caption = "One step; GB/s where the fewest bytes of a kernel are known."
    return Table(title=f"Kernels of {row}", header=header, rows=tuple(lines), caption=caption)


def _left_out(found: "EngineRun") -> list[str]:
    lines = [f"does not fit: {name}, {reason}" for name, reason in found.unfit.items()]
    lines += [f"failed: {name}, {reason}" for name, reason in found.failed.items()]
    return lines + [f"not begun: {name}" for name in found.skipped]

"""`tracefp4 bench kernels`: how long every kernel takes on this GPU, and whether its result was right."""

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tracefp4.cli.options import JsonOption

if TYPE_CHECKING:
    from tracefp4.bench.kernels import KernelRun
    from tracefp4.diagnostics.report import Table

EXIT_GATE_MISSED = 1


def kernels(
    out: Annotated[
        Path, typer.Option("--out", help="Where the result is stored as JSON.", dir_okay=False)
    ] = Path("runs/bench_kernels.json"),
    only: Annotated[
        str, typer.Option("--only", help="Groups of rows to measure, with commas; without it all.")
    ] = "",
    seconds: Annotated[
        float | None, typer.Option("--seconds", help="Begin no row after this time.", min=1)
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure every kernel on an NVIDIA GPU, in microseconds a call.

    Contenders are captured as CUDA graphs over operands that no cache holds
    and replayed in turn; the median counts. The result that was timed is
    written over poison and compared with the reference. Limits are what the
    call must move and compute over the copy bandwidth and the bf16 rate of
    this run. The exit code is 1 when a gate was missed, a result was wrong
    or a row failed. Groups can be measured in several runs: keep each file,
    `tracefp4 bench gates` reads them all.
    """
    from tracefp4.bench.gate_table import is_missed
    from tracefp4.bench.kernel_jobs import KernelSizes
    from tracefp4.bench.kernels import chosen_cases, run_kernels
    from tracefp4.bench.results import write_rows
    from tracefp4.cli.progress import DemoPrinter, print_table

    groups = tuple(name.strip() for name in only.split(",") if name.strip())
    cases = chosen_cases(groups, KernelSizes())
    on_event = partial(typer.echo, err=True) if as_json else DemoPrinter()

    def store(found: "KernelRun") -> dict[str, Any]:
        return write_rows(out, found.rows, suite="kernels", more=found.more())

    # after every case: a run that is ended from outside keeps what it measured
    found = run_kernels(cases, seconds=seconds, on_event=on_event, on_case=store)
    result = store(found)
    if as_json:
        typer.echo(json.dumps(result, indent=2, default=str))
    else:
        print_table(_table(found))
        print_table(_compile_table(found))
        for line in _left_out(found):
            typer.echo(line)
        typer.echo(f"{found.seconds:.0f} s, result stored in {out}")
    if found.failed or any(is_missed(row) for row in found.rows):
        raise typer.Exit(EXIT_GATE_MISSED)


def _table(found: "KernelRun") -> "Table":
    from tracefp4.bench.gate_table import gates_of
    from tracefp4.diagnostics.report import Table

    lines = [
        (
            row.id.removeprefix("kernels."),
            f"{row.value:,.1f} {row.unit}",
            f"{row.facts['GB/s']:,.0f}",
            "-" if row.share is None else f"{100 * row.share:.0f}%",
            "-" if row.ratio is None else f"{row.ratio:.2f}x",
            {None: "-", True: "yes", False: "NO"}[None if row.check is None else row.check.holds],
            ", ".join(gate.met(row) for gate in gates_of(row)) or "-",
        )
        for row in found.rows
    ]
    header = ("row", "time", "GB/s", "limit", "peer", "right", "gate")
    caption = (
        "limit: share of what bandwidth and arithmetic of this run allow. peer: times faster than the fastest; the "
        "JSON names all of them, the experts in use, and the spread. right: the timed result agrees with the reference."
    )
    return Table(title="Kernels", header=header, rows=tuple(lines), caption=caption)


def _compile_table(found: "KernelRun") -> "Table":
    from tracefp4.diagnostics.report import Table

    lines = [
        (name, f"{entry['variants']:.0f}", f"{entry['seconds']:.2f}")
        for name, entry in found.compiled.items()
    ]
    first: list[tuple[str, ...]] = [
        (op, "first use", f"{took_s:.2f}") for op, took_s in found.first_use.items()
    ]
    caption = (
        "Variants that were not in the cache. First use: compiled, loaded and compared with the reference."
    )
    header = ("library", "variants", "seconds")
    return Table(title="Compiled on first use", header=header, rows=(*lines, *first), caption=caption)


def _left_out(found: "KernelRun") -> list[str]:
    lines: list[Any] = [f"no kernel: {name}, {reason}" for name, reason in found.missing.items()]
    lines += [f"failed: {name}, {reason}" for name, reason in found.failed.items()]
    return lines + [f"not begun: {name}" for name in found.skipped]

"""What the commands that write checkpoints share: the output that was asked for, and what is said when it is there."""

import json
import re
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from tracefp4.errors import ConfigError

if TYPE_CHECKING:
    from tracefp4.checkpoints import ModuleError, Output, Summary
    from tracefp4.diagnostics.report import Table

NUM_WORST = 5
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def output(path: Path, *, max_shard_size: str, overwrite: bool) -> "Output":
    """Read the options of an output. Raises: ConfigError for a size that is none."""
    from tracefp4.checkpoints import Output

    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]B)", max_shard_size.strip().upper())
    size = int(float(found[1]) * _UNITS[found[2]]) if found else 0
    if size < 1:
        raise ConfigError(
            f"--max-shard-size: {max_shard_size!r} is no size. A size is a number with KB, MB, GB or TB. Try 5GB."
        )
    return Output(path=path, max_shard_bytes=size, overwrite=overwrite)


def show(summary: "Summary", *, as_json: bool) -> None:
    """Print errors by kind of module, the worst modules, and what was written."""
    if as_json:
        typer.echo(json.dumps(_as_json(summary), indent=2))
        return
    from tracefp4.cli.progress import print_table

    print_table(_kinds(summary))
    print_table(_worst(summary))
    for note in summary.notes:
        typer.echo(f"note: {note}")
    before, after = summary.num_bytes
    typer.echo(f"{summary.path}: {len(summary.errors)} linears in FP4, {len(summary.kept)} as they were")
    typer.echo(f"tensors: {_size(before)} -> {_size(after)}")


def _as_json(summary: "Summary") -> dict[str, object]:
    return {
        "path": str(summary.path),
        "bytes_before": summary.num_bytes[0],
        "bytes_after": summary.num_bytes[1],
        "notes": list(summary.notes),
        "kept": list(summary.kept),
        "modules": {
            name: {"kind": summary.kinds[name], **error.to_dict()} for name, error in summary.errors.items()
        },
    }


def _kinds(summary: "Summary") -> "Table":
    from tracefp4.diagnostics.report import Table

    by_kind: dict[str, list[ModuleError]] = defaultdict(list)
    for name, error in summary.errors.items():
        by_kind[summary.kinds[name]].append(error)
    rows = []
    for kind, errors in by_kind.items():
        relative = sorted(error.relative_error for error in errors)
        rows.append(
            (
                kind,
                str(len(errors)),
                f"{relative[len(relative) // 2]:.4f}",
                f"{relative[-1]:.4f}",
                f"{min(error.sqnr_db for error in errors):.2f}",
                f"{max(error.max_error for error in errors):.4g}",
                f"{sum(error.zero_fraction for error in errors) / len(errors):.2%}",
                str(sum(error.saturated_values for error in errors)),
                str(sum(error.lost_blocks for error in errors)),
            )
        )
    return Table(
        title="Error of the weights",
        header=(
            "kind", "modules", "error", "worst", "SQNR dB", "max |w-q|", "zeros", "cut", "lost",
        ),
        rows=tuple(rows),
        caption="Error: |W-Q| / |W|, the median and the worst module; SQNR is the worst. Cut: values that the "
        "grid's end saturates. Lost: blocks that are not zero and read back as zeros.",
    )  # fmt: skip


def _worst(summary: "Summary") -> "Table":
    from tracefp4.diagnostics.report import Table

    found = sorted(summary.errors.items(), key=lambda item: -item[1].relative_error)[:NUM_WORST]
    rows = tuple((name, f"{error.relative_error:.4f}", f"{error.max_error:.4g}") for name, error in found)
    return Table(title="Worst modules", header=("module", "error", "max |w-q|"), rows=rows)


def _size(num_bytes: int) -> str:
    """Bytes in the largest unit that leaves at least one."""
    unit = next((unit for unit in reversed(_UNITS) if num_bytes >= _UNITS[unit]), None)
    return f"{num_bytes} bytes" if unit is None else f"{num_bytes / _UNITS[unit]:.3g} {unit}"


def megabytes(done: int, total: int) -> tuple[int, int]:
    """Bytes as a bar shows them, rounded up: a small checkpoint is one of one."""
    return -(-done // 10**6), -(-total // 10**6)

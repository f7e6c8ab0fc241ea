"""What a person sees while a command runs: one line per step, tables at the end."""

import re
import time
from collections.abc import Mapping
from typing import Any

import typer

from tracefp4.diagnostics.report import MISMATCH_KEY, REWARD_KEY, Table, number

_NUMBER = re.compile(r"-|[+-]?[\d.,]+(e[+-]\d+)?(x|%.*| GiB)?")


class StepPrinter:
    """Prints one line per training step: call it with the step's metrics."""

    def __init__(self, *, total: int, label: str = "step") -> None:
        self._total = total
        self._label = label
        self._started_s = time.monotonic()

    def __call__(self, metrics: Mapping[str, Any]) -> None:
        """Print the step's number, reward, mismatch and the seconds since the start."""
        step = int(metrics["step"]) + 1
        elapsed_s = time.monotonic() - self._started_s
        reward, mismatch = number(metrics.get(REWARD_KEY), digits=3), number(metrics.get(MISMATCH_KEY))
        typer.echo(
            f"{self._label} {step:4d}/{self._total}   reward {reward:>6}   mean |d log p| {mismatch:>8}   "
            f"{elapsed_s:5.0f} s{_hint(metrics)}"
        )


def _hint(metrics: Mapping[str, Any]) -> str:
    """Why a rollout gives nothing to train on, where it does not."""
    is_skipped = bool(metrics.get("groups")) and metrics.get("groups_skipped") == metrics["groups"]
    return "   skipped: rewards are equal within every group" if is_skipped else ""


class DemoPrinter:
    """Prints the demo's progress: call it with one line of text, it adds the time since the start."""

    def __init__(self) -> None:
        self._started_s = time.monotonic()

    def __call__(self, text: str) -> None:
        """Print one event."""
        typer.echo(f"[{time.monotonic() - self._started_s:5.0f} s] {text}")


def print_table(table: Table) -> None:
    """Print a table to the terminal."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table as RichTable

    console = Console()
    shown = RichTable(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for index, name in enumerate(table.header):
        is_number = all(_NUMBER.fullmatch(row[index]) for row in table.rows)
        shown.add_column(
            name,
            justify="right" if is_number and index else "left",
            overflow="fold",
        )
    for row in table.rows:
        shown.add_row(*map(escape, row))
    console.print(f"[bold]{escape(table.title)}[/bold]")
    console.print(shown)
    if table.caption:
        console.print(escape(table.caption), style="dim")
        console.print()


class ProgressBar:
    """One bar with share, amount and time left, on stderr; call it with (done, total), inside a `with` statement.

    It appears with the first call: a command that refuses its arguments shows an error and nothing else.
    """

    def __init__(self, label: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=Console(stderr=True))
        self._task = self._progress.add_task(label, total=None)

    def __call__(self, done: int, total: int) -> None:
        """Move the bar."""
        self._progress.start()
        self._progress.update(self._task, completed=done, total=total)

    def __enter__(self) -> "ProgressBar":
        return self

    def __exit__(self, *error: object) -> None:
        if self._progress.live.is_started:
            self._progress.stop()

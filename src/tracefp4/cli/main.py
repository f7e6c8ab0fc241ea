"""The `tracefp4` command: one sub-command per file, errors and interrupts turned into exit codes.

Exit codes: 0 done; 1 a claim of a demo or a study does not hold; 2 a mistake in what was asked, with one message on
stderr; 130 interrupted; anything else is a bug and shows its traceback. Importing this file imports neither
torch nor transformers nor matplotlib: `tracefp4 --help` answers at once, and each command imports what it
needs when it runs.
"""

import warnings
from pathlib import Path
from typing import Any, TextIO

import typer
from typer.core import TyperGroup

from tracefp4.cli.bench import bench
from tracefp4.cli.calibrate import calibrate
from tracefp4.cli.demo import demo
from tracefp4.cli.doctor import doctor
from tracefp4.cli.eval import evaluate
from tracefp4.cli.export import export
from tracefp4.cli.generate import generate
from tracefp4.cli.import_ import import_
from tracefp4.cli.plan import plan
from tracefp4.cli.quantize import quantize
from tracefp4.cli.report import report
from tracefp4.cli.store import store
from tracefp4.cli.study import study
from tracefp4.cli.train import train
from tracefp4.errors import TraceFP4Error

EXIT_MISTAKE = 2
EXIT_INTERRUPTED = 130
_PACKAGE = str(Path(__file__).parents[1])


class _ErrorsAsExitCodes(TyperGroup):
    """Shows our errors as one red message, and Ctrl-C as exit code 130."""

    def invoke(self, ctx: Any) -> Any:
        """Run the chosen command."""
        try:
            return super().invoke(ctx)
        except TraceFP4Error as error:
            typer.secho(f"error: {error}", fg=typer.colors.RED, err=True)
            raise typer.Exit(EXIT_MISTAKE) from error
        except KeyboardInterrupt as error:
            typer.secho("interrupted", fg=typer.colors.YELLOW, err=True)
            raise typer.Exit(EXIT_INTERRUPTED) from error


app = typer.Typer(
    name="tracefp4",
    cls=_ErrorsAsExitCodes,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="FP4 rollouts for reinforcement learning, and a trainer that rounds the way the rollout did.",
)
app.command("demo")(demo)
app.command("train")(train)
app.command("eval")(evaluate)
app.command("generate")(generate)
app.command("plan")(plan)
app.command("report")(report)
app.command("calibrate")(calibrate)
app.command("quantize")(quantize)
app.command("export")(export)
app.command("import")(import_)
app.command("doctor")(doctor)
app.add_typer(bench, name="bench")
app.command("study")(study)
app.add_typer(store, name="store")


def run() -> None:
    """Entry point of the console script."""
    others = warnings.showwarning

    def shown(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if filename.startswith(_PACKAGE):
            # ours are for the person at the terminal, who has no use for a line of source
            typer.secho(f"warning: {message}", fg=typer.colors.YELLOW, err=True)
        else:
            others(message, category, filename, lineno, file, line)

    warnings.showwarning = shown
    app()

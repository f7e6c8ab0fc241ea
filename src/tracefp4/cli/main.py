"""The `tracefp4` command: one sub-command per file, errors and interrupts turned into exit codes.

Exit codes: 0 done; 1 a claim of the demo does not hold; 2 a mistake in what was asked, with one message on
stderr; 130 interrupted; anything else is a bug and shows its traceback. Importing this file imports neither
torch nor transformers nor matplotlib: `tracefp4 --help` answers at once, and each command imports what it
needs when it runs.
"""

from typing import Any

import typer
from typer.core import TyperGroup

from tracefp4.cli.demo import demo
from tracefp4.cli.doctor import doctor
from tracefp4.cli.eval import evaluate
from tracefp4.cli.generate import generate
from tracefp4.cli.plan import plan
from tracefp4.cli.report import report
from tracefp4.cli.train import train
from tracefp4.errors import TraceFP4Error

EXIT_MISTAKE = 2
EXIT_INTERRUPTED = 130


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
app.command("doctor")(doctor)


def run() -> None:
    """Entry point of the console script."""
    app()

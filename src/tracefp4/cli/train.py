"""`tracefp4 train`: one run from a recipe."""

from pathlib import Path
from typing import Annotated

import typer

from tracefp4.cli.options import SetOption


def train(
    recipe: Annotated[Path, typer.Argument(help="A recipe in TOML; see recipes/.")],
    overrides: SetOption = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run in run.dir from its last whole checkpoint.")
    ] = False,
) -> None:
    """Train a mixture of experts by GRPO with FP4 rollouts."""
    from tracefp4.cli.config import load_config
    from tracefp4.cli.progress import StepPrinter
    from tracefp4.rl.loop import train as run_training

    config = load_config(recipe, overrides=overrides or ())
    run_training(config, resume=resume, on_step=StepPrinter(total=config.train.steps))
    typer.echo(f"done: {config.run.dir}   (tracefp4 report {config.run.dir})")

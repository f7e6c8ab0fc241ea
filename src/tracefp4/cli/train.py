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
    from tracefp4.rl.placement import placement_of

    config = load_config(recipe, overrides=overrides or ())
    placement = placement_of(config.model)
    rules, task = config.quantization, config.task
    with_environment = f" with {task.environment}" if task.environment else ""
    typer.echo(
        f"{config.model.path}   task {task.name or task.path}{with_environment}   "
        f"{rules.mode}, guidance {rules.guidance}   {config.train.steps} steps into {config.run.dir}   "
        f"{placement.arithmetic.name} bf16 on {placement.device}"
    )
    if config.run.eval_items:
        typer.echo(f"evaluating {config.run.eval_items} held-out items before the first step and at the end")
    manifest = run_training(
        config, resume=resume, on_step=StepPrinter(total=config.train.steps), on_event=typer.echo
    )
    for step, found in sorted(manifest.get("evaluations", {}).items(), key=lambda item: int(item[0])):
        typer.echo(
            f"held-out accuracy after step {step}: {found['accuracy']:.1%} +- {found['standard_error']:.1%} "
            f"({found['num_items']} items)"
        )
    typer.echo(f"done: {config.run.dir}   (tracefp4 report {config.run.dir})")

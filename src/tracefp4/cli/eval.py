"""`tracefp4 eval`: accuracy and pass@k of a checkpoint on held-out items, rounded as deployed."""

import json
from pathlib import Path
from typing import Annotated

import typer

from tracefp4.cli.options import JsonOption, ModeOption, SetOption


def evaluate(
    checkpoint: Annotated[Path, typer.Argument(help="A local Hugging Face checkpoint directory.")],
    recipe: Annotated[Path, typer.Option("--recipe", help="Recipe whose task and sampling are used.")],
    overrides: SetOption = None,
    mode: ModeOption = "fp4",
    items: Annotated[int, typer.Option("--items", help="Held-out items.", min=1)] = 512,
    pass_at: Annotated[
        int, typer.Option("--pass-at", help="Samples per item for pass@k; 1 decodes greedily.", min=1)
    ] = 1,
    as_json: JsonOption = False,
) -> None:
    """Evaluate a checkpoint on held-out items of a recipe's task."""
    from tracefp4.cli.config import load_config
    from tracefp4.rl.evaluation import evaluate_checkpoint

    settings = [f'model.path="{checkpoint}"', f"quantization.mode={mode}", 'quantization.guidance="none"']
    config = load_config(recipe, overrides=[*(overrides or ()), *settings])
    result = evaluate_checkpoint(config, items=items, pass_at=pass_at)
    if as_json:
        typer.echo(json.dumps(result, indent=2))
        return
    typer.echo(f"accuracy {result['accuracy']:.4f} +- {result['accuracy_se']:.4f} ({items} items, {mode})")
    if pass_at > 1:
        typer.echo(f"pass@{pass_at} {result['pass_at_k']:.4f} +- {result['pass_at_k_se']:.4f}")

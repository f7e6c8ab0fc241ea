"""`tracefp4 eval`: accuracy and pass@k of a checkpoint on held-out items, rounded as deployed."""

import json
from dataclasses import asdict
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
        int,
        typer.Option(
            "--pass-at", help="Samples per item for pass@k; 1 samples at run.eval_temperature.", min=1
        ),
    ] = 1,
    as_json: JsonOption = False,
) -> None:
    """Evaluate a checkpoint on held-out items of a recipe's task."""
    from tracefp4.cli.config import load_config
    from tracefp4.rl.deployment import evaluate_checkpoint

    deployed = [f"quantization.mode={mode}", 'quantization.guidance="none"']
    config = load_config(recipe, overrides=[*(overrides or ()), *deployed, f'model.path="{checkpoint}"'])
    found = evaluate_checkpoint(config, num_items=items, samples=pass_at)
    if as_json:
        typer.echo(json.dumps(asdict(found), indent=2))
        return
    share = f"{found.accuracy:.4f} +- {found.standard_error:.4f}"
    typer.echo(f"accuracy {share} ({found.num_items} items, {mode}, rounded to nearest)")
    for k, probability in found.pass_at_k.items():
        if k > 1:
            typer.echo(f"pass@{k} {probability:.4f}")

"""`tracefp4 eval`: accuracy and pass@k of a checkpoint on held-out items, rounded as deployed."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from tracefp4.cli.options import JsonOption, ModeOption, SetOption


def evaluate(
    checkpoint: Annotated[
        Path, typer.Argument(help="A local Hugging Face checkpoint directory, BF16 or FP4.")
    ],
    recipe: Annotated[Path, typer.Option("--recipe", help="Recipe whose task and sampling are used.")],
    overrides: SetOption = None,
    mode: ModeOption = "fp4",
    items: Annotated[int, typer.Option("--items", help="Held-out items.", min=1)] = 512,
    pass_at: Annotated[
        int,
        typer.Option(
            "--pass-at",
            help="Samples per item, k of pass@k. With 1, the sampling temperature is run.eval_temperature.",
            min=1,
        ),
    ] = 1,
    as_json: JsonOption = False,
) -> None:
    """Evaluate a checkpoint on held-out items of a recipe's task.

    An FP4 checkpoint is computed with as it is stored. One that a run
    exported also holds how the run rounded K and V, so it gives the
    log-probs of the run; the recipe must round them likewise, or not at
    all (quantization.kv = "none"). Others are calibrated on prompts.
    """
    from tracefp4.cli.config import load_config
    from tracefp4.rl.deployment import evaluate_checkpoint

    nearest = ['quantization.guidance="none"', 'quantization.gate="none"']
    deployed = [f"quantization.mode={mode}", *nearest]
    config = load_config(recipe, overrides=[*(overrides or ()), *deployed, f'model.path="{checkpoint}"'])
    found = evaluate_checkpoint(
        config, num_items=items, samples=pass_at, tell=lambda line: typer.echo(line, err=True)
    )
    if as_json:
        typer.echo(json.dumps(asdict(found), indent=2))
        return
    share = f"{found.accuracy:.4f} +- {found.standard_error:.4f}"
    typer.echo(f"accuracy {share} ({found.num_items} items, {mode}, rounded to nearest)")
    for k, probability in found.pass_at_k.items():
        if k > 1:
            typer.echo(f"pass@{k} {probability:.4f}")

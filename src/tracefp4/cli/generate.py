"""`tracefp4 generate`: text from any checkpoint, through the package's own engine."""

from pathlib import Path
from typing import Annotated

import typer

from tracefp4.cli.options import ModeOption, SeedOption


def generate(
    checkpoint: Annotated[
        Path, typer.Argument(help="A local Hugging Face checkpoint directory, BF16 or FP4.")
    ],
    prompts: Annotated[list[str], typer.Argument(help="One or more prompts.")],
    mode: ModeOption = "fp4",
    chat: Annotated[
        bool, typer.Option("--chat", help="Wrap each prompt in the tokenizer's chat template.")
    ] = False,
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Longest completion.", min=1)] = 64,
    temperature: Annotated[
        float | None,
        typer.Option(
            "--temperature", help="0 is greedy; by default the checkpoint's generation config.", min=0.0
        ),
    ] = None,
    samples: Annotated[int, typer.Option("--samples", help="Completions per prompt.", min=1)] = 1,
    seed: SeedOption = 0,
) -> None:
    """Generate completions.

    An FP4 checkpoint is computed with as it is stored, K and V as the run
    rounded them that exported it; where none did, they are calibrated.
    """
    from dataclasses import replace

    from tracefp4.rl.deployment import generate_text, load_deployed

    deployed = load_deployed(checkpoint, mode=mode)
    typer.echo(deployed.cache, err=True)
    params = replace(deployed.params, max_tokens=max_tokens, n=samples, seed=seed)
    if temperature is not None:
        params = replace(params, temperature=temperature)
    completions = generate_text(deployed, prompts, params=params, is_chat=chat)
    for prompt, texts in zip(prompts, completions, strict=True):
        typer.secho(prompt, fg=typer.colors.CYAN)
        for text in texts:
            typer.echo(text)

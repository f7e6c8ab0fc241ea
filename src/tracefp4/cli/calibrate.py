"""`tracefp4 calibrate`: run a checkpoint over texts and write the statistics that quantization can use."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from tracefp4.checkpoints import Statistics
    from tracefp4.diagnostics.report import Table


def calibrate(
    checkpoint: Annotated[
        Path, typer.Argument(help="A local, unquantized Hugging Face checkpoint directory.")
    ],
    texts: Annotated[
        Path,
        typer.Argument(
            help="A .txt file (one document) or a .jsonl file, one object per line with text, chat messages or prompt. "
            "Use text like what the model will read and write."
        ),
    ],
    out: Annotated[Path, typer.Argument(help="The statistics file to write, e.g. statistics.safetensors.")],
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", help="Stop after so many tokens; rare experts need many.", min=1)
    ] = 131072,
    sequence_length: Annotated[
        int, typer.Option("--sequence-length", help="Tokens per sequence.", min=1)
    ] = 2048,
    device: Annotated[
        str,
        typer.Option("--device", metavar="cpu|cuda", help="Where the whole model runs (cpu: in float32)."),
    ] = "cpu",
) -> None:
    """Run a checkpoint over texts and write what its experts' inputs look like.

    Per expert and input channel, the mean square: how much an error in that
    channel of the weights costs. Per layer, the largest input: the static
    scale of quantized activations. `tracefp4 quantize` needs the file for
    --method h-scale and for --activations static.

    Experts that see fewer than 64 tokens are counted; their gate and up take
    the mean over all tokens, their down keeps the scales of nearest rounding.
    """
    from tracefp4.checkpoints import collect_statistics
    from tracefp4.cli.progress import ProgressBar, print_table
    from tracefp4.errors import ConfigError

    if out.suffix != ".safetensors" or not out.absolute().parent.is_dir():
        raise ConfigError(
            f"{out} cannot be written. The statistics are a .safetensors file in a directory that exists. Name one."
        )
    with ProgressBar("tokens") as on_tokens:
        found = collect_statistics(
            checkpoint,
            texts,
            max_tokens=max_tokens,
            sequence_length=sequence_length,
            device=device,
            on_tokens=on_tokens,
        )
    found.write(out)
    print_table(_table(found))
    typer.echo(f"statistics: {out} ({found.num_tokens} tokens, digest {found.digest})")


def _table(found: "Statistics") -> "Table":
    from tracefp4.diagnostics.report import Table

    exponents, rows, num_few = found.exponents(), [], 0
    for i, layer in sorted(found.layers.items()):
        few = int(found.few(i).sum())
        num_few += few
        counts = (int(layer.tokens.min()), int(layer.tokens.median()), int(layer.tokens.max()))
        amax = [f"{float(value):.3g}" for value in layer.amax]
        powers = [str(k) for k in exponents[i]]
        rows.append((str(i), *map(str, counts), str(few), amax[0], powers[0], amax[1], powers[1]))
    num_experts = sum(len(layer.tokens) for layer in found.layers.values())
    return Table(
        title="Tokens per routed expert, and largest inputs",
        header=("layer", "least", "median", "most", "few", "x amax", "x 2^k", "w2 amax", "w2 2^k"),
        rows=tuple(rows),
        caption=f"few: {num_few} of {num_experts} experts saw fewer than {found.min_tokens} tokens"
        + ("; more text, or --max-tokens, reaches them. " if num_few else ". ")
        + "x: the experts' input; w2: the down-projection's; k: their static exponents.",
    )

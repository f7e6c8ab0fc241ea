"""`tracefp4 import`: an FP4 checkpoint in another layout, or as a plain checkpoint of the same values."""

import json
from pathlib import Path
from typing import Annotated

import typer

from tracefp4.cli.options import JsonOption, MaxShardOption, OverwriteOption


def import_(
    checkpoint: Annotated[
        Path,
        typer.Argument(help="An FP4 checkpoint directory of tracefp4, llm-compressor, ModelOpt or gpt-oss."),
    ],
    out: Annotated[Path, typer.Argument(help="The directory to make. It appears whole or not at all.")],
    layout: Annotated[
        str | None,
        typer.Option(
            "--layout",
            metavar="compressed-tensors|modelopt|gpt-oss",
            help="Store the same codes and scales in this layout.",
        ),
    ] = None,
    dequantize: Annotated[
        bool,
        typer.Option(
            "--dequantize", help="Write the exact values as a plain checkpoint, scales beside them."
        ),
    ] = False,
    max_shard_size: MaxShardOption = "5GB",
    overwrite: OverwriteOption = False,
    as_json: JsonOption = False,
) -> None:
    """Read an FP4 checkpoint, and store it otherwise without changing a value.

    --layout carries codes and block scales byte for byte. Layouts store the
    outer scale as a factor or as its inverse; where turning it over would
    round it (it is no power of two), the import is refused.

    --dequantize writes what transformers and any trainer load: bf16 values
    under power-of-two scales and in MXFP4, float32 otherwise, and
    fp4_scales.safetensors beside them. `tracefp4 export` of that directory
    gives every byte back.

    \b
    Examples:
      tracefp4 import Qwen3-30B-A3B-FP4 out --layout modelopt
      tracefp4 import gpt-oss-20b out --dequantize
    """
    from tracefp4.checkpoints import change_layout, to_plain
    from tracefp4.cli.checkpoint_output import megabytes, output
    from tracefp4.cli.progress import ProgressBar
    from tracefp4.errors import ConfigError

    if (layout is None) != dequantize:
        raise ConfigError(
            f"tracefp4 import does one of two things; got {'both' if dequantize else 'neither'}. Pass --layout NAME to "
            "store the same bytes in another layout, or --dequantize for a plain checkpoint of the same values."
        )
    target = output(out, max_shard_size=max_shard_size, overwrite=overwrite)
    with ProgressBar("MB") as bar:

        def progress(done: int, total: int) -> None:
            bar(*megabytes(done, total))

        if layout is None:
            written = to_plain(checkpoint, target, progress=progress)
        else:
            written = change_layout(checkpoint, target, layout, progress=progress)
    what = "plain" if layout is None else layout
    typer.echo(json.dumps({"path": str(written), "layout": what}) if as_json else f"{written}: layout {what}")

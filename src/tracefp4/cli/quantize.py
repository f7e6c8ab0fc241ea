"""`tracefp4 quantize`: a Hugging Face checkpoint becomes an FP4 one that engines load."""

from pathlib import Path
from typing import Annotated

import typer

from tracefp4.cli.options import (
    ActivationsOption,
    CalibrationOption,
    JsonOption,
    MaxShardOption,
    OverwriteOption,
)


def quantize(
    checkpoint: Annotated[
        Path, typer.Argument(help="A local Hugging Face checkpoint directory, safetensors.")
    ],
    out: Annotated[Path, typer.Argument(help="The directory to make. It appears whole or not at all.")],
    scheme: Annotated[
        str,
        typer.Option(
            "--scheme",
            metavar="NAME",
            help="How weights are rounded. NVFP4_TENSOR_POW2 fits every NVFP4 layout; NVFP4_TENSOR_FP32 only modelopt, "
            "NVFP4_COMPRESSED_TENSORS only compressed-tensors; MXFP4_EVEN and the other MXFP4 schemes "
            "compressed-tensors and gpt-oss.",
        ),
    ] = "NVFP4_TENSOR_POW2",
    layout: Annotated[
        str,
        typer.Option("--layout", metavar="compressed-tensors|modelopt|gpt-oss", help="How it is stored."),
    ] = "compressed-tensors",
    method: Annotated[
        str,
        typer.Option(
            "--method",
            metavar="nearest|4over6|h-scale",
            help="Block scales: from the block maximum, the better of two, or searched under calibrated inputs.",
        ),
    ] = "nearest",
    calibration: CalibrationOption = None,
    activations: ActivationsOption = "w4a16",
    include: Annotated[
        list[str] | None,
        typer.Option(
            "--include",
            metavar="GLOB",
            help="Modules that become FP4, by whole name; replaces the default, which is all routed experts. May be "
            "repeated.",
        ),
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option("--exclude", metavar="GLOB", help="Modules that stay as they are. May be repeated."),
    ] = None,
    max_shard_size: MaxShardOption = "5GB",
    overwrite: OverwriteOption = False,
    as_json: JsonOption = False,
) -> None:
    """Quantize a checkpoint to NVFP4 or MXFP4, in a layout that inference engines load.

    Routed experts become FP4. Routers, embeddings, norms, attention and
    head stay as they are, unless --include names attention or head;
    routers, embeddings and norms never change. Gate and up of an expert
    share one scale, so nothing is rescaled when an engine fuses them. One
    tensor at a time is in memory, whatever the size of the model.

    compressed-tensors and gpt-oss are read by vLLM and SGLang, modelopt also
    by TensorRT-LLM. transformers (5.17) reads MXFP4; of NVFP4 experts it
    drops the outer scale. `tracefp4 import --dequantize` makes it a plain
    checkpoint that any version loads.

    A checkpoint that already is FP4 is refused: scales found again differ,
    and weights would change. To store it otherwise, use `tracefp4 import`.

    \b
    Examples:
      tracefp4 quantize Qwen3-30B-A3B out
      tracefp4 quantize Qwen3-30B-A3B out --layout modelopt --method 4over6
      tracefp4 quantize Qwen3-30B-A3B out --method h-scale --calibration statistics.safetensors
      tracefp4 quantize Qwen3-30B-A3B out --include '*.mlp.experts.*' --include '*.self_attn.*_proj'
      tracefp4 quantize gpt-oss-20b-bf16 out --scheme MXFP4_RCEIL --layout gpt-oss
    """
    from tracefp4.checkpoints import Settings, quantize_checkpoint, read_statistics
    from tracefp4.cli.checkpoint_output import megabytes, output, show
    from tracefp4.cli.progress import ProgressBar
    from tracefp4.formats import scheme_by_name

    settings = Settings(
        scheme=scheme_by_name(scheme),
        layout=layout,
        method=method,
        activations=activations,
        include=tuple(include or ()),
        exclude=tuple(exclude or ()),
    )
    statistics = None if calibration is None else read_statistics(calibration)
    target = output(out, max_shard_size=max_shard_size, overwrite=overwrite)
    with ProgressBar("MB") as bar:
        summary = quantize_checkpoint(
            checkpoint,
            target,
            settings,
            statistics=statistics,
            progress=lambda done, total: bar(*megabytes(done, total)),
        )
    show(summary, as_json=as_json)

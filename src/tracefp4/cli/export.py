"""`tracefp4 export`: the policy of a run, or an imported checkpoint, as an FP4 checkpoint."""

import json
from pathlib import Path
from typing import Annotated

import typer

from tracefp4.cli.options import (
    CalibrationOption,
    JsonOption,
    MaxShardOption,
    OverwriteOption,
)


def export(
    run: Annotated[
        Path,
        typer.Argument(
            help="A run directory (its newest whole checkpoint is taken), one of its checkpoints, or a directory that "
            "`tracefp4 import --dequantize` wrote."
        ),
    ],
    out: Annotated[Path, typer.Argument(help="The directory to make. It appears whole or not at all.")],
    layout: Annotated[
        str | None,
        typer.Option(
            "--layout",
            metavar="compressed-tensors|modelopt|gpt-oss",
            help="How it is stored; by default compressed-tensors, or the layout that was imported.",
        ),
    ] = None,
    activations: Annotated[
        str | None,
        typer.Option(
            "--activations",
            metavar="w4a16|static",
            help="Inputs of the experts: in high precision, or FP4 under one static scale per layer; by default as the "
            "run has them, dynamic ones as w4a16.",
        ),
    ] = None,
    calibration: CalibrationOption = None,
    max_shard_size: MaxShardOption = "5GB",
    overwrite: OverwriteOption = False,
    as_json: JsonOption = False,
) -> None:
    """Write a trained policy as the FP4 checkpoint that it was trained to be.

    Scheme and modules are those of the run's plan, so an engine computes
    with the very weights that the rollouts saw. A set of modules that
    differs from the plan's is refused. Static scales of inputs, K and V are
    the run's too; inputs that training rounded and no layout can store
    (dynamic ones) are named in a note.

    An imported checkpoint reuses its stored scales: every byte comes back.
    It is refused when its weights were changed.

    \b
    Examples:
      tracefp4 export runs/my-run out
      tracefp4 export runs/my-run/checkpoints/step_000100 out --layout modelopt
      tracefp4 export runs/my-run out --activations static --calibration statistics.safetensors
    """
    from tracefp4.checkpoints import from_plain, is_imported, read_statistics
    from tracefp4.cli.checkpoint_output import megabytes, output, show
    from tracefp4.cli.progress import ProgressBar
    from tracefp4.errors import ConfigError

    target = output(out, max_shard_size=max_shard_size, overwrite=overwrite)
    is_carried = is_imported(run)
    if is_carried and (activations is not None or calibration is not None):
        got = "--calibration" if activations is None else f"--activations {activations}"
        raise ConfigError(
            f"{run} was imported, and its scales are reused as they are; got {got}. Its input scales cannot change. "
            "Leave --activations and --calibration out."
        )
    with ProgressBar("MB") as bar:

        def progress(done: int, total: int) -> None:
            bar(*megabytes(done, total))

        if is_carried:
            written = from_plain(run, target, layout=layout, progress=progress)
        else:
            from tracefp4.rl.exporting import export_run

            summary = export_run(
                run,
                target,
                layout=layout or "compressed-tensors",
                activations=activations,
                statistics=None if calibration is None else read_statistics(calibration),
                progress=progress,
            )
    if not is_carried:
        show(summary, as_json=as_json)
    else:
        typer.echo(
            json.dumps({"path": str(written)}) if as_json else f"{written}: every byte as it was imported"
        )

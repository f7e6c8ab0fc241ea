"""Options that several commands share, so that they read and behave the same everywhere."""

from pathlib import Path
from typing import Annotated

import typer

SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the recipe; may be repeated."),
]
ModeOption = Annotated[
    str, typer.Option("--mode", help="fp4 (rounded to nearest, as deployed) or bf16.", metavar="fp4|bf16")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print machine-readable JSON instead of tables.")]
SeedOption = Annotated[int, typer.Option("--seed", help="Seed of everything that is drawn.")]
ActivationsOption = Annotated[
    str,
    typer.Option(
        "--activations",
        metavar="w4a16|static",
        help="Inputs of the quantized layers: in high precision, or FP4 under one calibrated scale per layer.",
    ),
]
CalibrationOption = Annotated[
    Path | None,
    typer.Option(
        "--calibration",
        metavar="FILE",
        help="Statistics from `tracefp4 calibrate`; needed by h-scale and by static.",
    ),
]
MaxShardOption = Annotated[
    str, typer.Option("--max-shard-size", metavar="SIZE", help="Largest file, e.g. 5GB or 500MB.")
]
OverwriteOption = Annotated[
    bool, typer.Option("--overwrite", help="Replace a checkpoint that is already in OUT.")
]

"""Options that several commands share, so that they read and behave the same everywhere."""

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

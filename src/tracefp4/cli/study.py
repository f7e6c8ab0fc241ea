"""`tracefp4 study`: comparisons of methods over seeds, with intervals; long, resumable, outside of the tests."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from tracefp4.diagnostics.report import Table

EXIT_CLAIM = 1
STUDIES = ("following",)
CLAIMS = {
    "task_teaches": "the BF16 arm gains at least 15 points of held-out accuracy in every cell",
    "gated_not_worse": "gated is not worse than ungated by .02 in area under the reward curve (one-sided 95%)",
    "coded_not_worse": "neither is coded (the noise gate with syndromes of 64 values)",
}


def study(
    which: Annotated[str, typer.Argument(metavar="following", help="Which study.")],
    out: Annotated[
        Path, typer.Option("--out", help="Directory of the study; a stopped one goes on there.")
    ] = Path("runs/following"),
    workers: Annotated[int, typer.Option("--workers", help="Runs at a time, one core each.", min=1)] = 1,
    seeds: Annotated[int, typer.Option("--seeds", help="Paired seeds per cell.", min=1)] = 5,
    steps: Annotated[int, typer.Option("--steps", help="Rollouts of each run.", min=1)] = 40,
    warm_steps: Annotated[int, typer.Option("--warm-steps", help="Supervised steps before.", min=1)] = 500,
) -> None:
    """Compare the rules by which a trainer follows its rollout.

    `following`: BF16, nearest rounding (QAT), every decision followed
    (ungated), only those inside the noise gate (gated), and the gate with
    syndromes of 64 values (coded), with 0 and 3 weight versions between
    sampling and training, and 1 and 4 optimizer steps per rollout. 100 runs
    of one to five core minutes: give it as many workers as there are cores.
    Exit code 1: a claim does not hold.
    """
    from tracefp4.cli.progress import DemoPrinter, print_table
    from tracefp4.errors import ConfigError
    from tracefp4.study.following import FollowingSettings, run_following

    if which not in STUDIES:
        raise ConfigError(
            f"study: unknown study {which!r}. Allowed: {', '.join(STUDIES)}. Run `tracefp4 study following`."
        )
    settings = FollowingSettings(seeds=tuple(range(seeds)), steps=steps, warm_steps=warm_steps)
    result = run_following(out, settings=settings, workers=workers, on_event=DemoPrinter())
    for table in (_arms_table(result), _pairs_table(result)):
        print_table(table)
    for claim, holds in result["claims"].items():
        typer.echo(f"{'holds' if holds else 'DOES NOT HOLD'}: {CLAIMS[claim]}")
    typer.echo(f"results stored in {out / 'following.json'}")
    if not all(result["claims"].values()):
        raise typer.Exit(EXIT_CLAIM)


def _arms_table(result: Mapping[str, Any]) -> "Table":
    from tracefp4.diagnostics.report import Table, number

    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in result["runs"]:
        groups.setdefault((row["cell"], row["arm"]), []).append(row)

    def mean_of(rows: list[Mapping[str, Any]], name: str) -> str:
        found = [row[name] for row in rows if row[name] is not None]
        return number(sum(found) / len(found), digits=3) if found else "-"

    names = ("area", "accuracy_before", "accuracy_after", "mismatch_mean", "transmission", "followed")
    return Table(
        title="Means over the seeds",
        header=("cell", "arm", *(name.replace("_", " ") for name in names)),
        rows=tuple((*key, *(mean_of(rows, name) for name in names)) for key, rows in sorted(groups.items())),
        caption="area: mean reward over the steps; transmission: share of an update that the trainer sees.",
    )


def _pairs_table(result: Mapping[str, Any]) -> "Table":
    from tracefp4.diagnostics.report import Table, number

    return Table(
        title="Paired differences in area under the reward curve",
        header=("cell", "pair", "difference", "95% lower", "95% upper", "seeds"),
        rows=tuple(
            (
                found["cell"],
                f"{found['arm']} - {found['base']}",
                *(number(found[name], digits=3) for name in ("difference", "low", "high")),
                str(found["num_seeds"]),
            )
            for found in result["comparisons"]
        ),
        caption="Bounds are one-sided, Student's t over the seeds.",
    )

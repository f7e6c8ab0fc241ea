"""`tracefp4 bench guidance`: mismatch between rollout and trainer under every codec, and what each codec costs."""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tracefp4.cli.options import JsonOption, SeedOption

if TYPE_CHECKING:
    from tracefp4.diagnostics.report import Table

SIZE_NAMES = ("tiny", "cpu", "h200", "wide")


def guidance(
    size: Annotated[
        str | None,
        typer.Option(
            "--size",
            metavar="|".join(SIZE_NAMES),
            help="Model and rollout: `tiny` seconds, `cpu` minutes on two cores, `h200` and `wide` need an "
            "accelerator. Without it the hardware decides.",
        ),
    ] = None,
    model: Annotated[
        Path | None, typer.Option("--model", help="A checkpoint to measure; without it one is trained here.")
    ] = None,
    save_model: Annotated[
        Path | None, typer.Option("--save-model", help="Keep the model that is trained here, for --model.")
    ] = None,
    train_seconds: Annotated[
        float | None,
        typer.Option(
            "--train-seconds", help="End the training after this time; the size has its own.", min=1
        ),
    ] = None,
    codecs: Annotated[
        str, typer.Option("--codecs", help="Codecs to measure, with commas; without it all that are listed.")
    ] = "",
    no_sweep: Annotated[
        bool, typer.Option("--no-sweep", help="Leave out the combinations of long codes with few scale bits.")
    ] = False,
    update: Annotated[
        bool,
        typer.Option(
            "--update", help="Measure how much of a weight update each codec lets through, instead."
        ),
    ] = False,
    out: Annotated[
        Path, typer.Option("--out", help="Where the result is stored as JSON.", dir_okay=False)
    ] = Path("runs/bench_guidance.json"),
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Measure how far a trainer's log-probs are from an FP4 rollout's.

    A small mixture of experts is trained on arithmetic, then decodes token
    by token in FP4 (weights, activations, KV cache) and records how it
    rounded. Trainers score the same tokens in one pass: BF16, nearest
    rounding (QAT), and following the records as each codec keeps them. The
    floor is BF16 beside BF16: a codec at or below it makes FP4 training as
    close to its rollout as BF16 training is. `B/token` is what the codec
    stores for the activations of Qwen3.5-35B-A3B.

    --update asks the opposite question: after a step on the weights, how
    much of the change does a trainer that follows the rollout still see,
    with and without the noise gate.
    """
    from tracefp4.bench.guidance_run import GuidanceOptions, run_guidance
    from tracefp4.cli.progress import DemoPrinter, print_table
    from tracefp4.rl.rundir import write_atomically

    printer = DemoPrinter()
    options = GuidanceOptions(
        size=size,
        model=model,
        save_model=save_model,
        train_seconds=train_seconds,
        codecs=tuple(name.strip() for name in codecs.split(",") if name.strip()),
        is_swept=not no_sweep,
        is_update=update,
        seed=seed,
    )
    result = run_guidance(options, on_event=partial(typer.echo, err=True) if as_json else printer)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, (json.dumps(result, indent=2, default=str) + "\n").encode())
    if as_json:
        typer.echo(json.dumps(result, indent=2, default=str))
        return
    for table in _tables(result):
        print_table(table)
    for line in _verdict(result):
        typer.echo(line)
    typer.echo(
        f"{result['device']}, {result['arithmetic']} arithmetic, {result['hardware']}\nresult stored in {out}"
    )


def _tables(result: Mapping[str, Any]) -> "Sequence[Table]":
    return (_update_table(result),) if "steps" in result else (_mismatch_table(result), _cost_table(result))


def _mismatch_table(result: Mapping[str, Any]) -> "Table":
    from tracefp4.diagnostics.report import Table

    lines = [
        (
            _name(row),
            f"{row['mean']:.5f}",
            f"{row['p99']:.3f}",
            f"{row['largest']:.2f}",
            f"{row['k3']:.1e}",
            _share(row["residual"]),
            _count(row["undecoded"]),
            {None: "floor", True: "yes", False: "no"}[row["within_floor"]],
        )
        for row in result["rows"]
    ]
    header = ("row", "mean |d|", "p99", "max", "k3", "wrong", "undec", "within")
    caption = (
        "d = log p_train - log p_rollout of the sampled tokens. wrong: codes that differ from the rollout's. undec: "
        "syndrome blocks without a plausible decoding. /half: the last half of the layers. *: rows of this model are "
        "shorter than the code, which promises too much for a large model."
    )
    return Table(title="FP4 rollout and trainer", header=header, rows=tuple(lines), caption=caption)


def _cost_table(result: Mapping[str, Any]) -> "Table":
    from tracefp4.diagnostics.report import Table

    lines = [
        (
            _name(row),
            _count(row["activation_bytes"]),
            _count(row["kv_bytes"]),
            _count(row["own_bytes"]),
            _rate(row["encode_rate"]),
            _rate(row["decode_rate"]),
            f"{row['mean']:.5f}",
        )
        for row in sorted(result["rows"], key=lambda row: row["activation_bytes"])
        if row["activation_bytes"]
    ]
    header = ("codec", "B/token", "K, V", "here", "encode", "decode", "mean |d|")
    caption = (
        "B/token: codec bytes of the activations of Qwen3.5-35B-A3B; K, V: of its cache; here: of all sites of this "
        "model. encode, decode: million values a second."
    )
    return Table(title="What each codec costs", header=header, rows=tuple(lines), caption=caption)


def _update_table(result: Mapping[str, Any]) -> "Table":
    from tracefp4.diagnostics.report import Table

    steps = [f"{step:g}" for step in result["steps"]]
    lines = [
        (
            row["id"],
            row["gate"],
            f"{row['mean']:.5f}",
            _share(row["followed"]),
            *(_slope(row["transmission"][step]) for step in steps),
        )
        for row in result["rows"]
    ]
    header = ("row", "gate", "mean |d|", "held", *steps)
    caption = (
        "mean |d|: at the rollout's own weights. held: values that the gate leaves to the record. Under each step "
        "size: the share of a sign-SGD step's change in log p that the trainer sees, with half of its 95% interval."
    )
    return Table(title="What a trainer sees of an update", header=header, rows=tuple(lines), caption=caption)


def _verdict(result: Mapping[str, Any]) -> Sequence[str]:
    if "best" not in result:
        return ()
    best = next((row for row in result["rows"] if row["id"] == result["best"]), None)
    if best is None:
        return (f"floor {result['floor']:.5f}: no codec is at or below it without a shortened code",)
    return (
        f"floor {result['floor']:.5f}; fewest bytes at or below it: {best['id']}, {best['activation_bytes']:,} bytes "
        f"per token (aim {result['aim_bytes']:,}, ambition {result['ambition_bytes']:,})",
    )


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.3f}%" if value < 0.01 else f"{100 * value:.1f}%"


def _count(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}" if value >= 10 else f"{value:.1f}"


def _slope(found: Mapping[str, float]) -> str:
    if "slope" not in found:
        return "-"
    half = f"+-{found['high'] - found['slope']:.2f}" if "high" in found else ""
    return f"{found['slope']:.2f}{half}"


def _name(row: Mapping[str, Any]) -> str:
    return row["id"].replace(".last_half", "/half") + ("*" if row["is_shortened"] else "")

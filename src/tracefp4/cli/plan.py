"""`tracefp4 plan`: what would become FP4, what a record weighs, and what fits, before anything is
downloaded.
"""

import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tracefp4.cli.options import JsonOption

if TYPE_CHECKING:
    from tracefp4.diagnostics.report import Table
    from tracefp4.patching.budget import GuidanceBytes, Memory
    from tracefp4.patching.rules import ModuleDecision, PlanRules
    from tracefp4.patching.shapes import ModelShape

GIB = 1024**3


def plan(
    model: Annotated[
        str,
        typer.Argument(
            help="A known name such as qwen3.5-35b-a3b, a config.json, or a checkpoint directory."
        ),
    ],
    codec: Annotated[
        str, typer.Option("--codec", metavar="mantissa|full|none", help="What is recorded per value.")
    ] = "mantissa",
    layers: Annotated[
        str,
        typer.Option(
            "--layers", metavar="all|last_half|last:N", help="Layers that are recorded and followed."
        ),
    ] = "all",
    sites: Annotated[
        str, typer.Option("--sites", help="Site kinds, separated by commas: x, k, v, w2.")
    ] = "x,k,v",
    exclude: Annotated[
        list[str] | None,
        typer.Option("--exclude", help="Whole-name glob of modules that stay bf16; may be repeated."),
    ] = None,
    card: Annotated[
        str, typer.Option("--card", metavar="h200|h100|b200|rtx4090|NGB", help="Device that it should fit.")
    ] = "h200",
    context: Annotated[int, typer.Option("--context", help="Tokens per sequence.", min=1)] = 32768,
    batch: Annotated[int, typer.Option("--batch", help="Sequences at once.", min=1)] = 16,
    all_modules: Annotated[
        bool, typer.Option("--all-modules", help="Name every module instead of grouping layers.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show every module's decision, guidance bytes per token, memory in BF16 and FP4, and what fits a
    card.
    """
    from tracefp4.patching import budget
    from tracefp4.patching.catalogue import shape_by_name
    from tracefp4.patching.rules import PlanRules

    shape = shape_by_name(model)
    kinds = tuple(kind.strip() for kind in sites.split(",") if kind.strip())
    rules = PlanRules(guidance=codec, layers=layers, sites=kinds, exclude=tuple(exclude or ()))
    decisions = budget.decisions_for(shape, rules)
    record = budget.record_bytes(shape, decisions, rules)
    memory = budget.memory(shape, decisions, context=context, batch=batch)
    usable = int(budget.card_bytes(card) * budget.USABLE_FRACTION)
    if as_json:
        answer = {
            "model": shape.name,
            "note": shape.note,
            "rules": asdict(rules),
            "modules": [asdict(d) | {"guided": _guided(d, shape, rules)} for d in decisions],
            "guidance_bytes_per_token": asdict(record) | {"total": record.total},
            "memory_bytes": asdict(memory) | {"context": context, "batch": batch},
            "fits": {"card": card, "usable_bytes": usable}
            | {name: need <= usable for name, need in _needs(memory)},
        }
        typer.echo(json.dumps(answer, indent=2))
        return
    from tracefp4.cli.progress import print_table

    print_table(_decision_table(shape, decisions, rules, is_full=all_modules))
    print_table(_guidance_table(record, rules))
    print_table(_memory_table(memory, context=context, batch=batch))
    print_table(_fit_table(memory, card=card, usable=usable))
    if shape.note:
        typer.echo(f"note: {shape.note}")


def _guided(decision: "ModuleDecision", shape: "ModelShape", rules: "PlanRules") -> list[str]:
    from tracefp4.patching.budget import guided_sites

    if not decision.is_quantized or rules.guidance == "none":
        return []
    from tracefp4.errors import ConfigError

    try:
        return [site.kind for site in guided_sites(shape, [decision], rules)]
    except ConfigError:  # no site of this one module is guided
        return []


def _decision_table(
    shape: "ModelShape", decisions: Sequence["ModuleDecision"], rules: "PlanRules", *, is_full: bool
) -> "Table":
    from tracefp4.diagnostics.report import Table

    sets = _module_sets(shape, decisions, rules, is_full=is_full)
    rows = tuple((name, ranges(layers), *key) for name, layers, key in sets)
    return Table(
        title=f"{shape.name}: modules",
        header=("module", "layers", "precision", "guided sites", "reason"),
        rows=rows,
    )


def _module_sets(
    shape: "ModelShape", decisions: Sequence["ModuleDecision"], rules: "PlanRules", *, is_full: bool
) -> list[tuple[str, tuple[int, ...], tuple[str, str, str]]]:
    """Return (modules, layers, (precision, guided sites, reason)): first equal layers, then equal parents."""
    by_name: dict[tuple[str, tuple[str, str, str]], list[int]] = {}
    for d in decisions:
        guided = ", ".join(_guided(d, shape, rules)) or "-"
        name = d.name if is_full or d.layer is None else d.name.split(f".{d.layer}.", 1)[1]
        key = (name, ("FP4" if d.is_quantized else "bf16", guided, d.reason))
        by_name.setdefault(key, []).extend([] if d.layer is None else [d.layer])
    by_parent: dict[tuple[str, tuple[int, ...], tuple[str, str, str]], list[str]] = {}
    for (name, key), layers in by_name.items():
        parent, _, leaf = name.rpartition(".")
        by_parent.setdefault((parent, tuple(layers), key), []).append(leaf)
    found = []
    for (parent, layers, key), leaves in by_parent.items():
        names = leaves[0] if len(leaves) == 1 else f"{{{', '.join(leaves)}}}"
        found.append((f"{parent}.{names}" if parent else names, layers, key))
    return found


def ranges(layers: Sequence[int]) -> str:
    """Write layer numbers shortly: `0-39`, `3, 7, ..., 39 (10)`, `-` for none."""
    if not layers:
        return "-"
    if len(layers) == 1:
        return str(layers[0])
    steps = {b - a for a, b in itertools.pairwise(layers)}
    if steps == {1}:
        return f"{layers[0]}-{layers[-1]}"
    if len(layers) <= 3:
        return ", ".join(map(str, layers))
    return f"{layers[0]}, {layers[1]}, ..., {layers[-1]} ({len(layers)})"


def _guidance_table(record: "GuidanceBytes", rules: "PlanRules") -> "Table":
    from tracefp4.diagnostics.report import Table

    lines = (
        ("activations: codes and block scales", record.activations),
        ("KV: codes and block scales", record.kv),
        ("row exponents", record.row_exponents),
        ("routed expert ids", record.routed_ids),
        ("total", record.total),
    )
    return Table(
        title=f"Guidance, bytes per token (codec {rules.guidance}, layers {rules.layers})",
        header=("part", "bytes"),
        rows=tuple((name, f"{value:,}") for name, value in lines),
    )


def _gib(value: int) -> str:
    return f"{value / GIB:,.2f} GiB"


def _memory_table(memory: "Memory", *, context: int, batch: int) -> "Table":
    from tracefp4.diagnostics.report import Table

    rows = [
        ("weights", _gib(memory.weights_bf16), _gib(memory.weights_plan)),
        (f"KV cache, {batch} x {context:,} tokens", _gib(memory.kv_bf16), _gib(memory.kv_plan)),
    ]
    if memory.state:
        rows.append((f"recurrent state, {batch} sequences", _gib(memory.state), _gib(memory.state)))
    title = f"Engine memory ({memory.parameters / 1e9:,.2f}B parameters)"
    return Table(title=title, header=("part", "BF16", "FP4 plan"), rows=tuple(rows))


def _needs(memory: "Memory") -> list[tuple[str, int]]:
    return [
        ("engine, BF16", memory.weights_bf16 + memory.kv_bf16 + memory.state),
        ("engine, FP4 plan", memory.weights_plan + memory.kv_plan + memory.state),
        ("trainer, all on one card", memory.trainer),
    ]


def _fit_table(memory: "Memory", *, card: str, usable: int) -> "Table":
    from tracefp4.diagnostics.report import Table

    rows: list[tuple[Any, ...]] = []
    for name, need in _needs(memory):
        verdict = "fits" if need <= usable else f"does not fit: {-(-need // usable)} cards or more"
        rows.append((name, _gib(need), _gib(usable), verdict))
    return Table(
        title=f"Does it fit {card}?",
        header=("what", "needs", "usable", "verdict"),
        rows=tuple(rows),
        caption=(
            "Usable is 90% of the card. Trainer: bf16 weights and gradients, fp32 master weights and "
            "Adam moments, "
            "16 bytes per parameter. Activations and workspaces are not counted."
        ),
    )

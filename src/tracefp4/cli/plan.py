"""`tracefp4 plan`: what becomes FP4, what a record weighs and what fits, before any download."""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from tracefp4.cli.options import JsonOption
from tracefp4.errors import ConfigError

if TYPE_CHECKING:
    from tracefp4.patching.budget import GuidanceBytes


def plan(
    model: Annotated[
        str,
        typer.Argument(
            help="A known name such as qwen3.5-35b-a3b, a config.json, or a checkpoint directory."
        ),
    ],
    codec: Annotated[
        str,
        typer.Option(
            "--codec",
            metavar="none|auto|<codes>[+<scales>]",
            help="What a record keeps. Codes: full (4 bits), low2, mantissa (the lowest bit), or syndromes of the "
            "lowest bits: secded, parity<g>, bch<n>_<t>. Scales: raw (8 bits a block), coset2, coset1, or such a "
            "syndrome. mantissa_lean is mantissa+coset2. auto: chosen by site from measured noise.",
        ),
    ] = "bch64_3+coset1",
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
    """Show what becomes FP4 and why, guidance bytes per token, memory, and what fits a card."""
    from tracefp4.patching import budget
    from tracefp4.patching.catalogue import shape_by_name
    from tracefp4.patching.rules import AUTO, PlanRules

    shape = shape_by_name(model)
    kinds = tuple(kind.strip() for kind in sites.split(",") if kind.strip())
    try:
        rules = PlanRules(guidance=codec, layers=layers, sites=kinds, exclude=tuple(exclude or ()))
    except ConfigError as error:  # which names the keys of a recipe; the options here have their names
        own = str(error).replace("quantization.guidance:", "--codec:").replace("quantization.", "--", 1)
        raise ConfigError(own) from error
    decisions = budget.decisions_for(shape, rules)
    by_codec = budget.bytes_by_codec(shape, decisions, rules)
    # Under auto no codec is chosen yet, and there is no one record to weigh.
    record = None if rules.guidance == AUTO else budget.record_bytes(shape, decisions, rules)
    memory = budget.memory(shape, decisions, context=context, batch=batch, weight=rules.weight)
    usable = int(budget.card_bytes(card) * budget.USABLE_FRACTION)
    if as_json:
        modules = [
            asdict(d) | {"guided": budget.guided_kinds(d, num_layers=shape.layers, rules=rules)}
            for d in decisions
        ]
        answer = {
            "model": shape.name,
            "note": shape.note,
            "rules": asdict(rules),
            "modules": modules,
            "guidance_bytes_per_token": None if record is None else _with_total(record),
            "guidance_bytes_by_codec": {name: _with_total(found) for name, found in by_codec.items()},
            "memory_bytes": asdict(memory) | {"context": context, "batch": batch},
            "card": {"name": card, "usable_bytes": usable},
            "fits": {name: need <= usable for name, need in budget.needs(memory).items()},
        }
        typer.echo(json.dumps(answer, indent=2))
        return
    from tracefp4.cli.plan_tables import (
        codec_table,
        decision_table,
        fit_table,
        guidance_table,
        memory_table,
    )
    from tracefp4.cli.progress import print_table

    print_table(decision_table(shape, decisions, rules, is_full=all_modules))
    if record is not None:
        print_table(guidance_table(record, rules))
    if by_codec:
        print_table(codec_table(by_codec, rules))
    print_table(memory_table(memory, context=context, batch=batch))
    print_table(fit_table(memory, card=card, usable=usable))
    if shape.note:
        typer.echo(f"note: {shape.note}")


def _with_total(record: "GuidanceBytes") -> dict[str, int]:
    return asdict(record) | {"total": record.total}

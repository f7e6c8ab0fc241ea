"""The tables of `tracefp4 plan`: decisions, bytes per token, memory, and the verdict for a card."""

import itertools
from collections.abc import Mapping, Sequence

from tracefp4.coding import codec_by_name
from tracefp4.diagnostics.report import Table
from tracefp4.patching.budget import GIB, GuidanceBytes, Memory, block_of, guided_kinds, needs
from tracefp4.patching.rules import ModuleDecision, PlanRules
from tracefp4.patching.shapes import ModelShape


def decision_table(
    shape: ModelShape, decisions: Sequence[ModuleDecision], rules: PlanRules, *, is_full: bool
) -> Table:
    """List the modules with their decision and reason, grouped unless `is_full`."""
    sets = _module_sets(shape, decisions, rules, is_full=is_full)
    rows = tuple((name, ranges(layers), *key) for name, layers, key in sets)
    return Table(
        title=f"{shape.name}: modules",
        header=("module", "layers", "precision", "reason"),
        rows=rows,
    )


# (precision with the guided sites, reason)
Verdict = tuple[str, str]


def _module_sets(
    shape: ModelShape, decisions: Sequence[ModuleDecision], rules: PlanRules, *, is_full: bool
) -> list[tuple[str, tuple[int, ...], Verdict]]:
    """Return (modules, layers, verdict): one per module, or equal layers and then equal parents joined."""
    by_name: dict[tuple[str, Verdict], list[int]] = {}
    for d in decisions:
        guided = ", ".join(guided_kinds(d, num_layers=shape.layers, rules=rules))
        precision = "bf16" if not d.is_quantized else f"FP4, guided {guided}" if guided else "FP4"
        name = d.name if is_full or d.layer is None else d.name.split(f".{d.layer}.", 1)[1]
        verdict = (precision, d.reason)
        by_name.setdefault((name, verdict), []).extend([] if d.layer is None else [d.layer])
    if is_full:
        return [(name, tuple(layers), verdict) for (name, verdict), layers in by_name.items()]
    by_parent: dict[tuple[str, tuple[int, ...], Verdict], list[str]] = {}
    for (name, verdict), layers in by_name.items():
        parent, _, leaf = name.rpartition(".")
        by_parent.setdefault((parent, tuple(layers), verdict), []).append(leaf)
    found = []
    for (parent, shared, verdict), leaves in by_parent.items():
        names = leaves[0] if len(leaves) == 1 else f"{{{', '.join(leaves)}}}"
        found.append((f"{parent}.{names}" if parent else names, shared, verdict))
    return found


def ranges(layers: Sequence[int]) -> str:
    """Write layer numbers shortly: `0-39`, `3, 7, ..., 39`, `30 of 0-38`, `-` for none."""
    if not layers:
        return "-"
    if len(layers) == 1:
        return str(layers[0])
    steps = {b - a for a, b in itertools.pairwise(layers)}
    if steps == {1}:
        return f"{layers[0]}-{layers[-1]}"
    if len(layers) <= 3:
        return ", ".join(map(str, layers))
    if len(steps) == 1:
        return f"{layers[0]}, {layers[1]}, ..., {layers[-1]}"
    return f"{len(layers)} of {layers[0]}-{layers[-1]}"


def codec_table(found: Mapping[str, GuidanceBytes], rules: PlanRules) -> Table:
    """Compare the codecs over the plan's sites; the chosen one is marked."""
    block = block_of(rules.activation)
    rows = tuple(
        (
            f"{name} *" if name == rules.guidance else name,
            f"{codec_by_name(name).bits_per_value(block_size=block):.4g}",
            f"{record.activations:,}",
            f"{record.kv:,}",
            f"{record.total:,}",
        )
        for name, record in found.items()
    )
    marked = (
        "* is this plan's codec." if rules.guidance in found else "auto chooses among them by measured noise."
    )
    return Table(
        title=f"Guidance by codec, bytes per token (layers {rules.layers})",
        header=("codec", "bits per value", "activations", "KV", "total"),
        rows=rows,
        caption=(
            f"{marked} Bits per value count codes and block scales; the total also row exponents and routed ids. A "
            "codec of fewer bits serves where trainer and rollout differ in fewer values."
        ),
    )


def guidance_table(record: GuidanceBytes, rules: PlanRules) -> Table:
    """List a record's bytes per token by purpose."""
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


def memory_table(memory: Memory, *, context: int, batch: int) -> Table:
    """List the engine's memory in bf16 and under the plan."""
    rows = [
        ("weights", _gib(memory.weights_bf16), _gib(memory.weights_plan)),
        (f"KV cache, {batch} x {context:,} tokens", _gib(memory.kv_bf16), _gib(memory.kv_plan)),
    ]
    if memory.state:
        rows.append((f"recurrent state, {batch} sequences", _gib(memory.state), _gib(memory.state)))
    title = f"Engine memory ({memory.parameters / 1e9:,.2f}B parameters)"
    return Table(title=title, header=("part", "BF16", "FP4 plan"), rows=tuple(rows))


def fit_table(memory: Memory, *, card: str, usable: int) -> Table:
    """Compare what engine and trainer need with what a card offers."""
    rows: list[tuple[str, ...]] = []
    for name, need in needs(memory).items():
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

"""Which linears of a checkpoint become FP4: routed experts by default, others by whole-name globs.

Embeddings, norms and routers never do; the head only by its exact name, and not while it is tied to the embedding.
What an engine runs as one matrix or one kernel (gate with up, q with k and v, the experts of a layer) is selected
as a whole or not at all. Never reads a tensor.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from tracefp4.checkpoints.grouping import Group, fused_modules, group
from tracefp4.checkpoints.linears import Inventory, Linear
from tracefp4.errors import ConfigError

NEVER = {
    "router": "a flipped expert costs more than any rounding",
    "embedding": "it is looked up, not multiplied",
    "norm": "it is a vector",
}
"""Kinds that stay in high precision whatever is asked, and why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """What becomes FP4."""

    linears: tuple[Linear, ...]
    """Selected, in stored order."""
    groups: tuple[Group, ...]
    """The same linears, those that share an outer scale together."""
    notes: tuple[str, ...]
    """What a pattern matched and was left in high precision, each with its reason."""


def select(stock: Inventory, *, include: Sequence[str] = (), exclude: Sequence[str] = ()) -> Selection:
    """Choose linears.

    Args:
        stock: what the checkpoint stores.
        include: whole-name globs over module names (`fnmatchcase`; `*` crosses dots) that replace the default,
            which is every routed expert. The head is taken only by its exact name.
        exclude: globs of what stays in high precision; they win over `include`.

    Raises:
        ConfigError: a pattern that matches nothing, or only what can never be FP4; nothing is left; a part of what
            engines fuse.
    """
    names = _module_names(stock)
    notes: list[str] = []
    chosen: set[str] = set()
    for pattern in include:
        chosen |= _included(pattern, stock, names, notes)
    if not include:
        chosen = {linear.module for linear in stock.linears if linear.kind == "expert"}
    for pattern in exclude:
        chosen -= set(_matches("exclude", pattern, names))
    linears = tuple(linear for linear in stock.linears if linear.module in chosen)
    if not linears:
        raise ConfigError(
            f"Nothing is left to quantize; include {list(include)}, exclude {list(exclude)}. At least one linear must "
            f"become FP4. {' '.join(notes) or 'Exclude less.'}"
        )
    _check_whole(stock, chosen)
    return Selection(linears=linears, groups=group(linears), notes=tuple(dict.fromkeys(notes)))


def _module_names(stock: Inventory) -> dict[str, str]:
    """Kind of every module that a pattern may name: linears, and what has a name but no matrix."""
    # fused experts are named one by one, by their linears
    found = {item.module: item.kind for item in stock.stored.values() if not item.is_fused}
    return found | {linear.module: linear.kind for linear in stock.linears}


def _included(pattern: str, stock: Inventory, names: dict[str, str], notes: list[str]) -> set[str]:
    matched = _matches("include", pattern, names)
    linear_names = {linear.module for linear in stock.linears}
    kept = [name for name in matched if name in linear_names and names[name] in NEVER]
    allowed = {name for name in matched if name in linear_names and names[name] not in NEVER}
    if not allowed:
        kind = names[matched[0]]
        raise ConfigError(
            f"include: {pattern!r} matches only what cannot become FP4, such as {matched[0]} ({kind}: "
            f"{NEVER.get(kind, 'it holds no matrix')}). Routers, embeddings and norms stay in high precision. Remove "
            "the pattern."
        )
    if kept:
        notes.append(
            f"{pattern!r}: {len(kept)} routers and embeddings stay in high precision, {kept[0]} among them."
        )
    for name in sorted(name for name in allowed if names[name] == "head"):
        reason = "it is tied to the embedding" if stock.ties_embeddings else "only its exact name includes it"
        if stock.ties_embeddings or pattern != name:
            notes.append(f"{name} stays in high precision: {reason}.")
            allowed.discard(name)
    return allowed


def _matches(option: str, pattern: str, names: dict[str, str]) -> list[str]:
    matched = [name for name in names if fnmatchcase(name, pattern)]
    if not matched:
        near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.3) or list(names)[:3]
        raise ConfigError(
            f"{option}: {pattern!r} matches no module. Patterns are globs over whole module names. "
            f"Near: {', '.join(near)}."
        )
    return matched


def _check_whole(stock: Inventory, chosen: set[str]) -> None:
    """Refuse to split what an engine loads as one: it would reject the file or read it wrongly."""
    whole: dict[str, list[str]] = {}
    for linear in stock.linears:
        if linear.experts is not None:
            whole.setdefault(linear.experts, []).append(linear.module)
    touched = {name.rpartition(".")[0] for name in chosen}
    near = (linear for linear in stock.linears if linear.module.rpartition(".")[0] in touched)
    together = [*whole.values(), *fused_modules(near)]
    for members in together:
        inside = [name for name in members if name in chosen]
        if inside and len(inside) < len(members):
            outside = next(name for name in members if name not in chosen)
            raise ConfigError(
                f"{inside[0]} would become FP4 and {outside} not; engines run these {len(members)} modules as one. "
                "Select all of them or none. Widen or narrow the patterns."
            )

"""Linears that engines fuse into one matrix, and that therefore share one outer scale.

Gate and up of one expert or MLP; q, k and v of self-attention, under either of their usual names; the pairs that
engines fuse in latent attention and in gated delta layers. In cross-attention q has another input, so only k and v
are fused. An attention whose parts are named otherwise is left apart, and a warning lists it: an engine may fuse
it all the same. Never computes a scale.
Source: `packed_modules_mapping` of the families' models in vLLM.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tracefp4.checkpoints.linears import Linear
from tracefp4.checkpoints.names import is_attention

FUSED = (
    ("gate_proj", "up_proj"), ("w1", "w3"), ("q_proj", "k_proj", "v_proj"), ("to_q", "to_k", "to_v"),
    ("q_a_proj", "kv_a_proj_with_mqa"), ("in_proj_qkv", "in_proj_z"), ("in_proj_b", "in_proj_a"),
)  # fmt: skip
"""Last names of sibling modules that engines make one matrix of, in that order."""
# Parts of attention that stand alone, or are stored as one matrix already.
_ALONE = {
    "o_proj", "out_proj", "to_out", "proj", "qkv", "qkv_proj", "kv_proj", "to_qkv", "to_kv", "q_b_proj", "kv_b_proj",
    "in_proj_qkvz", "in_proj_ba",
}  # fmt: skip
_CROSS = re.compile(r"cross|encoder_attn|encdecatt|attn2", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Group:
    """Linears that share one outer scale, and with it one input scale."""

    members: tuple[Linear, ...]
    """In the order in which an engine stacks them; one for a linear that stands alone."""


def group(linears: Iterable[Linear]) -> tuple[Group, ...]:
    """Put linears that engines fuse together; each is in exactly one group, in the order of first members.

    Warns: once, listing attention modules whose parts have unknown names.
    """
    siblings = _siblings(linears)
    known = _ALONE.union(*FUSED)
    unknown = [
        f"{parent} ({', '.join(sorted(parts))})"
        for parent, parts in siblings.items()
        if is_attention(parent) and not parts.keys() <= known
    ]
    if unknown:
        warnings.warn(
            f"Attention with unknown names: {'; '.join(unknown)}. Their matrices share no outer scale; an engine that "
            "fuses them would need one. Exclude them, or check how the engine loads them."
        )
    return tuple(found for parent, parts in siblings.items() for found in _groups(parent, parts))


def fused_modules(linears: Iterable[Linear]) -> list[list[str]]:
    """Names of the modules that an engine makes one matrix of; those that stand alone are left out."""
    siblings = _siblings(linears)
    groups = [found for parent, parts in siblings.items() for found in _groups(parent, parts)]
    return [[member.module for member in found.members] for found in groups if len(found.members) > 1]


def _siblings(linears: Iterable[Linear]) -> dict[str, dict[str, Linear]]:
    """Linears by the module that holds them and by their last name."""
    found: dict[str, dict[str, Linear]] = {}
    for linear in linears:
        parent, _, leaf = linear.module.rpartition(".")
        found.setdefault(parent, {})[leaf] = linear
    return found


def _groups(parent: str, parts: dict[str, Linear]) -> Iterator[Group]:
    placed: set[str] = set()
    for leaf, linear in parts.items():
        if leaf in placed:
            continue
        names = next((names for names in FUSED if leaf in names), (leaf,))
        present = [name for name in names if name in parts]
        if names[-2:] in (("k_proj", "v_proj"), ("to_k", "to_v")) and _is_cross(parent, parts, present):
            present = [name for name in present if (name == names[0]) == (leaf == names[0])]
        placed.update(present)
        yield Group(tuple(parts[name] for name in present) if len(present) > 1 else (linear,))


def _is_cross(parent: str, parts: dict[str, Linear], present: list[str]) -> bool:
    """Cross-attention by its name, or because q reads a width that k or v does not."""
    return _CROSS.search(parent) is not None or len({parts[name].shape[1] for name in present}) > 1

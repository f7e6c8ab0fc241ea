"""What a stored tensor is, from its name: routed expert, router, attention, norm and so on, per model family.

Names are those of the files that `save_pretrained` of transformers 5.17 writes and that engines load. Most
families store every expert by itself; some releases store all experts of a layer in one 3-D tensor, and how gate
and up share it depends on the family:

    family                    per expert                          fused 3-D
    qwen2_moe ... glm4_moe    mlp.experts.E.{gate,up,down}_proj   gate_up_proj [E, 2I, H], gate rows before up rows
    mixtral                   block_sparse_moe.experts.E.{w1,w3,w2}   none
    gpt_oss                   none                                gate_up_proj [E, H, 2I], columns alternate, biases

A name says what a tensor is, never whether it is quantized (`selection.py`), and its layout comes from the family,
never from a guess at the shape.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tracefp4.errors import ConfigError

KINDS = (
    "expert", "shared_expert", "attention", "mlp", "head", "draft", "router", "norm", "embedding", "expert_bias",
    "other",
)  # fmt: skip
"""`draft` is a layer for multi-token prediction; `mlp` a dense one; `expert` a routed expert, fused or not."""

ROLES = {
    "gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up", "down_proj": "down", "w2": "down",
    "gate_up_proj": "gate_up",
}  # fmt: skip
"""Part of a gated MLP by the module's last name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """How the checkpoints of one model type name and lay out their routed experts."""

    model_type: str
    """`model_type` of config.json (of its `text_config`, where there is one)."""
    experts: str = "mlp.experts"
    """Where the experts of a layer live, below the layer."""
    leaves: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    """Last names of one expert's gate, up and down projection."""
    is_per_expert: bool = True
    """True when an expert may be stored by itself."""
    fused: str = "concatenated"
    """3-D layout of gate and up: `concatenated` [E, 2I, H], `interleaved` [E, H, 2I], `none` (never fused)."""


FAMILIES = {
    family.model_type: family
    for family in (
        *(
            Family(model_type=name)
            for name in (
                "qwen2_moe", "qwen3_moe", "qwen3_5_moe_text", "qwen3_next", "olmoe", "deepseek_v3", "glm4_moe",
            )
        ),
        Family(
            model_type="mixtral", experts="block_sparse_moe.experts", leaves=("w1", "w3", "w2"), fused="none"
        ),
        Family(model_type="gpt_oss", is_per_expert=False, fused="interleaved"),
    )
}  # fmt: skip
"""Every supported family by its model type; `qwen3_5_moe` is read through its `text_config`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """What one stored tensor is."""

    name: str
    """Name in the file."""
    module: str
    """The module that owns it: the name without its last part (`weight`, `bias`, `gate_up_proj`)."""
    kind: str
    """One of `KINDS`."""
    layer: int | None
    """Decoder layer, None outside the layers."""
    expert: int | None = None
    """Index of a routed expert that is stored by itself."""
    role: str = ""
    """Of an expert: `gate`, `up`, `down`, `gate_up` (fused); empty for all other kinds."""
    is_fused: bool = False
    """True for one tensor that holds all experts of a layer."""


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of config.json that describes the language model."""
    nested = config.get("text_config")
    return nested if isinstance(nested, Mapping) else config


def family_of(config: Mapping[str, Any]) -> Family:
    """Return the family of a config.json.

    Raises:
        ConfigError: a model type that is not supported.
    """
    model_type = text_config(config).get("model_type", config.get("model_type"))
    if model_type not in FAMILIES:
        raise ConfigError(
            f"The model type {model_type!r} is not supported; supported: {', '.join(sorted(FAMILIES))}. The layout of "
            "experts comes from it. Use a checkpoint of one of these families."
        )
    return FAMILIES[model_type]


def classify(name: str, *, family: Family, num_layers: int) -> Stored:
    """Say what a stored tensor is.

    Args:
        name: name in the file.
        family: names of the experts.
        num_layers: decoder layers; the layers behind them, and `mtp.*`, predict further tokens (`draft`).
    """
    module = name.rpartition(".")[0]
    found = re.search(r"(?:^|\.)layers\.(\d+)\.", name)
    layer = int(found[1]) if found else None
    is_draft = name.startswith("mtp.") or (layer is not None and layer >= num_layers)
    expert = re.fullmatch(
        rf".+\.{re.escape(family.experts)}\.(?:(\d+)\.)?(\w+?)(_bias|\.weight|\.bias)?", name
    )
    if expert is not None and expert[2] in ROLES:
        is_bias = expert[3] in ("_bias", ".bias")
        return Stored(
            name=name,
            module=module,
            kind="draft" if is_draft else "expert_bias" if is_bias else "expert",
            layer=layer,
            expert=int(expert[1]) if expert[1] else None,
            role=ROLES[expert[2]],
            is_fused=expert[1] is None,
        )
    kind = _kind(module)
    if is_draft and kind not in ("norm", "embedding", "router", "head"):
        kind = "draft"
    return Stored(name=name, module=module, kind=kind, layer=layer)


def _kind(module: str) -> str:
    """Kind of a module that is no routed expert; the order decides, e.g. a norm of attention is a norm."""
    parts = module.split(".")
    leaf = parts[-1]
    if "norm" in leaf:
        return "norm"
    if any("embed" in part for part in parts):
        return "embedding"
    if leaf in ("gate", "router", "shared_expert_gate"):
        return "router"
    if leaf in ("lm_head", "head"):
        return "head"
    if any(part in ("shared_expert", "shared_experts") for part in parts):
        return "shared_expert"
    if is_attention(module):
        return "attention"
    return "mlp" if "mlp" in parts else "other"


def is_attention(module: str) -> bool:
    """Say whether a module lies inside an attention module, of any naming."""
    return any("attn" in part or "attention" in part.lower() for part in module.split("."))

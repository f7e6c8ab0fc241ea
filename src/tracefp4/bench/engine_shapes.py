"""Which models the suite `engine` can build without a checkpoint, and the config and plan that one of them would have.

Shapes are the known ones (`patching.catalogue`), whole or cut to their first layers, and `tiny` and `tiny-hybrid`,
which run on any processor. This module makes no weights.
"""

from dataclasses import replace
from typing import Any

from tracefp4.errors import ConfigError
from tracefp4.patching.catalogue import ALIASES, KNOWN_SHAPES
from tracefp4.patching.plan import Plan, plan
from tracefp4.patching.rules import PlanRules
from tracefp4.patching.shapes import ModelShape

TINY = ModelShape(
    name="tiny",
    hidden=64,
    layers=2,
    attention_layers=(0, 1),
    q_heads=4,
    kv_heads=2,
    head_dim=64,
    experts=4,
    top_k=2,
    moe_inter=32,
    vocab=256,
    qk_norm=1,
)
"""Small enough for a processor; its figures say nothing but that the suite runs."""
TINY_HYBRID = replace(
    TINY,
    name="tiny-hybrid",
    layers=4,
    attention_layers=(3,),
    has_q_gate=True,
    shared_inter=32,
    delta_qk_heads=2,
    delta_v_heads=4,
    delta_dim=16,
)
"""The same of a model with gated delta layers."""
ROTATED_SHARE = 0.25
"""Of a head, in models with gated delta layers."""
ROPE_THETA = 1e6
NORM_EPSILON = 1e-6
PLANS = {"fp4": PlanRules(guidance="none"), "bf16": PlanRules(mode="bf16", guidance="none")}
"""What is compared: routed experts and cache in FP4, as a recipe without options has them, and nothing in FP4."""


def measured_names() -> list[str]:
    """Return the names that `measured_shape` takes."""
    shapes = {**KNOWN_SHAPES, **{shape.name: shape for shape in (TINY, TINY_HYBRID)}}
    return [name for name, shape in shapes.items() if _is_built(shape)]


def measured_shape(name: str, *, layers: int | None = None) -> ModelShape:
    """Return a shape by name.

    Args:
        name: One of `measured_names`, or an alias, in any case.
        layers: Keep the first so many decoder layers; None keeps all. The name of a part says how many.

    Raises:
        ConfigError: No such shape, one that is neither plain Qwen3-MoE nor Qwen3.5-MoE, or more layers than it has.
    """
    asked = name.lower()
    own = {shape.name: shape for shape in (TINY, TINY_HYBRID)}
    shape = own.get(asked) or KNOWN_SHAPES.get(ALIASES.get(asked, asked))
    if shape is None or not _is_built(shape):
        what = "no known shape" if shape is None else "a model that this suite does not build"
        raise ConfigError(
            f"bench engine: random weights cannot be made for {name!r}, {what}; shapes: {', '.join(measured_names())}. "
            "Name one of them."
        )
    if layers is None or layers == shape.layers:
        return shape
    if not 1 <= layers < shape.layers:
        raise ConfigError(
            f"bench engine: {shape.name} cannot be cut to its first {layers} layers; it has {shape.layers}. Allowed: 1 "
            f"to {shape.layers}. Correct --layers, or leave it out."
        )
    kept = tuple(layer for layer in shape.attention_layers if layer < layers)
    return replace(shape, name=f"{shape.name}.{layers}_layers", layers=layers, attention_layers=kept)


def config_of(shape: ModelShape, *, max_positions: int) -> Any:
    """Return the transformers config of a shape.

    Args:
        shape: From `measured_shape`.
        max_positions: Longest sequence.
    """
    from transformers import Qwen3_5MoeTextConfig, Qwen3MoeConfig

    rope = {"rope_type": "default", "rope_theta": ROPE_THETA}
    common = {
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "moe_intermediate_size": shape.moe_inter,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.q_heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.top_k,
        "max_position_embeddings": max_positions,
        "tie_word_embeddings": shape.is_tied,
        "rms_norm_eps": NORM_EPSILON,
    }
    if not is_hybrid(shape):
        return Qwen3MoeConfig(
            **common,
            intermediate_size=shape.dense_inter or shape.moe_inter,
            norm_topk_prob=True,
            decoder_sparse_step=1,
            mlp_only_layers=[],
            rope_parameters=rope,
        )
    attends = [layer in shape.attention_layers for layer in range(shape.layers)]
    return Qwen3_5MoeTextConfig(
        **common,
        shared_expert_intermediate_size=shape.shared_inter,
        layer_types=["full_attention" if found else "linear_attention" for found in attends],
        linear_num_key_heads=shape.delta_qk_heads,
        linear_num_value_heads=shape.delta_v_heads,
        linear_key_head_dim=shape.delta_dim,
        linear_value_head_dim=shape.delta_dim,
        linear_conv_kernel_dim=shape.delta_conv,
        rope_parameters=rope | {"partial_rotary_factor": ROTATED_SHARE},
    )


def plan_of(config: Any, rules: PlanRules) -> Plan:
    """Return the plan of a config's model: that of a run on real weights. No weight is allocated."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return plan(AutoModelForCausalLM.from_config(config), rules)


def is_hybrid(shape: ModelShape) -> bool:
    """Return whether layers of a shape keep a state instead of K and V."""
    return len(shape.attention_layers) != shape.layers


def _is_built(shape: ModelShape) -> bool:
    """Whether this is Qwen3-MoE (attention in every layer, experts without biases, norms of heads) or Qwen3.5-MoE
    (gates of attention and a shared expert in every layer beside)."""
    odd = (
        shape.has_attention_bias,
        shape.has_expert_bias,
        shape.has_sinks,
        shape.dense_layers,
        shape.windowed_layers,
        shape.extra_parameters,
        shape.qk_norm != 1,
        shape.has_q_gate != is_hybrid(shape),
        bool(shape.shared_inter) != is_hybrid(shape),
    )
    return not any(odd)

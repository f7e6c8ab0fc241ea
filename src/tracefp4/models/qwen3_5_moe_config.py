"""What the engine needs to know of a Qwen3.5-MoE checkpoint: sizes and tensor names, with everything unsupported
refused.

The source is a transformers `Qwen3_5MoeTextConfig`; only its attributes are read, so transformers is not imported here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tracefp4.errors import ConfigError
from tracefp4.models.qwen3_moe_config import Qwen3MoeSizes


@dataclass(frozen=True, kw_only=True, slots=True)
class Qwen35MoeSizes(Qwen3MoeSizes):
    """Sizes and switches of one model; no layer is dense."""

    delta_layers: frozenset[int]
    """Gated delta layers, which keep a state; the others attend."""
    shared_size: int
    """Inner width of the shared expert."""
    rotated_share: float
    """Share of a head that is rotated."""
    delta_key_heads: int
    """Hk, query and key heads of a delta layer."""
    delta_value_heads: int
    """Hv, its value heads; a multiple of Hk."""
    delta_key_dim: int
    """Dk, width of its queries and keys."""
    delta_value_dim: int
    """Dv, width of its values."""
    delta_taps: int
    """K, tokens that its convolution sees."""

    @property
    def rotary_dim(self) -> int:
        """Values of a head that are rotated, from its first one on."""
        return int(self.head_dim * self.rotated_share)

    @property
    def state_layers(self) -> frozenset[int]:
        """The gated delta layers."""
        return self.delta_layers

    @property
    def delta_width(self) -> int:
        """W, channels of the convolution: queries, keys and values of all heads."""
        return 2 * self.delta_key_heads * self.delta_key_dim + self.delta_value_heads * self.delta_value_dim

    def _layer_shapes(self, layer: int) -> dict[str, tuple[int, ...]]:
        hidden, shared = self.hidden_size, self.shared_size
        shapes = {
            name: shape
            for name, shape in Qwen3MoeSizes._layer_shapes(self, layer).items()
            if layer not in self.delta_layers or not name.startswith("self_attn.")
        }
        if layer in self.delta_layers:
            values = self.delta_value_heads * self.delta_value_dim
            shapes |= {
                "linear_attn.in_proj_qkv.weight": (self.delta_width, hidden),
                "linear_attn.in_proj_z.weight": (values, hidden),
                "linear_attn.in_proj_b.weight": (self.delta_value_heads, hidden),
                "linear_attn.in_proj_a.weight": (self.delta_value_heads, hidden),
                "linear_attn.conv1d.weight": (self.delta_width, 1, self.delta_taps),
                "linear_attn.A_log": (self.delta_value_heads,),
                "linear_attn.dt_bias": (self.delta_value_heads,),
                "linear_attn.norm.weight": (self.delta_value_dim,),
                "linear_attn.out_proj.weight": (hidden, values),
            }
        else:
            # every head's queries, and below them what gates the head's output
            shapes["self_attn.q_proj.weight"] = (2 * self.num_heads * self.head_dim, hidden)
        return shapes | {
            "mlp.shared_expert.gate_proj.weight": (shared, hidden),
            "mlp.shared_expert.up_proj.weight": (shared, hidden),
            "mlp.shared_expert.down_proj.weight": (hidden, shared),
            "mlp.shared_expert_gate.weight": (1, hidden),
        }


def read_sizes(config: Any) -> Qwen35MoeSizes:
    """Read a transformers Qwen3_5MoeTextConfig.

    Raises: ConfigError for another architecture, a rope type other than `default`, attention biases or an activation
        other than silu: each would make the engine compute another function than the trainer.
    """
    _refuse_unsupported(config)
    rope = config.rope_parameters
    kinds = list(config.layer_types)
    return Qwen35MoeSizes(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        num_experts=config.num_experts,
        top_k=config.num_experts_per_tok,
        expert_size=config.moe_intermediate_size,
        dense_size=0,
        vocab_size=config.vocab_size,
        norm_epsilon=config.rms_norm_eps,
        rope_theta=float(rope["rope_theta"]),
        renormalizes=True,
        ties_embeddings=bool(config.tie_word_embeddings),
        dense_layers=frozenset(),
        delta_layers=frozenset(n for n, kind in enumerate(kinds) if kind == "linear_attention"),
        shared_size=config.shared_expert_intermediate_size,
        rotated_share=float(rope.get("partial_rotary_factor", 1.0)),
        delta_key_heads=config.linear_num_key_heads,
        delta_value_heads=config.linear_num_value_heads,
        delta_key_dim=config.linear_key_head_dim,
        delta_value_dim=config.linear_value_head_dim,
        delta_taps=config.linear_conv_kernel_dim,
    )


def _refuse_unsupported(config: Any) -> None:
    if config.model_type != "qwen3_5_moe_text":
        raise ConfigError(
            f"The engine does not implement this model; got model_type = {config.model_type!r}. Only "
            "'qwen3_5_moe_text' is supported. Pass the text part of a checkpoint with images (config.text_config)."
        )
    rope = config.rope_parameters or {}
    kinds = set(config.layer_types) - {"linear_attention", "full_attention"}
    for name, found, allowed in (
        ("rope_parameters['rope_type']", rope.get("rope_type", "default"), "default"),
        ("attention_bias", bool(config.attention_bias), False),
        ("hidden_act", config.hidden_act, "silu"),
        ("layer_types beside linear_attention and full_attention", sorted(kinds), []),
    ):
        if found != allowed:
            raise ConfigError(
                f"The engine does not implement this model; got {name} = {found!r}. Only {allowed!r} is "
                "supported. Use a model without it, or an engine adapter that supports it."
            )

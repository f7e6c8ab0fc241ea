"""What the engine needs to know of a Qwen3-MoE or OLMoE checkpoint: sizes and tensor names, with everything
unsupported refused.

The source is a transformers config; only its attributes are read, so transformers is not imported here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tracefp4.errors import ConfigError
from tracefp4.formats.arithmetic import round_bf16


@dataclass(frozen=True, kw_only=True, slots=True)
class Qwen3MoeSizes:
    """Sizes and switches of one model."""

    num_layers: int
    """L."""
    hidden_size: int
    """Width of the residual stream."""
    num_heads: int
    """H, query heads."""
    num_kv_heads: int
    """C, kv heads; divides H."""
    head_dim: int
    """D; may differ from hidden_size / H."""
    num_experts: int
    """E."""
    top_k: int
    """J, experts per token."""
    expert_size: int
    """I, inner width of one expert."""
    dense_size: int
    """Inner width of a dense layer."""
    vocab_size: int
    """V."""
    norm_epsilon: float
    """Added to the mean square in every norm."""
    rope_theta: float
    """Base of the rotary frequencies."""
    renormalizes: bool
    """True if the chosen experts' weights are divided by their sum (norm_topk_prob)."""
    ties_embeddings: bool
    """True if the head is the embedding matrix."""
    dense_layers: frozenset[int]
    """Layers with a dense MLP instead of experts."""
    norms_heads: bool = True
    """True if queries and keys are normed head by head, False if over the whole projection (OLMoE)."""
    clip_qkv: float | None = None
    """Limit that q, k and v are clipped to, before heads are rotated; None: none (OLMoE)."""

    @property
    def rotary_dim(self) -> int:
        """Values of a head that are rotated, from its first one on."""
        return self.head_dim

    @property
    def state_layers(self) -> frozenset[int]:
        """Layers that keep a state instead of K and V."""
        return frozenset()

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of the state dict, by name, with its shape; without `lm_head.weight` if it is tied."""
        found: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocab_size, self.hidden_size),
            "model.norm.weight": (self.hidden_size,),
        }
        if not self.ties_embeddings:
            found["lm_head.weight"] = (self.vocab_size, self.hidden_size)
        for layer in range(self.num_layers):
            found |= {
                f"model.layers.{layer}.{name}": shape for name, shape in self._layer_shapes(layer).items()
            }
        return found

    def _layer_shapes(self, layer: int) -> dict[str, tuple[int, ...]]:
        hidden, query, kv = (
            self.hidden_size,
            self.num_heads * self.head_dim,
            self.num_kv_heads * self.head_dim,
        )
        shapes: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (hidden,),
            "self_attn.q_proj.weight": (query, hidden),
            "self_attn.k_proj.weight": (kv, hidden),
            "self_attn.v_proj.weight": (kv, hidden),
            "self_attn.o_proj.weight": (hidden, query),
            "self_attn.q_norm.weight": (self.head_dim if self.norms_heads else query,),
            "self_attn.k_norm.weight": (self.head_dim if self.norms_heads else kv,),
            "post_attention_layernorm.weight": (hidden,),
        }
        if layer in self.dense_layers:
            return shapes | {
                "mlp.gate_proj.weight": (self.dense_size, hidden),
                "mlp.up_proj.weight": (self.dense_size, hidden),
                "mlp.down_proj.weight": (hidden, self.dense_size),
            }
        return shapes | {
            "mlp.gate.weight": (self.num_experts, hidden),
            "mlp.experts.gate_up_proj": (self.num_experts, 2 * self.expert_size, hidden),
            "mlp.experts.down_proj": (self.num_experts, hidden, self.expert_size),
        }


def read_sizes(config: Any) -> Qwen3MoeSizes:
    """Read a transformers Qwen3MoeConfig or OlmoeConfig.

    Raises: ConfigError for another architecture, a rope type other than `default`, sliding windows, attention biases,
        an activation other than silu, or a limit of q, k and v that is no bf16 number: each would make the engine
        compute another function than the trainer.
    """
    _refuse_unsupported(config)
    is_olmoe = config.model_type == "olmoe"
    return Qwen3MoeSizes(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        num_experts=config.num_experts,
        top_k=config.num_experts_per_tok,
        expert_size=config.intermediate_size if is_olmoe else config.moe_intermediate_size,
        dense_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        norm_epsilon=config.rms_norm_eps,
        rope_theta=float(config.rope_parameters["rope_theta"]),
        renormalizes=bool(config.norm_topk_prob),
        ties_embeddings=bool(config.tie_word_embeddings),
        dense_layers=frozenset() if is_olmoe else _dense_layers(config),
        norms_heads=not is_olmoe,
        clip_qkv=config.clip_qkv if is_olmoe else None,
    )


def _dense_layers(config: Any) -> frozenset[int]:
    """Layers of a Qwen3-MoE without experts."""
    step = config.decoder_sparse_step
    dense = {n for n in range(config.num_hidden_layers) if config.num_experts == 0 or (n + 1) % step}
    return frozenset(dense | set(config.mlp_only_layers or ()))


def _refuse_unsupported(config: Any) -> None:
    rope = config.rope_parameters or {}
    window = config.sliding_window if getattr(config, "use_sliding_window", False) else None
    model_type = "olmoe" if config.model_type == "olmoe" else "qwen3_moe"
    clip = getattr(config, "clip_qkv", None)
    for name, found, allowed in (
        ("model_type", config.model_type, model_type),
        ("rope_parameters['rope_type']", rope.get("rope_type", "default"), "default"),
        ("sliding_window", window, None),
        ("attention_bias", bool(config.attention_bias), False),
        ("hidden_act", config.hidden_act, "silu"),
        ("clip_qkv", clip, clip if clip is None else float(round_bf16(torch.tensor(clip, device="cpu")))),
    ):
        if found != allowed:
            raise ConfigError(
                f"The engine does not implement this model; got {name} = {found!r}. Only {allowed!r} is "
                "supported. Use a model without it, or an engine adapter that supports it."
            )

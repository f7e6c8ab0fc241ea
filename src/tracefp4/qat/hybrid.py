"""Qwen3.5-MoE in the trainer: the forwards of its own classes, with bf16 rounded where its kernels write it.

Gated delta layers compute whole sequences in chunks through the very functions that the engine's op is made of
(`ops/gated_delta/rule.py`), differentiable, and each packed sequence from a state of zeros; so their forward is ours in
every arithmetic. The others are replaced only where bf16 is emulated. Roundings are straight-through.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from tracefp4.errors import ConfigError
from tracefp4.formats.arithmetic import round_bf16_
from tracefp4.ops.gated_delta import DeltaWeights, Projected
from tracefp4.ops.gated_delta.operands import Storage
from tracefp4.ops.gated_delta.rule import chunked, gated_norm, gates, heads
from tracefp4.qat.ste import round_bf16_through

DELTA = "Qwen3_5MoeGatedDeltaNet"
"""Name of the class of gated delta layers."""


class _Through(Storage):
    """Storage whose rounding gradients pass through."""

    def written(self, x: Tensor) -> Tensor:
        stored = x.to(self.dtype)
        return (round_bf16_through(stored) if self.emulates_bf16 else stored).to(self.wide)


def delta_forward(
    self: Any,
    hidden_states: Tensor,
    cache_params: object = None,
    attention_mask: Tensor | None = None,
    segment_lengths: Sequence[int] | None = None,
    **unused: object,
) -> Tensor:
    """A gated delta layer over whole sequences; the signature is that of transformers' Qwen3_5MoeGatedDeltaNet.

    Args:
        self: the layer, with `tracefp4` (its Arithmetic) set.
        hidden_states: [B, T, hidden], every row one sequence, padded on its right, or on its left where a mask says so.
        cache_params: must be None: states of a cache are not read.
        attention_mask: [B, T], 0 at padding; None: none on the left.
        segment_lengths: as for `attention.attention_forward`: packed sequences begin from zeros, each by itself.
        unused: what transformers passes to every layer.

    Returns:
        [B, T, hidden].

    Raises:
        ConfigError: a cache is given.
    """
    if cache_params is not None:
        raise ConfigError(
            f"A patched gated delta layer computes whole sequences; got a cache ({type(cache_params).__name__}). Only "
            "None is allowed. Pass use_cache=False, or undo the patch to generate with transformers."
        )
    x = (
        hidden_states
        if attention_mask is None
        else hidden_states * attention_mask[..., None].to(hidden_states.dtype)
    )
    storage = _Through(x.dtype, self.tracefp4.emulates_bf16)
    weights = DeltaWeights(
        taps=self.conv1d.weight[:, 0].T,
        a_log=self.A_log.to(storage.wide),
        dt_bias=self.dt_bias.to(storage.wide),
        norm=self.norm.weight,
        epsilon=self.norm.variance_epsilon,
    )
    given = (self.in_proj_qkv(x), self.in_proj_z(x), self.in_proj_b(x), self.in_proj_a(x))
    lengths = list(segment_lengths) if segment_lengths is not None else [x.shape[1]]
    segments = zip(*(part.split(lengths, dim=1) for part in given), strict=True)
    parts = [_from_zeros(Projected(*segment), weights, self.head_k_dim, storage) for segment in segments]
    return self.out_proj(torch.cat(parts, dim=1))


def _from_zeros(projected: Projected, weights: DeltaWeights, key_dim: int, storage: Storage) -> Tensor:
    """Gated outputs [B, T, Hv Dv] of sequences from their first tokens on."""
    window = pad(projected.mixed, (0, 0, weights.taps.shape[0] - 1, 0))
    q, k, v = heads(window, weights, key_dim, storage)
    log_decay, beta = gates(projected, weights, storage)
    state = v.new_zeros(v.shape[0], v.shape[2], key_dim, v.shape[3])
    o, _ = chunked(q, k, v, log_decay, beta, state)
    return gated_norm(o, projected.z, weights, storage)


def norm_forward(self: Any, x: Tensor) -> Tensor:
    """x * rsqrt(mean(x^2) + eps) * (1 + w) in the storage dtype, one rounding at the output."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * (1.0 + self.weight)


def gated_attention_forward(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None,
    past_key_values: object = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention behind its gate, R(a R(sigmoid(g))), the first values of every head rotated; the signature is that of
    transformers' Qwen3_5MoeAttention."""
    from transformers import AttentionInterface
    from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import apply_rotary_pos_emb

    if past_key_values is not None:
        raise ConfigError(
            f"A patched attention layer computes whole sequences; got a cache ({type(past_key_values).__name__}). Only "
            "None is allowed. Pass use_cache=False, or undo the patch to generate with transformers."
        )
    by_head = (*hidden_states.shape[:-1], -1, self.head_dim)
    q, gate = self.q_proj(hidden_states).view(*by_head[:-1], 2 * self.head_dim).chunk(2, dim=-1)
    k, v = (project(hidden_states).view(by_head) for project in (self.k_proj, self.v_proj))
    q, k = self.q_norm(q).transpose(1, 2), self.k_norm(k).transpose(1, 2)
    q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
    attend = AttentionInterface()[self.config._attn_implementation]
    out, _ = attend(self, q, k, v.transpose(1, 2), attention_mask, scaling=self.scaling, **options)
    gated = out.flatten(-2) * round_bf16_through(gate.flatten(-2).sigmoid())
    return self.o_proj(round_bf16_(gated)), None


def block_forward(self: Any, hidden_states: Tensor) -> Tensor:
    """Routed experts and the shared one behind its gate: R(routed + R(R(sigmoid(g)) shared))."""
    x = hidden_states.flatten(0, 1)
    shared = round_bf16_(round_bf16_through(self.shared_expert_gate(x).sigmoid()) * self.shared_expert(x))
    _, weights, ids = self.gate(x)
    return round_bf16_(self.experts(x, ids, weights) + shared).view_as(hidden_states)


EMULATED_FORWARDS: Mapping[str, Callable[..., Any]] = {
    "Qwen3_5MoeRMSNorm": norm_forward,
    "Qwen3_5MoeAttention": gated_attention_forward,
    "Qwen3_5MoeSparseMoeBlock": block_forward,
}
"""By the name of the class: what replaces its forward where bf16 is emulated."""

"""Operands of gated delta layers, and a sequence computed by transformers' own functions."""

import torch
from torch.nn.functional import silu, softplus
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as theirs

from tracefp4.ops.gated_delta import DeltaState, DeltaWeights, Projected

EPSILON = 1e-6


def layer(num_keys=2, num_values=4, key_dim=64, value_dim=64, *, taps=4, dtype=torch.bfloat16):
    """Weights of a layer."""
    torch.manual_seed(1)
    width = 2 * num_keys * key_dim + num_values * value_dim
    return DeltaWeights(
        taps=(torch.randn(taps, width) / 2).to(dtype),
        a_log=torch.rand(num_values).mul(8).add(0.01).log().to(torch.promote_types(dtype, torch.float32)),
        dt_bias=torch.randn(num_values).to(torch.promote_types(dtype, torch.float32)),
        norm=(torch.rand(value_dim) + 0.5).to(dtype),
        epsilon=EPSILON,
    )


def projected(weights, *leading, seed=0):
    """Projections of random tokens."""
    torch.manual_seed(seed)
    heads, width, dtype = weights.a_log.shape[0], weights.taps.shape[1], weights.taps.dtype
    sizes = (width, heads * weights.norm.shape[0], heads, heads)
    return Projected(*(torch.randn(*leading, n).to(dtype) for n in sizes))


def states(weights, key_dim, num_slots=5, *, dtype=torch.bfloat16, is_zero=False):
    """States of sequences that are under way, or new."""
    torch.manual_seed(2)
    heads, (taps, width) = weights.a_log.shape[0], weights.taps.shape
    scale = 0.0 if is_zero else 1.0
    return DeltaState(
        (torch.randn(num_slots, taps - 1, width) * scale).to(weights.taps.dtype),
        (torch.randn(num_slots, heads, weights.norm.shape[0], key_dim) * scale).to(dtype),
    )


def copy(state):
    return DeltaState(*(part.clone() for part in state))


def their_layer(rule, given, weights, key_dim):
    """Outputs [B, T, Hv Dv] and last states [B, Hv, Dk, Dv] of new sequences, as Qwen3_5MoeGatedDeltaNet has them."""
    heads, value_dim = weights.a_log.shape[0], weights.norm.shape[0]
    key_width = (weights.taps.shape[1] - heads * value_dim) // 2
    mixed = theirs.causal_conv1d_fn(given.mixed.mT, weights.taps.mT.contiguous(), activation="silu").mT
    q, k, v = mixed.split([key_width, key_width, heads * value_dim], dim=-1)
    q, k = (x.unflatten(-1, (-1, key_dim)) for x in (q, k))
    group = heads // q.shape[2]
    q, k = (x.repeat_interleave(group, dim=2) for x in (q, k))
    g = -weights.a_log.exp() * softplus(given.a.to(weights.a_log.dtype) + weights.dt_bias)
    o, last = rule(
        q, k, v.unflatten(-1, (heads, value_dim)), g=g, beta=given.b.sigmoid(), output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    wide = o.to(torch.promote_types(o.dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPSILON)
    normed = (weights.norm * normed.to(o.dtype)).flatten(-2)
    return (normed * silu(given.z.to(wide.dtype))).to(o.dtype), last

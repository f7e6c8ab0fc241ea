"""The definition of a decode step of gated delta layers: convolution and gates, then the rule, norm and gate.

Sums over the key dimension have an order, which kernels keep, so that states are equal bit for bit: `sum_over_keys`.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad, silu, softplus

from tracefp4.ops.gated_delta.operands import DeltaState, DeltaWeights, Prepared, Projected, Storage

LANES = 8
"""Partial sums of a sum over keys; 16 bytes of the state are consecutive terms of one."""
_L2_EPSILON = 1e-6


def step_reference(
    projected: Projected, weights: DeltaWeights, state: DeltaState, slots: Tensor, *, emulates_bf16: bool
) -> Tensor:
    """Advance checked sequences by a token; see `gated_delta_step`."""
    storage = Storage(projected.mixed.dtype, emulates_bf16)
    prepared = prepare_reference(projected, weights, state, slots, storage=storage)
    return advance_reference(prepared, projected.z, weights, state.recurrent, slots, storage=storage)


def prepare_reference(
    projected: Projected, weights: DeltaWeights, state: DeltaState, slots: Tensor, *, storage: Storage
) -> Prepared:
    """Return what the rule takes and move `state.conv` on by a token; zeros where a slot is negative."""
    is_live = slots >= 0
    at = slots[is_live]
    live = Projected(*(part[is_live, None] for part in projected))
    found = mixed_heads(live.mixed, weights, state, at, torch.ones_like(at), storage=storage)
    log_decay, beta = gates(live, weights, storage=storage)
    parts = []
    for part in (*found, log_decay.exp(), beta):
        whole = part.new_zeros(slots.shape[0], *part.shape[2:])
        whole[is_live] = part[:, 0]
        parts.append(whole)
    q, k, v, decay, beta = parts
    return Prepared(q, k, v.to(storage.dtype), decay, beta)


def mixed_heads(
    mixed: Tensor,
    weights: DeltaWeights,
    state: DeltaState,
    slots: Tensor,
    lengths: Tensor,
    *,
    storage: Storage,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k [B, T, Hk, Dk] and v [B, T, Hv, Dv], wide, of T tokens each; move `state.conv` on by `lengths`.

        c = R(sum over t of taps_t x_t), oldest first;  m = R(silu(c));  q, k, v = parts of m
        k = k r(k), q = (q r(q)) Dk^-1/2, r(x) = 1 / sqrt(sum of x^2 + 1e-6) in float64, rounded to the wide dtype

    R is `storage.written`.
    """
    num_tokens, (num_taps, width) = mixed.shape[1], weights.taps.shape
    num_heads, value_dim, key_dim = state.recurrent.shape[1:]
    window = torch.cat([state.conv[slots], mixed.detach().to(state.conv.dtype)], dim=1)
    last = lengths[:, None] + torch.arange(num_taps - 1, device=mixed.device)
    state.conv[slots] = window.gather(1, last[..., None].expand(-1, -1, width))
    total = window[:, :num_tokens].to(storage.wide) * weights.taps[0].to(storage.wide)
    for t in range(1, num_taps):
        total = total + window[:, t : t + num_tokens].to(storage.wide) * weights.taps[t].to(storage.wide)
    values = storage.written(silu(storage.written(total)))
    key_width = (width - num_heads * value_dim) // 2
    q, k, v = values.split([key_width, key_width, num_heads * value_dim], dim=-1)
    q, k = (_of_length_one(x.unflatten(-1, (-1, key_dim))) for x in (q, k))
    return q * key_dim**-0.5, k, v.unflatten(-1, (num_heads, value_dim))


def gates(projected: Projected, weights: DeltaWeights, *, storage: Storage) -> tuple[Tensor, Tensor]:
    """Return log decay -exp(a_log) softplus(a + dt_bias), never positive, and beta R(sigmoid(b)); wide [.., Hv]."""
    a = projected.a.detach().to(storage.wide) + weights.dt_bias.to(storage.wide)
    log_decay = -weights.a_log.to(storage.wide).exp() * softplus(a)
    return log_decay, storage.written(projected.b.detach().to(storage.wide).sigmoid())


def advance_reference(
    prepared: Prepared,
    z: Tensor,
    weights: DeltaWeights,
    recurrent: Tensor,
    slots: Tensor,
    *,
    storage: Storage,
) -> Tensor:
    """Apply the rule to the states at `slots`, in place; return the gated output [B, Hv Dv]."""
    is_live = slots >= 0
    at = slots[is_live]
    q, k, v, decay, beta = (part[is_live].to(storage.wide) for part in prepared)
    group = v.shape[1] // k.shape[1]
    q, k = (x.repeat_interleave(group, dim=1)[:, :, None] for x in (q, k))
    unit = 16 // recurrent.element_size()
    s = recurrent[at].to(storage.wide) * decay[..., None, None]
    delta = (v - sum_over_keys(s * k, unit)) * beta[..., None]
    s = s + k * delta[..., None]
    recurrent[at] = s.to(recurrent.dtype)
    out = z.new_zeros(z.shape)
    o = sum_over_keys(s * q, unit)
    out[is_live] = gated_norm(o, z[is_live], weights, storage=storage)
    return out


def sum_over_keys(x: Tensor, unit: int) -> Tensor:
    """Return the sum over the last dimension in the order of the kernels.

    Lane l of 8 adds up units l, l + 8, l + 16, ... of `unit` terms, one term after the other; then lanes 4 apart are
    added, then those 2 and 1 apart.

    Args:
        x: [.., Dk].
        unit: Terms in 16 bytes of the state.
    """
    x = pad(x, (0, -x.shape[-1] % (LANES * unit))).unflatten(-1, (-1, LANES, unit))
    terms = x.movedim(-2, -3).flatten(-2).unbind(-1)  # [.., LANES] each
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    while total.shape[-1] > 1:
        low, high = total.chunk(2, dim=-1)
        total = low + high
    return total[..., 0]


def gated_norm(o: Tensor, z: Tensor, weights: DeltaWeights, *, storage: Storage) -> Tensor:
    """Return R(R(norm R(R(o) r)) silu(z)) [.., Hv Dv] of o [.., Hv, Dv], r from float64 as in `rms_norm`."""
    o = storage.written(o)
    epsilon = torch.tensor(weights.epsilon, dtype=torch.float32, device="cpu").to(torch.float64).item()
    squares = o.to(torch.float64).square().sum(-1, keepdim=True)
    factor = (squares * (1.0 / o.shape[-1]) + epsilon).sqrt().reciprocal().to(storage.wide)
    normed = storage.written(storage.written(o * factor) * weights.norm.to(storage.wide))
    return storage.written(normed.flatten(-2) * silu(z.detach().to(storage.wide))).to(storage.dtype)


def _of_length_one(x: Tensor) -> Tensor:
    epsilon = torch.tensor(_L2_EPSILON, dtype=torch.float32, device="cpu").to(torch.float64).item()
    squares = x.to(torch.float64).square().sum(-1, keepdim=True)
    return x * (squares + epsilon).sqrt().reciprocal().to(x.dtype)

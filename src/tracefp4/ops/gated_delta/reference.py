"""The definition of a decode step of gated delta layers: convolution and gates, then the rule, norm and gate.

Sums over the key dimension have an order, which kernels keep, so that states are equal bit for bit: `sum_over_keys`.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from tracefp4.ops.gated_delta.operands import DeltaState, DeltaWeights, Prepared, Projected, Storage
from tracefp4.ops.gated_delta.rule import gated_norm, gates, heads

LANES = 8
"""Partial sums of a sum over keys; 16 bytes of the state are consecutive terms of one."""


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
    window = torch.cat([state.conv[at], live.mixed.to(state.conv.dtype)], dim=1)
    state.conv[at] = window[:, 1:]
    found = heads(window, weights, state.recurrent.shape[-1], storage)
    log_decay, beta = gates(live, weights, storage)
    parts = []
    for part in (*found, log_decay.exp(), beta):
        whole = part.new_zeros(slots.shape[0], *part.shape[2:])
        whole[is_live] = part[:, 0]
        parts.append(whole)
    q, k, v, decay, beta = parts
    return Prepared(q, k, v.to(storage.dtype), decay, beta)


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
    out[is_live] = gated_norm(o, z[is_live], weights, storage)
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

"""A prefill of gated delta layers: many tokens of several sequences, whose states are replaced in place.

This is the rule of `reference.py` in another order of operations; S is rounded to its storage once, at the end.
"""

import torch
from torch import Tensor

from tracefp4.ops.gated_delta.operands import DeltaState, DeltaWeights, Projected, Storage
from tracefp4.ops.gated_delta.rule import chunked, gated_norm, gates, heads


def prefill(
    projected: Projected,
    weights: DeltaWeights,
    state: DeltaState,
    slots: Tensor,
    lengths: Tensor,
    *,
    emulates_bf16: bool,
) -> Tensor:
    """Advance checked sequences by several tokens; see `gated_delta_prefill`."""
    storage = Storage(projected.mixed.dtype, emulates_bf16)
    num_taps, width = weights.taps.shape
    window = torch.cat([state.conv[slots], projected.mixed], dim=1)
    last = lengths[:, None] + torch.arange(num_taps - 1, device=lengths.device)
    state.conv[slots] = window.gather(1, last[..., None].expand(-1, -1, width))
    q, k, v = heads(window, weights, state.recurrent.shape[-1], storage)
    log_decay, beta = gates(projected, weights, storage)
    is_token = (torch.arange(beta.shape[1], device=beta.device) < lengths[:, None])[..., None]
    log_decay, beta = (x.masked_fill(~is_token, 0.0) for x in (log_decay, beta))
    o, end = chunked(q, k, v, log_decay, beta, state.recurrent[slots].to(storage.wide).mT)
    state.recurrent[slots] = end.mT.to(state.recurrent.dtype)
    return gated_norm(o, projected.z, weights, storage)

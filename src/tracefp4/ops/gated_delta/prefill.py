"""The gated delta rule over many tokens at once: chunks of 64, matrix products inside, a scan over chunks.

Within a chunk, with G the running sum of log decay, D_ij = exp(G_i - G_j) for i >= j, and rows i = tokens:

    (I + strictly lower part of (beta K K^T) D) [U, Y] = [beta V, beta K exp(G)]
    N = U - Y S;   O = (Q exp(G)) S + (lower part of Q K^T D) N;   S' = exp(G_last) S + (K exp(G_last - G))^T N

This is the rule of `reference.py` in another order of operations; S is rounded to its storage once, at the end.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from tracefp4.ops.gated_delta.operands import DeltaState, DeltaWeights, Projected, Storage
from tracefp4.ops.gated_delta.reference import gated_norm, gates, mixed_heads

CHUNK = 64


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
    q, k, v = mixed_heads(projected.mixed, weights, state, slots, lengths, storage=storage)
    log_decay, beta = gates(projected, weights, storage=storage)
    is_token = (torch.arange(beta.shape[1], device=beta.device) < lengths[:, None])[..., None]
    # where nothing decays and nothing is overwritten, the state stays what it is
    log_decay, beta = (x.masked_fill(~is_token, 0.0) for x in (log_decay, beta))
    group = v.shape[2] // k.shape[2]
    q, k = (x.repeat_interleave(group, dim=2) for x in (q, k))
    q, k, v, log_decay, beta = (x.movedim(2, 1) for x in (q, k, v, log_decay, beta))
    o, end = _scan(q, k, v, log_decay, beta, state.recurrent[slots].to(storage.wide).mT)
    state.recurrent[slots] = end.mT.to(state.recurrent.dtype)
    return gated_norm(o.movedim(1, 2), projected.z, weights, storage=storage)


def _scan(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Outputs [B, H, T, Dv] and the state [B, H, Dk, Dv] after T tokens; operands are [B, H, T, ..]."""
    num_tokens = q.shape[2]
    filled = -num_tokens % CHUNK
    q, k, v = (pad(x, (0, 0, 0, filled)).unflatten(2, (-1, CHUNK)) for x in (q, k, v))
    log_decay, beta = (pad(x, (0, filled)).unflatten(2, (-1, CHUNK)) for x in (log_decay, beta))
    running = log_decay.cumsum(-1)
    is_later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).triu(1)
    between = (running[..., :, None] - running[..., None, :]).masked_fill(is_later, -torch.inf).exp()
    k_beta, grown = k * beta[..., None], running.exp()[..., None]
    system = (k_beta @ k.mT) * between
    right = torch.cat([v * beta[..., None], k_beta * grown], dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    new, read = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    inside = (q @ k.mT) * between
    q = q * grown
    left = (running[..., -1:] - running).exp()[..., None]
    kept, decay = k * left, running[..., -1].exp()[..., None, None]
    outputs = []
    for n in range(q.shape[2]):
        fresh = new[:, :, n] - read[:, :, n] @ state
        outputs.append(q[:, :, n] @ state + inside[:, :, n] @ fresh)
        state = state * decay[:, :, n] + kept[:, :, n].mT @ fresh
    return torch.cat(outputs, dim=2)[:, :, :num_tokens], state

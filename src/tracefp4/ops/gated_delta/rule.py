"""What gated delta layers compute, without anybody's state: heads out of a convolution, gates, chunks of the rule, and
the norm of the output. Differentiable; the ops use it on states in place, a trainer on whole sequences.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad, silu, softplus

from tracefp4.ops.gated_delta.operands import DeltaWeights, Projected, Storage

CHUNK = 64
_L2_EPSILON = 1e-6


def heads(
    window: Tensor, weights: DeltaWeights, key_dim: int, storage: Storage
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k [B, T, Hk, Dk] and v [B, T, Hv, Dv], wide, of the last T tokens of a window [B, K - 1 + T, W].

        c = R(sum over t of taps_t x_t), oldest first;  m = R(silu(c));  q, k, v = parts of m
        k = k r(k), q = (q r(q)) Dk^-1/2, r(x) = 1 / sqrt(sum of x^2 + 1e-6) in float64, rounded to the wide dtype

    R is `storage.written`.
    """
    num_taps, width = weights.taps.shape
    num_tokens = window.shape[1] - num_taps + 1
    window, taps = window.to(storage.wide), weights.taps.to(storage.wide)
    total = window[:, :num_tokens] * taps[0]
    for t in range(1, num_taps):
        total = total + window[:, t : t + num_tokens] * taps[t]
    values = storage.written(silu(storage.written(total)))
    value_width = weights.a_log.shape[0] * weights.norm.shape[0]
    key_width = (width - value_width) // 2
    q, k, v = values.split([key_width, key_width, value_width], dim=-1)
    q, k = (_of_length_one(x.unflatten(-1, (-1, key_dim))) for x in (q, k))
    return q * key_dim**-0.5, k, v.unflatten(-1, (-1, weights.norm.shape[0]))


def gates(projected: Projected, weights: DeltaWeights, storage: Storage) -> tuple[Tensor, Tensor]:
    """Return log decay -exp(a_log) softplus(a + dt_bias), never positive, and beta R(sigmoid(b)); wide [.., Hv]."""
    a = projected.a.to(storage.wide) + weights.dt_bias.to(storage.wide)
    log_decay = -weights.a_log.to(storage.wide).exp() * softplus(a)
    return log_decay, storage.written(projected.b.to(storage.wide).sigmoid())


def chunked(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Apply the rule to many tokens: chunks of 64, matrix products inside, a scan over chunks.

    Within a chunk, with G the running sum of log decay, D_ij = exp(G_i - G_j) for i >= j, and rows i = tokens:

        (I + strictly lower part of (beta K K^T) D) [U, Y] = [beta V, beta K exp(G)]
        N = U - Y S;   O = (Q exp(G)) S + (lower part of Q K^T D) N;   S' = exp(G_last) S + (K exp(G_last - G))^T N

    Args:
        q: [B, T, Hk, Dk], as what follows in one wide dtype; Hv / Hk value heads share a key head.
        k: [B, T, Hk, Dk].
        v: [B, T, Hv, Dv].
        log_decay: [B, T, Hv].
        beta: [B, T, Hv]. Where both gates are 0 the state stays what it is.
        state: [B, Hv, Dk, Dv], before the first token.

    Returns:
        Outputs [B, T, Hv, Dv] and the state after the last token.
    """
    num_tokens, filled, group = q.shape[1], -q.shape[1] % CHUNK, v.shape[2] // k.shape[2]
    q, k = (x.repeat_interleave(group, dim=2) for x in (q, k))
    q, k, v = (pad(x.movedim(2, 1), (0, 0, 0, filled)).unflatten(2, (-1, CHUNK)) for x in (q, k, v))
    log_decay, beta = (pad(x.mT, (0, filled)).unflatten(2, (-1, CHUNK)) for x in (log_decay, beta))
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
    return torch.cat(outputs, dim=2)[:, :, :num_tokens].movedim(1, 2), state


def gated_norm(o: Tensor, z: Tensor, weights: DeltaWeights, storage: Storage) -> Tensor:
    """Return R(R(norm R(R(o) r)) silu(z)) [.., Hv Dv] of o [.., Hv, Dv], r from float64 as in `rms_norm`."""
    o = storage.written(o)
    epsilon = torch.tensor(weights.epsilon, dtype=torch.float32, device="cpu").to(torch.float64).item()
    squares = o.to(torch.float64).square().sum(-1, keepdim=True)
    factor = (squares * (1.0 / o.shape[-1]) + epsilon).sqrt().reciprocal().to(storage.wide)
    normed = storage.written(storage.written(o * factor) * weights.norm.to(storage.wide))
    return storage.written(normed.flatten(-2) * silu(z.to(storage.wide))).to(storage.dtype)


def _of_length_one(x: Tensor) -> Tensor:
    epsilon = torch.tensor(_L2_EPSILON, dtype=torch.float32, device="cpu").to(torch.float64).item()
    squares = x.to(torch.float64).square().sum(-1, keepdim=True)
    return x * (squares + epsilon).sqrt().reciprocal().to(x.dtype)

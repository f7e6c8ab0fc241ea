"""Logits to tokens: one uniform number per row, inverse CDF in float64, and the log-probability of what was
drawn.

The noise is a hash of (seed, prompt index, sample index, position), not a generator's state, so a draw
depends on nothing else in the batch. Cutting is in the usual order: temperature, top-k, top-p, renormalise.
Ties at a cut keep the lowest token ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tracefp4.rollout.noise import uniform
from tracefp4.rollout.sequence import Draw


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class DrawBatch:
    """Parameters of N draws as columns."""

    keys: Tensor
    """int64 [N], noise keys."""
    positions: Tensor
    """int64 [N], position of the token drawn."""
    temperature: Tensor
    """float64 [N]; 0 is greedy."""
    top_k: Tensor
    """int64 [N]; 0 keeps all."""
    top_p: Tensor
    """float64 [N]; 1 keeps all."""
    forced: Tensor | None = None
    """int64 [N], tokens to take in place of drawn ones; -1 draws. None draws every row."""


def sample(logits: Tensor, draws: Sequence[Draw]) -> tuple[list[int], list[float]]:
    """Token ids and log-probs of the draws of one pass; each reads its own row of `logits` [M, V]."""
    if not draws:
        return [], []
    params = [found.sequence.request.params for found in draws]
    batch = DrawBatch(
        keys=torch.tensor([found.sequence.noise_key for found in draws]),
        positions=torch.tensor([len(found.sequence.ids) for found in draws]),
        temperature=torch.tensor([found.temperature for found in params], dtype=torch.float64),
        top_k=torch.tensor([found.top_k for found in params]),
        top_p=torch.tensor([found.top_p for found in params], dtype=torch.float64),
    )
    forced = [found.sequence.forced_token for found in draws]
    if any(token is not None for token in forced):
        batch = replace(batch, forced=torch.tensor([-1 if token is None else token for token in forced]))
    token_ids, logprobs = draw(logits[torch.tensor([found.logit_row for found in draws])], batch)
    return token_ids.tolist(), logprobs.tolist()


def draw(logits: Tensor, batch: DrawBatch) -> tuple[Tensor, Tensor]:
    """Draw one token per row.

    Args:
        logits: float [N, V], finite (-Inf excludes a token). N = 0 gives empty results.
        batch: parameters of the N rows.

    Returns:
        (int64 [N], float64 [N]): token ids, and the natural log of the probability with which each was
        drawn; for greedy rows the log-probability at temperature 1.
    """
    is_greedy = batch.temperature == 0
    temperature = batch.temperature.masked_fill(is_greedy, 1.0)
    probs = torch.softmax(logits.to(torch.float64) / temperature[:, None], dim=-1)
    if bool((batch.top_k > 0).any()) or bool((batch.top_p < 1).any()):
        probs = truncated(probs, top_k=batch.top_k, top_p=batch.top_p.masked_fill(is_greedy, 1.0))
    tokens = inverse_cdf(probs, uniform(batch.keys, batch.positions))
    if bool(is_greedy.any()):
        tokens = torch.where(is_greedy, logits.argmax(dim=-1), tokens)
    if batch.forced is not None:
        tokens = torch.where(batch.forced >= 0, batch.forced, tokens)
    return tokens, probs.gather(1, tokens[:, None])[:, 0].log()


def truncated(probs: Tensor, *, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Zero all but the top_k most probable tokens, then all beyond cumulative top_p of the rest, and
    renormalise.

    The token that crosses top_p is kept, so at least one always is. Args: probs [N, V]; top_k [N], 0 keeps
    all; top_p [N]. Returns: [N, V], rows sum to 1.
    """
    ordered, ids = torch.sort(probs, dim=-1, descending=True, stable=True)
    rank = torch.arange(probs.shape[1])
    limit = torch.where(top_k > 0, top_k, probs.shape[1])
    ordered = ordered.masked_fill(rank >= limit[:, None], 0.0)
    ordered = ordered / ordered.sum(dim=-1, keepdim=True)
    before = ordered.cumsum(dim=-1) - ordered
    ordered = ordered.masked_fill((before >= top_p[:, None]) & (rank > 0), 0.0)
    return torch.zeros_like(probs).scatter(1, ids, ordered / ordered.sum(dim=-1, keepdim=True))


def inverse_cdf(probs: Tensor, noise: Tensor) -> Tensor:
    """First token whose cumulative probability exceeds noise * total; tokens of probability 0 are never
    drawn."""
    cumulative = probs.cumsum(dim=-1)
    total = cumulative[:, -1]
    # noise * total may round up to total, which would point past the last possible token
    target = torch.minimum(noise * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target[:, None], right=True)[:, 0]

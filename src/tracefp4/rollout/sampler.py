"""Logits to tokens: one uniform number per row, inverse CDF in float64, and the log-probability of what was drawn.

The noise is a hash of (seed, prompt index, sample index, position), not a generator's state, so a draw depends on
nothing else in the batch. Cutting is in the usual order: temperature, top-k, top-p, renormalise. Ties at a cut keep
the lowest token ids.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB


def noise_key(*, seed: int, prompt_index: int, sample_index: int) -> int:
    """Return the signed 64-bit key of one sequence's noise stream; equal inputs, equal key."""
    key = 0
    for part in (seed, prompt_index, sample_index):
        key = _mix((key ^ (part & MASK)) + GOLDEN & MASK)
    return _signed(key)


def uniform(keys: Tensor, positions: Tensor) -> Tensor:
    """Return one number in [0, 1) per row, float64 with 53 random bits.

    Args:
        keys: int64 [N], from `noise_key`.
        positions: int64 [N], position of the token to be drawn.

    Source: splitmix64 finalizer (Steele, Lea, Flood 2014); int64 products wrap as unsigned ones do.
    """
    state = keys + positions * _signed(GOLDEN)
    state = (state ^ _shift(state, 30)) * _signed(MIX_1)
    state = (state ^ _shift(state, 27)) * _signed(MIX_2)
    state = state ^ _shift(state, 31)
    return _shift(state, 11).to(torch.float64) * 2.0**-53


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


def draw(logits: Tensor, batch: DrawBatch) -> tuple[Tensor, Tensor]:
    """Draw one token per row.

    Args:
        logits: float [N, V], finite (-Inf excludes a token). N = 0 gives empty results.
        batch: parameters of the N rows.

    Returns:
        (int64 [N], float64 [N]): token ids, and the natural log of the probability with which each was drawn; for
        greedy rows the log-probability at temperature 1.
    """
    is_greedy = batch.temperature == 0
    temperature = batch.temperature.masked_fill(is_greedy, 1.0)
    probs = torch.softmax(logits.to(torch.float64) / temperature[:, None], dim=-1)
    if bool((batch.top_k > 0).any()) or bool((batch.top_p < 1).any()):
        probs = truncated(probs, top_k=batch.top_k, top_p=batch.top_p.masked_fill(is_greedy, 1.0))
    tokens = inverse_cdf(probs, uniform(batch.keys, batch.positions))
    if bool(is_greedy.any()):
        tokens = torch.where(is_greedy, logits.argmax(dim=-1), tokens)
    return tokens, probs.gather(1, tokens[:, None])[:, 0].log()


def truncated(probs: Tensor, *, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Zero all but the top_k most probable tokens, then all beyond cumulative top_p of the rest, and renormalise.

    The token that crosses top_p is kept, so at least one always is. Args: probs [N, V]; top_k [N], 0 keeps all; top_p
    [N]. Returns: [N, V], rows sum to 1.
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
    """First token whose cumulative probability exceeds noise * total; tokens of probability 0 are never drawn."""
    cumulative = probs.cumsum(dim=-1)
    total = cumulative[:, -1]
    # noise * total may round up to total, which would point past the last possible token
    target = torch.minimum(noise * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target[:, None], right=True)[:, 0]


def _mix(state: int) -> int:
    state = (state ^ (state >> 30)) * MIX_1 & MASK
    state = (state ^ (state >> 27)) * MIX_2 & MASK
    return state ^ (state >> 31)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _shift(state: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64."""
    return (state >> bits) & ((1 << (64 - bits)) - 1)

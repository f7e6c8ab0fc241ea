"""The definition of sample: logits rounded to bf16, and one draw per row by inverse CDF in float64.

Cutting is in the usual order: temperature, top-k, top-p, renormalise. Ties at a cut keep the lowest token ids.
"""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import linear

from tracefp4.formats.arithmetic import round_bf16
from tracefp4.ops.sample.noise import uniform
from tracefp4.ops.sample.operands import Draws, Sampled


def sample_reference(hidden: Tensor, head: Tensor, draws: Draws) -> Sampled:
    """Draw from checked operands; see `sample`."""
    logits = logits_reference(hidden, head)
    forced = torch.full_like(draws.keys, -1) if draws.forced is None else draws.forced
    is_number = logits.isfinite() | (logits == -torch.inf)
    is_drawable = is_number.all(-1) & (logits > -torch.inf).any(-1) & (forced < head.shape[0])
    logits, possible = logits.masked_fill(~is_drawable[:, None], 0.0), forced.masked_fill(~is_drawable, -1)
    tokens, logprobs = draw(logits, replace(draws, forced=possible))
    return Sampled(torch.where(is_drawable, tokens, forced), logprobs.masked_fill(~is_drawable, torch.nan))


def logits_reference(hidden: Tensor, head: Tensor) -> Tensor:
    """Return R(hidden head^T), float32 [N, V] with bf16 values: accumulated in float32, rounded once."""
    return round_bf16(linear(hidden.detach().to(torch.float32), head.detach().to(torch.float32)))


def draw(logits: Tensor, draws: Draws) -> Sampled:
    """Draw one token per row.

    Args:
        logits: float [N, V], finite (-Inf excludes a token). N = 0 gives empty results.
        draws: parameters of the N rows.

    Returns:
        Token ids and log-probabilities; for greedy rows those at temperature 1 and without top-p.
    """
    is_greedy = draws.temperature == 0
    temperature = draws.temperature.masked_fill(is_greedy, 1.0)
    probs = torch.softmax(logits.to(torch.float64) / temperature[:, None], dim=-1)
    if bool((draws.top_k > 0).any()) or bool((draws.top_p < 1).any()):
        probs = truncated(probs, top_k=draws.top_k, top_p=draws.top_p.masked_fill(is_greedy, 1.0))
    tokens = inverse_cdf(probs, uniform(draws.keys, draws.positions))
    if bool(is_greedy.any()):
        tokens = torch.where(is_greedy, logits.argmax(dim=-1), tokens)
    if draws.forced is not None:
        tokens = torch.where(draws.forced >= 0, draws.forced, tokens)
    return Sampled(tokens, probs.gather(1, tokens[:, None])[:, 0].log())


def truncated(probs: Tensor, *, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Zero all but the top_k most probable tokens, then all beyond cumulative top_p of the rest, and
    renormalise.

    The token that crosses top_p is kept, so at least one always is. Args: probs [N, V]; top_k [N], 0 keeps
    all; top_p [N]. Returns: [N, V], rows sum to 1.
    """
    ordered, ids = torch.sort(probs, dim=-1, descending=True, stable=True)
    rank = torch.arange(probs.shape[1], device=probs.device)
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

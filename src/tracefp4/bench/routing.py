"""Where tokens go in a benchmark of experts: uniform at random, or skewed as Zipf's law with exponent 1.

A decode step reads the weights of the experts that are in use, so a figure without their number says nothing: real
routing uses fewer than uniform routing does. Experts of one token are distinct. Draws are repeatable.
"""

from typing import Literal

import torch
from torch import Tensor

Skew = Literal["uniform", "zipf"]
SKEWS: tuple[Skew, ...] = ("uniform", "zipf")


def draw_experts(num_tokens: int, *, num_experts: int, top_k: int, skew: Skew, seed: int) -> Tensor:
    """Draw the experts of every token.

    Args:
        num_tokens: T.
        num_experts: E.
        top_k: k, at most E.
        skew: "zipf" draws, without replacement, in proportion to 1 / rank; which expert has which rank is drawn too.
        seed: Of everything that is drawn.

    Returns:
        int64 [T, k] on the CPU, distinct in a row.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    weights = torch.zeros(num_experts, device="cpu")
    if skew == "zipf":
        ranks = torch.randperm(num_experts, generator=generator, device="cpu") + 1
        weights = -ranks.float().log()
    # the k largest of log weight + Gumbel noise are k draws without replacement
    noise = torch.rand(num_tokens, num_experts, generator=generator, device="cpu").clamp_(min=1e-30)
    return (weights - noise.log_().neg_().log_()).topk(top_k, dim=-1).indices


def num_distinct(ids: Tensor) -> int:
    """Return how many experts are in use."""
    return int(ids.unique().numel())

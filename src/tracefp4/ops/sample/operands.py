"""What is drawn and what comes of it: parameters of draws as columns, tokens with their log-probabilities."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Draws:
    """Parameters of N draws as columns, on the device of the logits."""

    keys: Tensor
    """int64 [N], noise keys."""
    positions: Tensor
    """int64 [N], position of the token drawn."""
    temperature: Tensor
    """float64 [N], 0 or more; 0 is greedy."""
    top_k: Tensor
    """int64 [N]; 0 keeps all."""
    top_p: Tensor
    """float64 [N]; 1 keeps all."""
    forced: Tensor | None = None
    """int64 [N], tokens to take in place of drawn ones, below V; -1 draws. None draws every row."""


class Sampled(NamedTuple):
    """What was drawn."""

    tokens: Tensor
    """int64 [N]."""
    logprobs: Tensor
    """float64 [N], the natural log of the probability with which each was drawn."""

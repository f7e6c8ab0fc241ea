"""Logits to tokens: the draws of a pass as columns for `ops/sample`, which defines them.

The noise of a draw is a hash of (seed, prompt index, sample index, position), not a generator's state, so a draw
depends on nothing else in the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from tracefp4.ops.sample import Draws, draw
from tracefp4.rollout.sequence import Draw


def sample(logits: Tensor, draws: Sequence[Draw]) -> tuple[list[int], list[float]]:
    """Token ids and log-probs of the draws of one pass; each reads its own row of `logits` [M, V]."""
    if not draws:
        return [], []
    params = [found.sequence.request.params for found in draws]
    column = partial(torch.tensor, device=logits.device)
    batch = Draws(
        keys=column([found.sequence.noise_key for found in draws]),
        positions=column([len(found.sequence.ids) for found in draws]),
        temperature=column([found.temperature for found in params], dtype=torch.float64),
        top_k=column([found.top_k for found in params]),
        top_p=column([found.top_p for found in params], dtype=torch.float64),
    )
    forced = [found.sequence.forced_token for found in draws]
    if any(token is not None for token in forced):
        batch = replace(batch, forced=column([-1 if token is None else token for token in forced]))
    token_ids, logprobs = draw(logits[column([found.logit_row for found in draws])], batch)
    return token_ids.tolist(), logprobs.tolist()

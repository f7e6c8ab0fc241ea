"""Model outputs to tokens: the draws of a pass as columns for `ops/sample`, which defines them.

The noise of a draw is a hash of (seed, prompt index, sample index, position), not a generator's state, so a draw
depends on nothing else in the batch, and not on whether its pass was captured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from functools import partial

import torch
from torch import Tensor

from tracefp4.ops.sample import Draws
from tracefp4.rollout.sequence import Draw

_host = partial(torch.tensor, device="cpu")


def columns(draws: Sequence[Draw]) -> Draws:
    """Return the parameters of draws, in host memory; none gives empty columns."""
    params = [found.sequence.request.params for found in draws]
    forced = [found.sequence.forced_token for found in draws]
    return Draws(
        keys=_host([found.sequence.noise_key for found in draws], dtype=torch.int64),
        positions=_host([len(found.sequence.ids) for found in draws], dtype=torch.int64),
        temperature=_host([found.temperature for found in params], dtype=torch.float64),
        top_k=_host([found.top_k for found in params], dtype=torch.int64),
        top_p=_host([found.top_p for found in params], dtype=torch.float64),
        forced=_host([-1 if token is None else token for token in forced], dtype=torch.int64),
    )


def joined(first: Draws, second: Draws, *, device: torch.device) -> Draws:
    """Return the draws of both, in order, on a device."""

    def column(name: str) -> Tensor:
        return torch.cat([getattr(first, name), getattr(second, name)]).to(device)

    return Draws(**{field.name: column(field.name) for field in fields(Draws)})

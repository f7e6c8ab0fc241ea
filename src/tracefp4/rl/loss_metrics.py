"""Metrics of the loss: sums and extremes over trained tokens on their device, numbers once they are read, and a step's
metrics from those of its micro-batches. Nothing here waits for a device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from tracefp4.rl.losses import LossConfig


_ONE_IF_EMPTY = ("ratio_mean", "tis_mean", "tis_raw_mean")
"""Means that are 1 where nothing is trained."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """Per-token quantities [B, T] that the metrics read."""

    mask: Tensor
    """Trained tokens."""
    ratio: Tensor
    """Of the policy to the proximal one."""
    raw_weight: Tensor
    """Importance weight before it is capped."""
    weight: Tensor
    """Importance weight."""
    kept: Tensor
    """Whether it is not dropped."""
    advantage: Tensor
    """Of the token."""


_EXTREMES = ("ratio_max", "tis_raw_max", "ratio_min")
"""The last numbers of a loss; the smallest is kept negated."""


def summed(
    tokens: Tokens, means: Mapping[str, Tensor], *, config: LossConfig
) -> tuple[tuple[str, ...], list[Tensor]]:
    """Names of quantities; and their number, their sums and the extremes over trained tokens, float64. `means` are
    further quantities [B, T] whose mean is wanted."""
    mask, ratio, raw = tokens.mask, tokens.ratio, tokens.raw_weight
    is_low = (ratio < 1.0 - config.clip_low) & (tokens.advantage < 0)
    is_high = (ratio > 1.0 + config.clip_high) & (tokens.advantage > 0)
    is_capped = raw > config.tis_cap if config.tis_cap is not None else torch.zeros_like(is_low)
    averaged = {
        "ratio_mean": ratio,
        "clip_low_fraction": is_low,
        "clip_high_fraction": is_high,
        "tis_mean": tokens.weight,
        "tis_raw_mean": raw,
        "tis_clipped_fraction": is_capped,
        "tis_dropped_fraction": ~tokens.kept,
        "policy_kl": ratio - 1.0 - ratio.log(),
        **means,
    }
    sums = [torch.where(mask, values.to(torch.float64), 0.0).sum() for values in averaged.values()]
    largest = [
        torch.where(mask, values, -torch.inf).amax().to(torch.float64) for values in (ratio, raw, -ratio)
    ]
    return tuple(averaged), [mask.sum().to(torch.float64), *sums, *largest]


def read_metrics(names: tuple[str, ...], numbers: Sequence[float]) -> dict[str, float]:
    """Means, fractions and extremes of what `summed` gave; without trained tokens ratios are 1 and fractions 0."""
    num_tokens, *read = numbers
    if not num_tokens:
        read = [float(name in _ONE_IF_EMPTY) for name in names] + [1.0, 1.0, -1.0]
    found = dict(zip((*names, *_EXTREMES), read, strict=True))
    divided = {name: found[name] / max(num_tokens, 1.0) for name in names}
    return {"num_tokens": num_tokens, **found, **divided, "ratio_min": -found["ratio_min"]}


def merge_metrics(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Merge the metrics of several micro-batches into those of the whole step.

    Names ending in `_max` take the maximum, `_min` the minimum, `num_tokens` adds; every other one is the
    mean weighted by `num_tokens`, which equals the metric of the joined batch. Parts without trained tokens
    do not count.

    Args:
        parts: metrics of `grpo_loss`, all with the same names; may be empty.

    Returns:
        One dictionary with the same names ({} for no parts).
    """
    if not parts:
        return {}
    filled = [part for part in parts if part["num_tokens"] > 0] or [parts[0]]
    total = sum(part["num_tokens"] for part in filled)
    merged: dict[str, float] = {}
    for name in filled[0]:
        values = [part[name] for part in filled]
        if name == "num_tokens":
            merged[name] = total
        elif name.endswith("_max"):
            merged[name] = max(values)
        elif name.endswith("_min"):
            merged[name] = min(values)
        else:
            weighted = sum(part[name] * part["num_tokens"] for part in filled)
            merged[name] = weighted / total if total else values[0]
    return merged

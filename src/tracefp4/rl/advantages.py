"""GRPO advantages: a completion is compared with the other completions of its own prompt.

For the rewards r_1..r_n of one group:

    A_i = (r_i - mean) / (std + epsilon)        normalize="std", std unbiased (divides by n - 1)
    A_i = r_i - mean                            normalize="none" (Dr. GRPO)

A group whose rewards are all equal says nothing about which completion was better. It is found by equality of
its
smallest and largest reward, not by a small standard deviation: 0.1 is not a dyadic fraction, so the mean of
four equal 0.1 may differ from 0.1 in the last bit, and dividing that by a tiny std would invent an advantage.
Such groups get exactly 0 and are reported. They stay in the loss denominators unless the caller leaves them
out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tracefp4.errors import ConfigError, RecordError

NORMALIZATIONS = ("std", "none")


@dataclass(frozen=True, kw_only=True, slots=True)
class AdvantageConfig:
    """How rewards of one group become advantages."""

    normalize: str = "std"
    """`std`: divide by the unbiased standard deviation of the group. `none`: only subtract the mean."""
    epsilon: float = 1e-6
    """Added to the standard deviation, > 0 (1e-6, as in verl). Not used with `none`."""

    def __post_init__(self) -> None:
        if self.normalize not in NORMALIZATIONS:
            raise ConfigError(
                f"AdvantageConfig.normalize is refused: got {self.normalize!r}; allowed is one of "
                f"{NORMALIZATIONS}. Change the advantage section."
            )
        if not self.epsilon > 0.0:
            raise ConfigError(
                f"AdvantageConfig.epsilon is refused: got {self.epsilon!r}; allowed is a number > 0. "
                "Use 1e-6."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Advantages:
    """Advantages of N completions and what was skipped."""

    values: Tensor
    """float32 [N], in the order of the rewards; exactly 0 in skipped groups."""
    skipped: Tensor
    """bool [N], True: all rewards of this completion's group are equal."""
    num_groups: int
    """Number of different groups."""
    num_skipped_groups: int
    """Groups whose rewards are all equal, groups of one completion among them."""
    reward_mean: float
    """Mean of all rewards; 0 for no rewards."""
    group_std_mean: float
    """Mean over groups of the unbiased standard deviation; 0 for groups of one and for no groups."""


def group_advantages(rewards: Tensor, *, groups: Tensor, config: AdvantageConfig) -> Advantages:
    """Compute the advantage of every completion within its group.

    Args:
        rewards: float [N], finite.
        groups: int64 [N], any integers; equal numbers are one group. Groups may have different sizes.
        config: the normalization.

    Returns:
        Values, the skipped mask and counts. Arithmetic is in float64, the values are float32.

    Raises:
        ConfigError: shapes that are not [N] and [N].
        RecordError: a NaN or infinite reward, with its index.
    """
    if rewards.dim() != 1 or groups.shape != rewards.shape:
        raise ConfigError(
            f"group_advantages needs rewards [N] and groups [N]; got {tuple(rewards.shape)} and "
            f"{tuple(groups.shape)}. Flatten both in the same order."
        )
    reward = rewards.detach().to(torch.float64)
    bad = ~torch.isfinite(reward)
    if bad.any():
        index = int(bad.nonzero()[0])
        raise RecordError(
            f"group_advantages needs finite rewards; got {reward[index].item()} for sample {index}. "
            "Let the reward function return a number, or drop the sample."
        )
    if reward.numel() == 0:
        empty = torch.zeros(0, dtype=torch.float32, device=reward.device)
        return Advantages(
            values=empty,
            skipped=empty.bool(),
            num_groups=0,
            num_skipped_groups=0,
            reward_mean=0.0,
            group_std_mean=0.0,
        )
    _, group, sizes = torch.unique(groups, return_inverse=True, return_counts=True)
    num_groups = sizes.numel()
    zeros = torch.zeros(num_groups, dtype=torch.float64, device=reward.device)
    lowest = zeros.scatter_reduce(0, group, reward, "amin", include_self=False)
    highest = zeros.scatter_reduce(0, group, reward, "amax", include_self=False)
    is_equal = lowest == highest
    centered = reward - (zeros.index_add(0, group, reward) / sizes)[group]
    variance = zeros.index_add(0, group, centered.square()) / (sizes - 1).clamp(min=1)
    std = torch.where(is_equal, 0.0, variance.sqrt())
    values = centered / (std[group] + config.epsilon) if config.normalize == "std" else centered
    skipped = is_equal[group]
    return Advantages(
        values=torch.where(skipped, 0.0, values).to(torch.float32),
        skipped=skipped,
        num_groups=num_groups,
        num_skipped_groups=int(is_equal.sum()),
        reward_mean=reward.mean().item(),
        group_std_mean=std.mean().item(),
    )

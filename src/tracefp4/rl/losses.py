"""The GRPO surrogate: PPO clipping, rollout importance weights, and one rule for the denominator.

Three policies meet here: `rollout` sampled the tokens (the engine), `old` is the trainer's own forward before
the update, `new` carries the gradient. Per trained token t of sequence b, with A the advantage:

    r   = exp(clamp(new - old, +-bound))                       PPO ratio, has the gradient
    w   = min(exp(clamp(old - rollout, +-bound)), tis_cap)     importance weight, a constant (detached)
    w   = 0 where exp(old - rollout) is outside keep_range     the IcePop mask; still in the denominator
    pg  = max(-A*r, -A*clamp(r, 1 - clip_low, 1 + clip_high))
    pg  = min(pg, -A*dual_clip) where A < 0                    only with dual_clip
    kl  = exp(ref - new) - (ref - new) - 1                     k3, only with kl_coefficient > 0
    l   = w*pg + kl_coefficient*kl

The weight is taken from `old`, not from `new`: the ratio already holds the change since `old`, so a weight
built on `new` would count it twice and, if not detached, double the gradient.

Masked entries are replaced by constants *before* any subtraction or exp, so a sentinel (1.0, -inf, NaN) in a
masked position can reach neither the loss nor the gradient; multiplying by a zero mask afterwards would turn
inf into NaN.

Denominators are global: the caller adds `loss_denominator` over all micro-batches and ranks of one optimizer
step and passes the sum to every call; losses and gradients of the pieces then ADD UP to those of one big
batch (gradients are summed over ranks, never averaged). Averaging micro-batch means instead is a different
objective.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tracefp4.errors import ConfigError, RecordError
from tracefp4.rl.loss_metrics import Tokens, read_metrics, summed

AGGREGATIONS = ("token_mean", "sequence_mean", "dr_grpo")


@dataclass(frozen=True, kw_only=True, slots=True)
class LossConfig:
    """Every constant of the surrogate. Defaults: clip .2/.2, weights capped at 5, no reference KL, token
    mean."""

    clip_low: float = 0.2
    """The ratio is clipped from below at 1 - clip_low; in [0, 1)."""
    clip_high: float = 0.2
    """The ratio is clipped from above at 1 + clip_high; >= 0 (DAPO: 0.28)."""
    dual_clip: float | None = None
    """Bound c > 1 on the loss of tokens with negative advantage, -A*c. None: no bound (verl's default is
    3)."""
    tis_cap: float | None = 5.0
    """Upper bound of the importance weight, > 0. None: the weight is not truncated (and is 1 without
    keep_range)."""
    keep_range: tuple[float, float] | None = None
    """(low, high), 0 < low <= high: tokens whose exp(old - rollout) lies outside get weight 0. None: all are
    kept."""
    aggregation: str = "token_mean"
    """`token_mean`: sum over tokens / tokens. `sequence_mean`: mean over tokens, then over sequences.
    `dr_grpo`: sum over tokens / (sequences * constant_length)."""
    constant_length: int | None = None
    """The fixed length of `dr_grpo`, >= 1, normally the response limit. None with the other aggregations."""
    kl_coefficient: float = 0.0
    """Weight of the k3 divergence to the reference policy, >= 0. 0 needs no reference log-probs."""
    log_ratio_bound: float = 20.0
    """Log-ratios are clamped to +- this before exp, > 0 (20, as in verl 0.7). A clamped token has no
    gradient."""

    def __post_init__(self) -> None:
        _require(0.0 <= self.clip_low < 1.0, "clip_low", self.clip_low, "a number in [0, 1)")
        _require(self.clip_high >= 0.0, "clip_high", self.clip_high, "a number >= 0")
        _require(
            self.dual_clip is None or self.dual_clip > 1.0,
            "dual_clip",
            self.dual_clip,
            "None or a number > 1",
        )
        _require(self.tis_cap is None or self.tis_cap > 0.0, "tis_cap", self.tis_cap, "None or a number > 0")
        if self.keep_range is not None:
            is_range = len(self.keep_range) == 2 and 0.0 < self.keep_range[0] <= self.keep_range[1]
            _require(is_range, "keep_range", self.keep_range, "None or (low, high) with 0 < low <= high")
        _require(self.aggregation in AGGREGATIONS, "aggregation", self.aggregation, f"one of {AGGREGATIONS}")
        needs_length = self.aggregation == "dr_grpo"
        has_length = self.constant_length is not None and self.constant_length >= 1
        allowed = "an integer >= 1 with aggregation 'dr_grpo', None otherwise"
        is_length_right = has_length if needs_length else self.constant_length is None
        _require(is_length_right, "constant_length", self.constant_length, allowed)
        _require(self.kl_coefficient >= 0.0, "kl_coefficient", self.kl_coefficient, "a number >= 0")
        _require(self.log_ratio_bound > 0.0, "log_ratio_bound", self.log_ratio_bound, "a number > 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class LossData:
    """The constants of one micro-batch: everything the loss reads except the log-probs under training."""

    old_logprobs: Tensor
    """[B, T], log p of the token under the trainer before the update; entries outside `mask` are ignored."""
    rollout_logprobs: Tensor
    """[B, T], log p of the token under the distribution it was sampled from; entries outside `mask` are
    ignored."""
    advantages: Tensor
    """[B], one per sequence, or [B, T], one per token."""
    mask: Tensor
    """bool [B, T], True: the token at this entry was sampled by the policy and is trained."""
    ref_logprobs: Tensor | None = None
    """[B, T], log p under the reference policy. None: there is no reference (needs kl_coefficient 0)."""


@dataclass(frozen=True, slots=True)
class LossOutput:
    """What one call of the loss returns."""

    loss: Tensor
    """0-dim, this micro-batch's share of the step's loss; backward() adds its share of the gradient."""
    metrics: dict[str, float]
    """Means, maxima and fractions over the trained tokens of this call; merge them with `merge_metrics`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PendingLoss:
    """A loss that nobody has looked at: its backward pass may be launched while the device still computes it."""

    loss: Tensor
    """As `LossOutput.loss`."""
    mask: Tensor
    """bool [B, T], trained tokens."""
    operands: Mapping[str, Tensor]
    """What has to be finite at trained tokens, [B, T] each."""
    names: tuple[str, ...]
    """Of the sums among the numbers."""
    numbers: Tensor
    """float64: of every operand its entries that are not finite, the trained tokens, sums, and extremes."""

    def read(self) -> LossOutput:
        """Wait for the numbers. Raises: RecordError as `grpo_loss`, whose gradients are then of no use."""
        read = self.numbers.tolist()
        if any(read[: len(self.operands)]):
            _refuse(self.operands, mask=self.mask)
        return LossOutput(self.loss, read_metrics(self.names, read[len(self.operands) :]))


def loss_denominator(mask: Tensor, *, config: LossConfig) -> float:
    """Count what this micro-batch adds to the step's denominator.

    token_mean: trained tokens. sequence_mean: sequences with at least one trained token. dr_grpo: the same
    sequences times constant_length. A sequence whose tokens are all masked is in neither numerator nor
    denominator; one whose group was skipped (advantage 0) stays in the denominator unless the caller masks it
    or leaves it out, as `rl.update` does.

    Args:
        mask: bool [B, T], True where a token is trained.
        config: names the aggregation.

    Returns:
        A number >= 0. Add it over all micro-batches and ranks of one optimizer step.
    """
    if config.aggregation == "token_mean":
        return float(mask.sum().item())
    num_sequences = float(mask.any(dim=-1).sum().item())
    if config.aggregation == "sequence_mean":
        return num_sequences
    assert config.constant_length is not None
    return num_sequences * config.constant_length


def grpo_loss(logprobs: Tensor, *, data: LossData, config: LossConfig, denominator: float) -> LossOutput:
    """Compute the clipped surrogate of the module docstring for one micro-batch.

    Args:
        logprobs: [B, T] float, log p of the token at each entry under the policy being trained, with
            gradient.
            float32 or lower is computed in float32, float64 in float64.
        data: the constants of the micro-batch, [B, T] each.
        config: the constants of the method.
        denominator: the global denominator of the optimizer step (see `loss_denominator`), >= 0; values below
            1 are read as 1, so a step without any trained token has loss 0 and gradient 0.

    Returns:
        The loss and its metrics.

    Raises:
        ConfigError: shapes that differ, a mask that is not boolean, a KL coefficient without reference
            log-probs.
        RecordError: a NaN or an infinity at a trained position, with tensor and position.
    """
    return pending_grpo_loss(logprobs, data=data, config=config, denominator=denominator).read()


def pending_grpo_loss(
    logprobs: Tensor, *, data: LossData, config: LossConfig, denominator: float
) -> PendingLoss:
    """Compute `grpo_loss` without waiting for a device; what is not finite is refused when it is read."""
    operands = _check(logprobs, data=data, config=config, denominator=denominator)
    mask = data.mask
    dtype = torch.promote_types(logprobs.dtype, torch.float32)
    new = torch.where(mask, logprobs.to(dtype), 0.0)
    old = torch.where(mask, data.old_logprobs.detach().to(dtype), 0.0)
    rollout = torch.where(mask, data.rollout_logprobs.detach().to(dtype), 0.0)
    advantage = data.advantages.detach().to(dtype)
    advantage = torch.where(mask, advantage if advantage.dim() == 2 else advantage[:, None], 0.0)
    bound = config.log_ratio_bound

    ratio = (new - old).clamp(-bound, bound).exp()
    weight, kept = _importance_weight(old - rollout, config=config)
    surrogate, unbounded = _clipped_surrogate(ratio, advantage=advantage, config=config)
    token_loss = weight * surrogate
    divergence = torch.zeros_like(token_loss)
    if config.kl_coefficient > 0.0:
        assert data.ref_logprobs is not None
        log_ref = (torch.where(mask, data.ref_logprobs.detach().to(dtype), 0.0) - new).clamp(-bound, bound)
        divergence = log_ref.exp() - log_ref - 1.0
        token_loss = token_loss + config.kl_coefficient * divergence
    loss = _aggregate(token_loss, mask=mask, config=config) / max(denominator, 1.0)
    with torch.no_grad():
        tokens = Tokens(mask, ratio, (old - rollout).clamp(-bound, bound).exp(), weight, kept, advantage)
        means = {
            "surrogate": weight * surrogate,
            "reference_kl": divergence,
            "dual_clip_fraction": surrogate < unbounded,
        }
        bad = [(mask & ~torch.isfinite(tensor.detach())).sum() for tensor in operands.values()]
        names, sums = summed(tokens, means, config=config)
        numbers = torch.stack([count.to(torch.float64) for count in (*bad, *sums)])
    return PendingLoss(loss=loss, mask=mask, operands=operands, names=names, numbers=numbers)


def _importance_weight(log_weight: Tensor, *, config: LossConfig) -> tuple[Tensor, Tensor]:
    """w and which tokens keep it, from log_weight = old - rollout (0 at masked entries)."""
    kept = torch.ones_like(log_weight, dtype=torch.bool)
    if config.tis_cap is None and config.keep_range is None:
        return torch.ones_like(log_weight), kept
    # select before exp: a rejected token's weight must be 0, and 0 * exp(1000) would be NaN
    if config.keep_range is not None:
        low, high = (math.log(edge) for edge in config.keep_range)
        kept = (log_weight >= low) & (log_weight <= high)
    bound = config.log_ratio_bound
    weight = torch.where(kept, log_weight, 0.0).clamp(-bound, bound).exp()
    if config.tis_cap is not None:
        weight = weight.clamp(max=config.tis_cap)
    return torch.where(kept, weight, 0.0).detach(), kept


def _clipped_surrogate(ratio: Tensor, *, advantage: Tensor, config: LossConfig) -> tuple[Tensor, Tensor]:
    """The clipped loss, and the same before the dual-clip bound."""
    clipped = ratio.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
    surrogate = torch.maximum(-advantage * ratio, -advantage * clipped)
    if config.dual_clip is None:
        return surrogate, surrogate
    bounded = torch.minimum(surrogate, -advantage * config.dual_clip)
    return torch.where(advantage < 0, bounded, surrogate), surrogate


def _aggregate(token_loss: Tensor, *, mask: Tensor, config: LossConfig) -> Tensor:
    """The numerator: sum over trained tokens, or over sequences of their token means."""
    selected = torch.where(mask, token_loss, 0.0)
    if config.aggregation != "sequence_mean":
        return selected.sum()
    num_tokens = mask.sum(dim=-1).clamp(min=1).to(token_loss.dtype)
    return (selected.sum(dim=-1) / num_tokens).sum()


def _check(logprobs: Tensor, *, data: LossData, config: LossConfig, denominator: float) -> dict[str, Tensor]:
    """Refuse shapes and masks that would give a silent wrong loss; return what has to be finite."""
    if logprobs.dim() != 2:
        raise ConfigError(
            f"grpo_loss needs log-probs of shape [B, T]; got {tuple(logprobs.shape)}. Pad a batch first."
        )
    if data.mask.dtype != torch.bool:
        raise ConfigError(f"grpo_loss needs a boolean mask; got {data.mask.dtype}. Use mask.bool().")
    if not math.isfinite(denominator) or denominator < 0:
        raise ConfigError(
            f"grpo_loss needs a denominator >= 0; got {denominator}. Add up loss_denominator(mask)."
        )
    if config.kl_coefficient > 0.0 and data.ref_logprobs is None:
        raise ConfigError(
            f"grpo_loss needs ref_logprobs with kl_coefficient {config.kl_coefficient}; got None. "
            "Pass the reference policy's log-probs or set kl_coefficient to 0."
        )
    shaped = {"old_logprobs": data.old_logprobs, "rollout_logprobs": data.rollout_logprobs, "mask": data.mask}
    if data.ref_logprobs is not None:
        shaped["ref_logprobs"] = data.ref_logprobs
    if data.advantages.dim() == 2:
        shaped["advantages"] = data.advantages
    elif data.advantages.shape != logprobs.shape[:1]:
        raise ConfigError(
            f"grpo_loss needs advantages [B] or [B, T]; got {tuple(data.advantages.shape)} "
            f"for log-probs {tuple(logprobs.shape)}. Give one per sequence."
        )
    for name, tensor in shaped.items():
        if tensor.shape != logprobs.shape:
            raise ConfigError(
                f"grpo_loss needs {name} of the log-probs' shape {tuple(logprobs.shape)}; "
                f"got {tuple(tensor.shape)}. Align every tensor on the token it belongs to."
            )
    del shaped["mask"]
    per_token = (
        data.advantages if data.advantages.dim() == 2 else data.advantages[:, None].expand_as(logprobs)
    )
    return {"logprobs": logprobs.detach(), **shaped, "advantages": per_token}


def _refuse(operands: Mapping[str, Tensor], *, mask: Tensor) -> None:
    """Name the first entry that is not finite."""
    for name, tensor in operands.items():
        found = mask & ~torch.isfinite(tensor.detach())
        if found.any():
            row, column = (int(index) for index in found.nonzero()[0])
            raise RecordError(
                f"grpo_loss needs finite {name} at trained tokens; got {tensor[row, column].item()} at "
                f"sample {row}, "
                f"position {column} ({int(found.sum())} in all). Find the forward that produced it, or mask "
                "the sample."
            )


def _require(is_allowed: bool, name: str, value: object, allowed: str) -> None:
    if not is_allowed:
        raise ConfigError(
            f"LossConfig.{name} is refused: got {value!r}; allowed is {allowed}. Change the loss section."
        )

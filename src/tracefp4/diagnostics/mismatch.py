"""How far the trainer's log-probs are from the rollout's, under the names that other frameworks report.

All quantities are averages over the trained tokens, which were sampled by the rollout q; p is the trainer, T
tokens in all, sequence s has T_s of them, and

    d_t = log p(token t) - log q(token t)

Arithmetic is in float64. A NaN or an infinity among the trained tokens is an error with its position: leaving
such tokens out would make a broken engine look healthy. Sequences without trained tokens take part in
nothing. verl adds 1e-8 to its denominators; that is left out here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tracefp4.errors import ConfigError, RecordError

# verl rollout_corr_helper.SAFETY_BOUND: log-ratios are clamped to +- this before the exp of a chi-square
CHI2_BOUND = 20.0


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenPair:
    """The trained tokens of a batch under both sides, checked and flattened in row-major order."""

    train: Tensor
    """float64 [T], log p of the token under the trainer."""
    rollout: Tensor
    """float64 [T], log q of the token under the rollout."""
    sequence: Tensor
    """int64 [T], row of the batch that the token belongs to."""

    @property
    def difference(self) -> Tensor:
        """float64 [T], d = log p - log q."""
        return self.train - self.rollout


def token_pair(train_logprobs: Tensor, *, rollout_logprobs: Tensor, mask: Tensor) -> TokenPair:
    """Select and check the trained tokens.

    Args:
        train_logprobs: float [B, T], log p of the token at each entry.
        rollout_logprobs: float [B, T], log q of the same token.
        mask: bool [B, T], True at trained tokens; other entries are ignored, whatever they hold.

    Raises:
        ConfigError: shapes that differ or a mask that is not boolean.
        RecordError: a NaN or an infinity at a trained token, with side, sample and position.
    """
    shapes = {tuple(train_logprobs.shape), tuple(rollout_logprobs.shape), tuple(mask.shape)}
    if len(shapes) != 1 or mask.dim() != 2 or mask.dtype != torch.bool:
        raise ConfigError(
            f"Mismatch metrics need log-probs and a boolean mask of one shape [B, T]; got {sorted(shapes)} "
            "and "
            f"{mask.dtype}. Align both sides on the token they belong to."
        )
    sides = {"train": train_logprobs.detach(), "rollout": rollout_logprobs.detach()}
    for side, logprobs in sides.items():
        bad = mask & ~torch.isfinite(logprobs)
        if bad.any():
            row, column = (int(index) for index in bad.nonzero()[0])
            raise RecordError(
                "Mismatch metrics need finite log-probs at trained tokens; got "
                f"{logprobs[row, column].item()} on the "
                f"{side} side at sample {row}, position {column} ({int(bad.sum())} in all). "
                "Check that side's logits; do not drop the token."
            )
    return TokenPair(
        train=sides["train"][mask].to(torch.float64),
        rollout=sides["rollout"][mask].to(torch.float64),
        sequence=mask.nonzero()[:, 0],
    )


def summary_metrics(pair: TokenPair) -> dict[str, float]:
    """Compute our own summary; {"mismatch/num_tokens": 0} alone for no tokens.

    mismatch/abs_mean, abs_p99, abs_max: of |d| (p99: linear interpolation between order statistics).
    mismatch/k1 = mean(-d), k2 = mean(d^2 / 2), k3 = mean(e^d - 1 - d): estimators of KL(q || p); k3 >= 0.
    """
    count = pair.train.numel()
    if count == 0:
        return {"mismatch/num_tokens": 0.0}
    d = pair.difference
    size = d.abs()
    return {
        "mismatch/num_tokens": float(count),
        "mismatch/abs_mean": size.mean().item(),
        "mismatch/abs_p99": _quantile(size, 0.99),
        "mismatch/abs_max": size.max().item(),
        "mismatch/k1": -d.mean().item(),
        "mismatch/k2": (d.square() / 2).mean().item(),
        "mismatch/k3": (d.expm1() - d).mean().item(),
    }


def verl_metrics(pair: TokenPair) -> dict[str, float]:
    """Compute verl's off-policy metrics under verl's names; {} for no tokens.

    Means over tokens:
      rollout_corr/kl = mean(-d);  rollout_corr/k3_kl = mean(e^d - d - 1)
      rollout_corr/chi2_token = mean(e^(2 c(d))) - 1, c clamps to +-20
    Means over sequences, with P_s = mean_t log p and Q_s = mean_t log q of sequence s:
      rollout_corr/training_ppl = mean(e^-P_s), training_log_ppl = mean(-P_s); rollout_ppl, rollout_log_ppl
      with Q_s rollout_corr/log_ppl_diff = mean(Q_s - P_s); log_ppl_abs_diff of |.|; log_ppl_diff_max, _min
      over s rollout_corr/ppl_ratio = mean(e^(Q_s - P_s));  rollout_corr/chi2_seq = mean(e^(2 c(sum_t d))) - 1
    On probabilities, not log-probs (as verl computes them, though its docstring says otherwise):
      training/rollout_probs_diff_max, _mean, _std (unbiased; 0 for one token) of |e^log p - e^log q|
      training/rollout_actor_probs_pearson_corr; 1 when both sides are equal token by token, NaN when one side
      is constant and the sides differ

    Source: verl trainer/ppo/rollout_corr_helper.py and utils/debug/metrics.py.
    """
    if pair.train.numel() == 0:
        return {}
    d = pair.difference
    mean_train, mean_rollout, sum_d = _per_sequence(pair)
    gap = mean_rollout - mean_train
    p, q = pair.train.exp(), pair.rollout.exp()
    diff = (p - q).abs()
    return {
        "rollout_corr/kl": -d.mean().item(),
        "rollout_corr/k3_kl": (d.expm1() - d).mean().item(),
        "rollout_corr/training_ppl": (-mean_train).exp().mean().item(),
        "rollout_corr/training_log_ppl": -mean_train.mean().item(),
        "rollout_corr/rollout_ppl": (-mean_rollout).exp().mean().item(),
        "rollout_corr/rollout_log_ppl": -mean_rollout.mean().item(),
        "rollout_corr/log_ppl_diff": gap.mean().item(),
        "rollout_corr/log_ppl_abs_diff": gap.abs().mean().item(),
        "rollout_corr/log_ppl_diff_max": gap.max().item(),
        "rollout_corr/log_ppl_diff_min": gap.min().item(),
        "rollout_corr/ppl_ratio": gap.exp().mean().item(),
        "rollout_corr/chi2_token": _chi2(d),
        "rollout_corr/chi2_seq": _chi2(sum_d),
        "training/rollout_probs_diff_max": diff.max().item(),
        "training/rollout_probs_diff_mean": diff.mean().item(),
        "training/rollout_probs_diff_std": diff.std().item() if diff.numel() > 1 else 0.0,
        "training/rollout_actor_probs_pearson_corr": _pearson(p, q),
    }


def nemo_rl_metrics(pair: TokenPair) -> dict[str, float]:
    """Compute NeMo-RL's generation metrics under its names; {} for no tokens.

      token_mult_prob_error = mean(e^|d|)            1 is perfect; look into more than 1.05
      gen_kl_error = mean(e^d - 1 - d)               k3 form of KL(q || p)
      policy_kl_error = mean(e^-d - 1 + d)           the same with the sides exchanged
      js_divergence_error = mean(k3(log m - log p) + k3(log m - log q)) / 2 with m = (p + q) / 2 and
                            k3(x) = e^-x - 1 + x
      sampling_importance_ratio = mean(e^d)          tokens whose e^d overflows count as 0

    Source: nemo_rl/algorithms/loss_functions.py, ClippedPGLossFn with kl_type "k3".
    """
    if pair.train.numel() == 0:
        return {}
    d = pair.difference
    log_mixture = torch.logaddexp(pair.train, pair.rollout) - torch.log(
        torch.tensor(2.0, dtype=torch.float64, device="cpu")
    )
    above_train, above_rollout = pair.train - log_mixture, pair.rollout - log_mixture
    js = (above_train.expm1() - above_train + above_rollout.expm1() - above_rollout) / 2
    ratio = d.exp()
    return {
        "token_mult_prob_error": d.abs().exp().mean().item(),
        "gen_kl_error": (d.expm1() - d).mean().item(),
        "policy_kl_error": ((-d).expm1() + d).mean().item(),
        "js_divergence_error": js.mean().item(),
        "sampling_importance_ratio": torch.where(ratio.isinf(), 0.0, ratio).mean().item(),
    }


def mismatch_metrics(train_logprobs: Tensor, *, rollout_logprobs: Tensor, mask: Tensor) -> dict[str, float]:
    """Compute every metric of this module; arguments and errors as in `token_pair`."""
    pair = token_pair(train_logprobs, rollout_logprobs=rollout_logprobs, mask=mask)
    return {**summary_metrics(pair), **verl_metrics(pair), **nemo_rl_metrics(pair)}


def mismatch_by_lag(
    train_logprobs: Tensor, *, rollout_logprobs: Tensor, mask: Tensor, version_lag: Tensor
) -> dict[int, dict[str, float]]:
    """Compute the summary separately for every weight-version lag.

    Args:
        train_logprobs, rollout_logprobs, mask: as in `token_pair`.
        version_lag: int64 [B, T], versions between sampling and training, per token.

    Returns:
        lag -> `summary_metrics` of the trained tokens with that lag, ascending.
    """
    token_pair(train_logprobs, rollout_logprobs=rollout_logprobs, mask=mask)
    lags = sorted(set(version_lag[mask].tolist()))
    return {
        lag: summary_metrics(
            token_pair(train_logprobs, rollout_logprobs=rollout_logprobs, mask=mask & (version_lag == lag))
        )
        for lag in lags
    }


def _per_sequence(pair: TokenPair) -> tuple[Tensor, Tensor, Tensor]:
    """Mean log p, mean log q and sum of d of every sequence that has trained tokens."""
    _, index, count = torch.unique_consecutive(pair.sequence, return_inverse=True, return_counts=True)
    zeros = torch.zeros(count.numel(), dtype=torch.float64, device=pair.train.device)
    sum_train, sum_rollout = zeros.index_add(0, index, pair.train), zeros.index_add(0, index, pair.rollout)
    return sum_train / count, sum_rollout / count, sum_train - sum_rollout


def _chi2(log_ratio: Tensor) -> float:
    return (2.0 * log_ratio.clamp(-CHI2_BOUND, CHI2_BOUND)).exp().mean().item() - 1.0


def _pearson(x: Tensor, y: Tensor) -> float:
    if torch.equal(x, y):
        return 1.0
    x, y = x - x.mean(), y - y.mean()
    return ((x * y).sum() / (x.square().sum().sqrt() * y.square().sum().sqrt())).item()


def _quantile(values: Tensor, fraction: float) -> float:
    """Linear interpolation between order statistics; torch.quantile refuses more than 16 million values."""
    ordered = values.sort().values
    place = fraction * (ordered.numel() - 1)
    low = int(place)
    high = min(low + 1, ordered.numel() - 1)
    return (ordered[low] + (ordered[high] - ordered[low]) * (place - low)).item()

"""How much of a weight update the quantized, guided trainer can see.

Following the rollout's codes also follows them when the weights have moved, so log-ratios, PPO clipping and
KL may act on a number that is too small. With a_t the change of log p(token t) of the unquantized model over
an update and b_t the change of the quantized model's, over the same tokens:

    slope       = sum(a_t b_t) / sum(a_t^2)                regression through the origin; 1: all of it is seen
    residual_t  = b_t - slope * a_t
    noise_ratio = rms(residual) / rms(a)                   rounding noise in units of the signal

Interval: tokens of one sequence share their context, so the variance is the cluster-robust sandwich over
sequences,

    var(slope) = G/(G-1) * sum_g (sum_{t in g} a_t residual_t)^2 / (sum_t a_t^2)^2

with G sequences, and the bounds are slope -+ t * sqrt(var), t the Student quantile with G-1 degrees of
freedom. With a single sequence its tokens are taken as the clusters, which is too narrow when they are
correlated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import Tensor

from tracefp4.errors import ConfigError, RecordError


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateTransmission:
    """The regression of the quantized model's change on the unquantized model's change."""

    slope: float
    """Share of the update that is seen, 1 is all; NaN when the unquantized model did not change at all."""
    low: float
    """Lower bound of the interval; NaN with fewer than two clusters or without a signal."""
    high: float
    """Upper bound of the interval; NaN like `low`."""
    noise_ratio: float
    """rms(residual) / rms(change of the unquantized model); NaN without a signal."""
    signal_rms: float
    """rms of the unquantized model's change in log p, nats; 0 means there was nothing to transmit."""
    num_tokens: int
    """Tokens in the regression."""
    num_clusters: int
    """Sequences with tokens in the regression (tokens, if there is a single sequence)."""

    def metrics(self) -> dict[str, float]:
        """Return `transmission/...` numbers; those that are undefined (NaN) are left out, the counts
        never."""
        named = {
            "slope": self.slope,
            "low": self.low,
            "high": self.high,
            "noise_ratio": self.noise_ratio,
            "signal_rms": self.signal_rms,
            "num_tokens": float(self.num_tokens),
        }
        return {f"transmission/{name}": value for name, value in named.items() if not math.isnan(value)}


def update_transmission(
    quantized_change: Tensor, *, reference_change: Tensor, mask: Tensor, confidence: float = 0.95
) -> UpdateTransmission:
    """Regress the change seen under quantization on the change of the unquantized model, through the origin.

    Args:
        quantized_change: float [B, T], log p after minus before the update, through the quantized (guided)
            forward.
        reference_change: float [B, T], the same through the unquantized forward.
        mask: bool [B, T], True at the tokens to use; other entries are ignored, whatever they hold.
        confidence: of the interval, in (0, 1).

    Returns:
        Slope, interval and noise ratio. Arithmetic is in float64.

    Raises:
        ConfigError: shapes that differ, a mask that is not boolean, no tokens, a confidence outside (0, 1).
        RecordError: a NaN or an infinity at a token in use.
    """
    _check(quantized_change, reference_change=reference_change, mask=mask, confidence=confidence)
    a = reference_change.detach()[mask].to(torch.float64)
    b = quantized_change.detach()[mask].to(torch.float64)
    _, cluster = torch.unique(mask.nonzero()[:, 0], return_inverse=True)
    num_clusters = int(cluster.max()) + 1
    if num_clusters == 1:
        cluster, num_clusters = torch.arange(a.numel(), device="cpu"), a.numel()
    energy = a.square().sum()
    signal_rms = (energy / a.numel()).sqrt().item()
    nan = math.nan
    if energy == 0:
        return UpdateTransmission(
            slope=nan,
            low=nan,
            high=nan,
            noise_ratio=nan,
            signal_rms=0.0,
            num_tokens=a.numel(),
            num_clusters=num_clusters,
        )
    slope = (a * b).sum() / energy
    residual = b - slope * a
    half_width = nan
    if num_clusters > 1:
        scores = torch.zeros(num_clusters, dtype=torch.float64, device="cpu").index_add(
            0, cluster.cpu(), (a * residual).cpu()
        )
        variance = scores.square().sum() / energy.cpu().square() * num_clusters / (num_clusters - 1)
        half_width = student_quantile(0.5 + confidence / 2, degrees=num_clusters - 1) * math.sqrt(
            variance.item()
        )
    return UpdateTransmission(
        slope=slope.item(),
        low=slope.item() - half_width,
        high=slope.item() + half_width,
        noise_ratio=residual.square().mean().sqrt().item() / signal_rms,
        signal_rms=signal_rms,
        num_tokens=a.numel(),
        num_clusters=num_clusters,
    )


def student_quantile(probability: float, *, degrees: int) -> float:
    """Return the Student t quantile: exact for 1 and 2 degrees of freedom, else by Hill's expansion.

    Args:
        probability: in (0, 1).
        degrees: degrees of freedom, >= 1.

    Source: G. W. Hill, Algorithm 396, CACM 13 (1970); here the Cornish-Fisher form of Abramowitz and Stegun
    26.7.5, relative error below 2% at 3 and below 0.1% from 6 degrees on, for probabilities up to 0.975.
    """
    if degrees == 1:
        return math.tan(math.pi * (probability - 0.5))
    if degrees == 2:
        return (2 * probability - 1) * math.sqrt(2 / (4 * probability * (1 - probability)))
    z = NormalDist().inv_cdf(probability)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return sum(term / degrees**power for power, term in enumerate(terms))


def _check(quantized_change: Tensor, *, reference_change: Tensor, mask: Tensor, confidence: float) -> None:
    shapes = {tuple(quantized_change.shape), tuple(reference_change.shape), tuple(mask.shape)}
    if len(shapes) != 1 or mask.dim() != 2 or mask.dtype != torch.bool:
        raise ConfigError(
            f"update_transmission needs changes and a boolean mask of one shape [B, T]; got "
            f"{sorted(shapes)} and {mask.dtype}. Align both on the same tokens."
        )
    if not mask.any():
        raise ConfigError(
            "update_transmission needs at least one token; got a mask without any. Sample more."
        )
    if not 0.0 < confidence < 1.0:
        raise ConfigError(f"update_transmission needs a confidence in (0, 1); got {confidence}. Use 0.95.")
    for name, change in (("quantized_change", quantized_change), ("reference_change", reference_change)):
        bad = mask & ~torch.isfinite(change.detach())
        if bad.any():
            row, column = (int(index) for index in bad.nonzero()[0])
            raise RecordError(
                f"update_transmission needs finite changes; got {change[row, column].item()} in {name} "
                f"at sample {row}, position {column}. Check that forward's logits."
            )

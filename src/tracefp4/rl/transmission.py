"""How much of an update the quantized, guided forward can see: measured around one update, on a few samples.

Following a rollout's codes also follows them after the weights have moved, so the trainer's own log-ratio may
be too small. Before and after the update the same tokens are scored twice: quantized as in training, and with
every quantizer off (BF16 around the same weights, the same routing replayed); the slope of the one change over
the other is the share of the update that is seen (`diagnostics.transmission` has the equations). Samples of different
ages are scored apart, because a record that is some versions old hides more: `lag<n>/...` beside the whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from tracefp4.diagnostics.transmission import update_transmission
from tracefp4.formats import BF16_LAYER
from tracefp4.qat import ExpertWeights, SiteSettings
from tracefp4.rl.samples import TrainingSample, spread
from tracefp4.rl.trainer import PolicyTrainer


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class _Scores:
    """Log-probs [B, T] in float64, quantized as in training and unquantized, and the share of values followed."""

    quantized: Tensor
    unquantized: Tensor
    followed: float


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class _Change:
    """What an update did to the log-probs [B, T] of some samples; the mask is True at trained tokens."""

    quantized: Tensor
    unquantized: Tensor
    mask: Tensor


class TransmissionProbe:
    """Scores samples when it is made, and again after the update."""

    def __init__(
        self,
        trainer: PolicyTrainer,
        samples: Sequence[TrainingSample],
        *,
        num_samples: int,
        version: int = 0,
    ) -> None:
        """Choose samples and score them.

        Args:
            trainer: the policy, before the update.
            samples: of the step; those without a trained token are passed over.
            num_samples: how many are used, spread evenly over the step.
            version: of the weights that are about to be updated; a sample's lag is counted from it.
        """
        usable = [sample for sample in samples if sample.num_trained]
        self._trainer = trainer
        self._groups: dict[int, list[TrainingSample]] = {}
        for sample in spread(usable, count=num_samples):
            self._groups.setdefault(sample.version_lag(version), []).append(sample)
        self._before = {lag: self._scores(group) for lag, group in self._groups.items()}

    def finish(self) -> dict[str, float]:
        """Score again and return metrics; {} when no sample was usable.

        `transmission/...` over all samples; with more than one age, or any but 0, also `lag<n>/transmission/...` and
        `lag<n>/guidance/followed_values_fraction`.
        """
        if not self._groups:
            return {}
        changes = {lag: self._change(lag) for lag in sorted(self._groups)}
        found = _slope(list(changes.values()))
        if list(changes) == [0]:
            return found
        for lag, change in changes.items():
            found |= {f"lag{lag}/{name}": value for name, value in _slope([change]).items()}
            found[f"lag{lag}/guidance/followed_values_fraction"] = self._before[lag].followed
        return found

    def _change(self, lag: int) -> _Change:
        before, after = self._before[lag], self._scores(self._groups[lag])
        mask = _padded(
            [torch.tensor(sample.trained_flags, device="cpu") for sample in self._groups[lag]]
        ).bool()
        return _Change(
            quantized=after.quantized - before.quantized,
            unquantized=after.unquantized - before.unquantized,
            mask=mask,
        )

    def _scores(self, samples: Sequence[TrainingSample]) -> _Scores:
        quantized = self._trainer.score(samples)
        with unquantized_forward(self._trainer.applied.model):
            unquantized = self._trainer.score(samples)
        return _Scores(
            quantized=_padded(quantized.logprobs),
            unquantized=_padded(unquantized.logprobs),
            followed=quantized.values_followed_fraction,
        )


@contextmanager
def unquantized_forward(model: nn.Module) -> Iterator[None]:
    """Compute in BF16 inside: a patched model with its own weights, and no quantizer.

    Weights are shared, not copied, so what an update changed is seen at once. Not for training passes: nothing
    is quantized in the backward either.
    """
    touched = [(m, m.tracefp4) for m in model.modules() if hasattr(m, "tracefp4")]
    try:
        for module, state in touched:
            if isinstance(state, ExpertWeights | SiteSettings):
                setattr(module, "tracefp4", replace(state, precision=BF16_LAYER))  # noqa: B010
        yield
    finally:
        for module, state in touched:
            setattr(module, "tracefp4", state)  # noqa: B010


def _padded(rows: Sequence[Tensor]) -> Tensor:
    return nn.utils.rnn.pad_sequence([row.to(torch.float64) for row in rows], batch_first=True)


def _slope(changes: Sequence[_Change]) -> dict[str, float]:
    """Regress over the samples of all given changes; their rows are padded to one length."""
    parts = [
        [row for change in changes for row in getattr(change, name)]
        for name in ("quantized", "unquantized", "mask")
    ]
    quantized, unquantized, mask = (_padded(rows) for rows in parts)
    found = update_transmission(quantized, reference_change=unquantized, mask=mask.bool())
    return found.metrics()

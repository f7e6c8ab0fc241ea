"""How much of an update the quantized, guided forward can see: measured around one update, on a few samples.

Following a rollout's codes also follows them after the weights have moved, so the trainer's own log-ratio may
be too small. Before and after the update the same tokens are scored twice: quantized as in training, and with
every quantizer off (BF16 around the same weights, the same routing replayed); the slope of the one change over
the other is the share of the update that is seen (`diagnostics.transmission` has the equations).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from tracefp4.diagnostics.transmission import update_transmission
from tracefp4.formats import BF16_LAYER
from tracefp4.qat import ExpertWeights, SiteSettings
from tracefp4.rl.samples import TrainingSample
from tracefp4.rl.trainer import PolicyTrainer


class TransmissionProbe:
    """Scores samples when it is made, and again after the update."""

    def __init__(
        self, trainer: PolicyTrainer, samples: Sequence[TrainingSample], *, num_samples: int
    ) -> None:
        """Choose samples and score them.

        Args:
            trainer: the policy, before the update.
            samples: of the step; those without completion tokens are passed over.
            num_samples: how many are used, spread evenly over the step.
        """
        usable = [sample for sample in samples if sample.token_ids]
        stride = max(1, len(usable) // num_samples)
        self._trainer, self._samples = trainer, usable[::stride][:num_samples]
        self._before = self._scores()

    def finish(self) -> dict[str, float]:
        """Score again and return `transmission/...` metrics; {} when no sample was usable."""
        if not self._samples:
            return {}
        (quantized, unquantized), mask = self._scores(), self._mask()
        found = update_transmission(
            quantized - self._before[0], reference_change=unquantized - self._before[1], mask=mask
        )
        return found.metrics()

    def _scores(self) -> tuple[Tensor, Tensor]:
        """Log-probs [B, T] in float64: quantized as in training, and unquantized."""
        if not self._samples:
            return torch.empty(0, 0), torch.empty(0, 0)
        quantized = self._trainer.score(self._samples).logprobs
        with unquantized_forward(self._trainer.applied.model):
            unquantized = self._trainer.score(self._samples).logprobs
        return _padded(quantized), _padded(unquantized)

    def _mask(self) -> Tensor:
        return _padded([torch.ones(len(sample.token_ids)) for sample in self._samples]).bool()


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

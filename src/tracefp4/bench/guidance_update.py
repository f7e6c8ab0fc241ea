"""`tracefp4 bench guidance --update`: after the weights have moved, how much of the change does each trainer still see?

Following the rollout's codes also follows them where an update moved a value, so a guided trainer's change in log p is
too small. Weights w move by sign-SGD, w - eta * sign(dL/dw) on float32 masters, with L the next-token loss of a batch
of text under FP4 (nearest rounding). The same sampled tokens are scored before and after, the rollout's records
followed both times; the slope of the trainer's change on the unquantized model's change (routing replayed on both
sides) is the share of the update that it sees (`diagnostics.transmission`). Each codec runs with and without the noise
gate, whose bands are calibrated from a replay at the rollout's own weights.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tracefp4.bench.guidance import Comparison
from tracefp4.bench.guidance_model import next_token_loss, token_rows
from tracefp4.diagnostics.agreement import AgreementCounts
from tracefp4.diagnostics.transmission import update_transmission
from tracefp4.guidance import Site
from tracefp4.guidance.gate import NoiseGate
from tracefp4.patching import Plan, PlanRules
from tracefp4.rl.same_tokens import mismatch_row, routing_only
from tracefp4.rl.trainer import Scored

STEPS = (1e-5, 1e-4, 3e-4)
"""Sizes eta of the sign-SGD steps."""
GRADIENT_SEED = 1003
GRADIENT_ROWS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """One trainer: what it follows, and where."""

    id: str
    """Codec, or `nearest`."""
    gate: str
    """`none` or `noise`; `-` without guidance."""
    plan: Plan
    """Its plan."""
    bands: Mapping[Site, float] | None
    """Bands of the gate; None without one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateRow:
    """What one trainer sees of the updates."""

    id: str
    """Codec, or `nearest`."""
    gate: str
    """`none`, `noise`, or `-`."""
    mean: float
    """Mean |log p_train - log p_rollout| at the rollout's own weights, nats."""
    followed: float
    """Share of the values at guided sites that are left to the record; 0 without guidance."""
    transmission: dict[str, dict[str, float]] = field(default_factory=dict)
    """Step size, as text, -> slope, low, high, noise_ratio, signal_rms of `update_transmission`."""

    def to_json(self) -> dict[str, object]:
        """Return every field."""
        return {
            "id": self.id,
            "gate": self.gate,
            "mean": self.mean,
            "followed": self.followed,
            "transmission": self.transmission,
        }


@dataclass(kw_only=True)
class UpdateProbe:
    """Moves the weights of a comparison's policy and scores its tokens again."""

    comparison: Comparison
    """Its rollout has been sampled; its masters are float32."""
    masters: Mapping[str, Tensor]
    """Float32 weights of the rollout, by name, before anything rounded them."""
    codecs: Sequence[str]
    """Codecs to measure."""

    def run(self, on_row: Callable[[UpdateRow], None]) -> list[UpdateRow]:
        """Measure every way at every step size; the weights are put back at the end.

        Args:
            on_row: called with every finished row, at the end.
        """
        signs = self._signs()
        ways = self._ways()
        before = self._scores(ways, "the rollout's own weights")
        reference = self._unquantized()
        rows = [self._row(way, scored) for way, scored in zip(ways, before, strict=True)]
        for step in STEPS:
            self._move(signs, step)
            moved = _padded(self._unquantized().logprobs) - _padded(reference.logprobs)
            for row, old, new in zip(rows, before, self._scores(ways, f"a step of {step:g}"), strict=True):
                change = _padded(new.logprobs) - _padded(old.logprobs)
                found = update_transmission(change, reference_change=moved, mask=self._mask())
                row.transmission[f"{step:g}"] = {
                    name.removeprefix("transmission/"): value for name, value in found.metrics().items()
                }
        self._move(signs, 0.0)
        for row in rows:
            on_row(row)
        return rows

    def _ways(self) -> list[Way]:
        found = [Way(id="nearest", gate="-", plan=self._plan("none"), bands=None)]
        self.comparison.on_event("calibrating the noise gate at the rollout's own weights")
        whole = self._plan("full")
        scored = self.comparison.bed.score(whole, self.comparison.samples, measure=True)
        self.gate = NoiseGate.calibrated({site: scored.noise[site] for site in whole.guided_sites})
        for name in self.codecs:
            plan = self._plan(name)
            found.append(Way(id=name, gate="none", plan=plan, bands=None))
            found.append(Way(id=name, gate="noise", plan=plan, bands=self.gate.bands))
        return found

    def _plan(self, guidance: str) -> Plan:
        return self.comparison.plan(PlanRules(guidance=guidance))

    def _scores(self, ways: Sequence[Way], when: str) -> list[Scored]:
        found = []
        for number, way in enumerate(ways):
            self.comparison.on_event(f"{when}: {way.id}, gate {way.gate} ({number + 1}/{len(ways)})")
            bed, samples = self.comparison.bed, self.comparison.samples
            found.append(bed.score(way.plan, samples, measure=True, bands=way.bands))
        return found

    def _unquantized(self) -> Scored:
        """Score with every quantizer off, the rollout's experts replayed."""
        bf16 = self.comparison.bf16
        routed = [routing_only(sample, bf16) for sample in self.comparison.samples]
        return self.comparison.bed.score(bf16, routed)

    def _row(self, way: Way, scored: Scored) -> UpdateRow:
        guided = {(site.kind, site.layer) for site in way.plan.guided_sites}
        counts = sum((c for key, c in scored.agreement.items() if key in guided), AgreementCounts())
        return UpdateRow(
            id=way.id,
            gate=way.gate,
            mean=mismatch_row(self.comparison.samples, scored.logprobs)["mean"],
            followed=counts.rates().get("followed", 0.0),
        )

    def _signs(self) -> dict[str, Tensor]:
        """Signs of the gradients at the rollout's weights, int8 by name; the model's gradients are dropped."""
        self.comparison.on_event("gradient of the next-token loss")
        bed = self.comparison.bed
        model: Any = bed.policy.model
        rows = token_rows(
            bed.policy.tokenizer,
            num_rows=GRADIENT_ROWS,
            num_tokens=self.comparison.size.num_tokens,
            seed=GRADIENT_SEED + self.comparison.seed,
        )
        device = next(model.parameters()).device
        with bed.trainer(self._plan("none")):
            next_token_loss(model, torch.tensor(rows, device=device)).backward()
        signs = {
            name: torch.sign(p.grad).to(torch.int8)
            for name, p in model.named_parameters()
            if p.grad is not None
        }
        for parameter in model.parameters():
            parameter.grad = None
        return signs

    @torch.no_grad()
    def _move(self, signs: Mapping[str, Tensor], step: float) -> None:
        """Set the weights to masters - step * sign; whoever computes with them rounds them first."""
        for name, parameter in self.comparison.bed.policy.model.named_parameters():
            master = self.masters[name]
            parameter.data = master - step * signs[name] if name in signs else master.clone()

    def _mask(self) -> Tensor:
        return _padded([torch.ones(len(sample.token_ids)) for sample in self.comparison.samples]).bool()


def masters_of(model: nn.Module) -> dict[str, Tensor]:
    """Copy the weights of a model that nothing has patched yet, in float32."""
    return {name: p.detach().to(torch.float32, copy=True) for name, p in model.named_parameters()}


def _padded(rows: Sequence[Tensor]) -> Tensor:
    return nn.utils.rnn.pad_sequence([row.to(torch.float64) for row in rows], batch_first=True)

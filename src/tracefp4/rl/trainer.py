"""The policy under training: scores samples and updates on them, following the rollout's recorded decisions.

One transformers model, patched by a plan. Every forward pass over samples runs inside `with replay(...)`, so
the proximal ("old") log-probs and the update see the same guidance and the ratio carries no rounding noise.
Micro-batches are addressed by position, so their order, padding and recomputation change nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tracefp4.diagnostics.agreement import (
    AgreementCounts,
    RoutingAgreement,
    SiteCounts,
    collect_routing,
    collect_sites,
    merge_routing,
    merge_sites,
)
from tracefp4.errors import RecordError
from tracefp4.formats.arithmetic import Arithmetic
from tracefp4.guidance import ReplayBatch
from tracefp4.guidance.joining import recode_all
from tracefp4.guidance.session import replay
from tracefp4.patching import Applied, Plan
from tracefp4.rl.batching import Batch, micro_batches, pad, token_logprobs
from tracefp4.rl.losses import LossConfig, LossData, grpo_loss, loss_denominator, merge_metrics
from tracefp4.rl.optimizer import MasterWeightAdamW
from tracefp4.rl.samples import TrainingSample


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """Log-probs of samples under the trainer, and how well its codes agreed with the rollout's."""

    logprobs: tuple[Tensor, ...]
    """One tensor [C] per sample: log p of every completion token, no gradient."""
    agreement: dict[tuple[str, int], AgreementCounts]
    """Counts by (site kind, layer); filled only where full records were kept as references."""
    routing: dict[int, RoutingAgreement]
    """Counts by decoder layer of the router; empty where routing is not replayed."""
    positions_missing: int
    """Guided places without a usable record, rounded to nearest (over all sites)."""
    values_changed_fraction: float
    """Share of guided values whose codeword differs from nearest rounding at the same scale."""


@dataclass(kw_only=True, slots=True)
class Following:
    """How much of the records a pass followed, at the plan's guided sites, added over micro-batches."""

    values: int = 0
    """Values rounded."""
    changed: int = 0
    """Values whose codeword differs from nearest rounding at the same scale."""
    positions: int = 0
    """Positions times sites."""
    positions_guided: int = 0
    """Those with a usable record; the others were rounded to nearest."""

    def add(self, batch: ReplayBatch, *, plan: Plan) -> None:
        """Add the counters of a batch that has run."""
        for site in plan.guided_sites:
            counts = batch.counters.sites.get(site)
            if counts is not None:
                self.values += counts.values
                self.changed += int(counts.values_changed)
                self.positions += counts.positions
                self.positions_guided += counts.positions_guided

    @property
    def changed_fraction(self) -> float:
        """Share of values that guidance moved; 0 without any."""
        return self.changed / self.values if self.values else 0.0

    def metrics(self) -> dict[str, float]:
        """Return `guidance/...` metrics; {} where the plan guides nothing."""
        if not self.positions:
            return {}
        return {
            "guidance/followed_fraction": self.positions_guided / self.positions,
            "guidance/changed_fraction": self.changed_fraction,
        }


@dataclass(kw_only=True)
class PolicyTrainer:
    """Forward, loss and optimizer steps of the policy."""

    applied: Applied
    """The patched model and its plan."""
    arithmetic: Arithmetic
    """Storage and rounding of the numbers around the quantizers."""
    pad_id: int
    """Token id at padding."""
    temperature: float
    """Sampling temperature of the rollouts; log-probs are of the same distribution."""
    micro_batch_tokens: int
    """Most tokens, padding included, in one forward pass."""
    optimizer: MasterWeightAdamW | None = None
    """None: this trainer only scores."""

    @property
    def plan(self) -> Plan:
        """The plan that model and records share."""
        return self.applied.plan

    def logits(self, batch: Batch) -> Tensor:
        """Run the model over a padded batch: [B, T, V]."""
        return self.applied.model(
            input_ids=batch.input_ids,
            attention_mask=batch.attention_mask,
            position_ids=batch.model_positions(),
            use_cache=False,
        ).logits

    def score(self, samples: Sequence[TrainingSample], *, measure: bool = False) -> Scored:
        """Compute the log-probs of every completion token, guided as the plan says.

        Args:
            samples: with their records, in the plan's codec or in `full` (recoded here, in every pass).
            measure: also compare codes with the records, before and after guidance; they must be `full`.

        Raises:
            RecordError: a record of another scheme or plan, or one that is not `full` when measuring.
        """
        parts: list[tuple[int, Tensor]] = []
        counts: list[SiteCounts] = []
        routers: list[dict[int, RoutingAgreement]] = []
        following = Following()
        with torch.no_grad():
            for chosen in self._micro_batches(samples):
                batch = self._pad([samples[i] for i in chosen])
                replayed = self._replay_batch(batch, measure=measure)
                with replay(replayed):
                    logprobs = self._token_logprobs(batch)
                parts += [(i, logprobs[row][batch.completion_mask[row]]) for row, i in enumerate(chosen)]
                following.add(replayed, plan=self.plan)
                counts.append(_measured(replayed))
                routers.append(collect_routing(replayed.counters))
        ordered = [logprobs for _, logprobs in sorted(parts, key=lambda part: part[0])]
        return Scored(
            logprobs=tuple(ordered),
            agreement=merge_sites(counts),
            routing=merge_routing(routers),
            positions_missing=following.positions - following.positions_guided,
            values_changed_fraction=following.changed_fraction,
        )

    def update(
        self,
        samples: Sequence[TrainingSample],
        *,
        old_logprobs: Sequence[Tensor] | None,
        ref_logprobs: Sequence[Tensor] | None,
        loss: LossConfig,
        lr_scale: float,
        grad_clip: float,
        trains_truncated: bool = True,
    ) -> tuple[dict[str, float], list[Tensor]]:
        """Take one optimizer step on `samples`.

        Args:
            samples: with advantages.
            old_logprobs: proximal log-probs, one [C] per sample; None takes this very pass, detached (exact when
                the samples get a single optimizer step, and one forward pass cheaper).
            ref_logprobs: of the reference policy, or None without a KL term.
            loss: constants of the surrogate.
            lr_scale: the schedule's value.
            grad_clip: largest gradient norm, 0 for none.
            trains_truncated: False masks truncated samples.

        Returns:
            (metrics of the step, log-probs of every sample as seen before the step). A gradient norm that is not
            finite takes no step: `optimizer_steps_skipped` is then 1.
        """
        assert self.optimizer is not None, "this trainer only scores"
        batches = [
            (chosen, self._pad([samples[i] for i in chosen], trains_truncated))
            for chosen in self._micro_batches(samples)
        ]
        denominator = sum(loss_denominator(batch.loss_mask, config=loss) for _, batch in batches)
        metrics: list[dict[str, float]] = []
        total_loss = 0.0
        seen: list[Tensor] = [torch.empty(0)] * len(samples)
        following = Following()
        for chosen, batch in batches:
            replayed = self._replay_batch(batch, measure=False)
            with replay(replayed):
                logprobs = self._token_logprobs(batch)
                old = (
                    logprobs.detach()
                    if old_logprobs is None
                    else _spread(batch, [old_logprobs[i] for i in chosen])
                )
                ref = None if ref_logprobs is None else _spread(batch, [ref_logprobs[i] for i in chosen])
                data = LossData(
                    old_logprobs=old,
                    rollout_logprobs=batch.rollout_logprobs,
                    advantages=batch.advantages,
                    mask=batch.loss_mask,
                    ref_logprobs=ref,
                )
                result = grpo_loss(logprobs, data=data, config=loss, denominator=denominator)
                result.loss.backward()
            following.add(replayed, plan=self.plan)
            metrics.append(result.metrics)
            total_loss += result.loss.item()
            for row, i in enumerate(chosen):
                seen[i] = logprobs.detach()[row][batch.completion_mask[row]]
        step = self.optimizer.step(lr_scale=lr_scale, grad_clip=grad_clip)
        found = {**merge_metrics(metrics), **following.metrics(), "loss": total_loss, "grad_norm": step.norm}
        return {**found, "optimizer_steps_skipped": 0.0 if step.is_taken else 1.0}, seen

    def _micro_batches(self, samples: Sequence[TrainingSample]) -> list[tuple[int, ...]]:
        lengths = [sample.num_tokens for sample in samples]
        return micro_batches(lengths, max_tokens=self.micro_batch_tokens, sorts_by_length=True)

    def _pad(self, samples: Sequence[TrainingSample], trains_truncated: bool = True) -> Batch:
        return pad(
            samples, pad_id=self.pad_id, dtype=self.arithmetic.torch_dtype, trains_truncated=trains_truncated
        )

    def _token_logprobs(self, batch: Batch) -> Tensor:
        return token_logprobs(
            self.logits(batch),
            input_ids=batch.input_ids,
            temperature=self.temperature,
            mask=batch.completion_mask,
        )

    def _replay_batch(self, batch: Batch, *, measure: bool) -> ReplayBatch:
        plan = self.plan
        for record in batch.records:
            if record is not None:
                record.check(scheme_digest=plan.scheme_digest, plan_digest=plan.digest)
        codec = plan.rules.guidance
        whole = codec in ("none", "full")
        records = list(batch.records) if whole else recode_all(batch.records, codec)
        return ReplayBatch(
            positions=batch.positions,
            records=records,
            decoder=plan.rules.decoder,  # type: ignore[arg-type]
            sites=plan.guided_sites,
            replay_routing=plan.rules.replay_routing,
            references=batch.records if measure else None,
        )


def _spread(batch: Batch, per_sample: Sequence[Tensor]) -> Tensor:
    """Place one [C] tensor per sample at the completion entries of the batch, 0 elsewhere."""
    values = torch.cat(list(per_sample))
    if values.numel() != int(batch.completion_mask.sum()):
        raise RecordError(
            f"log-probs do not fit the batch; got {values.numel()} for {int(batch.completion_mask.sum())} completion "
            "tokens. Score the same samples that are updated on."
        )
    return torch.zeros_like(batch.rollout_logprobs).masked_scatter(
        batch.completion_mask, values.to(batch.rollout_logprobs)
    )


def _measured(batch: ReplayBatch) -> dict[tuple[str, int], AgreementCounts]:
    """Counts of the sites that were compared with a reference."""
    return {site: counts for site, counts in collect_sites(batch.counters).items() if counts.compared}


def with_advantages(samples: Sequence[TrainingSample], advantages: Tensor) -> list[TrainingSample]:
    """Return the samples with their advantages set."""
    return [replace(sample, advantage=float(a)) for sample, a in zip(samples, advantages, strict=True)]

"""The policy under training: scores samples and updates on them, following the rollout's recorded decisions.

One transformers model, patched by a plan. Every forward pass over samples runs inside `with replay(...)`, so
the proximal ("old") log-probs and the update see the same guidance and the ratio carries no rounding noise.
Micro-batches are addressed by position, so their order, padding, packing and recomputation change nothing.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from tracefp4.diagnostics.agreement import (
    AgreementCounts,
    RoutingAgreement,
    collect_routing,
    collect_sites,
    merge_routing,
    merge_sites,
)
from tracefp4.errors import RecordError
from tracefp4.formats.arithmetic import Arithmetic
from tracefp4.guidance import ReplayBatch, Site
from tracefp4.guidance.counters import Counters
from tracefp4.guidance.joining import recode_all
from tracefp4.guidance.noise import NoiseHistogram, histograms, merge_histograms
from tracefp4.guidance.rates import ResidualCounts, residual_counts
from tracefp4.guidance.session import replay
from tracefp4.ops.upload import upload
from tracefp4.patching import Applied, Plan
from tracefp4.qat.attention import no_mask
from tracefp4.qat.experts import steady_weights
from tracefp4.rl.ahead import Ahead
from tracefp4.rl.alarms import SaturationAlarm
from tracefp4.rl.batching import Batch, micro_batches, pad, token_logprobs
from tracefp4.rl.fetching import RecordFetcher, records_of
from tracefp4.rl.following import Following
from tracefp4.rl.loss_metrics import merge_metrics
from tracefp4.rl.losses import (
    LossConfig,
    LossData,
    PendingLoss,
    loss_denominator,
    pending_grpo_loss,
)
from tracefp4.rl.optimizer import MasterWeightAdamW
from tracefp4.rl.packing import PackedRow, pack, packed_micro_batches
from tracefp4.rl.samples import TrainingSample


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """Log-probs of samples under the trainer, and how well its codes agreed with the rollout's."""

    logprobs: tuple[Tensor, ...]
    """One tensor [C] per sample, on the CPU: log p of every completion token, no gradient."""
    agreement: dict[tuple[str, int], AgreementCounts]
    """Counts by (site kind, layer); filled only where full records were kept as references."""
    routing: dict[int, RoutingAgreement]
    """Counts by decoder layer of the router; empty where routing is not replayed."""
    positions_missing: int
    """Guided places without a usable record, rounded to nearest (over all sites)."""
    values_changed_fraction: float
    """Share of the values with a record whose codeword differs from nearest rounding at the same scale."""
    values_followed_fraction: float = 0.0
    """Share of values at guided sites left to the record: those inside the noise gate, or all that have one."""
    noise: Mapping[Site, NoiseHistogram] = field(default_factory=dict)
    """Boundary distances by site, of all values and of those that disagree (`guidance.noise`); filled like
    `agreement`."""
    residuals: ResidualCounts = field(default_factory=ResidualCounts)
    """What each candidate codec would have left wrong; empty without candidates."""


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
    """Most tokens in one forward pass, padding included where samples are padded."""
    optimizer: MasterWeightAdamW | None = None
    """None: this trainer only scores."""
    packing: bool = False
    """True: the samples of a micro-batch share one row without padding (`rl.packing`); nothing else changes."""
    fetcher: RecordFetcher | None = None
    """Reads records that a store keeps; None: every sample holds its own."""
    bands: Mapping[Site, float] | None = None
    """Noise gate per site (`guidance.gate`), in units of the block's decode scale; None follows records everywhere."""
    alarm: SaturationAlarm | None = None
    """Told of every update's roundings; None: nobody watches."""

    @property
    def plan(self) -> Plan:
        """The plan that model and records share."""
        return self.applied.plan

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(self.applied.model.parameters()).device

    def logits(self, batch: Batch) -> Tensor:
        """Run the model over a batch that is padded on its right: [B, T, V]."""
        return self.applied.model(
            input_ids=batch.input_ids,
            attention_mask=no_mask(self.device),
            is_causal_row=True,
            position_ids=batch.model_positions(),
            use_cache=False,
        ).logits

    def packed_logits(self, row: PackedRow) -> Tensor:
        """Run the model over a packed row: [1, N, V]. Positions that restart keep the samples apart."""
        return self.applied.model(
            input_ids=row.input_ids,
            attention_mask=no_mask(self.device),
            position_ids=row.positions,
            segment_lengths=row.lengths,
            use_cache=False,
        ).logits

    def score(
        self, samples: Sequence[TrainingSample], *, measure: bool = False, candidates: Sequence[str] = ()
    ) -> Scored:
        """Compute the log-probs of every completion token, guided as the plan says.

        Args:
            samples: with their records, in the plan's codec or in `full` (recoded here, in every pass).
            measure: also compare codes with the records, before and after guidance; they must be `full`.
            candidates: codecs to try at every guided site beside the plan's, when measuring (`guidance.rates`).

        Raises:
            RecordError: a record of another scheme or plan, or one that is not `full` when measuring.
        """
        passes: list[_Pass] = []
        with torch.no_grad(), steady_weights(self.applied.model):
            for chosen, batch in self._with_records(self._padded(samples), samples):
                row = pack(batch) if self.packing else None
                replayed = self._replay_batch(batch, row, measure=measure, candidates=candidates)
                with replay(replayed):
                    logprobs = self._token_logprobs(batch.to(self.device), row, mask=batch.completion_mask)
                passes.append(_Pass(chosen, batch.completion_mask, logprobs, replayed.counters))
        following = Following.of((found.counters for found in passes), plan=self.plan)
        return Scored(
            logprobs=tuple(_by_sample(passes)),
            agreement=merge_sites(_measured(found.counters) for found in passes),
            routing=merge_routing(collect_routing(found.counters) for found in passes),
            positions_missing=following.positions - following.positions_guided,
            values_changed_fraction=following.changed_fraction,
            values_followed_fraction=following.followed_values_fraction,
            noise=merge_histograms(histograms(found.counters) for found in passes),
            residuals=sum((residual_counts(found.counters) for found in passes), ResidualCounts()),
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

        Raises:
            RecordError: a record of another scheme or plan, or numbers of a trained token that are not finite; no
                weight has moved.
        """
        assert self.optimizer is not None, "this trainer only scores"
        self.optimizer.forget_gradients()  # of an update that ended in an error
        batches = self._padded(samples, trains_truncated)
        denominator = sum(loss_denominator(batch.loss_mask, config=loss) for _, batch in batches)
        passes: list[_Pass] = []
        pending: list[PendingLoss] = []
        # the first micro-batch is prepared while weights are quantized, the others during backward passes
        with (
            Ahead(self._prepared(batches, samples), self.device) as ahead,
            steady_weights(self.applied.model),
        ):
            while (ready := ahead.take()) is not None:
                chosen, batch, row, replayed = ready
                there = batch.to(self.device)
                with replay(replayed):
                    logprobs = self._token_logprobs(there, row, mask=batch.completion_mask)
                    old = self._placed(batch, chosen, old_logprobs)
                    data = LossData(
                        old_logprobs=logprobs.detach() if old is None else old,
                        rollout_logprobs=there.rollout_logprobs,
                        advantages=there.advantages,
                        mask=there.loss_mask,
                        ref_logprobs=self._placed(batch, chosen, ref_logprobs),
                    )
                    result = pending_grpo_loss(logprobs, data=data, config=loss, denominator=denominator)
                    ahead.begin()
                    result.loss.backward()
                pending.append(replace(result, loss=result.loss.detach()))
                passes.append(_Pass(chosen, batch.completion_mask, logprobs.detach(), replayed.counters))
        results = [result.read() for result in pending]  # refused before a weight moves
        step = self.optimizer.step(lr_scale=lr_scale, grad_clip=grad_clip)
        following = Following.of((found.counters for found in passes), plan=self.plan)
        total_loss = sum(torch.stack([result.loss for result in results]).tolist()) if results else 0.0
        found = {**merge_metrics([result.metrics for result in results]), **following.metrics()}
        found |= {"loss": total_loss, "grad_norm": step.norm}
        found |= {} if self.alarm is None else self.alarm.hear(following)
        return {**found, "optimizer_steps_skipped": 0.0 if step.is_taken else 1.0}, _by_sample(passes)

    def _micro_batches(self, samples: Sequence[TrainingSample]) -> list[tuple[int, ...]]:
        lengths = [sample.num_tokens for sample in samples]
        if self.packing:
            return packed_micro_batches(lengths, max_tokens=self.micro_batch_tokens)
        return micro_batches(lengths, max_tokens=self.micro_batch_tokens, sorts_by_length=True)

    def _padded(
        self, samples: Sequence[TrainingSample], trains_truncated: bool = True
    ) -> list[tuple[tuple[int, ...], Batch]]:
        """Every micro-batch: which samples, and their batch."""
        return [
            (chosen, self._pad([samples[i] for i in chosen], trains_truncated))
            for chosen in self._micro_batches(samples)
        ]

    def _with_records(
        self, batches: Sequence[tuple[tuple[int, ...], Batch]], samples: Sequence[TrainingSample]
    ) -> Iterator[tuple[tuple[int, ...], Batch]]:
        """The micro-batches with their records; those of the next one are read while this one is in the model."""
        groups = [[samples[i] for i in chosen] for chosen, _ in batches]
        for (chosen, batch), records in zip(batches, records_of(self.fetcher, groups), strict=True):
            yield chosen, replace(batch, records=records)

    def _prepared(
        self, batches: Sequence[tuple[tuple[int, ...], Batch]], samples: Sequence[TrainingSample]
    ) -> Iterator["_Prepared"]:
        """The micro-batches of an update, with all that their passes follow."""
        for place, (chosen, batch) in enumerate(self._with_records(batches, samples)):
            row = pack(batch) if self.packing else None
            replayed = self._replay_batch(batch, row, measure=False, is_first=place == 0)
            replayed.gather()
            yield _Prepared(chosen, batch, row, replayed)

    def _pad(self, samples: Sequence[TrainingSample], trains_truncated: bool = True) -> Batch:
        # log-probs and advantages are numbers of the loss, never bf16
        dtype = torch.promote_types(self.arithmetic.torch_dtype, torch.float32)
        return pad(samples, pad_id=self.pad_id, dtype=dtype, trains_truncated=trains_truncated)

    def _placed(
        self, batch: Batch, chosen: Sequence[int], per_sample: Sequence[Tensor] | None
    ) -> Tensor | None:
        """One [C] tensor per sample at the completion entries of the batch, on the device; None without any."""
        if per_sample is None:
            return None
        return upload(_spread(batch, [per_sample[i] for i in chosen]), self.device)

    def _token_logprobs(self, batch: Batch, row: PackedRow | None, *, mask: Tensor) -> Tensor:
        """Log-probs of completion tokens, [B, T] whatever the model's input looked like.

        Args: batch: on the device; row and mask (its completion mask): in host memory.
        """
        if row is None:
            return token_logprobs(
                self.logits(batch),
                input_ids=batch.input_ids,
                temperature=self.temperature,
                mask=mask,
            )
        there = row.to(self.device)
        found = token_logprobs(
            self.packed_logits(there),
            input_ids=there.input_ids,
            temperature=self.temperature,
            mask=row.packed(mask) & row.labelled(),
        )
        return there.unpacked(found)

    def _replay_batch(
        self,
        batch: Batch,
        row: PackedRow | None,
        *,
        measure: bool,
        candidates: Sequence[str] = (),
        is_first: bool = False,
    ) -> ReplayBatch:
        """What the pass over a batch, in host memory, follows; what rounding cannot represent is counted where codes
        are compared, and in the first pass of an update."""
        plan = self.plan
        for record in batch.records:
            if record is not None:
                record.check(scheme_digest=plan.scheme_digest, plan_digest=plan.digest)
        records = recode_all(batch.records, plan.codecs) if plan.codecs else list(batch.records)
        return ReplayBatch(
            positions=batch.positions if row is None else row.positions,
            records=records,
            record_index=None if row is None else row.record_index,
            decoder=plan.rules.decoder,  # type: ignore[arg-type]
            bands=self.bands,
            sites=plan.guided_sites,
            replay_routing=plan.rules.replay_routing,
            references=batch.records if measure else None,
            candidates=candidates,
            device=self.device,
            counts_saturation=is_first or measure,
        )


class _Prepared(NamedTuple):
    """A micro-batch that can enter the model."""

    chosen: tuple[int, ...]
    """Index of every row's sample."""
    batch: Batch
    """In host memory, with records."""
    row: PackedRow | None
    """The same packed; None for a padded batch."""
    replayed: ReplayBatch
    """What the pass follows."""


@dataclass(frozen=True, slots=True)
class _Pass:
    """What is left of a pass over one micro-batch; read when all of them have been launched."""

    chosen: tuple[int, ...]
    """Index of every row's sample."""
    completion_mask: Tensor
    """bool [B, T], in host memory."""
    logprobs: Tensor
    """[B, T], on the device."""
    counters: Counters
    """What its sites and routers did."""


def _by_sample(passes: Sequence[_Pass]) -> list[Tensor]:
    """Log-probs of every sample's completion tokens, on the CPU, in the order of the samples."""
    found: dict[int, Tensor] = {}
    for each in passes:
        rows = zip(each.chosen, each.logprobs.cpu(), each.completion_mask, strict=True)
        found |= {i: logprobs[mask] for i, logprobs, mask in rows}
    return [found[i] for i in sorted(found)]


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


def _measured(counters: Counters) -> dict[tuple[str, int], AgreementCounts]:
    """Counts of the sites that were compared with a reference."""
    return {site: counts for site, counts in collect_sites(counters).items() if counts.compared}


def with_advantages(samples: Sequence[TrainingSample], advantages: Tensor) -> list[TrainingSample]:
    """Return the samples with their advantages set."""
    return [replace(sample, advantage=float(a)) for sample, a in zip(samples, advantages, strict=True)]

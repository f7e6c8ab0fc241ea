"""Score the same sampled tokens under the same weights with several trainers, so that only rounding differs.

One engine samples, with whole records; another may be made to decode the same tokens (teacher forcing); any plan's
trainer scores them in one pass over whole sequences. Everything is built anew for every call and the policy's model is
left unpatched, its parameters rounded to the storage of the arithmetic. This module trains nothing.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from torch import Tensor

from tracefp4.formats.arithmetic import Arithmetic
from tracefp4.guidance import Site
from tracefp4.patching import Plan, PlanRules, apply, plan
from tracefp4.rl.config import RolloutConfig
from tracefp4.rl.policy import Policy
from tracefp4.rl.samples import TrainingSample
from tracefp4.rl.sync import build_engine
from tracefp4.rl.trainer import PolicyTrainer, Scored
from tracefp4.rl.update import mismatch_of
from tracefp4.rollout import Completion, LocalEngine, SamplingParams

BF16_RULES = PlanRules(mode="bf16", guidance="none")
LIVE_BF16_RULES = PlanRules(mode="bf16", guidance="none", replay_routing=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class SameTokens:
    """One policy, and what every rollout and trainer of the comparison shares."""

    policy: Policy
    """The model and its tokenizer; on the device where everything runs."""
    arithmetic: Arithmetic
    """Of engines and trainers."""
    rollout: RolloutConfig
    """Engine sizes."""
    micro_batch_tokens: int
    """Most tokens, padding included, in one forward pass of a trainer."""

    def plan(self, rules: PlanRules) -> Plan:
        """Make the plan of the policy under other rules; static exponents are not calibrated."""
        return plan(self.policy.model, rules)

    def sample(
        self, chosen: Plan, prompts: Sequence[Sequence[int]], params: SamplingParams
    ) -> list[TrainingSample]:
        """Sample completions under a plan, with whole records of every site that it quantizes, and of the routing."""
        with self.engine(chosen) as engine:
            groups = engine.generate([list(prompt) for prompt in prompts], params)
        return [as_sample(completion) for group in groups for completion in group]

    def force(self, chosen: Plan, samples: Sequence[TrainingSample]) -> list[TrainingSample]:
        """Decode the tokens of these samples under another plan: its own log-probs, records and expert choices."""
        with self.engine(chosen) as engine:
            groups = engine.force(
                [list(sample.prompt_ids) for sample in samples],
                [[list(sample.token_ids)] for sample in samples],
            )
        return [as_sample(group[0]) for group in groups]

    def score(
        self,
        chosen: Plan,
        samples: Sequence[TrainingSample],
        *,
        measure: bool = False,
        bands: Mapping[Site, float] | None = None,
        candidates: Sequence[str] = (),
    ) -> Scored:
        """Score the tokens with the trainer of a plan, as `PolicyTrainer.score`; `bands` is its noise gate."""
        with self.trainer(chosen, bands=bands) as trainer:
            return trainer.score(samples, measure=measure, candidates=candidates)

    @contextmanager
    def engine(self, chosen: Plan) -> Iterator[LocalEngine]:
        """Give an engine on the policy's weights that records every site which the plan quantizes."""
        applied = apply(self.policy.model, chosen, arithmetic=self.arithmetic)
        try:
            engine = build_engine(
                self.policy.model, chosen, arithmetic=self.arithmetic, rollout=self.rollout, records=True
            )
        finally:
            applied.undo()
        yield engine

    @contextmanager
    def trainer(self, chosen: Plan, *, bands: Mapping[Site, float] | None = None) -> Iterator[PolicyTrainer]:
        """Give the trainer of a plan; the model is patched inside."""
        applied = apply(self.policy.model, chosen, arithmetic=self.arithmetic)
        try:
            yield PolicyTrainer(
                applied=applied,
                arithmetic=self.arithmetic,
                pad_id=self.policy.pad_id,
                temperature=1.0,
                micro_batch_tokens=self.micro_batch_tokens,
                bands=bands,
            )
        finally:
            applied.undo()


def as_sample(completion: Completion) -> TrainingSample:
    """Turn an engine's completion into a sample with its own record."""
    assert completion.record is not None, "the engine records nothing"
    return TrainingSample(
        trajectory=completion.record.identity.trajectory,
        prompt_ids=tuple(completion.prompt_ids),
        token_ids=tuple(completion.token_ids),
        rollout_logprobs=tuple(completion.logprobs),
        weight_versions=tuple(completion.weight_versions),
        finish_reason=completion.finish_reason,
        is_truncated=completion.finish_reason == "length",
        record=completion.record,
    )


def routing_only(sample: TrainingSample, other: Plan) -> TrainingSample:
    """Keep the expert choices of a record and sign it for a trainer that rounds otherwise, on purpose."""
    assert sample.record is not None, "a sample without a record has no expert choices"
    identity = replace(sample.record.identity, plan_digest=other.digest, scheme_digest=other.scheme_digest)
    return replace(sample, record=replace(sample.record, identity=identity, sites={}))


def signed(samples: Sequence[TrainingSample], plan: Plan) -> list[TrainingSample]:
    """Sign the records for a plan that computes the same as their own and differs in how they are followed alone.

    Raises:
        RecordError: a record has other schemes than the plan.
    """
    found = []
    for sample in samples:
        record = sample.record
        if record is not None:
            record.check(scheme_digest=plan.scheme_digest, plan_digest=record.identity.plan_digest)
            record = replace(record, identity=replace(record.identity, plan_digest=plan.digest))
        found.append(replace(sample, record=record))
    return found


def mismatch_row(samples: Sequence[TrainingSample], logprobs: Sequence[Tensor]) -> dict[str, float]:
    """Return mean, p99, max and k3 of d = log p_train - log p_rollout under these names, with all standard metrics."""
    metrics = mismatch_of(samples, logprobs)
    short = {
        "mean": metrics["mismatch/abs_mean"],
        "p99": metrics["mismatch/abs_p99"],
        "max": metrics["mismatch/abs_max"],
        "k3": metrics["rollout_corr/k3_kl"],
    }
    return {**short, **metrics}

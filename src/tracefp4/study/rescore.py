"""Score the same sampled tokens, under the same weights, with every trainer, so that only rounding differs.

Tokens are sampled once by the FP4 engine, with full records. Then log p is taken from each trainer (bf16,
nearest rounding, guided) on exactly these tokens, all of them replaying the rollout's expert choices. The BF16
pair is the difference that everyone accepts today: a BF16 engine decodes the same tokens, forced, and the BF16
trainer scores them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from tracefp4.diagnostics.agreement import AgreementCounts
from tracefp4.formats.arithmetic import EMULATED
from tracefp4.patching import Plan, PlanRules, apply, plan
from tracefp4.rl.config import RunConfig
from tracefp4.rl.policy import Policy, load_policy
from tracefp4.rl.prompts import build_held_out, encode
from tracefp4.rl.samples import TrainingSample
from tracefp4.rl.sync import build_engine
from tracefp4.rl.trainer import PolicyTrainer, Scored
from tracefp4.rl.update import mismatch_of
from tracefp4.rollout import Completion, SamplingParams

BF16_RULES = PlanRules(mode="bf16", guidance="none")
RESCORE_SEED = 4242


@dataclass(frozen=True, kw_only=True, slots=True)
class Rescored:
    """Mismatch of every pair of rollout and trainer on one checkpoint."""

    rows: dict[str, dict[str, float]]
    """`bf16`, `fp4_bf16`, `qat`, `guided` -> mean, p99, max, k3 of d = log p_train - log p_rollout, and all
    standard metrics under their own names."""
    agreement: list[dict[str, Any]]
    """Per site and layer: share of codes that differ from the rollout's, with nearest rounding everywhere
    (`before`), and in the guided pass before (`local`) and after its own guidance (`after`); `scales`."""
    num_tokens: int
    """Completion tokens scored."""


def rescore(checkpoint: Path, guided: Plan, config: RunConfig, *, num_prompts: int) -> Rescored:
    """Compare the trainers on one checkpoint.

    Args:
        checkpoint: local Hugging Face checkpoint.
        guided: the FP4 plan with guidance; nearest rounding is the same plan without it.
        config: task, sampling length and engine sizes.
        num_prompts: held-out prompts, `rollout.samples_per_prompt` completions each.
    """
    policy = load_policy(checkpoint)
    bf16 = plan(policy.model, BF16_RULES)
    samples = _sample_fp4(policy, guided, config, num_prompts)
    forced = _force_bf16(policy, bf16, config, samples)
    nearest = _score(policy, guided.without_guidance(), config, samples, measure=True)
    followed = _score(policy, guided, config, samples, measure=True)
    without = _score(policy, bf16, config, [_routing_only(sample, bf16) for sample in samples])
    pair = _score(policy, bf16, config, forced)
    rows = {
        "bf16": _row(forced, pair.logprobs),
        "fp4_bf16": _row(samples, without.logprobs),
        "qat": _row(samples, nearest.logprobs),
        "guided": _row(samples, followed.logprobs),
    }
    num_tokens = sum(len(sample.token_ids) for sample in samples)
    return Rescored(rows=rows, agreement=_agreement(nearest, followed), num_tokens=num_tokens)


def _sample_fp4(policy: Policy, guided: Plan, config: RunConfig, num_prompts: int) -> list[TrainingSample]:
    applied = apply(policy.model, guided, arithmetic=EMULATED)
    try:
        engine = build_engine(policy.model, guided, arithmetic=EMULATED, rollout=config.rollout, records=True)
    finally:
        applied.undo()
    source = build_held_out(config.task)
    prompts = [encode(source.item(i), tokenizer=policy.tokenizer) for i in range(num_prompts)]
    params = SamplingParams(
        max_tokens=config.rollout.max_tokens,
        n=config.rollout.samples_per_prompt,
        seed=RESCORE_SEED,
        stop_token_ids=policy.defaults.stop_token_ids,
    )
    return [_as_sample(completion) for group in engine.generate(prompts, params) for completion in group]


def _force_bf16(
    policy: Policy, bf16: Plan, config: RunConfig, samples: Sequence[TrainingSample]
) -> list[TrainingSample]:
    """Decode the same tokens with the BF16 engine: its own log-probs and its own expert choices."""
    applied = apply(policy.model, bf16, arithmetic=EMULATED)
    try:
        engine = build_engine(policy.model, bf16, arithmetic=EMULATED, rollout=config.rollout, records=())
    finally:
        applied.undo()
    prompts = [list(sample.prompt_ids) for sample in samples]
    groups = engine.force(prompts, [[list(sample.token_ids)] for sample in samples])
    return [_as_sample(group[0]) for group in groups]


def _score(
    policy: Policy,
    chosen: Plan,
    config: RunConfig,
    samples: Sequence[TrainingSample],
    *,
    measure: bool = False,
) -> Scored:
    applied = apply(policy.model, chosen, arithmetic=EMULATED)
    try:
        trainer = PolicyTrainer(
            applied=applied,
            arithmetic=EMULATED,
            pad_id=policy.pad_id,
            temperature=1.0,
            micro_batch_tokens=config.train.micro_batch_tokens,
        )
        return trainer.score(samples, measure=measure)
    finally:
        applied.undo()


def _as_sample(completion: Completion) -> TrainingSample:
    assert completion.record is not None
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


def _routing_only(sample: TrainingSample, other: Plan) -> TrainingSample:
    """Keep the expert choices of a record and sign it for a trainer that rounds otherwise, on purpose."""
    assert sample.record is not None
    identity = replace(sample.record.identity, plan_digest=other.digest, scheme_digest=other.scheme_digest)
    return replace(sample, record=replace(sample.record, identity=identity, sites={}))


def _row(samples: Sequence[TrainingSample], logprobs: Sequence[Tensor]) -> dict[str, float]:
    metrics = mismatch_of(samples, logprobs)
    short = {
        "mean": metrics["mismatch/abs_mean"],
        "p99": metrics["mismatch/abs_p99"],
        "max": metrics["mismatch/abs_max"],
        "k3": metrics["rollout_corr/k3_kl"],
    }
    return {**short, **metrics}


def _agreement(nearest: Scored, followed: Scored) -> list[dict[str, Any]]:
    rows = []
    for (kind, layer), counts in sorted(followed.agreement.items()):
        open_loop: Mapping[str, float] = nearest.agreement.get((kind, layer), AgreementCounts()).rates()
        closed = counts.rates()
        rows.append(
            {
                "site": kind,
                "layer": layer,
                "before": open_loop.get("mismatch_before", 0.0),
                "local": closed.get("mismatch_before", 0.0),
                "after": closed.get("mismatch_after", 0.0),
                "scales": closed.get("scale_mismatch", 0.0),
            }
        )
    return rows

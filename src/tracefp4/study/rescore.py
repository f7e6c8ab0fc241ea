"""Score the same sampled tokens, under the same weights, with every trainer, so that only rounding differs.

Tokens are sampled once by the FP4 engine, with full records. Then log p is taken from each trainer (bf16,
nearest rounding, guided) on exactly these tokens, all of them replaying the rollout's expert choices. The BF16
pair is the difference that everyone accepts today: a BF16 engine decodes the same tokens, forced, and the BF16
trainer scores them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tracefp4.diagnostics.agreement import AgreementCounts
from tracefp4.patching import Plan
from tracefp4.rl.config import RunConfig
from tracefp4.rl.placement import placement_of
from tracefp4.rl.policy import load_policy
from tracefp4.rl.prompts import build_held_out, encode
from tracefp4.rl.same_tokens import BF16_RULES, SameTokens, mismatch_row, routing_only
from tracefp4.rl.trainer import Scored
from tracefp4.rollout import SamplingParams

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
    placement = placement_of(config.model)
    policy = load_policy(checkpoint, placement=placement)
    tokens = SameTokens(
        policy=policy,
        arithmetic=placement.arithmetic,
        rollout=config.rollout,
        micro_batch_tokens=config.train.micro_batch_tokens,
    )
    source = build_held_out(config.task)
    prompts = [encode(source.item(i), tokenizer=policy.tokenizer) for i in range(num_prompts)]
    params = SamplingParams(
        max_tokens=config.rollout.max_tokens,
        n=config.rollout.samples_per_prompt,
        seed=RESCORE_SEED,
        stop_token_ids=policy.defaults.stop_token_ids,
    )
    bf16 = tokens.plan(BF16_RULES)
    samples = tokens.sample(guided, prompts, params)
    forced = tokens.force(bf16, samples)
    nearest = tokens.score(guided.without_guidance(), samples, measure=True)
    followed = tokens.score(guided, samples, measure=True)
    without = tokens.score(bf16, [routing_only(sample, bf16) for sample in samples])
    rows = {
        "bf16": mismatch_row(forced, tokens.score(bf16, forced).logprobs),
        "fp4_bf16": mismatch_row(samples, without.logprobs),
        "qat": mismatch_row(samples, nearest.logprobs),
        "guided": mismatch_row(samples, followed.logprobs),
    }
    num_tokens = sum(len(sample.token_ids) for sample in samples)
    return Rescored(rows=rows, agreement=_agreement(nearest, followed), num_tokens=num_tokens)


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

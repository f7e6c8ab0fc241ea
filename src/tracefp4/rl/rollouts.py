"""One rollout: prompts in, scored and normalised training samples out."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tracefp4.rl.advantages import AdvantageConfig, group_advantages
from tracefp4.rl.evaluation import score_completion
from tracefp4.rl.prompts import encode
from tracefp4.rl.rewards import Scorer
from tracefp4.rl.samples import TrainingSample
from tracefp4.rl.tasks import Task
from tracefp4.rl.trainer import with_advantages
from tracefp4.rollout import Completion, Engine, SamplingParams


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    """Samples of one step, with what was measured while making them."""

    samples: list[TrainingSample]
    """num_prompts * n samples, groups adjacent; advantages set."""
    metrics: dict[str, float]
    """Rewards, lengths, skipped groups, guidance bytes, tokens per second."""


@dataclass(kw_only=True)
class RolloutMaker:
    """Turns tasks into samples with one engine and one verifier."""

    engine: Engine
    """Samples completions and their records."""
    tokenizer: Any
    """Encodes prompts, decodes completions."""
    scorer: Scorer
    """Gives rewards."""
    advantage: AdvantageConfig
    """Normalisation within a group."""
    truncated: str
    """`mask`, `penalize` (reward 0) or `train`."""
    codec: str
    """Codec whose bytes are reported: what the plan keeps per token."""

    def make(self, tasks: Sequence[Task], params: SamplingParams) -> Rollout:
        """Sample n completions of every task, score them and set their advantages."""
        before = self.engine.stats
        prompts = [encode(task, tokenizer=self.tokenizer) for task in tasks]
        groups = self.engine.generate(prompts, params)
        stats = self.engine.stats
        samples = [
            self._sample(completion, tasks[group], group)
            for group, found in enumerate(groups)
            for completion in found
        ]
        rewards = torch.tensor([sample.reward for sample in samples])
        advantages = group_advantages(
            rewards, groups=torch.tensor([sample.group_index for sample in samples]), config=self.advantage
        )
        seconds = stats.seconds - before.seconds
        tokens = stats.tokens_generated - before.tokens_generated
        num = len(samples)
        metrics = {
            "reward_mean": advantages.reward_mean,
            "reward_group_std": advantages.group_std_mean,
            "groups_skipped": float(advantages.num_skipped_groups),
            "groups": float(advantages.num_groups),
            "completion_tokens_mean": sum(len(sample.token_ids) for sample in samples) / num,
            "truncated_fraction": sum(sample.is_truncated for sample in samples) / num,
            "rollout_seconds": seconds,
            "rollout_tokens_per_s": tokens / seconds if seconds else 0.0,
            "guidance_bytes_per_token": bytes_per_token(samples, codec=self.codec),
        }
        return Rollout(samples=with_advantages(samples, advantages.values), metrics=metrics)

    def _sample(self, completion: Completion, task: Task, group: int) -> TrainingSample:
        reward = score_completion(completion, task, tokenizer=self.tokenizer, scorer=self.scorer)
        is_truncated = completion.finish_reason == "length"
        if is_truncated and self.truncated == "penalize":
            reward = 0.0
        record = completion.record
        return TrainingSample(
            trajectory=record.identity.trajectory
            if record is not None
            else f"{group}.{completion.sample_index}",
            prompt_ids=tuple(completion.prompt_ids),
            token_ids=tuple(completion.token_ids),
            rollout_logprobs=tuple(completion.logprobs),
            weight_versions=tuple(completion.weight_versions),
            reward=reward,
            group_index=group,
            finish_reason=completion.finish_reason,
            is_truncated=is_truncated,
            record=record,
        )


def bytes_per_token(samples: Sequence[TrainingSample], *, codec: str) -> float:
    """Return guidance bytes per recorded position under a codec: codes and scales, without routed ids."""
    if codec == "none":
        return 0.0
    total, positions = 0, 0
    for sample in samples:
        if sample.record is not None and sample.record.sites:
            size = sample.record.recode(codec).num_bytes()
            total += size.codes + size.block_scales
            positions += sample.record.length
    return total / positions if positions else 0.0

"""One rollout: prompts in, scored and normalised training samples out."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from tracefp4.guidance import Record
from tracefp4.guidance.codec import codec_by_name
from tracefp4.guidance.joining import recode_all
from tracefp4.rl.advantages import AdvantageConfig, group_advantages
from tracefp4.rl.evaluation import score_completion
from tracefp4.rl.prompts import encode
from tracefp4.rl.rewards import Scorer, outcome_metrics
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
    references: list[TrainingSample]
    """A few of the samples with their records as the engine made them, whole codes, to measure agreement with."""


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
    """Codec that records are kept in, `full` or `mantissa`; `none` leaves them as the engine made them."""

    def make(
        self, tasks: Sequence[Task], params: SamplingParams, *, step: int = 0, num_references: int = 0
    ) -> Rollout:
        """Sample n completions of every task, score them and set their advantages.

        Args:
            tasks: one GRPO group each.
            params: sampling.
            step: goes into the trajectories' names, `<step>.<group>.<sample>`, unique within a run.
            num_references: samples whose records are also kept as the engine made them, spread evenly.
        """
        before, counted = self.engine.stats, Counter(self.scorer.counts)
        prompts = [encode(task, tokenizer=self.tokenizer) for task in tasks]
        groups = self.engine.generate(prompts, params)
        stats = self.engine.stats
        found = [(group, completion) for group, row in enumerate(groups) for completion in row]
        made = [completion.record for _, completion in found]
        records = self._records(made)
        samples = [
            self._sample(completion, tasks[group], record, name=f"{step}.{group}.{completion.sample_index}")
            for (group, completion), record in zip(found, records, strict=True)
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
            **outcome_metrics(Counter(self.scorer.counts) - counted),
        }
        return Rollout(
            samples=with_advantages(samples, advantages.values),
            metrics=metrics,
            references=_references(samples, made, count=num_references),
        )

    def _records(self, records: Sequence[Record | None]) -> list[Record | None]:
        """Recode all records at once, so that no later pass has to; the engine keeps whole codes."""
        return list(records) if self.codec in ("none", "full") else recode_all(records, self.codec)

    def _sample(
        self, completion: Completion, task: Task, record: Record | None, *, name: str
    ) -> TrainingSample:
        reward = score_completion(completion, task, tokenizer=self.tokenizer, scorer=self.scorer)
        is_truncated = completion.finish_reason == "length"
        if is_truncated and self.truncated == "penalize":
            reward = 0.0
        if record is not None:
            record = replace(record, identity=replace(record.identity, trajectory=name))
        return TrainingSample(
            trajectory=name,
            prompt_ids=tuple(completion.prompt_ids),
            token_ids=tuple(completion.token_ids),
            rollout_logprobs=tuple(completion.logprobs),
            weight_versions=tuple(completion.weight_versions),
            reward=reward,
            group_index=completion.prompt_index,
            finish_reason=completion.finish_reason,
            is_truncated=is_truncated,
            record=record,
        )


def _references(
    samples: Sequence[TrainingSample], made: Sequence[Record | None], *, count: int
) -> list[TrainingSample]:
    """Give `count` of the samples that have a record their records before recoding."""
    usable = [
        replace(sample, record=replace(whole, identity=sample.record.identity))
        for sample, whole in zip(samples, made, strict=True)
        if whole is not None and sample.record is not None and sample.token_ids
    ]
    return usable[:: max(1, len(usable) // max(1, count))][:count]


def bytes_per_token(samples: Sequence[TrainingSample], *, codec: str) -> float:
    """Return guidance bytes per recorded position under a codec: codes and scales, without routed ids.

    Computed from widths, whatever codec the records are in. 0 for `none`, and without recorded sites.
    """
    if codec == "none":
        return 0.0
    bits = codec_by_name(codec).bits_per_value
    total, positions = 0.0, 0
    for sample in samples:
        if sample.record is not None and sample.record.sites:
            parts = sample.record.sites.values()
            total += sum(part.width * part.rows_per_token for part in parts) * sample.record.length * bits / 8
            positions += sample.record.length
    return total / positions if positions else 0.0

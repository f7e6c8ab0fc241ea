"""One rollout: prompts in, scored and normalised training samples out, of one turn or of several with an environment.

A sample is a whole trajectory with one record for all of its positions. What an environment said is input like the
prompt: recorded, and kept out of loss and metrics by `trained_mask`.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from tracefp4.coding import codec_by_name
from tracefp4.guidance import Record, Site
from tracefp4.guidance.joining import recode_all
from tracefp4.rl.advantages import AdvantageConfig, group_advantages
from tracefp4.rl.episodes import Episodes
from tracefp4.rl.evaluation import score_completion
from tracefp4.rl.partial import PartialRollouts
from tracefp4.rl.prompts import encode
from tracefp4.rl.rewards import Scorer, outcome_metrics
from tracefp4.rl.samples import TrainingSample, spread
from tracefp4.rl.tasks import Task
from tracefp4.rl.trainer import with_advantages
from tracefp4.rl.trajectories import Played, episode_metrics
from tracefp4.rollout import Completion, Engine, SamplingParams


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    """Samples of one step, with what was measured while making them."""

    samples: list[TrainingSample]
    """num_prompts * n samples, groups adjacent; advantages set."""
    metrics: dict[str, float]
    """Rewards, lengths, skipped groups, guidance bytes, tokens per second."""
    references: list[TrainingSample]
    """A few of the samples that the weights in use drew from their first token on, with their records as the engine
    made them, whole codes, to measure agreement with."""


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
    codec: str | Mapping[Site, str]
    """Codec that records are kept in, one for all sites or one per site; `none` leaves them as the engine made them."""
    keeps_routing: bool = True
    """Whether samples keep the recorded experts; False where no trainer follows them."""
    episodes: Episodes | None = None
    """Plays tasks with their environment on the same engine; None: completions have one turn."""
    partial: PartialRollouts | None = None
    """Groups that go on over several steps; None: every step completes its own. Not with an environment."""

    def make(
        self, tasks: Sequence[Task], params: SamplingParams, *, step: int = 0, num_references: int = 0
    ) -> Rollout:
        """Sample n completions of every task, score them and set their advantages.

        Args:
            tasks: one GRPO group each; those that are begun now, where groups go on over several steps.
            params: sampling.
            step: goes into the trajectories' names, `<step>.<group>.<sample>`, unique within a run.
            num_references: samples whose records are also kept as the engine made them, spread evenly.
        """
        before, counted = self.engine.stats, Counter(self.scorer.counts)
        groups, found = self._play(tasks, params)
        stats = self.engine.stats
        played = [(place, trajectory) for place, group in enumerate(groups) for trajectory in group]
        made = [trajectory.completion.record for _, trajectory in played]
        samples = [
            self._sample(trajectory, record, step=step, place=place)
            for (place, trajectory), record in zip(played, self._records(made), strict=True)
        ]
        rewards = torch.tensor([sample.reward for sample in samples], device="cpu")
        advantages = group_advantages(
            rewards,
            groups=torch.tensor([sample.group_index for sample in samples], device="cpu"),
            config=self.advantage,
        )
        seconds = stats.seconds - before.seconds
        tokens = stats.tokens_generated - before.tokens_generated
        num = len(samples)
        metrics = {
            "reward_mean": advantages.reward_mean,
            "reward_group_std": advantages.group_std_mean,
            "groups_skipped": float(advantages.num_skipped_groups),
            "groups": float(advantages.num_groups),
            "completion_tokens_mean": sum(sample.num_trained for sample in samples) / num,
            "truncated_fraction": sum(sample.is_truncated for sample in samples) / num,
            "rollout_seconds": seconds,
            "rollout_tokens_per_s": tokens / seconds if seconds else 0.0,
            "guidance_bytes_per_token": bytes_per_token(samples, codec=self.codec),
            **outcome_metrics(Counter(self.scorer.counts) - counted),
            **found,
        }
        return Rollout(
            samples=with_advantages(samples, advantages.values),
            metrics=metrics,
            references=_references(samples, made, count=num_references, version=self.engine.weight_version),
        )

    def _records(self, records: Sequence[Record | None]) -> list[Record | None]:
        """Keep of all records what the plan follows, recoded at once, so that no later pass has to; the engine keeps
        whole codes."""
        names = {self.codec} if isinstance(self.codec, str) else set(self.codec.values())
        kept = list(records) if names <= {"none", "full"} else recode_all(records, self.codec)
        return kept if self.keeps_routing else [record and record.without_routing() for record in kept]

    def _play(
        self, tasks: Sequence[Task], params: SamplingParams
    ) -> tuple[list[list[Played]], dict[str, float]]:
        """The trajectories of every group with their rewards, and the metrics of how they were played."""
        if self.episodes is not None:
            counted = Counter(self.episodes.counts)
            groups = self.episodes.play(tasks, params)
            played = [trajectory for group in groups for trajectory in group]
            return groups, episode_metrics(played, counts=Counter(self.episodes.counts) - counted)
        if self.partial is not None:
            complete, found = self.partial.play(tasks, params)
            return [self._scored(group.task, group.finished) for group in complete], found
        prompts = [encode(task, tokenizer=self.tokenizer) for task in tasks]
        completions = self.engine.generate(prompts, params)
        return [self._scored(task, group) for task, group in zip(tasks, completions, strict=True)], {}

    def _scored(self, task: Task, completions: Sequence[Completion]) -> list[Played]:
        return [
            Played(
                completion=completion,
                reward=score_completion(completion, task, tokenizer=self.tokenizer, scorer=self.scorer),
            )
            for completion in completions
        ]

    def _sample(self, played: Played, record: Record | None, *, step: int, place: int) -> TrainingSample:
        """The sample of a trajectory of the group at a place of the step that trains on it."""
        completion = played.completion
        name = f"{step}.{place}.{completion.sample_index}"
        is_truncated = completion.finish_reason != "stop"
        is_penalized = is_truncated and self.truncated == "penalize"
        if record is not None:
            record = replace(record, identity=replace(record.identity, trajectory=name))
        return TrainingSample(
            trajectory=name,
            prompt_ids=tuple(completion.prompt_ids),
            token_ids=tuple(completion.token_ids),
            rollout_logprobs=tuple(completion.logprobs),
            weight_versions=tuple(completion.weight_versions),
            trained_mask=None if completion.sampled_mask is None else tuple(completion.sampled_mask),
            reward=0.0 if is_penalized else played.reward,
            group_index=place,
            finish_reason=completion.finish_reason,
            is_truncated=is_truncated,
            record=record,
        )


def _references(
    samples: Sequence[TrainingSample], made: Sequence[Record | None], *, count: int, version: int
) -> list[TrainingSample]:
    """Give `count` of the samples that have a record their records before recoding; of samples with positions of older
    weights none, because there codes also differ by what the weights have moved."""
    usable = [
        (sample, whole, sample.record.identity)
        for sample, whole in zip(samples, made, strict=True)
        if whole is not None and sample.record is not None and sample.token_ids
        if sample.version_lag(version) == 0
    ]
    # Compacted: views of the step's whole records would keep all of them in memory.
    return [
        replace(sample, record=replace(whole.compact(), identity=identity))
        for sample, whole, identity in spread(usable, count=count)
    ]


def bytes_per_token(samples: Sequence[TrainingSample], *, codec: str | Mapping[Site, str]) -> float:
    """Return guidance bytes per recorded position under a codec, or one per site: codes and scales, no routed ids.

    Computed from widths, whatever codec the records are in. 0 for `none`, and without recorded sites.
    """
    if codec == "none":
        return 0.0
    total, positions = 0, 0
    for sample in samples:
        if sample.record is not None and sample.record.sites:
            rows = (
                part.rows_per_token
                * codec_by_name(codec if isinstance(codec, str) else codec[site]).row_bytes(
                    part.width, block_size=part.block_size
                )
                for site, part in sample.record.sites.items()
            )
            total += sum(rows) * sample.record.length
            positions += sample.record.length
    return total / positions if positions else 0.0

"""Partial rollouts: a step trains as soon as enough groups are complete, and the others go on in the next one.

More groups are under way than a step trains on. What is unfinished when enough are complete leaves the engine with its
tokens, log-probs, versions and record; the weights change; then it comes back and draws on, under its own seed. K and V
of its positions come back as they were recorded, so every position's record is what its token was sampled with.

Nothing is dropped for its age, which would keep long completions out of training: a step also waits for the groups
whose oldest position could not be trained on any later. Nothing here scores or trains.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from tracefp4.errors import ConfigError
from tracefp4.patching import Plan
from tracefp4.rl.config import RunConfig
from tracefp4.rl.episodes import SteppingEngine
from tracefp4.rl.tasks import Task
from tracefp4.rollout import Completion, SamplingParams

CACHED = ("k", "v")


@dataclass(kw_only=True, eq=False, slots=True)
class Group:
    """One prompt under way with its n samples.

    All samples draw their first token in one pass, so either none has begun or all have, under one version.
    """

    task: Task
    """What was asked; its index is the group's number in the run, and part of its noise."""
    seed: int
    """Of its draws: that of the step which it was begun in."""
    prompt_ids: list[int]
    """P token ids."""
    num_samples: int
    """n."""
    completions: dict[int, Completion] = field(default_factory=dict)
    """By sample: finished, or suspended (finish_reason `abort`). Empty until the first token is drawn."""

    @property
    def unfinished(self) -> list[Completion]:
        """Its suspended completions, in order of samples."""
        found = [self.completions[i] for i in sorted(self.completions)]
        return [completion for completion in found if completion.finish_reason == "abort"]

    @property
    def finished(self) -> list[Completion]:
        """Its other completions, in order of samples."""
        found = [self.completions[i] for i in sorted(self.completions)]
        return [completion for completion in found if completion.finish_reason != "abort"]

    @property
    def is_complete(self) -> bool:
        """True when every sample has ended."""
        return len(self.finished) == self.num_samples

    @property
    def oldest_version(self) -> int | None:
        """Weight version of its oldest position; None until it has begun."""
        return min((c.weight_versions[0] for c in self.completions.values() if c.token_ids), default=None)


class PartialRollouts:
    """The groups under way of one run, and the engine that samples them."""

    def __init__(
        self,
        engine: SteppingEngine,
        *,
        config: RunConfig,
        encode: Callable[[Task], list[int]],
        groups: Sequence[Group] = (),
    ) -> None:
        """Take over groups, of a checkpoint.

        Args:
            engine: used by nobody else between two calls of `play`, in which its weights may change.
            config: the recipe; rollout.partial_groups is above 0.
            encode: a task's prompt as token ids.
            groups: under way, oldest first.
        """
        self.groups = list(groups)
        """Under way or complete and not yet trained on, oldest first."""
        self._engine, self._encode = engine, encode
        self._num_groups = config.rollout.num_prompts
        self._num_under_way = config.rollout.num_prompts + config.rollout.partial_groups
        # what was sampled now is trained on after up to rollout_ahead further updates
        self._max_lag = config.train.max_version_diff - config.train.rollout_ahead

    @property
    def num_missing(self) -> int:
        """Tasks that the next `play` takes."""
        return self._num_under_way - len(self.groups)

    def play(self, tasks: Sequence[Task], params: SamplingParams) -> tuple[list[Group], dict[str, float]]:
        """Sample until num_prompts groups are complete, and suspend the rest.

        Args:
            tasks: `num_missing` new ones.
            params: sampling; the seed is that of the new groups, the others keep theirs.

        Returns:
            (num_prompts complete groups, those with the oldest positions first; metrics `partial/...`). A step also
            waits for every group whose oldest position is max_version_diff - rollout_ahead versions behind.

        Raises:
            ConfigError: what the engine refuses. Nothing stays in the engine after an error.
        """
        self.groups += [
            Group(task=task, seed=params.seed, prompt_ids=self._encode(task), num_samples=params.n)
            for task in tasks
        ]
        due = [group for group in self.groups if self._is_due(group)]
        by_number = {group.task.index: group for group in self.groups}
        try:
            for group in self.groups:
                self._queue(group, params)
            while not self._is_enough(due):
                if self._engine.step():
                    _keep(self._engine.take_finished(), by_number)
        except BaseException:
            self._engine.suspend()
            raise
        _keep(self._engine.suspend(), by_number)
        complete = [group for group in self.groups if group.is_complete]
        chosen = sorted(complete, key=_age)[: self._num_groups]
        self.groups = [group for group in self.groups if group not in chosen]
        return chosen, {**_metrics(chosen, self.groups), "partial/groups_due": float(len(due))}

    def _is_due(self, group: Group) -> bool:
        """True if the next update would make the group's oldest position too old."""
        oldest = group.oldest_version
        return oldest is not None and self._engine.weight_version - oldest >= self._max_lag

    def _is_enough(self, due: Sequence[Group]) -> bool:
        num_complete = sum(group.is_complete for group in self.groups)
        return num_complete >= self._num_groups and all(group.is_complete for group in due)

    def _queue(self, group: Group, params: SamplingParams) -> None:
        """Put a group into the engine: as one prompt if it has not begun, else what is left of its samples."""
        params = replace(params, seed=group.seed)
        if not group.completions:
            self._engine.submit(group.prompt_ids, params, prompt_index=group.task.index)
        for completion in group.unfinished:
            left = params.max_tokens - len(completion.token_ids)
            self._engine.resubmit(completion, [], replace(params, n=1, max_tokens=left))


def _keep(completions: Sequence[Completion], by_number: dict[int, Group]) -> None:
    """Note what the engine handed over. A prompt without a sampled token begins again, under one version."""
    for completion in completions:
        if completion.token_ids:
            by_number[completion.prompt_index].completions[completion.sample_index] = completion


def _age(group: Group) -> tuple[int, int]:
    """Oldest position first, then the order in which groups were begun."""
    oldest = group.oldest_version
    assert oldest is not None, "a complete group has tokens"
    return oldest, group.task.index


def _metrics(chosen: Sequence[Group], left: Sequence[Group]) -> dict[str, float]:
    carried = [completion for group in left for completion in group.unfinished]
    ended = [completion for group in chosen for completion in group.finished]
    return {
        "partial/carried": float(len(carried)),
        "partial/carried_tokens": float(sum(len(completion.token_ids) for completion in carried)),
        "partial/groups_waiting": float(sum(group.is_complete for group in left)),
        "partial/spanning": float(sum(len(set(completion.weight_versions)) > 1 for completion in ended)),
    }


def check_restorable(plan: Plan) -> None:
    """Refuse a plan under which a suspended completion comes back with other K and V than its record has.

    Fine are plans that record K and V of every layer that has them (they come back bit for bit), and plans that record
    neither (they are computed again under the weights in use, as where no cache outlives an update, and no record says
    otherwise). A gated delta layer has none; its state is computed again under the weights in use.

    Raises: ConfigError naming the settings.
    """
    recorded = {site for site in plan.guided_sites if site.kind in CACHED}
    num_layers = sum(decision.kind == "kv" for decision in plan.decisions)
    if recorded and len(recorded) < len(CACHED) * num_layers:
        raise ConfigError(
            f"rollout.partial_groups: K and V of a suspended completion come back from its record; got one with "
            f"{len(recorded)} of the {len(CACHED) * num_layers} sites k and v of {num_layers} layers. "
            "Allowed are all of them or none. Set quantization.layers = 'all' and name both k and v in "
            "quantization.sites, or neither; or set rollout.partial_groups = 0."
        )

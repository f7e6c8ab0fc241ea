"""Many trajectories at once, each a conversation of the policy with its environment, over one engine.

Between two engine steps, turns that have ended go to their environments, and answers that have arrived send their
trajectories back into the engine, while the others go on sampling. A trajectory stays one Completion from the first
prompt on: one record for all positions, a version for every sampled token, `sampled_mask` False at the environment's
tokens. Sampled ids are passed on as they are.

Weights may change between any two steps, and `EpisodeBatch.suspend` takes everything out of the engine: each token and
position keeps the version that it was made under. Nothing here normalises rewards or trains.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, Protocol

from tracefp4.errors import ConfigError, RecordError
from tracefp4.rl.calling import Calls, Outcome, build_calls
from tracefp4.rl.config import TaskConfig
from tracefp4.rl.environments import (
    End,
    Environment,
    EpisodeLimits,
    Reply,
    Turn,
    build_environment,
    checked_answer,
)
from tracefp4.rl.replies import encode_reply, first_prompt
from tracefp4.rl.rewards import Scorer
from tracefp4.rl.tasks import Task
from tracefp4.rl.trajectories import CALL_OUTCOMES, Played, Trajectory
from tracefp4.rollout import Completion, SamplingParams
from tracefp4.rollout.completion import EngineStats
from tracefp4.rollout.noise import noise_key


class SteppingEngine(Protocol):
    """What trajectories of several turns need of an engine: requests that join and leave between any two steps."""

    @property
    def weight_version(self) -> int:
        """Version of the weights in use."""

    @property
    def stats(self) -> EngineStats:
        """Counters since the engine was made."""

    @property
    def has_work(self) -> bool:
        """True while any request is unfinished."""

    def submit(self, prompt: list[int], params: SamplingParams, *, prompt_index: int = 0) -> int:
        """Queue a prompt with params.n samples."""

    def resubmit(self, completion: Completion, added: list[int], params: SamplingParams) -> int:
        """Queue a trajectory that goes on after `added`."""

    def step(self) -> Any:
        """Run one pass."""

    def take_finished(self) -> list[Completion]:
        """Hand over what has finished."""

    def suspend(self) -> list[Completion]:
        """End everything that is unfinished and hand it over."""


@dataclass
class Episodes:
    """Plays tasks against an environment on one engine, which nobody else uses meanwhile."""

    environment: Environment
    """Answers turns."""
    _: KW_ONLY
    engine: SteppingEngine
    """Samples."""
    tokenizer: Any
    """Encodes prompts and replies, decodes turns."""
    scorer: Scorer
    """Gives rewards where the environment leaves them to the task; its `on_error` holds for the environment too."""
    limits: EpisodeLimits
    """Turns, and tokens of a turn."""
    workers: int = 0
    """Threads for environments; 0: they are called between engine steps, in a fixed order."""
    timeout_s: float = 10.0
    """Limit of one call, seconds, > 0."""
    counts: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(CALL_OUTCOMES, 0)))
    """Outcomes of all calls so far."""

    def play(self, tasks: Sequence[Task], params: SamplingParams) -> list[list[Played]]:
        """Play params.n trajectories of every task to their ends.

        Args:
            tasks: one group each.
            params: `max_tokens` limits a trajectory's tokens after its first prompt, those of the environment included;
                `stop` and `keeps_stop` are the environment's.

        Returns:
            [len(tasks)][n], in the order of tasks and samples.

        Raises:
            RecordError: no prompt; with `on_error` "raise", a call that failed. Nothing stays in the engine.
            ConfigError: what the engine refuses; the environment's own; an engine that is busy or cannot be stepped.
        """
        batch = self.begin(tasks, params)
        try:
            while not batch.is_done:
                batch.step()
        except BaseException:
            batch.abandon()
            raise
        return batch.results()

    def begin(self, tasks: Sequence[Task], params: SamplingParams) -> EpisodeBatch:
        """Queue the first turns; for callers that do something between the steps."""
        if not hasattr(self.engine, "resubmit") or self.engine.has_work:
            raise ConfigError(
                f"Trajectories with an environment need an engine of their own that can be stepped; got a "
                f"{type(self.engine).__name__} that {'is busy' if hasattr(self.engine, 'resubmit') else 'cannot'}. "
                "Use a LocalEngine, and finish or suspend what runs on it."
            )
        prompts = [
            first_prompt(task, tokenizer=self.tokenizer, environment=self.environment) for task in tasks
        ]
        return EpisodeBatch(self, tasks, prompts=prompts, params=params)


class EpisodeBatch:
    """Trajectories under way; made by `Episodes.begin`."""

    def __init__(
        self,
        episodes: Episodes,
        tasks: Sequence[Task],
        *,
        prompts: Sequence[list[int]],
        params: SamplingParams,
    ) -> None:
        self._env, self._engine = episodes, episodes.engine
        self._calls: Calls = build_calls(workers=episodes.workers, timeout_s=episodes.timeout_s)
        self._prompts, self._params = prompts, params
        self._suspended: list[Completion] = []
        self._unbegun: list[int] = list(range(len(prompts)))
        self._trajectories = {
            (group, sample): Trajectory(
                task=task, seed=noise_key(seed=params.seed, prompt_index=group, sample_index=sample)
            )
            for group, task in enumerate(tasks)
            for sample in range(params.n)
        }

    @property
    def is_done(self) -> bool:
        """True when every trajectory is over and every call has ended."""
        is_over = all(trajectory.played is not None for trajectory in self._trajectories.values())
        return is_over and not self._calls.num_open

    def step(self) -> None:
        """Take up the answers that have arrived, then run one pass, or wait for an answer if there is nothing to run.

        Raises: as `Episodes.play`; the caller then calls `abandon`.
        """
        for outcome in self._calls.ready():
            self._take_up(outcome)
        self._queue()
        if self._engine.has_work:
            self._engine.step()
            for completion in self._engine.take_finished():
                self._end_turn(completion)
        else:
            self._calls.wait()

    def suspend(self) -> None:
        """Take everything out of the engine, which is then free; the next step puts it back, each trajectory with its
        record, its versions and its draws."""
        for completion in self._engine.suspend():
            if completion.finish_reason != "abort":
                self._end_turn(completion)
            elif completion.record is None and not completion.token_ids:
                # nothing of the prompt was computed: its samples begin together, so that it is computed once
                if completion.prompt_index not in self._unbegun:
                    self._unbegun.append(completion.prompt_index)
            else:
                self._suspended.append(completion)

    def results(self) -> list[list[Played]]:
        """Return what was played, by task and sample; only when `is_done`."""
        found = [
            trajectory.played for trajectory in self._trajectories.values() if trajectory.played is not None
        ]
        n = self._params.n
        return [found[i : i + n] for i in range(0, len(found), n)]

    def abandon(self) -> None:
        """Leave the engine empty and close the episodes, after an error."""
        self._engine.suspend()
        for trajectory in self._trajectories.values():
            if trajectory.played is None:
                self._close(trajectory)

    def _queue(self) -> None:
        """Put into the engine what has not begun, and what was suspended."""
        for group in self._unbegun:
            params = self._turn_params(self._params.max_tokens, sampled=0)
            self._engine.submit(self._prompts[group], replace(params, n=self._params.n), prompt_index=group)
        self._unbegun = []
        for completion in self._suspended:
            trajectory = self._trajectories[completion.prompt_index, completion.sample_index]
            left = self._params.max_tokens - len(completion.token_ids)
            sampled = len(completion.token_ids) - trajectory.turn_start
            self._engine.resubmit(completion, [], self._turn_params(left, sampled=sampled))
        self._suspended = []

    def _turn_params(self, left: int, *, sampled: int) -> SamplingParams:
        """Sampling of the rest of a turn: `left` tokens of the trajectory, less where the turn has its own limit."""
        own = self._env.limits.turn_tokens
        return replace(
            self._params,
            n=1,
            max_tokens=min(left, own - sampled) if own else left,
            stop=self._env.environment.stop,
            keeps_stop=True,
        )

    def _end_turn(self, completion: Completion) -> None:
        """Show a turn to the environment."""
        key = completion.prompt_index, completion.sample_index
        trajectory = self._trajectories[key]
        token_ids = completion.token_ids[trajectory.turn_start :]
        text = self._env.tokenizer.decode(token_ids, skip_special_tokens=True)
        index = len(trajectory.texts)
        is_full = len(completion.token_ids) >= self._params.max_tokens
        turn = Turn(
            index=index,
            token_ids=tuple(token_ids),
            text=text,
            is_complete=completion.finish_reason == "stop",
            is_last=is_full or index + 1 >= self._env.limits.max_turns,
        )
        trajectory.completion, trajectory.turn = completion, turn
        trajectory.texts.append(text)
        self._calls.post(key, _asking(self._env.environment, trajectory, turn))

    def _take_up(self, outcome: Outcome) -> None:
        """End a trajectory or send it on, as its environment answered."""
        if outcome.key is None:  # an episode's close: only a failure says anything
            if outcome.failure:
                self._env.counts[outcome.failure] += 1
                self._refuse_failure(outcome)
            return
        trajectory = self._trajectories[outcome.key]
        completion = trajectory.completion
        assert completion is not None
        outcome, added = self._checked(outcome, completion)
        self._env.counts[outcome.failure or "answered"] += 1
        if outcome.failure:
            self._refuse_failure(outcome)
            self._end(trajectory, reward=0.0, completion=replace(completion, finish_reason="abort"))
        elif isinstance(outcome.value, End):
            self._end(trajectory, reward=outcome.value.reward, completion=completion)
        else:
            trajectory.tool_calls += outcome.value.tool_calls
            self._reply(trajectory, outcome.value, added)

    def _checked(self, outcome: Outcome, completion: Completion) -> tuple[Outcome, list[int]]:
        """The outcome and the ids that the policy reads next; an answer that cannot be used becomes a failure."""
        if outcome.failure:
            return outcome, []
        try:
            answer = checked_answer(outcome.value)
            if isinstance(answer, End):
                return outcome, []
            last_id, tokenizer = completion.token_ids[-1], self._env.tokenizer
            return outcome, encode_reply(answer.content, tokenizer=tokenizer, last_id=last_id)
        except (ValueError, TypeError) as error:
            return replace(outcome, failure="error", detail=f"{type(error).__name__}: {error}"), []

    def _reply(self, trajectory: Trajectory, answer: Reply, added: list[int]) -> None:
        """Go on after the environment's tokens, unless a limit leaves no room for another sampled token."""
        completion, turn = trajectory.completion, trajectory.turn
        assert completion is not None and turn is not None
        left = self._params.max_tokens - len(completion.token_ids) - len(added)
        if turn.is_last or left < 1:
            self._end(
                trajectory, reward=answer.reward, completion=replace(completion, finish_reason="length")
            )
            return
        trajectory.turn_start = len(completion.token_ids) + len(added)
        self._engine.resubmit(completion, added, self._turn_params(left, sampled=0))

    def _end(self, trajectory: Trajectory, *, reward: float | None, completion: Completion) -> None:
        if reward is None:
            text = "\n".join(trajectory.texts)
            reward = self._env.scorer.score(trajectory.task, completion=text).value
        trajectory.played = Played(
            completion=completion,
            reward=float(reward),
            num_turns=len(trajectory.texts),
            tool_calls=trajectory.tool_calls,
        )
        self._close(trajectory)

    def _close(self, trajectory: Trajectory) -> None:
        if trajectory.episode is not None:
            self._calls.post(None, trajectory.episode.close)

    def _refuse_failure(self, outcome: Outcome) -> None:
        if outcome.failure and self._env.scorer.config.on_error == "raise":
            trajectory = "an episode's close" if outcome.key is None else f"trajectory {outcome.key}"
            raise RecordError(
                f"Environment of {trajectory} failed ({outcome.failure}): {outcome.detail}. Allowed is an answer "
                f"within {self._env.timeout_s} s. Repair it, or set task.reward_on_error to 'zero' to count it."
            )


def _asking(environment: Environment, trajectory: Trajectory, turn: Turn) -> Callable[[], Any]:
    """The call that asks a trajectory's environment for its answer; the first one opens the episode."""

    def ask() -> Any:
        episode = trajectory.episode
        if episode is None:
            episode = trajectory.episode = environment.open(trajectory.task, seed=trajectory.seed)
            if trajectory.played is not None:  # opened in a thread whose time was up: nobody reads the answer
                return episode.close()
        return episode.answer(turn)

    return ask


def build_episodes(
    task: TaskConfig, *, engine: SteppingEngine, tokenizer: Any, scorer: Scorer
) -> Episodes | None:
    """Return what plays a recipe's tasks on an engine; None where [task] names no environment.

    Raises: ConfigError as `build_environment`.
    """
    environment = build_environment(task)
    if environment is None:
        return None
    return Episodes(
        environment,
        engine=engine,
        tokenizer=tokenizer,
        scorer=scorer,
        limits=EpisodeLimits(max_turns=task.max_turns, turn_tokens=task.turn_tokens),
        workers=task.environment_workers,
        timeout_s=task.environment_timeout_s,
    )

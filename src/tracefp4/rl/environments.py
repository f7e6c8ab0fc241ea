"""What an environment is: it answers what the policy wrote in a turn, or ends the trajectory with a reward.

A trajectory begins with a prompt; the policy samples a turn; the environment reads it and replies (a tool's result, the
next user's turn) or ends. The environment reads text, and may read ids; what it says becomes token ids once, and the
ids that the policy sampled are never encoded again. Who runs trajectories is `episodes`, who calls foreign code with a
time limit `calling`. Nothing here samples or trains.

A run is resumed at the beginning of a rollout. It ends in the same bytes as an uninterrupted one if an episode depends
on nothing but its task, its seed and the turns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tracefp4.errors import ConfigError
from tracefp4.rl.config import TaskConfig
from tracefp4.rl.tasks import Task
from tracefp4.rl.verifiers import resolve_function

Content = str | Sequence[int] | Sequence[Mapping[str, str]]
"""What an environment says: plain text, token ids, or chat messages (role, content)."""

BUILT_IN = {"calculator": "tracefp4.rl.calculator:Calculator"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """What the policy sampled since the environment last spoke."""

    index: int
    """0 for the trajectory's first turn."""
    token_ids: tuple[int, ...]
    """Sampled ids, a stop token included; at least one."""
    text: str
    """Their text without special tokens. Only to be read: it is not what training sees."""
    is_complete: bool
    """True: a stop token or a stop text ended the turn. False: a limit on tokens did."""
    is_last: bool
    """True: the limits allow no other turn, so a Reply will not be shown to the policy. Answer with End."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """The environment answers and the policy goes on."""

    content: Content
    """What it says. Text and ids follow the sampled tokens as they are; messages go through the chat template. Empty:
    the policy just goes on."""
    tool_calls: int = 0
    """Tools that were called for this answer, for the metrics; 0 or more."""
    reward: float | None = None
    """The trajectory's reward if a limit keeps it from going on; None: the task's verifier scores what there is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class End:
    """The trajectory is over; it counts as truncated if its last turn was not complete."""

    reward: float | None = None
    """Its reward, finite. None: the task's verifier scores the policy's own text, turns joined by a line break."""


class Episode(Protocol):
    """The state of one trajectory's environment."""

    def answer(self, turn: Turn) -> Reply | End:
        """Look at a turn and answer it; called once per turn, in order."""

    def close(self) -> None:
        """Release what the episode holds; called once when the trajectory is over, also after a failed call."""


class Environment(Protocol):
    """Makes episodes. One object serves a whole run, and several threads where the recipe asks for workers."""

    @property
    def stop(self) -> tuple[str, ...]:
        """Texts that end a turn as soon as it contains one, such as "</tool>"; they stay in the turn. () for none."""

    def prompt(self, task: Task) -> Content | None:
        """Return what a trajectory begins with, the same for all samples of a task; None: the task as it stands.

        Text becomes the user's message where the tokenizer has a chat template. A quick, pure function: it has no time
        limit, and a failure ends the run.
        """

    def open(self, task: Task, *, seed: int) -> Episode:
        """Begin an episode; called when the trajectory's first turn has ended.

        Args:
            task: what was asked.
            seed: a 64-bit integer, different for every trajectory of a run and the same when the run is repeated.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeLimits:
    """How long a trajectory may go on. `SamplingParams.max_tokens` limits all tokens after the first prompt, those of
    the environment included."""

    max_turns: int = 8
    """Turns of the policy, >= 1."""
    turn_tokens: int = 0
    """Sampled tokens of one turn; 0: no limit of its own."""

    def __post_init__(self) -> None:
        if self.max_turns < 1 or self.turn_tokens < 0:
            raise ConfigError(
                f"EpisodeLimits are refused: got max_turns {self.max_turns} and turn_tokens {self.turn_tokens}; "
                "allowed are max_turns >= 1 and turn_tokens >= 0 (0: no limit of its own). Change task.max_turns or "
                "task.turn_tokens."
            )


def build_environment(task: TaskConfig) -> Environment | None:
    """Return the environment that a recipe's [task] table names; None where it names none.

    `task.environment` is a built-in name ("calculator") or "package.module:factory"; the factory is called with
    `task.environment_options` as keywords.

    Raises:
        ConfigError: a path that names no callable, options that the factory refuses, or a result without `stop`,
            `prompt` and `open`.
    """
    if not task.environment:
        return None
    factory = resolve_function(BUILT_IN.get(task.environment, task.environment), what="Environment")
    try:
        made: Any = factory(**task.environment_options)
    except TypeError as error:
        raise ConfigError(
            f"task.environment_options: {task.environment!r} refuses {dict(task.environment_options)} ({error}); "
            "allowed are the keywords of its factory. Correct them."
        ) from error
    missing = [name for name in ("stop", "prompt", "open") if not hasattr(made, name)]
    if missing:
        raise ConfigError(
            f"task.environment: {task.environment!r} made a {type(made).__name__} without {', '.join(missing)}; "
            "allowed is an Environment with stop, prompt and open. Return one from the factory."
        )
    checked: Environment = made
    return checked


def checked_answer(answer: Any) -> Reply | End:
    """Return what an episode answered.

    Raises:
        ValueError: neither Reply nor End, a reward that is not a finite number, or a negative count; the caller counts
            it as the environment's error.
    """
    if not isinstance(answer, Reply | End):
        raise ValueError(f"answered {answer!r}, neither Reply nor End")
    reward = answer.reward
    if reward is not None and not (isinstance(reward, bool | int | float) and math.isfinite(reward)):
        raise ValueError(f"gave the reward {reward!r}, not a finite number")
    if isinstance(answer, Reply) and answer.tool_calls < 0:
        raise ValueError(f"counted {answer.tool_calls} tool calls")
    return answer

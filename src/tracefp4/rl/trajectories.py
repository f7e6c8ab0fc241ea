"""One trajectory of several turns: what is known of it while it is played, what it is in the end, and its numbers.

Plain data; who plays is `episodes`. Nothing here calls an environment or an engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tracefp4.rl.environments import Episode, Turn
from tracefp4.rl.tasks import Task
from tracefp4.rollout import Completion

CALL_OUTCOMES = ("answered", "timeout", "error")


@dataclass(frozen=True, kw_only=True, slots=True)
class Played:
    """One finished trajectory with its reward."""

    completion: Completion
    """All turns. finish_reason `stop`: the policy or the environment ended it; `length`: a limit did; `abort`: the
    environment failed."""
    reward: float
    """From the environment or the task's verifier; 0 after a failure."""
    num_turns: int = 1
    """Turns of the policy."""
    tool_calls: int = 0
    """Tools that the environment called."""

    @property
    def num_environment_tokens(self) -> int:
        """Tokens that the environment gave."""
        return len(self.completion.token_ids) - sum(self.completion.sampled_flags)


@dataclass(kw_only=True, eq=False, slots=True)
class Trajectory:
    """One trajectory in the making."""

    task: Task
    """What was asked."""
    seed: int
    """Of its episode."""
    completion: Completion | None = None
    """As the engine last handed it over; None before that."""
    episode: Episode | None = None
    """None until its first turn has ended."""
    turn: Turn | None = None
    """The turn that the environment looks at, or looked at last."""
    turn_start: int = 0
    """Index of the current turn's first token among the completion's tokens."""
    texts: list[str] = field(default_factory=list)
    """Text of every turn."""
    tool_calls: int = 0
    """So far."""
    played: Played | None = None
    """Set when it is over."""


def episode_metrics(played: Sequence[Played], *, counts: Mapping[str, int]) -> dict[str, float]:
    """Return what a rollout's trajectories and environments did, under `env/`.

    Args:
        played: all trajectories of a rollout, at least one.
        counts: outcomes of its calls.

    Returns:
        Means per trajectory of `turns`, `tokens` (the environment's) and `tool_calls`; counts of calls by outcome, as
        `answered`, `timeout` and `error`.
    """
    num = len(played)
    return {
        "env/turns": sum(found.num_turns for found in played) / num,
        "env/turns_max": float(max(found.num_turns for found in played)),
        "env/tokens": sum(found.num_environment_tokens for found in played) / num,
        "env/tool_calls": sum(found.tool_calls for found in played) / num,
        **{f"env/{name}": float(counts.get(name, 0)) for name in CALL_OUTCOMES},
    }

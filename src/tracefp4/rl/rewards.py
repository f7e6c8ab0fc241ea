"""From a completion's text to a number, with a time limit and a stated outcome for every failure.

Three verifiers: `reasoning_gym` asks the task's dataset (`score_answer`), `math_verify` compares mathematical
expressions, `function` calls your own `package.module:function(prompt, completion, answer) -> float`. A
verifier that raises or runs too long gives reward 0 and is counted, or stops the run, by configuration; it is
never a silent 0. The two ways to enforce the limit, and what each cannot do, are described in time_limit.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tracefp4.errors import ConfigError, RecordError
from tracefp4.rl.tasks import Task
from tracefp4.rl.time_limit import RewardTimeout, VerifierProcess, call_with_timeout
from tracefp4.rl.verifiers import VERIFIERS, Verifier, extract_answer

OUTCOMES = ("scored", "no_answer", "timeout", "error")


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardConfig:
    """How completions are scored."""

    verifier: str = "reasoning_gym"
    """`reasoning_gym`, `math_verify` or `function`."""
    function: str = ""
    """Dotted path "package.module:function"; needed with `function`, empty otherwise."""
    timeout_s: float = 5.0
    """Wall-clock limit of one call, seconds, > 0."""
    isolation: str = "timer"
    """How the limit works: `timer` (interrupts; main thread only) or `process` (a worker that is killed)."""
    on_error: str = "zero"
    """What a verifier that raises or times out gives: `zero` (reward 0, counted), or `raise`."""
    answer_tag: str = "answer"
    """The answer is the last <tag>...</tag>; a completion without it scores 0. Empty: the whole text is the
    answer. `function` always gets the whole completion."""

    def __post_init__(self) -> None:
        if self.verifier not in VERIFIERS:
            raise ConfigError(
                f"RewardConfig.verifier is refused: got {self.verifier!r}; allowed is one of "
                f"{VERIFIERS}. Change the reward section."
            )
        if (self.verifier == "function") != bool(self.function):
            raise ConfigError(
                f"RewardConfig.function is refused: got {self.function!r} with verifier "
                f"{self.verifier!r}; allowed is 'package.module:function' with verifier 'function' and "
                "nothing otherwise. Set both."
            )
        if self.isolation not in ("timer", "process"):
            raise ConfigError(
                f"RewardConfig.isolation is refused: got {self.isolation!r}; allowed is 'timer' or "
                "'process'. Change the reward section."
            )
        if self.on_error not in ("zero", "raise"):
            raise ConfigError(
                f"RewardConfig.on_error is refused: got {self.on_error!r}; allowed is 'zero' or "
                "'raise'. Change the reward section."
            )
        if not (self.timeout_s > 0.0 and math.isfinite(self.timeout_s)):
            raise ConfigError(
                f"RewardConfig.timeout_s is refused: got {self.timeout_s!r}; allowed is a finite number "
                "of seconds > 0. Use 5."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Reward:
    """The score of one completion."""

    value: float
    """Finite; 0 unless outcome is `scored`."""
    outcome: str
    """`scored`, `no_answer` (no answer tag), `timeout` or `error`."""
    detail: str = ""
    """The error's text; empty when there was none."""


class Scorer:
    """Scores completions with one verifier and counts outcomes."""

    def __init__(self, config: RewardConfig) -> None:
        """Resolve the verifier.

        Raises:
            ConfigError: a dotted path that names no callable, or math-verify is not installed.
        """
        self.config = config
        self.counts: Counter[str] = Counter(dict.fromkeys(OUTCOMES, 0))
        self._verifier = Verifier(config.verifier, function=config.function)
        self._process: VerifierProcess | None = None
        if config.isolation == "process":
            self._process = VerifierProcess(config.verifier, function=config.function)

    def score(self, task: Task, *, completion: str) -> Reward:
        """Score one completion.

        Args:
            task: what was asked.
            completion: the completion's text, without the prompt.

        Returns:
            The reward and its outcome; `counts` has been updated.

        Raises:
            RecordError: with on_error "raise", a verifier that raised, timed out or returned no finite
                number.
            ConfigError: isolation "timer" outside the main thread, where it cannot work.
        """
        reward = self._score(task, completion=completion)
        self.counts[reward.outcome] += 1
        if reward.outcome in ("timeout", "error") and self.config.on_error == "raise":
            raise RecordError(
                f"Reward of task {task.index} of {task.source!r} failed ({reward.outcome}): "
                f"{reward.detail}. Repair the verifier, or set on_error to 'zero' to count it."
            )
        return reward

    def _score(self, task: Task, *, completion: str) -> Reward:
        answer: str | None = completion
        if self.config.verifier != "function" and self.config.answer_tag:
            answer = extract_answer(completion, tag=self.config.answer_tag)
        if answer is None:
            return Reward(value=0.0, outcome="no_answer")
        try:
            value = self._verify(task, answer=answer)
        except RewardTimeout:
            return Reward(value=0.0, outcome="timeout", detail=f"no result within {self.config.timeout_s} s")
        except ConfigError:
            raise
        # the boundary to foreign code: any failure is an outcome, counted or raised by `score`
        except Exception as error:
            return Reward(value=0.0, outcome="error", detail=f"{type(error).__name__}: {error}")
        if not isinstance(value, bool | int | float) or not math.isfinite(value):
            return Reward(value=0.0, outcome="error", detail=f"returned {value!r}, not a finite number")
        return Reward(value=float(value), outcome="scored")

    def _verify(self, task: Task, *, answer: str) -> Any:
        limit_s = self.config.timeout_s
        if self._process is not None:
            return self._process.verify(task, answer=answer, timeout_s=limit_s)
        self._verifier.prepare(task)
        return call_with_timeout(lambda: self._verifier.verify(task, answer=answer), timeout_s=limit_s)

    def close(self) -> None:
        """End the worker process, if there is one; the next call starts another."""
        if self._process is not None:
            self._process.close()


def outcome_metrics(counts: Mapping[str, int]) -> dict[str, float]:
    """Return `reward/<outcome>` counts for every outcome, zeros included."""
    return {f"reward/{outcome}": float(counts.get(outcome, 0)) for outcome in OUTCOMES}

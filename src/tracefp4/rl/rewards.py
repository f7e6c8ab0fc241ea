"""From a completion's text to a number, with a time limit and a stated outcome for every failure.

Three verifiers: `reasoning_gym` asks the task's dataset (`score_answer`), `math_verify` compares mathematical
expressions, `function` calls your own `package.module:function(prompt, completion, answer) -> float`. A
verifier that raises or runs too long gives reward 0 and is counted, or stops the run, by configuration; it is
never a silent 0.

The time limit interrupts the verifier by a SIGALRM timer (wall clock), which therefore has to run in the main
thread of a POSIX process. It ends any loop of Python code, also one that swallows exceptions, because the
timer keeps firing. It cannot end a single long call into C, such as 9**9**9: the limit takes effect when that
call returns.
"""

from __future__ import annotations

import importlib
import math
import re
import signal
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

from tracefp4.errors import ConfigError, RecordError
from tracefp4.rl.tasks import Task, create_dataset

VERIFIERS = ("reasoning_gym", "math_verify", "function")
OUTCOMES = ("scored", "no_answer", "timeout", "error")
REPEAT_S = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardConfig:
    """How completions are scored."""

    verifier: str = "reasoning_gym"
    """`reasoning_gym`, `math_verify` or `function`."""
    function: str = ""
    """Dotted path "package.module:function"; needed with `function`, empty otherwise."""
    timeout_s: float = 5.0
    """Wall-clock limit of one call, seconds, > 0."""
    on_error: str = "zero"
    """What a verifier that raises or times out gives: `zero` (reward 0, counted) or `raise` (the run
    stops)."""
    answer_tag: str = "answer"
    """The answer is the last <tag>...</tag>; a completion without it scores 0. Empty: the whole text is the
    answer.
    `function` always gets the whole completion."""

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


class RewardTimeout(BaseException):
    """Raised inside a verifier when its time is up; a BaseException so that `except Exception` lets it
    through."""


class Scorer:
    """Scores completions with one verifier and counts outcomes."""

    def __init__(self, config: RewardConfig) -> None:
        """Resolve the verifier.

        Raises:
            ConfigError: a dotted path that names no callable, or math-verify is not installed.
        """
        self.config = config
        self.counts: Counter[str] = Counter(dict.fromkeys(OUTCOMES, 0))
        self._datasets: dict[str, Any] = {}
        self._function = resolve_function(config.function) if config.function else None
        if config.verifier == "math_verify":
            _import_math_verify()

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
            ConfigError: called outside the main thread, where the time limit cannot work.
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
        verify = self._verifier(task, answer=answer)
        try:
            value = call_with_timeout(verify, timeout_s=self.config.timeout_s)
        except RewardTimeout:
            return Reward(value=0.0, outcome="timeout", detail=f"no result within {self.config.timeout_s} s")
        except ConfigError:
            raise
        except (
            Exception
        ) as error:  # the boundary to foreign code: any failure is an outcome, counted or re-raised
            return Reward(value=0.0, outcome="error", detail=f"{type(error).__name__}: {error}")
        if not isinstance(value, bool | int | float) or not math.isfinite(value):
            return Reward(value=0.0, outcome="error", detail=f"returned {value!r}, not a finite number")
        return Reward(value=float(value), outcome="scored")

    def _verifier(self, task: Task, *, answer: str) -> Callable[[], Any]:
        """The call that will run under the time limit; building it may import and create, which is not
        timed."""
        if self._function is not None:
            function = self._function
            return lambda: function(task.prompt, answer, task.answer)
        if self.config.verifier == "math_verify":
            return lambda: verify_math(answer, gold=task.answer)
        key = f"{task.source}:{sorted(task.source_config.items())!r}"
        if key not in self._datasets:
            self._datasets[key] = create_dataset(task.source, seed=0, config=task.source_config)
        dataset = self._datasets[key]
        return lambda: dataset.score_answer(answer, entry=dict(task.entry))


def extract_answer(completion: str, *, tag: str = "answer") -> str | None:
    """Return the text of the last <tag>...</tag>, stripped; None without one (as reasoning_gym.utils
    does)."""
    found = re.findall(f"<{re.escape(tag)}>(.*?)</{re.escape(tag)}>", completion, flags=re.DOTALL)
    return found[-1].strip() if found else None


def verify_math(answer: str, *, gold: str) -> float:
    """Return 1.0 if math-verify finds `answer` equal to `gold`, else 0.0.

    Raises:
        RecordError: the gold answer is not a mathematical expression, so nothing could ever match.
    """
    parse, verify = _import_math_verify()
    # math-verify's own limit also uses SIGALRM and would disarm ours: switch it off, ours holds.
    # A bare expression is only read as a whole between dollar signs (x^2+1 without them is read as 1).
    expected = parse(f"${gold}$", parsing_timeout=None) or parse(gold, parsing_timeout=None)
    if not expected:
        raise RecordError(
            f"math-verify cannot parse the gold answer {gold!r}; allowed is a number or LaTeX. Correct the task file."
        )
    readings = (parse(text, parsing_timeout=None) for text in (f"${answer}$", answer))
    return float(any(verify(expected, found, timeout_seconds=None) for found in readings))


def resolve_function(path: str) -> Callable[..., Any]:
    """Import "package.module:function".

    Raises:
        ConfigError: a path without a colon, a module that does not import, or a name that is not callable.
    """
    module_name, colon, name = path.partition(":")
    if not (module_name and colon and name):
        raise ConfigError(
            f"Reward function {path!r} is not a path; allowed is 'package.module:function'. "
            "Separate module and name by a colon."
        )
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(
            f"Reward function {path!r} cannot be imported: {error}. Put its module on PYTHONPATH "
            "or install its package."
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(
            f"Reward function {path!r} is {function!r} in its module; a callable is needed. "
            "Check the name after the colon."
        )
    return function  # type: ignore[no-any-return]


def call_with_timeout(function: Callable[[], Any], *, timeout_s: float) -> Any:
    """Call a function and interrupt it after timeout_s seconds of wall-clock time.

    The timer fires again every 0.05 s, so a loop whose body catches everything still ends. A SIGALRM timer
    that was already running is suspended and continued afterwards. A single call into C is not interrupted.

    Raises:
        RewardTimeout: the time was up.
        ConfigError: not in the main thread, or a platform without setitimer.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        raise ConfigError(
            "The reward time limit needs the main thread of a POSIX process; got thread "
            f"{threading.current_thread().name!r}. Score completions in the main thread."
        )
    is_armed = True

    def interrupt(signum: int, frame: FrameType | None) -> None:
        if is_armed:
            raise RewardTimeout

    previous = signal.signal(signal.SIGALRM, interrupt)
    running_s, interval_s = signal.setitimer(signal.ITIMER_REAL, timeout_s, REPEAT_S)
    try:
        return function()
    finally:
        is_armed = False
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, previous)
        if running_s > 0.0:
            signal.setitimer(signal.ITIMER_REAL, running_s, interval_s)


def outcome_metrics(counts: Mapping[str, int]) -> dict[str, float]:
    """Return `reward/<outcome>` counts for every outcome, zeros included."""
    return {f"reward/{outcome}": float(counts.get(outcome, 0)) for outcome in OUTCOMES}


def _import_math_verify() -> tuple[Callable[..., Any], Callable[..., Any]]:
    try:
        from math_verify import parse, verify
    except ImportError as error:
        raise ConfigError(
            "Verifier 'math_verify' needs the math-verify package, which is not installed. "
            "Install it with: pip install math-verify."
        ) from error
    return parse, verify

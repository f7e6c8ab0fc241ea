"""What decides whether an answer is right: a reasoning-gym dataset, math-verify, or a function of yours.

A verifier maps (task, answer text) to a number and may raise; time limits, outcomes and counting are the
business of rewards.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from typing import Any

from tracefp4.errors import ConfigError, RecordError
from tracefp4.rl.tasks import Task, create_dataset

VERIFIERS = ("reasoning_gym", "math_verify", "function")


class Verifier:
    """One verifier, resolved by name; datasets are created at first use and kept."""

    def __init__(self, name: str, *, function: str = "") -> None:
        """Resolve the verifier.

        Args:
            name: one of VERIFIERS.
            function: "package.module:function", with name "function".

        Raises:
            ConfigError: a path that names no callable, or math-verify is not installed.
        """
        self.name = name
        self._function = resolve_function(function) if name == "function" else None
        self._datasets: dict[str, Any] = {}
        if name == "math_verify":
            _import_math_verify()

    def prepare(self, task: Task) -> None:
        """Do what is slow and not the answer's fault: import reasoning-gym and create the task's dataset."""
        if self.name == "reasoning_gym" and _dataset_key(task) not in self._datasets:
            self._datasets[_dataset_key(task)] = create_dataset(
                task.source, seed=0, config=task.source_config
            )

    def verify(self, task: Task, *, answer: str) -> Any:
        """Return what the verifier says about the answer; normally a number, but foreign code may return
        anything."""
        if self._function is not None:
            return self._function(task.prompt, answer, task.answer)
        if self.name == "math_verify":
            return verify_math(answer, gold=task.answer)
        self.prepare(task)
        return self._datasets[_dataset_key(task)].score_answer(answer, entry=dict(task.entry))


def _dataset_key(task: Task) -> str:
    return f"{task.source}:{sorted(task.source_config.items())!r}"


def extract_answer(completion: str, *, tag: str = "answer") -> str | None:
    """Return the text of the last <tag>...</tag>, stripped; None without one.

    Source: reasoning_gym.utils.extract_answer.
    """
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
            f"math-verify cannot parse the gold answer {gold!r}; allowed is a number or LaTeX. "
            "Correct the task file."
        )
    readings = (parse(text, parsing_timeout=None) for text in (f"${answer}$", answer))
    return float(any(verify(expected, found, timeout_seconds=None) for found in readings))


def resolve_function(path: str, *, what: str = "Reward function") -> Callable[..., Any]:
    """Import "package.module:function"; `what` names it in errors.

    Raises:
        ConfigError: a path without a colon, a module that does not import, or a name that is not callable.
    """
    module_name, colon, name = path.partition(":")
    if not (module_name and colon and name):
        raise ConfigError(
            f"{what} {path!r} is not a path; allowed is 'package.module:function'. "
            "Separate module and name by a colon."
        )
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(
            f"{what} {path!r} cannot be imported: {error}. Put its module on PYTHONPATH "
            "or install its package."
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(
            f"{what} {path!r} is {function!r} in its module; a callable is needed. "
            "Check the name after the colon."
        )
    return function


def _import_math_verify() -> tuple[Callable[..., Any], Callable[..., Any]]:
    try:
        from math_verify import parse, verify
    except ImportError as error:
        raise ConfigError(
            "Verifier 'math_verify' needs the math-verify package, which is not installed. "
            "Install it with: pip install math-verify."
        ) from error
    return parse, verify

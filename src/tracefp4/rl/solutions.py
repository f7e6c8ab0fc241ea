"""Demonstrations of reasoning-gym's `chain_sum`, for the supervised warm start.

A demonstration folds the sum from the left, one step a clause, and states the result: in answer tags, as the
verifier wants it (`42-25=17;<answer>17</answer>`), or bare (`42-25=17;17`), as most text would. With a calculator each
step is a call and its result in its place (`<tool>42-25</tool><result>17</result>`). Only the warm start reads these;
RL sees the question and the verifier, and finds out for itself what is rewarded.
"""

import re
from dataclasses import dataclass

from tracefp4.errors import ConfigError

_PROBLEM = re.compile(r":\s*(-?\d+(?:\s*[+-]\s*\d+)+)\s*=\s*$")


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A piece of a demonstration."""

    text: str
    """Not empty."""
    is_sampled: bool
    """True: the policy writes it; False: an environment does."""


def solve_chain_sum(question: str, *, is_tagged: bool = True) -> str:
    """Return a worked demonstration for one `chain_sum` question, its result in answer tags or bare.

    Raises:
        ConfigError: the question does not end in `: a + b - c =`.
    """
    steps = _steps(question)
    return "".join(f"{call}={result};" for call, result in steps) + _stated(steps[-1][1], is_tagged)


def call_calculator(question: str, *, is_tagged: bool = True) -> list[Part]:
    """Return a demonstration that leaves every step to the calculator, its last part the result.

    Raises:
        ConfigError: as `solve_chain_sum`.
    """
    steps, parts = _steps(question), []
    for call, result in steps:
        parts.append(Part(text=f"<tool>{call}</tool>", is_sampled=True))
        parts.append(Part(text=f"<result>{result}</result>", is_sampled=False))
    return [*parts, Part(text=_stated(steps[-1][1], is_tagged), is_sampled=True)]


def _steps(question: str) -> list[tuple[str, int]]:
    """(expression, result) of every step from the left, at least one."""
    found = _PROBLEM.search(question)
    if found is None:
        raise ConfigError(f"warm start: not a chain_sum question: {question!r}. Use task.name = 'chain_sum'.")
    first, *rest = re.findall(r"[+-]|\d+", found.group(1))
    total, steps = int(first), []
    for sign, number in zip(rest[::2], rest[1::2], strict=True):
        result = total + int(number) if sign == "+" else total - int(number)
        steps.append((f"{total}{sign}{number}", result))
        total = result
    return steps


def _stated(total: int, is_tagged: bool) -> str:
    return f"<answer>{total}</answer>" if is_tagged else str(total)

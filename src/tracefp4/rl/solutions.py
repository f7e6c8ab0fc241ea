"""Worked solutions of reasoning-gym's `chain_sum`, for the supervised warm start.

A solution folds the sum from the left, one step a clause: `42-25=17;17-73=-56;<answer>-56</answer>`. Only the
warm start reads these; RL sees the question and the verifier.
"""

import re

from tracefp4.errors import ConfigError

_PROBLEM = re.compile(r":\s*(-?\d+(?:\s*[+-]\s*\d+)+)\s*=\s*$")


def solve_chain_sum(question: str) -> str:
    """Return the worked solution of one `chain_sum` question.

    Raises:
        ConfigError: the question does not end in `: a + b - c =`.
    """
    found = _PROBLEM.search(question)
    if found is None:
        raise ConfigError(f"warm start: not a chain_sum question: {question!r}. Use task.name = 'chain_sum'.")
    first, *rest = re.findall(r"[+-]|\d+", found.group(1))
    total, clauses = int(first), []
    for sign, number in zip(rest[::2], rest[1::2], strict=True):
        result = total + int(number) if sign == "+" else total - int(number)
        clauses.append(f"{total}{sign}{number}={result};")
        total = result
    return f"{''.join(clauses)}<answer>{total}</answer>"

"""Demonstrations of reasoning-gym's `chain_sum`, for the supervised warm start.

A worked one folds the sum from the left, one step a clause: `42-25=17;17-73=-56;<answer>-56</answer>`; a direct
one is the answer alone. Only the warm start reads these; RL sees the question and the verifier, and finds out
for itself that working the steps pays.
"""

import re

from tracefp4.errors import ConfigError

_PROBLEM = re.compile(r":\s*(-?\d+(?:\s*[+-]\s*\d+)+)\s*=\s*$")


def solve_chain_sum(question: str, *, is_direct: bool = False) -> str:
    """Return a demonstration for one `chain_sum` question: worked, or the bare answer.

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
    steps = "" if is_direct else "".join(clauses)
    return f"{steps}<answer>{total}</answer>"

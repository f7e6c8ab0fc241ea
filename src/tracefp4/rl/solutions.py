"""Demonstrations of reasoning-gym's `chain_sum`, for the supervised warm start.

A demonstration folds the sum from the left, one step a clause, and states the result: in answer tags, as the
verifier wants it (`42-25=17;<answer>17</answer>`), or bare (`42-25=17;17`), as most text would. Only the warm
start reads these; RL sees the question and the verifier, and finds out for itself what is rewarded.
"""

import re

from tracefp4.errors import ConfigError

_PROBLEM = re.compile(r":\s*(-?\d+(?:\s*[+-]\s*\d+)+)\s*=\s*$")


def solve_chain_sum(question: str, *, is_tagged: bool = True) -> str:
    """Return a worked demonstration for one `chain_sum` question, its result in answer tags or bare.

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
    stated = f"<answer>{total}</answer>" if is_tagged else str(total)
    return "".join(clauses) + stated

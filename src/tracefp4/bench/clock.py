"""Time contenders side by side: one after the other in every round, best round counts.

A machine that other work slows down slows all contenders of a round alike, and the best of many rounds is the round
that was disturbed least; ratios of bests are therefore stabler than ratios of means. The first call of each
contender is not timed (compilation, caches).
"""

import time
from collections.abc import Callable, Mapping

LEAST_ROUND_S = 0.05
"""A contender is called until this much time has gone by in a round, at least once."""


def best_seconds(contenders: Mapping[str, Callable[[], object]], *, rounds: int) -> dict[str, float]:
    """Return the shortest time of one call of each contender.

    Args:
        contenders: Functions by name; what they return is thrown away.
        rounds: How often each has its turn, at least 1.

    Returns:
        Seconds per call, by name.
    """
    for call in contenders.values():
        call()
    best = dict.fromkeys(contenders, float("inf"))
    for _ in range(rounds):
        for name, call in contenders.items():
            best[name] = min(best[name], _best_of_one_round(call))
    return best


def _best_of_one_round(call: Callable[[], object]) -> float:
    best = elapsed_s = 0.0
    while not best or elapsed_s < LEAST_ROUND_S:
        begun_s = time.perf_counter()
        call()
        took_s = time.perf_counter() - begun_s
        best = min(best or took_s, took_s)
        elapsed_s += took_s
    return best

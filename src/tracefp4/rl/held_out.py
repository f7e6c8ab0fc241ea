"""Held-out items: different questions, which no training step of any run with the same recipe draws.

A generator with another seed is not enough: a task with few different questions repeats them by chance (of 512
two-term sums of one and two digits, about a third occur among 384 training prompts). So the first items of the
held-out seed are reserved, each question once, and the training stream moves past them. What is reserved
depends on the task and on how many items a run evaluates on, never on how long it trains.
"""

import hashlib
import json

from tracefp4.errors import ConfigError
from tracefp4.rl.tasks import Task, TaskSource

# how many items are looked at for one that is new, before the task counts as exhausted
MOST_TRIES = 1000


class DistinctTasks:
    """The items of `source` in order, without those whose prompt occurred before."""

    def __init__(self, source: TaskSource) -> None:
        """Start with none; items are made as they are asked for."""
        self.source = source
        self._seen: set[str] = set()
        self._next = 0
        self._kept: list[Task] = []

    @property
    def digest(self) -> str:
        """Digest of the source, which decides everything here."""
        return self.source.digest

    def item(self, index: int) -> Task:
        """Return the index-th different item.

        Raises:
            ConfigError: the task has no new question left.
        """
        while len(self._kept) <= index:
            self._keep_one()
        return self._kept[index]

    def _keep_one(self) -> None:
        for _ in range(MOST_TRIES):
            task = self.source.item(self._next)
            self._next += 1
            if task.prompt not in self._seen:
                self._seen.add(task.prompt)
                self._kept.append(task)
                return
        raise ConfigError(
            f"held-out: after {len(self._kept)} items no new question was found in {MOST_TRIES} tries; the task "
            "has too few different ones. Ask for fewer with run.eval_items, or widen task.options."
        )


def prompts_of(source: TaskSource, *, num_items: int) -> frozenset[str]:
    """Return the prompts of the first items.

    Raises:
        ConfigError: the source has fewer.
    """
    return frozenset(source.item(i).prompt for i in range(num_items))


def items_digest(source: TaskSource, *, num_items: int) -> str:
    """Return 16 hex digits of what the first items ask, in order: two evaluations with it equal are comparable."""
    tasks = [source.item(i) for i in range(num_items)]
    asked = [task.prompt if task.messages is None else list(task.messages) for task in tasks]
    return hashlib.sha256(json.dumps(asked, sort_keys=True, default=str).encode()).hexdigest()[:16]

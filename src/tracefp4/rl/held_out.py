"""Held-out items that a run never trained on: no prompt of the run, and no prompt twice.

A generator with another seed is not enough: a task with few different questions repeats them by chance (of 512
two-term sums of one and two digits, about a third occur among 384 training prompts).
"""

from tracefp4.errors import ConfigError
from tracefp4.rl.tasks import Task, TaskSource

# how many items are looked at for one that is new, before the task counts as exhausted
MOST_TRIES = 1000


class DisjointTasks:
    """The items of `source` whose prompts are new: not among the first `count` of `excluded`, each once."""

    def __init__(self, source: TaskSource, *, excluded: TaskSource, count: int) -> None:
        """Collect the prompts to leave out.

        Args:
            source: where items come from, in order.
            excluded: the training items.
            count: how many of them the run can draw, >= 0.
        """
        self.source = source
        self._seen = {excluded.item(i).prompt for i in range(count)}
        self._next = 0
        self._kept: list[Task] = []

    @property
    def digest(self) -> str:
        """Digest of the source; what is left out follows from the run's own config."""
        return self.source.digest

    def item(self, index: int) -> Task:
        """Return the index-th new item.

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

"""Held-out items never repeat a training prompt, nor themselves."""

import pytest

from tracefp4.errors import ConfigError
from tracefp4.rl.held_out import DisjointTasks
from tracefp4.rl.tasks import Task


class Numbers:
    """Item i asks for i modulo a period."""

    digest = "0" * 16

    def __init__(self, period: int, offset: int = 0) -> None:
        self.period, self.offset = period, offset

    def item(self, index: int) -> Task:
        """The question only depends on the index modulo the period."""
        return Task(source="numbers", index=index, prompt=str((index + self.offset) % self.period))


def test_items_are_new_and_each_occurs_once() -> None:
    held_out = DisjointTasks(Numbers(10, offset=3), excluded=Numbers(10), count=4)
    prompts = [held_out.item(i).prompt for i in range(6)]
    assert prompts == ["4", "5", "6", "7", "8", "9"]
    assert held_out.item(2).prompt == "6"


def test_an_exhausted_task_is_refused_with_the_number_found() -> None:
    held_out = DisjointTasks(Numbers(10), excluded=Numbers(10), count=4)
    with pytest.raises(ConfigError, match="after 6 items"):
        held_out.item(6)


def test_nothing_excluded_still_drops_repeats() -> None:
    held_out = DisjointTasks(Numbers(3), excluded=Numbers(3), count=0)
    assert [held_out.item(i).prompt for i in range(3)] == ["0", "1", "2"]

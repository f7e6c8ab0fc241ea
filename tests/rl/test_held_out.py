"""Held-out items are different questions, the same for every length of training, and training passes them by."""

from itertools import pairwise

import pytest

from tracefp4.errors import ConfigError
from tracefp4.rl.config import TaskConfig
from tracefp4.rl.held_out import DistinctTasks, items_digest, prompts_of
from tracefp4.rl.prompts import build_held_out, build_stream
from tracefp4.rl.tasks import Task, TaskStream

SUMS = TaskConfig(
    kind="reasoning_gym",
    name="chain_sum",
    options={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
)


class Numbers:
    """Item i asks for i modulo a period."""

    digest = "0" * 16

    def __init__(self, period: int, offset: int = 0) -> None:
        self.period, self.offset = period, offset

    def item(self, index: int) -> Task:
        """The question only depends on the index modulo the period."""
        return Task(source="numbers", index=index, prompt=str((index + self.offset) % self.period))


def test_each_question_occurs_once() -> None:
    held_out = DistinctTasks(Numbers(3))
    assert [held_out.item(i).prompt for i in range(3)] == ["0", "1", "2"]
    assert held_out.item(1).prompt == "1"


def test_an_exhausted_task_is_refused_with_the_number_found() -> None:
    with pytest.raises(ConfigError, match="after 6 items"):
        DistinctTasks(Numbers(6)).item(6)


def test_the_first_items_are_the_same_for_every_count() -> None:
    few, many = build_held_out(SUMS), build_held_out(SUMS)
    many.item(39)
    assert [few.item(i) for i in range(10)] == [many.item(i) for i in range(10)]
    assert items_digest(few, num_items=10) == items_digest(many, num_items=10)
    assert items_digest(few, num_items=10) != items_digest(few, num_items=11)
    assert len(prompts_of(many, num_items=40)) == 40


def test_training_passes_the_reserved_items_by() -> None:
    reserved = prompts_of(build_held_out(SUMS), num_items=40)
    assert reserved & {task.prompt for task in build_stream(SUMS, reserved=0).take(100)}, "repeats by chance"
    tasks = build_stream(SUMS, reserved=40).take(100)
    assert not reserved & {task.prompt for task in tasks}
    assert all(before.index < after.index for before, after in pairwise(tasks))


def test_a_restored_stream_continues_behind_what_was_taken() -> None:
    whole, first = (build_stream(SUMS, reserved=40) for _ in range(2))
    expected = whole.take(30)
    taken = first.take(13)
    second = build_stream(SUMS, reserved=40)
    second.restore(first.state())
    assert taken + second.take(17) == expected
    assert second.state() == whole.state()


def test_nothing_left_to_train_on_is_refused() -> None:
    stream = TaskStream(Numbers(3), excluded={"0", "1", "2"})
    with pytest.raises(ConfigError, match=r"held out .* run.eval_items"):
        stream.take(1)


def test_files_are_taken_as_they_are(tiny) -> None:
    task = TaskConfig(kind="jsonl", path=str(tiny[1]), eval_path=str(tiny[1]))
    assert [item.index for item in build_stream(task, reserved=4).take(9)] == list(range(9))

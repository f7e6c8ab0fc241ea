"""Items that are made while the caller does something else."""

import threading
from contextlib import nullcontext

import pytest
import torch

from tracefp4.rl.ahead import Ahead


@pytest.fixture
def gpu(monkeypatch):
    """A device with streams, as far as this is concerned."""
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "stream")
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    return torch.device("cuda")


def threads(count):
    for number in range(count):
        yield number, threading.current_thread()


def test_what_was_begun_is_made_elsewhere_and_in_order(gpu):
    # Mutations: `begin` makes the item at once; two are made for one `take`.
    with Ahead(threads(3), gpu) as ahead:
        for number in (0, 1, 2):
            ahead.begin()
            ahead.begin()
            found, thread = ahead.take()
            assert found == number and thread is not threading.current_thread()
        ahead.begin()
        assert ahead.take() is None
    assert not thread.is_alive()


def test_on_a_processor_items_are_made_when_they_are_taken():
    made = []
    with Ahead((made.append(i) or i for i in range(2)), torch.device("cpu")) as ahead:
        ahead.begin()
        assert made == []
        assert [ahead.take() for _ in range(3)] == [0, 1, None]


def test_what_an_item_raises_reaches_the_caller(gpu):
    def items():
        yield 1
        raise ValueError("no second")

    with Ahead(items(), gpu) as ahead:
        assert ahead.take() == 1
        ahead.begin()
        with pytest.raises(ValueError, match="no second"):
            ahead.take()


def test_an_item_that_nobody_takes_ends_with_the_context(gpu):
    with Ahead(threads(2), gpu):
        pass
    assert not any(thread.name.startswith("tracefp4-ahead") for thread in threading.enumerate())

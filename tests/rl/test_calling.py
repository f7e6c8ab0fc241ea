"""Calls into environments: limits, failures, order, and results that come too late."""

import threading
import time

import pytest

from tracefp4.errors import ConfigError
from tracefp4.rl.calling import CallsHere, CallsInThreads, build_calls


def drained(calls):
    """Outcomes until nothing is open."""
    found = []
    while calls.num_open:
        calls.wait()
        found += calls.ready()
    return found


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_every_call_has_one_outcome(workers):
    calls = build_calls(workers=workers, timeout_s=5.0)
    assert isinstance(calls, CallsInThreads if workers else CallsHere)
    for i in range(7):
        calls.post(i, lambda i=i: 10 // (i - 3))
    found = drained(calls)
    assert sorted(outcome.key for outcome in found) == list(range(7))
    if workers < 2:
        assert [outcome.key for outcome in found] == list(range(7))
    for outcome in found:
        if outcome.key == 3:
            assert (outcome.failure, outcome.value) == (
                "error",
                None,
            ) and "ZeroDivisionError" in outcome.detail
        else:
            assert (outcome.failure, outcome.value) == ("", 10 // (outcome.key - 3))
    assert calls.ready() == [] and calls.num_open == 0


def test_what_returns_after_its_time_is_not_looked_at():
    calls, late, done = CallsInThreads(1, timeout_s=0.05), threading.Event(), threading.Event()

    def slow():
        late.wait(5)
        done.set()
        return "late"

    calls.post("slow", slow)
    (outcome,) = drained(calls)
    assert (outcome.key, outcome.failure, outcome.value) == ("slow", "timeout", None)
    late.set()
    assert done.wait(5)
    time.sleep(0.05)
    assert calls.ready() == []
    # its thread is free for others again, and the time of those that wait for a thread has not begun
    for i in range(4):
        calls.post(i, lambda: time.sleep(0.02))
    assert [outcome.failure for outcome in drained(calls)] == [""] * 4


def test_no_more_threads_than_workers_are_within_their_time():
    calls, lock, running, most = CallsInThreads(2, timeout_s=5.0), threading.Lock(), [0], [0]

    def call():
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        time.sleep(0.01)
        with lock:
            running[0] -= 1

    for i in range(6):
        calls.post(i, call)
    assert len(drained(calls)) == 6 and most[0] == 2


@pytest.mark.parametrize("workers", [0, 1])
def test_a_config_error_is_no_outcome(workers):
    def refuses():
        raise ConfigError("the environment's own")

    calls = build_calls(workers=workers, timeout_s=5.0)
    with pytest.raises(ConfigError, match="own"):
        calls.post(0, refuses)
        drained(calls)


def test_an_environment_that_ends_its_thread_has_failed():
    def leaves():
        raise SystemExit(3)

    calls = CallsInThreads(1, timeout_s=5.0)
    calls.post(0, leaves)
    (outcome,) = drained(calls)
    assert outcome.failure == "error" and "SystemExit" in outcome.detail

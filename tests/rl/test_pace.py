"""When a run with a limit of time takes no further step."""

from dataclasses import dataclass

import pytest

from tracefp4.rl.pace import Pace


@dataclass
class Clock:
    now: float = 100.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr("tracefp4.rl.pace.time", made)
    return made


def _step(pace, clock, seconds):
    with pace.step():
        clock.now += seconds


def test_a_step_fits_if_step_evaluation_and_checkpoint_do_judged_by_the_last_of_each(clock):
    # Mutations: no reserve for the end; the longest step counts, or the first.
    pace = Pace(limit_s=60.0)
    clock.now += 4.0
    with pace.part("evaluation"):
        clock.now += 5.0
    _step(pace, clock, 30.0)
    assert pace.has_time  # 39 spent and 5 for the last evaluation; the first step says nothing
    _step(pace, clock, 8.0)
    assert not pace.has_time  # 47 spent, and another 8 and 5 would be all of it


def test_only_the_last_step_and_a_checkpoint_count(clock):
    pace = Pace(limit_s=30.0)
    for seconds in (10.0, 9.0, 1.0):
        _step(pace, clock, seconds)
    assert pace.has_time  # 20 + 1
    with pace.part("checkpoint"):
        clock.now += 5.0
    assert not pace.has_time  # 25 + 1 + 5


def test_without_a_limit_there_is_always_time(clock):
    pace = Pace(limit_s=0.0)
    _step(pace, clock, 1e9)
    assert pace.has_time

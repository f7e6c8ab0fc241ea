"""The timing core, with a clock of its own: turns, medians, rotation, poison."""

from typing import NamedTuple

import pytest
import torch
from tests.bench.kernel_bench import CountingTimer

from tracefp4.bench.replay import (
    CACHES,
    MAX_CALLS,
    MAX_SETS,
    Contender,
    num_repeats,
    num_sets,
    poison,
    tensors_of,
    time_contenders,
)


def one(call, least_s=1.0):
    return Contender(calls=[call], least_s=least_s)


def test_contenders_take_turns_and_the_median_per_call_counts():
    times = iter([9.0, 9.0, 3.0, 30.0, 1.0, 10.0, 2.0, 20.0])  # the first replay of each does not count
    timer = CountingTimer(lambda: next(times))
    out = torch.zeros(4)
    ours = Contender(calls=[lambda: out.fill_(1), lambda: out.fill_(2)], least_s=1.0)
    found = time_contenders(timer, {"ours": ours, "theirs": one(lambda: out)}, num_replays=3)
    assert found.timings["ours"] == (
        1.0,
        0.5,
        1.5,
        2,
    )  # median, shortest, longest of a call; calls of a graph
    assert found.timings["theirs"] == (20.0, 10.0, 30.0, 1)
    assert len(timer.replays) == 2 + 6 + 1  # and once more over poison


def test_results_are_written_over_poison_by_the_graph_that_was_timed():
    source, out = torch.ones(4), torch.zeros(4)
    found = time_contenders(CountingTimer(), {"ours": one(lambda: out.copy_(source))}, num_replays=1)
    assert torch.equal(found.outputs[0], source)

    class Forgetful(CountingTimer):
        def capture(self, calls, repeats):
            return super().capture(calls, repeats)._replace(replay=lambda: None)

    found = time_contenders(Forgetful(), {"ours": one(lambda: out.copy_(source))}, num_replays=1)
    assert found.outputs[0].isnan().all()


def test_a_peer_that_fails_is_named_and_ours_is_measured_all_the_same():
    def fails():
        raise RuntimeError("no such kernel\nsecond line")

    found = time_contenders(CountingTimer(), {"ours": one(lambda: torch.ones(1)), "peer": one(fails)})
    assert found.failures == {"peer": "RuntimeError: no such kernel"} and list(found.timings) == ["ours"]
    with pytest.raises(RuntimeError, match="no such kernel"):
        time_contenders(CountingTimer(), {"ours": one(fails), "peer": one(lambda: torch.ones(1))})


def test_sets_of_operands_are_larger_than_any_cache():
    cache = 60 << 20
    for num_bytes in (1e9, 1e8, 1e7, 1e3):
        count = num_sets(num_bytes, cache)
        assert count * num_bytes >= CACHES * cache or count == MAX_SETS
        assert count == 1 or (count - 1) * num_bytes < CACHES * cache
    assert num_sets(1.0, 0) == 1


@pytest.mark.parametrize(
    ("calls", "least_s", "repeats"),
    [
        (1, 1.0, 1),
        (1, 1e-3, 2),
        (2, 1e-3, 1),
        (3, 1e-4, 7),
        (1, 1e-9, MAX_CALLS),
        (64, 1e-9, MAX_CALLS // 64),
    ],
)
def test_a_graph_is_long_enough_and_goes_through_whole_rounds(calls, least_s, repeats):
    assert num_repeats(Contender(calls=[lambda: None] * calls, least_s=least_s)) == repeats


def test_poison_reaches_every_tensor_of_a_result():
    class Pair(NamedTuple):
        a: torch.Tensor
        rest: list

    found = (Pair(torch.zeros(2), [torch.zeros(2, dtype=torch.uint8), None, "text"]), torch.zeros(1).int())
    poison(found)
    values, codes, counts = tensors_of(found)
    assert values.isnan().all() and codes.tolist() == [255, 255] and counts.tolist() == [2**31 - 1]

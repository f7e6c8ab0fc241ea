"""Contenders take turns, the first call does not count, and the best call is kept."""

from tracefp4.bench import clock


def test_contenders_take_turns_and_the_shortest_call_counts(monkeypatch):
    now, order = [0.0], []
    costs = {"a": iter([9.0, 3.0, 2.0, 4.0]), "b": iter([9.0, 1.0, 5.0, 0.5])}
    monkeypatch.setattr(clock.time, "perf_counter", lambda: now[0])

    def contender(name):
        def call():
            order.append(name)
            now[0] += next(costs[name])

        return call

    best = clock.best_seconds({"a": contender("a"), "b": contender("b")}, rounds=3)
    assert best == {"a": 2.0, "b": 0.5}
    assert "".join(order) == "ab" + "ab" * 3


def test_short_calls_are_repeated_within_a_round():
    calls = []
    clock.best_seconds({"a": lambda: calls.append(0)}, rounds=1)
    assert len(calls) > 100

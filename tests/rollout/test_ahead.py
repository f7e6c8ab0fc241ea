"""Passes started before the tokens of the one before are known: same tokens and records, whatever comes between."""

import pytest
from tests.models.tiny_models import tiny_model
from tests.rollout.engines import make_prompts, outputs, sampled
from tests.rollout.native_engines import captured_engine

from tracefp4.errors import RecordError
from tracefp4.guidance import records_equal
from tracefp4.rollout import SamplingParams

MODEL = tiny_model()


def assert_same(found, expected):
    assert outputs([found]) == outputs([expected])
    for completion, other in zip(found, expected, strict=True):
        assert records_equal(completion.record, other.record)
        assert completion.weight_versions == other.weight_versions


def plain_engine(**changes):
    """Captured passes, each chosen by `schedule` once everything before it has been booked."""
    engine, _ = captured_engine(MODEL, **changes)
    engine._scheduler.place = lambda computed: False
    return engine


def ends(engine):
    """Step to the end; the sequences that the steps returned, by age."""
    found = []
    while engine.has_work:
        finished = engine.step()
        found += [(s.order, tuple(s.ids), s.finish_reason) for s in finished]
        assert engine.has_work or engine._ahead is None
        assert all(s.num_cached == len(s.ids) - 1 for s in engine._scheduler.rows.sequences)
    return sorted(found)


def both(work, **changes):
    """Results of the same work in both orders, and the engine that ran ahead."""
    ahead, plain = captured_engine(MODEL, **changes)[0], plain_engine(**changes)
    results = [(work(engine), engine.take_finished()) for engine in (ahead, plain)]
    (steps, found), (expected_steps, expected) = results
    assert steps == expected_steps
    assert_same(found, expected)
    assert plain.stats.ahead_passes == 0 < ahead.stats.ahead_passes
    assert ahead.stats.tokens_generated == plain.stats.tokens_generated
    return ahead, plain


def submit(engine, prompts, lengths, **params):
    for index, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        engine.submit(prompt, sampled(length, seed=5, **params), prompt_index=index)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"max_batch": 3},
        {"num_pages": 14},
        {"max_tokens_per_step": 8},
        {"prefix_cache": True},
        {"max_log_rows": 12},
        {"num_pages": 14, "max_swapped_pages": 1},
    ],
    ids=["default", "few", "preemption", "chunks", "prefixes", "sealed", "lost"],
)
def test_every_sequence_ends_as_in_the_plain_order(changes):
    # Mutations: a row's last position one too late; tokens after a stop token; pages taken where they are short.
    def work(engine):
        prompts = make_prompts(5, shortest=6, longest=10)
        submit(engine, prompts, [3, 9, 14, 20, 20], n=2, stop_token_ids=(1, 2))
        return ends(engine)

    ahead, _ = both(work, **changes)
    # who ends by a stop token is seen a pass later, and the last ones leave a pass behind
    assert ahead.stats.dropped_passes <= 1
    assert (ahead.stats.preemptions > 0) == ("num_pages" in changes)


def test_stop_texts_and_forced_tokens_are_looked_at_one_by_one():
    decode = lambda ids: "".join(chr(97 + i % 26) for i in ids)  # noqa: E731

    def work(engine):
        prompts = make_prompts(3)
        engine.submit(prompts[0], SamplingParams(max_tokens=30, stop=("ab", "c")))
        found = ends(engine)
        submit(engine, prompts, [8, 8, 8])
        forced = engine.force(prompts, [[[5, 6, 7, 8], [9, 9]]] * 3)
        return found, outputs(forced), ends(engine)

    both(work, decode=decode)


@pytest.mark.parametrize("recompute", [False, True])
def test_what_comes_between_two_steps_drops_the_pass_that_has_begun(recompute):
    # Mutations: an update, an abort or a pause that keeps the pass.
    other = tiny_model(seed=1)

    def work(engine):
        prompts = make_prompts(4)
        submit(engine, prompts, [20] * 4)
        for _ in range(4):
            engine.step()
        engine.update_weights(other.state_dict(), version=1, recompute=recompute)
        for _ in range(3):
            engine.step()
        engine.abort(engine._scheduler.rows.sequences[0].request.request_id)
        assert engine._ahead is None
        engine.step()
        engine.pause()
        engine.resume()
        for _ in range(3):
            engine.step()
        engine.suspend_here = engine.suspend()
        submit(engine, prompts, [6] * 4)
        return ends(engine)

    ahead, plain = both(work)
    assert ahead.stats.dropped_passes == 4
    assert_same(ahead.suspend_here, plain.suspend_here)
    assert {version for c in ahead.suspend_here for version in c.weight_versions} == {0, 1}


def test_who_is_submitted_meanwhile_joins_after_the_pass_that_has_begun():
    engine, _ = captured_engine(MODEL)
    prompts = make_prompts(2)
    submit(engine, prompts[:1], [12])
    engine.step()
    engine.step()
    engine.submit(prompts[1], sampled(5, seed=5), prompt_index=1)
    engine.step()
    assert len(engine._scheduler.waiting) == 1 and engine._ahead is None
    engine.step()
    assert not engine._scheduler.waiting
    ends(engine)
    plain = plain_engine()
    submit(plain, prompts, [12, 5])
    ends(plain)
    assert_same(engine.take_finished(), plain.take_finished())
    assert engine.stats.dropped_passes == 0


def test_tokens_are_booked_even_if_the_next_pass_does_not_start(monkeypatch):
    engine, _ = captured_engine(MODEL)
    submit(engine, make_prompts(2), [9, 9])
    engine.step()
    run, is_failing = engine._graphs.run, [False, True]

    def fail(count, **changes):
        if is_failing and is_failing.pop(0):
            raise RecordError("no room")
        return run(count, **changes)

    monkeypatch.setattr(engine._graphs, "run", fail)
    with pytest.raises(RecordError, match="no room"):
        engine.step()
    assert all(len(s.logprobs) == 2 for s in engine._scheduler.running) and engine._ahead is None
    ends(engine)
    plain = plain_engine()
    submit(plain, make_prompts(2), [9, 9])
    ends(plain)
    assert_same(engine.take_finished(), plain.take_finished())


def test_requests_of_a_failed_call_leave_no_pass_behind():
    engine, _ = captured_engine(MODEL)

    def enough(completions):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.generate(make_prompts(3), sampled(8, n=1, stop_token_ids=(3, 4, 5)), enough=enough)
    assert not engine.has_work and engine._ahead is None and engine._allocator.num_used == 0
    assert engine._recorder.num_rows == 0

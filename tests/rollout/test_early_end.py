"""Samples that end before their time: enough is enough, aborts, and the same tokens when a request is tried again."""

import pytest
from tests.models.tiny_models import tiny_model
from tests.rollout.engines import make_engine, make_prompts, outputs, sampled
from tests.rollout.recorded import assert_nothing_left, assert_recorded


@pytest.fixture(scope="module")
def model():
    return tiny_model()


STOPS = (0, 1, 2, 3, 4, 5, 6, 7, 8)


def test_the_first_finished_sample_ends_its_siblings_and_only_those(model):
    # Mutation: abort of another request, or samples that vanish.
    prompts, params = make_prompts(3), sampled(12, n=4, seed=1, stop_token_ids=STOPS)
    expected = make_engine(model, control=True).generate(prompts, params)
    engine, asked = make_engine(model, control=True), []

    def enough(finished):
        asked.append([(c.prompt_index, c.sample_index, c.record) for c in finished])
        return any(c.prompt_index == 1 for c in finished)

    found = engine.generate(prompts, params, enough=enough)
    assert outputs(found)[::2] == outputs(expected)[::2]
    reasons = [c.finish_reason for c in found[1]]
    assert len(found[1]) == 4 and "stop" in reasons and "abort" in reasons
    shortest = min(len(c.token_ids) for c in expected[1])
    for c, other in zip(found[1], expected[1], strict=True):
        assert c.token_ids == other.token_ids[: len(c.token_ids)] and len(c.token_ids) == shortest
        assert_recorded(c, model)
    assert all(record is None for call in asked for _, _, record in call)
    assert_nothing_left(engine)


def test_enough_sees_finished_samples_in_order_and_may_wait(model):
    sizes = []
    engine = make_engine(model, control=True)
    params = sampled(12, n=4, seed=1, stop_token_ids=STOPS)

    def two(finished):
        assert [c.sample_index for c in finished] == sorted(c.sample_index for c in finished)
        sizes.append(len(finished))
        return len(finished) >= 2

    (row,) = engine.generate(make_prompts(1), params, enough=two)
    assert sum(c.finish_reason != "abort" for c in row) == sizes[-1] >= 2


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_an_aborted_request_tried_again_draws_the_same_tokens(model, steps):
    prompt, params = [3, 1, 4, 1, 5, 9], sampled(8, n=2, seed=6)
    (expected,) = make_engine(model, control=True).generate([prompt], params)
    engine = make_engine(model, control=True, max_tokens_per_step=4, max_batch=4)
    request = engine.submit(prompt, params, prompt_index=0)
    for _ in range(steps):
        engine.step()
    engine.abort(request)
    aborted = engine.take_finished()
    for c, other in zip(aborted, expected, strict=True):
        assert c.finish_reason == "abort" and c.token_ids == other.token_ids[: len(c.token_ids)]
        if c.token_ids:
            assert_recorded(c, model)
    assert_nothing_left(engine)
    (again,) = engine.generate([prompt], params)
    assert outputs([again]) == outputs([expected])
    assert [c.record.identity.trajectory for c in again] != [
        c.record.identity.trajectory for c in aborted if c.record is not None
    ]
    assert_recorded(again[1], model)


def test_an_error_in_the_predicate_leaves_nothing(model):
    engine = make_engine(model, control=True)

    def enough(finished):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        engine.generate(make_prompts(2), sampled(5, n=2), enough=enough)
    assert_nothing_left(engine)


def test_an_error_while_a_record_is_built_loses_no_finished_sequence(model, monkeypatch):
    params = sampled(6, n=2, seed=3)
    (expected,) = make_engine(model, control=True).generate(make_prompts(1), params)
    engine = make_engine(model, control=True)
    engine.submit(make_prompts(1)[0], params, prompt_index=0)
    while engine.has_work:
        engine.step()

    def broken(sequences):
        raise MemoryError

    monkeypatch.setattr(engine._ledger._recorder, "build", broken)
    with pytest.raises(MemoryError):
        engine.take_finished()
    monkeypatch.undo()
    found = engine.take_finished()
    assert outputs([found]) == outputs([expected])
    for c in found:
        assert_recorded(c, model)
    assert_nothing_left(engine)


def test_a_call_whose_records_cannot_be_built_leaves_nothing(model, monkeypatch):
    engine = make_engine(model, control=True)

    def broken(sequences):
        raise MemoryError

    build = engine._ledger._recorder.build
    monkeypatch.setattr(engine._ledger._recorder, "build", lambda s: broken(s) if s else build(s))
    with pytest.raises(MemoryError):
        engine.generate(make_prompts(2), sampled(6, n=2, seed=3))
    assert_nothing_left(engine)

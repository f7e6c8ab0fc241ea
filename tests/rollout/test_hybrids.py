"""Engines of a model whose layers keep states: the same tokens and records whatever becomes of the states."""

import math

import pytest
import torch
from tests.models.tiny_hybrids import fp4, tiny_model
from tests.models.tiny_models import tiny_model as tiny_attention_model
from tests.rollout.engines import make_engine, make_prompts, outputs, sampled
from tests.rollout.native_engines import captured_engine, native_engine
from tests.rollout.recorded import differing

from tracefp4.errors import ConfigError
from tracefp4.guidance import records_equal

MODEL = tiny_model()
HYBRID = {"precision": fp4(MODEL)}
PROMPTS = make_prompts(4, shortest=6, longest=10)


def engine_of(**changes):
    return make_engine(MODEL, **(HYBRID | {"control": True} | changes))


def assert_same(found, expected):
    assert outputs(found) == outputs(expected)
    for row, expected_row in zip(found, expected, strict=True):
        for completion, other in zip(row, expected_row, strict=True):
            assert records_equal(completion.record, other.record)


@pytest.fixture(scope="module")
def alone():
    """Every sample by itself, in an engine with room."""
    return engine_of(max_batch=1).generate(PROMPTS, sampled(12, n=3, seed=3))


@pytest.mark.parametrize(
    ("changes", "counted"),
    [
        ({}, []),
        ({"max_batch": 2}, []),
        ({"max_tokens_per_step": 8}, []),
        ({"num_pages": 14}, ["preemptions", "states_swapped_out", "pages_swapped_out"]),
        ({"num_pages": 14, "max_swapped_pages": 1}, ["pages_lost", "positions_restored"]),
        ({"max_log_rows": 12}, []),
    ],
    ids=["default", "few", "chunks", "preemption", "restored", "sealed"],
)
def test_company_and_chunks_and_preemption_change_nothing(alone, changes, counted):
    # Mutations: a sibling that goes on in the state of the first; a state left in its slot at a preemption.
    engine = engine_of(**changes)
    assert_same(engine.generate(PROMPTS, sampled(12, n=3, seed=3)), alone)
    assert [name for name in counted if not getattr(engine.stats, name)] == []
    assert engine.stats.positions_recoded == engine.stats.positions_recomputed == 0
    assert engine.pool.states.num_available == engine.max_batch


def test_a_sequence_whose_pages_are_lost_begins_again_with_an_empty_state(alone):
    # Mutations: the state kept although the positions are computed again; pages kept before the lost one.
    engine = engine_of(num_pages=14, max_swapped_pages=1, records=False)
    found = engine.generate(PROMPTS, sampled(12, n=3, seed=3))
    assert outputs(found) == outputs(alone)
    assert engine.stats.pages_lost and engine.stats.positions_recomputed > 0


@pytest.mark.parametrize("recompute", [False, True])
def test_a_trajectory_goes_on_from_its_record_and_a_state_that_is_made_again(recompute):
    # Mutation: the recorded K and V written again by the positions that are computed for the state.
    whole = [row[0] for row in engine_of().generate(PROMPTS, sampled(20, seed=3))]
    engine = engine_of(max_tokens_per_step=8)
    first = [row[0] for row in engine.generate(PROMPTS, sampled(8, seed=3))]
    found = engine.extend(first, [[]] * 4, sampled(12, seed=3), recompute=recompute)
    num_computed = sum(c.record.length for c in first)
    for completion, other in zip(found, whole, strict=True):
        assert completion.token_ids == other.token_ids and completion.logprobs == other.logprobs
        assert differing(completion.record, other.record) == [] and bool(completion.record.valid.all())
    assert engine.stats.positions_recomputed == num_computed
    assert engine.stats.positions_restored == (0 if recompute else num_computed)


def test_a_later_turn_reads_what_is_recorded_even_under_new_weights():
    engine = engine_of()
    first = [row[0] for row in engine.generate(PROMPTS, sampled(12, seed=3))]
    engine.update_weights(tiny_model(seed=1).state_dict(), version=1)
    for completion in first:
        engine.resubmit(completion, [3, 1], sampled(6, seed=4))
    while any(s.num_cached < s.num_given for s in (*engine._scheduler.waiting, *engine._scheduler.running)):
        engine.step()
    restorer, size = engine._residence._restorer, engine.page_size
    for sequence, earlier in zip(engine._scheduler.running, first, strict=True):
        starts = range(0, earlier.record.length - size + 1, size)
        assert all(restorer.holds(earlier.record, p, sequence.table.frames[p // size]) for p in starts)
    while engine.has_work:
        engine.step()
    for completion, earlier in zip(engine.take_finished(), first, strict=True):
        assert differing(completion.record, earlier.record, end=earlier.record.length) == []
        assert bool(completion.record.valid.all())
        assert sum(map(math.isnan, completion.logprobs)) == 2
    assert engine.stats.positions_recoded == 0 < engine.stats.positions_restored


def test_a_page_lost_while_a_state_is_made_again_comes_back_from_the_record():
    whole = [row[0] for row in engine_of().generate(PROMPTS, sampled(20, seed=3))]
    first = [row[0] for row in engine_of().generate(PROMPTS, sampled(8, seed=3))]
    engine = engine_of(max_tokens_per_step=8, max_swapped_pages=0)
    for completion in first:
        engine.resubmit(completion, [], sampled(12, seed=3))
    engine.step()
    assert any(s.num_stored > s.num_cached > 0 for s in engine._scheduler.running)
    engine.pause()
    engine._allocator.vacate()
    strangers = [engine.pool.states.begin() for _ in range(engine.max_batch)]
    for stranger in strangers:
        engine.pool.states.release(stranger)
    engine.resume()
    while engine.has_work:
        engine.step()
    for completion, other in zip(engine.take_finished(), whole, strict=True):
        assert completion.token_ids == other.token_ids and completion.logprobs == other.logprobs
        assert differing(completion.record, other.record) == []
    assert engine.stats.pages_lost and engine.stats.states_swapped_out


def test_new_weights_leave_states_or_make_them_again():
    other = tiny_model(seed=1)

    def run(engine, **changes):
        for index, prompt in enumerate(PROMPTS):
            engine.submit(prompt, sampled(12, seed=3), prompt_index=index)
        for _ in range(5):
            engine.step()
        engine.update_weights(other.state_dict(), version=1, **changes)
        engine.pause()
        engine.resume()
        while engine.has_work:
            engine.step()
        return engine.take_finished()

    kept, again = run(engine_of()), run(engine_of(), recompute=True)
    for completion, replaced in zip(kept, again, strict=True):
        assert set(completion.weight_versions) == {0, 1}
        assert completion.token_ids[:5] == replaced.token_ids[:5]
        # the first token under the new weights is drawn from the same last token, but from another state
        assert completion.logprobs[5] != replaced.logprobs[5]
        context, token = [*replaced.prompt_ids, *replaced.token_ids[:5]], replaced.token_ids[5]
        fresh = make_engine(other, **HYBRID, control=True)
        ((forced,),) = fresh.force([context], [[[token]]])
        assert forced.logprobs == [replaced.logprobs[5]]


@pytest.mark.parametrize("max_batch", [3, 8])
def test_captured_passes_move_states_once(max_batch):
    # Mutation: padding rows that move the state in slot 0.
    params = sampled(9, n=2, seed=3)
    expected = native_engine(MODEL, **HYBRID, max_batch=max_batch).generate(PROMPTS[:3], params)
    engine, captures = captured_engine(MODEL, **HYBRID, max_batch=max_batch)
    assert_same(engine.generate(PROMPTS[:3], params), expected)
    assert engine.stats.graph_passes == captures.num_repeats > 0 and engine.stats.ahead_passes > 0


def test_a_pass_started_ahead_counts_whatever_comes_between():
    # Mutation: such a pass is dropped, although the states have moved on with it.
    def run(engine, between):
        for index, prompt in enumerate(PROMPTS):
            engine.submit(prompt, sampled(12, seed=3), prompt_index=index)
        for _ in range(3):
            engine.step()
            between(engine)
        while engine.has_work:
            engine.step()
        return engine.take_finished()

    def rest(engine):
        engine.pause()
        engine.resume()

    expected = run(native_engine(MODEL, **HYBRID), lambda engine: None)
    engine, _ = captured_engine(MODEL, **HYBRID)
    assert_same([run(engine, rest)], [expected])
    assert engine.stats.ahead_passes > 0 == engine.stats.dropped_passes
    engine, _ = captured_engine(MODEL, **HYBRID)
    found = run(engine, lambda engine: engine.abort(0))
    assert (
        found[0].finish_reason == "abort"
        and found[0].token_ids == expected[0].token_ids[: len(found[0].token_ids)]
    )
    assert_same([found[1:]], [expected[1:]])


def test_states_are_stored_as_asked():
    sizes = {}
    for dtype in ("auto", "float32", "bfloat16"):
        engine = engine_of(control=False, state_dtype=dtype)
        engine.generate(PROMPTS, sampled(4))
        sizes[dtype] = engine.pool.states.layers[0].recurrent.dtype
    assert sizes == {"auto": torch.float32, "float32": torch.float32, "bfloat16": torch.bfloat16}
    assert engine_of().pool.states.layers[0].recurrent.dtype == torch.float64


def test_what_cannot_be_had_is_refused():
    with pytest.raises(ConfigError, match="prefix_cache True"):
        engine_of(prefix_cache=True)
    with pytest.raises(ConfigError, match="got state_dtype 'fp8'"):
        engine_of(state_dtype="fp8")
    with pytest.raises(ConfigError, match="no layers that keep a state; got state_dtype 'bfloat16'"):
        make_engine(tiny_attention_model(), state_dtype="bfloat16")


def test_who_ends_between_two_steps_is_said_by_the_next_one():
    # Mutation: what ends in a pass that had begun is told nobody.
    params = sampled(30, seed=3)
    whole = native_engine(MODEL, **HYBRID).generate(PROMPTS[1:2], params)[0][0].token_ids
    # after the first token a step draws one, and the pass that it has begun the next one
    index = next(i for i in range(2, 20, 2) if whole[i] not in whole[:i])
    engine, _ = captured_engine(MODEL, **HYBRID)
    request = engine.submit(PROMPTS[1], sampled(30, seed=3, stop_token_ids=(whole[index],)))
    while engine._scheduler.has_work:
        assert engine.step() == []
        engine.pause()
        engine.resume()
    assert engine.has_work and [s.request.request_id for s in engine.step()] == [request]
    assert not engine.has_work and engine.take_finished()[0].token_ids == whole[: index + 1]


def test_states_are_made_again_after_a_pass_that_failed(monkeypatch):
    # Mutation: the pass is run again on states that it had moved.
    expected = engine_of().generate(PROMPTS, sampled(12, seed=3))
    engine = engine_of()
    for index, prompt in enumerate(PROMPTS):
        engine.submit(prompt, sampled(12, seed=3), prompt_index=index)
    for _ in range(5):
        engine.step()
    forward = engine._model.forward

    def fail(batch, pool):
        forward(batch, pool)
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(engine._model, "forward", fail)
        with pytest.raises(MemoryError):
            engine.step()
    while engine.has_work:
        engine.step()
    found = [[completion] for completion in engine.take_finished()]
    assert outputs(found) == outputs(expected)
    for (completion,), (other,) in zip(found, expected, strict=True):
        assert differing(completion.record, other.record) == []
    assert engine.stats.positions_recomputed > 0


def test_sizes_that_no_kernel_takes_are_not_captured():
    assert native_engine(MODEL, **HYBRID)._model.native.gaps == ("gated_delta",)
    large = tiny_model(linear_key_head_dim=64, linear_value_head_dim=128)
    assert native_engine(large, precision=fp4(large))._model.native.gaps == ()

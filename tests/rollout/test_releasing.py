"""An engine whose pool is given back between two steps draws, and records, what one that keeps it does."""

import gc
import weakref
from dataclasses import replace

import pytest
import torch
from tests.models import tiny_hybrids
from tests.models.tiny_models import tiny_model
from tests.rollout.engines import make_engine, make_prompts, outputs, sampled
from tests.rollout.native_engines import captured_engine, native_engine

from tracefp4.errors import BackendError
from tracefp4.guidance import Site, records_equal

PARAMS = {"n": 2, "seed": 3, "top_k": 9, "top_p": 0.9}
ENGINES = {
    "definition": make_engine,
    "native": native_engine,
    "captured": lambda model, **changes: captured_engine(model, **changes)[0],
}
KINDS = pytest.mark.parametrize("kind", ENGINES)


def assert_same(found, expected):
    assert outputs(found) == outputs(expected)
    for row, expected_row in zip(found, expected, strict=True):
        for completion, other in zip(row, expected_row, strict=True):
            assert completion.weight_versions == other.weight_versions
            identity = replace(completion.record.identity, trajectory=other.record.identity.trajectory)
            assert records_equal(replace(completion.record, identity=identity), other.record)


def memory_of(pool):
    """Weak references to every tensor that lies in the pool's memory, of all live ones."""
    gc.collect()
    places = {store.untyped_storage().data_ptr() for store in pool._stores() if store.numel()}
    tensors = (found for found in gc.get_objects() if type(found) is torch.Tensor)
    return [weakref.ref(t) for t in tensors if t.numel() and t.untyped_storage().data_ptr() in places]


@KINDS
def test_the_memory_goes_and_comes_back_by_itself(kind):
    engine, prompts = ENGINES[kind](tiny_model()), make_prompts(3)
    first = engine.generate(prompts, sampled(7, **PARAMS))
    size, layers, memory = engine.pool.num_bytes, len(engine.pool.layers), memory_of(engine.pool)
    assert size > 0 and len(memory) >= 3
    for _ in range(2):
        engine.release_pool()
        assert engine.pool.num_bytes == 0 and engine.pool.layers == []
        assert sum(store.numel() for store in engine.pool._stores()) == 0
        gc.collect()
        assert [ref for ref in memory if ref() is not None] == []
    assert_same(engine.generate(prompts, sampled(7, **PARAMS)), first)
    assert engine.pool.num_bytes == size and len(engine.pool.layers) == layers
    assert engine._allocator.num_used == 0


def test_captured_passes_go_with_the_addresses_that_they_read():
    engine, captures = captured_engine()
    prompts = make_prompts(3)
    expected = engine.generate(prompts, sampled(6))
    captured = captures.num_captured
    assert captured == len(engine._graphs._graphs) > 0
    engine.generate(prompts, sampled(6))
    assert captures.num_captured == captured
    engine.release_pool()
    assert engine._graphs._graphs == {}
    assert_same(engine.generate(prompts, sampled(6)), expected)
    assert captures.num_captured == 2 * captured


@KINDS
@pytest.mark.parametrize("changes", [{}, {"num_pages": 12}, {"prefix_cache": True}], ids=str)
@pytest.mark.parametrize("every", [1, 2, 5])
def test_unfinished_sequences_move_to_host_memory_and_go_on(kind, changes, every):
    # Where frames are few, other sequences run after a rest, and new weights would meet other positions.
    model, prompts = tiny_model(), make_prompts(4, shortest=6, longest=10)
    other = None if "num_pages" in changes else tiny_model(seed=1)

    def run(engine, *, releases):
        for index, prompt in enumerate(prompts):
            engine.submit(prompt, sampled(9, n=2, seed=2), prompt_index=index)
        steps = 0
        while engine.has_work:
            if releases and steps % every == 0:
                engine.release_pool()
                assert engine.pool.num_bytes == 0 and engine._ahead is None
            if steps == 4 and other is not None:
                engine.update_weights(other.state_dict(), version=1)
            engine.step()
            steps += 1
        return [engine.take_finished()]

    expected = run(ENGINES[kind](model, **changes), releases=False)
    engine = ENGINES[kind](model, **changes)
    assert_same(run(engine, releases=True), expected)
    assert {v for c in expected[0] for v in c.weight_versions} == ({0} if other is None else {0, 1})
    stats = engine.stats
    assert stats.pages_swapped_out > 0 and stats.pages_lost == stats.positions_recomputed == 0


@pytest.mark.parametrize("records", [True, tuple(Site("k", layer) for layer in range(2)), False], ids=str)
def test_pages_beyond_what_host_memory_may_hold_come_back_as_they_were(records):
    # From recorded codes, or computed again and then equal, because the weights are.
    model, prompts = tiny_model(), make_prompts(3, shortest=6, longest=10)

    def run(engine, *, releases):
        for index, prompt in enumerate(prompts):
            engine.submit(prompt, sampled(8, seed=2), prompt_index=index)
        while engine.has_work:
            engine.step()
            if releases:
                engine.release_pool()
        return [engine.take_finished()]

    changes = {"max_swapped_pages": 1, "records": records, "control": True}
    expected = run(make_engine(model, **changes), releases=False)
    engine = make_engine(model, **changes)
    found = run(engine, releases=True)
    assert outputs(found) == outputs(expected)
    stats = engine.stats
    assert stats.pages_lost > 0 and stats.positions_recoded == 0
    assert (stats.positions_restored > 0) == (records is True)
    assert (stats.positions_recomputed > 0) == (records is not True)
    if records is True:
        assert_same(found, expected)


@KINDS
@pytest.mark.parametrize("changes", [{}, {"max_swapped_pages": 0}], ids=str)
def test_states_move_to_host_memory_with_the_pages(kind, changes):
    model, prompts = tiny_hybrids.tiny_model(), make_prompts(3, shortest=6, longest=10)
    changes = {"precision": tiny_hybrids.fp4(model), **changes}

    def run(engine, *, releases):
        for index, prompt in enumerate(prompts):
            engine.submit(prompt, sampled(8, n=2, seed=2), prompt_index=index)
        while engine.has_work:
            if releases:
                engine.release_pool()
                assert engine.pool.num_bytes == 0 and engine.pool.states.layers == {}
                assert not any(part.numel() for part in engine.pool.states._parts())
            engine.step()
        return [engine.take_finished()]

    expected = run(ENGINES[kind](model, **changes), releases=False)
    engine = ENGINES[kind](model, **changes)
    found = run(engine, releases=True)
    assert engine.stats.states_swapped_out > 0 and engine.pool.states.num_available == engine.max_batch
    assert engine.stats.positions_recoded == 0
    assert_same(found, expected)


@KINDS
def test_new_weights_arrive_while_the_memory_is_away(kind):
    first, second, prompts = tiny_model(), tiny_model(seed=1), make_prompts(3)

    def run(engine, *, releases):
        found = [engine.generate(prompts, sampled(6, **PARAMS))]
        for version, model in enumerate((second, first), start=1):
            if releases:
                engine.release_pool()
            engine.update_weights(model.state_dict(), version=version)
            found.append(engine.generate(prompts, sampled(6, **PARAMS)))
        return [row for part in found for row in part]

    kept = run(ENGINES[kind](first), releases=False)
    assert_same(run(ENGINES[kind](first), releases=True), kept)


def test_what_was_suspended_or_ended_goes_on_afterwards():
    model, prompts = tiny_model(), make_prompts(3)

    def run(engine, *, releases):
        def rest():
            if releases:
                engine.release_pool()

        for index, prompt in enumerate(prompts):
            engine.submit(prompt, sampled(9, seed=2), prompt_index=index)
        for _ in range(4):
            engine.step()
        rest()
        cut = engine.suspend()
        assert {c.finish_reason for c in cut} == {"abort"}
        rest()
        longer = engine.extend(cut, [[]] * len(cut), sampled(5, seed=2))
        rest()
        forced = engine.force(prompts, [[[5, 6, 7, 8], [9, 9]]] * len(prompts))
        rest()
        engine.submit(prompts[0], sampled(9))
        engine.step()
        rest()
        engine.abort(engine._num_requests - 1)
        assert not engine.has_work
        return [longer, *forced]

    expected = run(make_engine(model), releases=False)
    engine = make_engine(model)
    assert_same(run(engine, releases=True), expected)
    assert engine._allocator.num_used == engine._allocator.num_saved == 0


def test_cached_prefixes_go_and_give_the_same_tokens_and_records_again():
    model, prompts = tiny_model(), make_prompts(2, shortest=9, longest=12)
    engine = make_engine(model, prefix_cache=True, control=True)
    first = engine.generate(prompts, sampled(6, **PARAMS))
    assert_same(engine.generate(prompts, sampled(6, **PARAMS)), first)
    hits = engine.stats.prefix_hits
    assert hits > 0 and engine._prefixes.entries
    engine.release_pool()
    assert engine._prefixes.entries == [] and engine.stats.pages_swapped_out == 0
    assert_same(engine.generate(prompts, sampled(6, **PARAMS)), first)
    assert engine.stats.prefix_hits == hits
    assert_same(engine.generate(prompts, sampled(6, **PARAMS)), first)
    assert engine.stats.prefix_hits > hits


def test_a_paused_engine_releases_and_resumes():
    engine, prompts = make_engine(), make_prompts(2)
    expected = make_engine().generate(prompts, sampled(6))
    for index, prompt in enumerate(prompts):
        engine.submit(prompt, sampled(6), prompt_index=index)
    engine.step()
    engine.pause()
    engine.release_pool()
    engine.resume()
    while engine.has_work:
        engine.step()
    assert_same([[c] for c in engine.take_finished()], expected)


def test_a_device_without_room_says_so_and_the_next_step_tries_again(monkeypatch):
    engine, prompts = make_engine(), make_prompts(2)
    expected = engine.generate(prompts, sampled(5))
    engine.release_pool()
    zeros, made = torch.zeros, []

    def full(*size, **options):
        made.append(size)
        if len(made) == 2:
            raise torch.OutOfMemoryError("nothing is left")
        return zeros(*size, **options)

    engine.submit(prompts[0], sampled(5))
    with monkeypatch.context() as patch:
        patch.setattr(torch, "zeros", full)
        with pytest.raises(
            BackendError, match=r"no room on cpu for the KV pool; got 64 pages.*Lower num_pages"
        ):
            engine.step()
    assert engine.pool.num_bytes == 0
    while engine.has_work:
        engine.step()
    assert_same([engine.take_finished()], expected[:1])

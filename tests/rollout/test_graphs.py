"""Captured decode passes give the tokens and the records of eager ones, whatever happens between two steps."""

from dataclasses import replace

import pytest
import torch
from tests.models.tiny_models import tiny_model
from tests.rollout.engines import make_engine, make_prompts, outputs, sampled
from tests.rollout.native_engines import captured_engine, native_engine

from tracefp4.formats.arithmetic import EMULATED
from tracefp4.guidance import records_equal
from tracefp4.rollout.graphs import buckets

PARAMS = {"n": 2, "seed": 3, "top_k": 9, "top_p": 0.9}


def assert_same(found, expected):
    assert outputs(found) == outputs(expected)
    for row, expected_row in zip(found, expected, strict=True):
        for completion, other in zip(row, expected_row, strict=True):
            assert records_equal(completion.record, other.record)


@pytest.mark.parametrize("max_batch", [1, 3, 8])
def test_tokens_and_records_are_those_of_eager_passes(max_batch):
    # Mutation: the last row left out of what is recorded; positions of draws not advanced.
    model, prompts = tiny_model(), make_prompts(3)
    expected = native_engine(model, max_batch=max_batch).generate(prompts, sampled(7, **PARAMS))
    engine, captures = captured_engine(model, max_batch=max_batch)
    assert_same(engine.generate(prompts, sampled(7, **PARAMS)), expected)
    stats = engine.stats
    assert stats.graph_passes == captures.num_repeats > 0 and stats.eager_passes == 0
    assert captures.num_captured <= len(buckets(max_batch))


def test_bytes_that_are_off_by_one_row_are_seen(monkeypatch):
    model, prompts = tiny_model(), make_prompts(3)
    expected = native_engine(model).generate(prompts, sampled(6))
    engine, _ = captured_engine(model)
    take = engine._recorder.take

    def shifted(taps, **changes):
        sites = {kind: replace(rows, packed=rows.packed.roll(1, 1)) for kind, rows in taps.sites.items()}
        return take(replace(taps, sites=sites), **changes)

    monkeypatch.setattr(engine._recorder, "take", shifted)
    found = engine.generate(prompts, sampled(6))
    assert outputs(found) == outputs(expected)
    for (completion,), (other,) in zip(found, expected, strict=True):
        assert not records_equal(completion.record, other.record)


@pytest.mark.parametrize("changes", [{"num_pages": 9}, {"max_tokens_per_step": 8}, {"prefix_cache": True}])
def test_preemption_chunks_and_cached_prefixes(changes):
    model, prompts = tiny_model(), make_prompts(4, shortest=6, longest=10)
    params = sampled(12, n=2, seed=1)
    eager, (engine, _) = native_engine(model, **changes), captured_engine(model, **changes)
    for asked in (prompts, prompts[:1]):
        assert_same(engine.generate(asked, params), eager.generate(asked, params))
    if "num_pages" in changes:
        assert engine.stats.preemptions > 0
    if "prefix_cache" in changes:
        assert engine.stats.prefix_hits > 0


def test_new_weights_pauses_and_forced_tokens_between_steps():
    first, second, prompts = tiny_model(), tiny_model(seed=1), make_prompts(3)

    def run(engine):
        for index, prompt in enumerate(prompts):
            engine.submit(prompt, sampled(9, seed=2), prompt_index=index)
            engine.step()
        engine.update_weights(second.state_dict(), version=1)
        engine.step()
        engine.pause()
        engine.resume()
        while engine.has_work:
            engine.step()
        found = engine.take_finished()
        forced = engine.force(prompts, [[[5, 6, 7, 8], [9, 9]]] * len(prompts))
        return [found, *forced]

    expected = run(native_engine(first))
    engine, captures = captured_engine(first)
    assert_same(run(engine), expected)
    assert expected[0][0].weight_versions[0] == 0 and expected[0][0].weight_versions[-1] == 1
    assert captures.num_repeats == engine.stats.graph_passes + engine.stats.dropped_passes


def test_padding_rows_write_nothing():
    engine, _ = captured_engine()
    for index, prompt in enumerate(make_prompts(3)):
        engine.submit(prompt, sampled(5), prompt_index=index)
    engine.step()
    engine.step()
    assert len(engine._scheduler.rows) == 3 and engine._graphs._sizes[2] == 4
    for pages in engine.pool.layers:
        for stored in (pages.keys, pages.values):
            assert not stored.packed[:, engine.pool.null_frame].any()


def test_sizes_of_captured_batches():
    assert buckets(1) == [1] and buckets(3) == [1, 2, 3]
    assert buckets(64) == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]
    assert buckets(100)[-4:] == [64, 80, 96, 100]
    assert buckets(512)[-2:] == [480, 512] and len(buckets(512)) < 40


def test_stats_say_why_decoding_is_eager():
    for changes, why in (
        ({"graphs": False}, "switched off"),
        ({"arithmetic": EMULATED}, "emulated arithmetic"),
        ({}, "cpu has no graphs"),
    ):
        engine = native_engine(**changes) if "arithmetic" not in changes else make_engine(**changes)
        engine.generate([[1, 2]], sampled(3))
        assert why in engine.stats.why_eager
        assert engine.stats.eager_passes == 2 and engine.stats.graph_passes == 0


def test_all_sizes_are_captured_at_the_start_if_asked():
    engine, captures = captured_engine(max_batch=8)
    engine._graphs.capture_all()
    assert captures.num_captured == 4
    engine.generate(make_prompts(2), sampled(3))
    assert captures.num_captured == 4


def test_a_pass_reads_its_input_from_one_copy():
    """What a graph reads is the copied buffer alone: rows changed after the copy change nothing."""
    engine, _ = captured_engine(max_batch=2)
    engine.submit([1, 2, 3], sampled(5))
    engine.step()
    rows = engine._scheduler.rows
    engine._scheduler.schedule()
    graphs = engine._graphs
    before = graphs.run(1)[0].tokens.clone()
    graphs._input[:1].copy_(rows.buffer[:1])
    rows.buffer.zero_()
    repeat, found = graphs._graph(1)
    repeat()
    assert torch.equal(found.drawn[0], before)

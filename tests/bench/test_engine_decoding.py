"""Random weights and sequences that begin in the middle: valid, repeatable, and steps like any other."""

import statistics
from dataclasses import replace

import pytest
import torch
from tests.bench.engine_bench import CPU, STEPS, with_engine, workshop

from tracefp4.bench.engine_decoding import launch_by_launch
from tracefp4.bench.engine_loads import copy_bandwidth, time_load
from tracefp4.bench.engine_points import Load
from tracefp4.bench.engine_shapes import TINY
from tracefp4.bench.engine_weights import RandomState
from tracefp4.bench.routing import SKEWS, draw_experts, num_distinct
from tracefp4.errors import ConfigError
from tracefp4.formats.schemes import MXFP4_FLOOR
from tracefp4.formats.tensor import BlockTensor
from tracefp4.ops.dequantize import dequantize
from tracefp4.rollout.graphs import DecodeGraphs
from tracefp4.rollout.runner import Runner

EXPERTS = "model.layers.1.mlp.experts.gate_up_proj"
WIDE = replace(TINY, name="wide", experts=32, top_k=4, moe_inter=16)


def equal(a, b):
    if isinstance(a, BlockTensor):
        return torch.equal(a.packed, b.packed) and torch.equal(a.block_scales, b.block_scales)
    return torch.equal(a, b)


def test_a_tensor_depends_on_its_name_and_the_seed_alone():
    shop = workshop()
    states = [shop.state("fp4", "uniform"), shop.state("fp4", "uniform")]
    assert set(states[0]) == set(shop.sizes.shapes()) and len(states[0]) == len(shop.sizes.shapes())
    for name in reversed(list(states[0])):
        assert equal(states[0][name], states[1][name])
        assert tuple(states[0][name].shape) == shop.sizes.shapes()[name]
    other = RandomState(shop.sizes, shop.plans["fp4"].layers, device=CPU, seed=1)
    assert not equal(states[0][EXPERTS], other[EXPERTS])
    assert not equal(states[0][EXPERTS], states[0][EXPERTS.replace("1", "0")])


def test_experts_are_valid_bytes_of_about_unit_gain():
    shop = workshop(WIDE)
    coded, plain = (shop.state(plan, "uniform")[EXPERTS] for plan in ("fp4", "bf16"))
    assert isinstance(coded, BlockTensor) and plain.dtype == torch.bfloat16
    values = dequantize(coded)
    assert bool(values.isfinite().all()) and coded.codes().unique().numel() == 16
    for found in (values, plain.float()):
        assert 0.6 < float(found.std()) * 64**0.5 < 1.7 and abs(float(found.mean())) < 0.01


def test_a_scheme_without_random_bytes_is_refused():
    shop = workshop()
    layers = [replace(layer, weight=MXFP4_FLOOR) for layer in shop.plans["fp4"].layers]
    with pytest.raises(ConfigError, match="under MXFP4_FLOOR; allowed are NVFP4 schemes"):
        RandomState(shop.sizes, layers, device=CPU)


@pytest.mark.parametrize("plan", ["fp4", "bf16"])
def test_skewed_routing_uses_fewer_experts(plan):
    def mean(engine):
        found = []
        for seed in range(4):
            engine.place([32] * 8, num_steps=4, seed=seed)
            engine.take_steps(2)
            found += engine.experts_in_use()
        return statistics.fmean(found)

    uniform, skewed = (
        with_engine(mean, plan, shape=WIDE, routing=routing) for routing in ("uniform", "zipf")
    )
    drawn = {
        skew: statistics.fmean(
            num_distinct(draw_experts(8, num_experts=32, top_k=4, skew=skew, seed=seed)) for seed in range(50)
        )
        for skew in SKEWS
    }
    # weights cannot route exactly so: hidden states of a small model are not independent
    assert abs(uniform - drawn["uniform"]) < 4 and abs(skewed - drawn["zipf"]) < 4, (uniform, skewed, drawn)
    assert uniform - skewed > 3


@pytest.mark.parametrize("plan", ["fp4", "bf16"])
def test_placed_sequences_decode_to_their_contexts(plan):
    def work(engine):
        contexts = [128, 40, 77]
        engine.place(contexts, num_steps=8)
        assert engine.stats.prefill_tokens == 3  # nothing is computed that came before
        assert len(engine.take_steps(7)) == 7
        running = engine._scheduler.running
        assert [len(sequence.ids) for sequence in running] == contexts
        assert [sequence.num_cached for sequence in running] == [context - 1 for context in contexts]
        assert engine.stats.tokens_generated == 24 and not engine.take_finished()
        engine.drop()
        assert not engine.has_work and engine._allocator.num_used == 0

    with_engine(work, plan)


def test_pages_are_random_but_the_null_frame():
    def work(engine):
        engine.place([128] * 4, num_steps=8)
        frames = [sequence.table.frames for sequence in engine._scheduler.running]
        null = engine.pool.null_frame
        for layer in engine.pool.layers:
            for pages in (layer.keys, layer.values):
                assert not pages.packed[:, null].any() and not pages.block_scales[:, null].any()
                assert pages.packed[:, frames[0][0]].unique().numel() > 100
        return frames

    frames = with_engine(work)
    assert frames == with_engine(work)
    assert all(found != sorted(found) for found in frames)


def test_only_pages_that_come_later_are_cleared():
    def work(engine):
        cleared, clear = [], engine.pool.clear
        engine.pool.clear = lambda frame: (cleared.append(frame), clear(frame))
        engine.place([52] * 4, num_steps=8)
        assert cleared == []
        engine.take_steps(7)
        assert cleared == [sequence.table.frames[-1] for sequence in engine._scheduler.running]

    with_engine(work)


def test_records_are_compared_with_the_pages():
    def work(engine):
        engine.place([64] * 2, num_steps=12)
        engine.take_steps(11)
        assert engine.count_record_differences() == 0
        sequence, pages = engine._scheduler.running[0], engine.pool.layers[1].values
        last = sequence.num_cached - 1
        pages.packed[0, sequence.table.frames[last // 16], last % 16, 0] ^= 1
        pages.block_scales[1, sequence.table.frames[last // 16], last % 16, 0] ^= 1
        # in plain order a byte of codes and one of scales; bytes of positions that were filled do not count
        assert engine.count_record_differences() == 2
        pages.packed[0, sequence.table.frames[0], 0, 0] ^= 1
        assert engine.count_record_differences() == 2

    with_engine(work)


@pytest.mark.parametrize("is_stale", [False, True])
def test_captured_passes_are_compared_with_their_launches(is_stale):
    passes = []

    def capture(body):
        repeat, outputs = launch_by_launch(body)
        return lambda: passes.append(None) if is_stale else passes.append(repeat()), outputs

    def work(engine):
        rows = engine._scheduler.rows
        engine._graphs = DecodeGraphs(engine._model, engine.pool, rows, engine._recorder, capture=capture)
        engine._runner = Runner(
            engine._model, engine.pool, rows=rows, recorder=engine._recorder, graphs=engine._graphs
        )
        found = time_load(engine, Load((64, 64, 40), "uniform"), sizes=workshop().sizes, steps=STEPS)
        assert engine._ahead is None and engine.stats.dropped_passes == 0
        return found

    found = with_engine(work, shape=TINY)
    assert (found.draw_differences > 0) == is_stale and found.graph_passes == 3
    # none is on the clock twice, or off it; the step that places computes chunks of a token
    assert len(passes) == STEPS.total - 1


def test_what_cannot_be_placed_is_refused():
    def work(engine):
        with pytest.raises(ConfigError, match="8 steps cannot be taken up to a context of 8 tokens"):
            engine.place([8], num_steps=8)
        with pytest.raises(ConfigError, match="9 sequences cannot decode at once; 8 of them do"):
            engine.place([64] * 9, num_steps=8)

    with_engine(work)

    def silent(engine):
        engine.place([64], num_steps=4)
        with pytest.raises(ConfigError, match="cannot tell what its steps recorded; got records=False"):
            engine.experts_in_use()

    with_engine(silent, records=False)


def test_a_load_is_timed_and_leaves_nothing():
    sizes = workshop().sizes

    def work(engine):
        found = time_load(engine, Load((64, 32), "uniform"), sizes=sizes, steps=STEPS)
        assert not engine.has_work and engine.stats.num_steps == 5
        return found

    found = with_engine(work)
    assert len(found.step_s) == 3 and found.batch == 2 and found.mean_s > 0 and found.record_differences == 0
    assert found.profile is None and all(2 <= count <= 4 for count in found.distinct)
    # the three timed steps of a sequence that ends at 64 tokens see 61, 62 and 63 of them
    kv_token = 2 * 2 * 2 * 64 * 0.5625
    assert found.moved.kv == (62 - 0 + 30 + 2) * kv_token
    silent = with_engine(work, records=False)
    assert silent.distinct == (4, 4) and silent.record_differences == 0


def test_a_step_can_be_profiled():
    steps, sizes = replace(STEPS, profiled=1), workshop().sizes
    found = with_engine(lambda engine: time_load(engine, Load((64,), "uniform"), sizes=sizes, steps=steps))
    assert found.profile is not None and found.profile.compute_s > 0 and len(found.step_s) == 3
    shares = [kernel.share for kernel in found.profile.kernels]
    assert sum(shares) == pytest.approx(1) and shares == sorted(shares, reverse=True)


def test_a_copy_has_a_bandwidth():
    assert 1e8 < copy_bandwidth(CPU) < 1e13

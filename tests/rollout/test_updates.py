"""Weights that change while sequences run: who computed each position, what its record holds, and who reads it.

The oracle of every position is a fresh engine with the weights that computed it, forced over the same tokens. Expert
inputs, routing and log-probs of a token belong to the weights that drew it; K and V belong to what later tokens read.
"""

import math
from dataclasses import replace

import pytest
import torch
from tests.models.tiny_models import fp4, tiny_model
from tests.rollout.engines import make_engine, sampled
from tests.rollout.recorded import (
    assert_frames_add_up,
    assert_nothing_left,
    assert_pages_hold_the_record,
    differing,
    forced_record,
    shifted,
)

from tracefp4.errors import ConfigError
from tracefp4.formats.tensor import BlockTensor
from tracefp4.guidance import Site, records_equal
from tracefp4.ops.kv_append import kv_append
from tracefp4.ops.kv_attention.reference import read_pages
from tracefp4.ops.quantize import quantize
from tracefp4.rollout.jobs import forced_jobs

PROMPT = [5, 1, 3, 2, 6]
DRAWN = ("x", "w2")
CACHED = ("k", "v")


@pytest.fixture(scope="module")
def old():
    return tiny_model()


@pytest.fixture(scope="module")
def new():
    return tiny_model(seed=9)


def finish(engine):
    while engine.has_work:
        engine.step()
        assert_frames_add_up(engine)
        for sequence in engine._scheduler.running:
            assert_pages_hold_the_record(engine, sequence)
    return engine.take_finished()


def begun(model, *, steps, n=1, prompt=PROMPT, **changes):
    engine = make_engine(model, control=True, **changes)
    engine.submit(list(prompt), sampled(9, n=n, seed=4))
    for _ in range(steps):
        engine.step()
    return engine


def only_first_layer(record):
    return replace(record, sites={site: part for site, part in record.sites.items() if site.layer == 0})


@pytest.mark.parametrize("paused", [False, True])
def test_without_recomputation_k_and_v_stay_and_each_position_has_its_weights(old, new, paused):
    engine = begun(old, steps=4)
    if paused:
        engine.pause()
        with pytest.raises(ConfigError, match="paused"):
            engine.step()
    engine.update_weights(new.state_dict(), version=7)
    engine.resume()
    (c,) = finish(engine)
    record, switch = c.record, len(PROMPT) + 3
    assert c.weight_versions == [0] * 4 + [7] * 5
    assert record.versions().tolist() == [0] * switch + [7] * (record.length - switch)
    assert record.valid.all() and engine.stats.positions_recomputed == 0
    assert differing(record, forced_record(old, c), end=switch) == []
    # later positions read old K and V under new weights: neither engine alone computes that. K and V of the first
    # layer depend on no other position.
    by_new = forced_record(new, c)
    assert differing(record, by_new, begin=switch) == list(range(switch, record.length))
    first_layer = (only_first_layer(record), only_first_layer(by_new))
    assert differing(*first_layer, sites=CACHED, routing=False, begin=switch) == []
    assert differing(*first_layer, sites=CACHED, routing=False, end=switch) == list(range(switch))
    assert_nothing_left(engine)


def test_with_recomputation_later_tokens_are_those_of_the_new_weights_alone(old, new):
    # Mutation: cache_rows of the record left at the old rows; x rows taken from the recomputation.
    engine = begun(old, steps=4)
    engine.update_weights(new.state_dict(), version=7, recompute=True)
    (c,) = finish(engine)
    record, switch = c.record, len(PROMPT) + 3
    by_old, by_new = forced_record(old, c), forced_record(new, c)
    assert c.weight_versions == [0] * 4 + [7] * 5
    assert record.versions().tolist() == [0] * switch + [7] * (record.length - switch)
    # K and V of every position: what later tokens read
    assert differing(record, by_new, sites=CACHED, routing=False) == []
    assert differing(record, by_old, sites=CACHED, routing=False, end=switch) == list(range(switch))
    # expert inputs and routing: what the drawn tokens came from
    assert differing(record, by_old, sites=DRAWN, end=switch) == []
    assert differing(record, by_new, sites=DRAWN, end=switch) == list(range(switch))
    assert differing(record, by_new, begin=switch) == []
    assert len(differing(shifted(record), by_new, begin=switch, end=record.length - 1)) == 4
    assert record.valid.all()
    assert engine.stats.positions_recomputed == engine.stats.positions_recoded == switch
    # and the log-probs of later tokens are the new weights' own
    (forced,) = make_engine(new, control=True).force([PROMPT], [[c.token_ids]])
    assert c.logprobs[4:] == forced[0].logprobs[4:] and c.logprobs[:4] != forced[0].logprobs[:4]
    assert_nothing_left(engine)


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_recomputation_in_the_middle_of_a_prompt_and_of_a_group(old, new, steps):
    prompt = [*PROMPT, *PROMPT, 1]
    engine = begun(old, steps=steps, n=3, prompt=prompt, max_tokens_per_step=4, max_batch=4, num_pages=24)
    engine.update_weights(new.state_dict(), version=2, recompute=True)
    found = finish(engine)
    switch = 4 * steps if steps < 3 else len(prompt)
    for c in found:
        by_old, by_new = forced_record(old, c), forced_record(new, c)
        assert differing(c.record, by_new, sites=CACHED, routing=False) == []
        assert differing(c.record, by_old, sites=DRAWN, end=switch) == []
        assert differing(c.record, by_new, sites=DRAWN, begin=switch) == []
        assert c.record.versions().tolist() == [0] * switch + [2] * (c.record.length - switch)
    assert_nothing_left(engine)


def test_two_updates_in_a_row_leave_the_last_k_and_v_and_every_token_its_weights(old, new):
    third = tiny_model(seed=4)
    engine = begun(old, steps=3)
    engine.update_weights(new.state_dict(), version=1, recompute=True)
    engine.step()  # recomputes, and draws one token from the new weights
    engine.update_weights(third.state_dict(), version=2, recompute=True)
    (c,) = finish(engine)
    assert c.weight_versions == [0] * 3 + [1] + [2] * 5
    first, second = len(PROMPT) + 2, len(PROMPT) + 3
    assert differing(c.record, forced_record(third, c), sites=CACHED, routing=False) == []
    assert differing(c.record, forced_record(old, c), sites=DRAWN, end=first) == []
    assert differing(c.record, forced_record(new, c), sites=DRAWN, begin=first, end=second) == []
    assert differing(c.record, forced_record(third, c), begin=second) == []
    assert_nothing_left(engine)


def test_abort_before_anything_read_the_new_k_and_v_keeps_the_old_record(old, new):
    engine = begun(old, steps=4, max_tokens_per_step=2, max_batch=2)
    (sequence,) = engine._scheduler.running
    computed = sequence.num_computed
    engine.update_weights(new.state_dict(), version=1, recompute=True)
    engine.step()  # two of the positions
    engine.abort(0)
    (c,) = engine.take_finished()
    assert c.record.length == computed and c.record.versions().unique().tolist() == [0]
    assert differing(c.record, forced_record(old, c), end=computed) == []
    assert_nothing_left(engine)


def test_ver_5_an_update_aborts_nobody(old, new):
    for recompute in (False, True):
        engine = make_engine(old, control=True)
        for index in range(3):
            engine.submit([*PROMPT, index], sampled(6, seed=4), prompt_index=index)
        engine.step()
        engine.step()
        engine.update_weights(new.state_dict(), version=1, recompute=recompute)
        found = finish(engine)
        assert [c.finish_reason for c in found] == ["length"] * 3
        assert all(c.weight_versions == [0, 0, 1, 1, 1, 1] for c in found)


def test_ver_3_a_request_carries_the_version_that_computed_it(old, new):
    """Dispatched under 4; one update, whatever it is made of, is one version; admitted in between means: computed
    after."""
    engine = make_engine(old, control=True, weight_version=4, max_batch=1)
    engine.submit(PROMPT, sampled(3, seed=1), prompt_index=0)
    engine.submit(PROMPT, sampled(2, seed=1), prompt_index=1)  # waits for the only place
    engine.step()
    engine.update_weights(new.state_dict(), version=5)
    first, second = finish(engine)
    assert first.weight_versions == [4, 5, 5]
    assert first.record.versions().tolist() == [4] * 5 + [5] * 2
    assert second.weight_versions == [5, 5] and second.record.versions().unique().tolist() == [5]


def test_ver_1_a_sample_in_three_parts_keeps_a_version_for_every_token(old, new):
    """Segments of 3, 1 and 4 tokens under versions 7, 8 and 9."""
    engine = make_engine(old, control=True, weight_version=7)
    engine.submit([5, 1], sampled(8, seed=4))
    for _ in range(3):
        engine.step()
    parts = engine.suspend()
    assert not engine.has_work and [len(c.token_ids) for c in parts] == [3]
    assert_nothing_left(engine)
    engine.update_weights(new.state_dict(), version=8)
    engine.resubmit(parts[0], [], sampled(5, seed=4))
    engine.step()
    parts = engine.suspend()
    assert parts[0].weight_versions == [7, 7, 7, 8] and parts[0].record.version_lag(8) == 1
    engine.update_weights(old.state_dict(), version=9)
    (c,) = engine.extend(parts, [[]], sampled(4, seed=4))
    assert c.weight_versions == [7, 7, 7, 8, 9, 9, 9, 9] and c.finish_reason == "length"
    # row p belongs to input p; token i is drawn from position P - 1 + i
    assert c.record.versions().tolist() == [7, 7, 7, 7, 8, 9, 9, 9, 9]
    assert c.record.length == 2 + 8 - 1 and len(c.logprobs) == 8
    assert_nothing_left(engine)


def test_a_handed_over_rollout_goes_on_bit_for_bit_here_and_elsewhere(old):
    whole = make_engine(old, control=True).generate([PROMPT, PROMPT[:2]], sampled(9, n=2, seed=4))
    engine = make_engine(old, control=True)
    for index, prompt in enumerate([PROMPT, PROMPT[:2]]):
        engine.submit(prompt, sampled(9, n=2, seed=4), prompt_index=index)
    for _ in range(4):
        engine.step()
    parts = engine.suspend()
    assert_nothing_left(engine)
    for other in (engine, make_engine(old, control=True, page_size=8)):
        rest = sampled(9 - 4, seed=4)
        found = other.extend(parts, [[] for _ in parts], rest)
        assert other.stats.positions_recomputed == 0 and other.stats.positions_restored > 0
        for c, expected in zip(found, [c for row in whole for c in row], strict=True):
            assert (c.prompt_index, c.sample_index) == (expected.prompt_index, expected.sample_index)
            assert (c.token_ids, c.logprobs) == (expected.token_ids, expected.logprobs)
            assert differing(c.record, expected.record) == []
            assert not records_equal(shifted(c.record), expected.record)
        assert_nothing_left(other)


def test_a_handed_over_rollout_can_have_its_k_and_v_computed_under_new_weights(old, new):
    engine = begun(old, steps=4)
    parts = engine.suspend()
    engine.update_weights(new.state_dict(), version=3)
    (c,) = engine.extend(parts, [[]], sampled(5, seed=4), recompute=True)
    switch = len(PROMPT) + 3
    assert differing(c.record, forced_record(new, c), sites=CACHED, routing=False) == []
    assert differing(c.record, forced_record(old, c), sites=DRAWN, end=switch) == []
    assert differing(c.record, forced_record(new, c), begin=switch) == []
    assert c.record.valid.all()


def test_rft_1_weights_there_and_back_give_the_first_results_again(old):
    """Twice the experts, then half, then the first again: derived scales follow every time."""
    engine = make_engine(old, control=True)
    state = {name: tensor.clone() for name, tensor in old.state_dict().items()}
    first = engine.generate([PROMPT], sampled(6, seed=1))
    seen = []
    for version, factor in ((1, 2.0), (2, 0.5), (3, 1.0)):
        scaled = {
            name: t * factor if "lm_head" in name or "experts" in name else t for name, t in state.items()
        }
        engine.update_weights(scaled, version=version)
        fresh = make_engine(old, control=True)
        fresh.update_weights(scaled, version=version)
        seen.append(engine.generate([PROMPT], sampled(6, seed=1)))
        assert seen[-1][0][0].logprobs == fresh.generate([PROMPT], sampled(6, seed=1))[0][0].logprobs
    assert seen[2][0][0].logprobs == first[0][0].logprobs and seen[1][0][0].logprobs != first[0][0].logprobs
    assert differing(seen[2][0][0].record, first[0][0].record) == []


def kv_exponents(k, v):
    return tuple(replace(layer, k_exponent=k, v_exponent=v) for layer in fp4())


def test_kvq_4_an_update_cannot_drop_the_scales_of_the_cache(old, new):
    """They belong to the plan, not to the weights: 2^2 before an update is 2^2 after it, and K = 10752 stays 10752."""
    engine = make_engine(old, control=True, precision=kv_exponents(2, -1))
    for version, model in ((1, new), (2, old)):
        engine.update_weights(model.state_dict(), version=version)
        for pages in engine.pool.layers:
            assert (int(pages.keys.outer), int(pages.values.outer)) == (2, -1)
    keys = engine.pool.layers[0].keys
    rows = torch.full((1, 2, 32), 10752.0)
    rounded = quantize(rows.reshape(1, -1), scheme=keys.scheme, exponent=2)
    stored = BlockTensor(
        packed=rounded.packed.view(1, 2, -1),
        block_scales=rounded.block_scales.view(1, 2, -1),
        outer=keys.outer,
        scheme=keys.scheme,
    )
    kv_append(keys, stored, slots=torch.tensor([5]))
    assert read_pages(keys, torch.tensor([[1]]), torch.float64)[:, 0, 1].unique().tolist() == [10752.0]
    ((c,),) = engine.generate([PROMPT], sampled(3))
    assert c.record.sites[Site("k", 0)].static_exponent == 2


def test_rft_3_scales_after_an_update_are_the_calibrated_ones_or_refused(old, new):
    """No scale is ever zero: it is a power of two whose exponent has a range, and weights do not carry it."""
    engine = make_engine(old, control=True, precision=kv_exponents(-3, 4))
    expected = make_engine(new, control=True, precision=kv_exponents(-3, 4)).generate([PROMPT], sampled(5))
    engine.update_weights(new.state_dict(), version=1)
    found = engine.generate([PROMPT], sampled(5))
    assert found[0][0].logprobs == expected[0][0].logprobs
    assert differing(found[0][0].record, expected[0][0].record) == []
    for wrong in (-111, 117, math.nan):
        with pytest.raises(ConfigError, match="k_exponent"):
            kv_exponents(wrong, 0)


def test_a_log_that_is_sealed_while_positions_are_computed_again_loses_none_of_them(old, new):
    # Mutation: sealing in the middle of a recomputation, whose rows are then those of another log.
    engine = begun(old, steps=6, max_tokens_per_step=2, max_batch=2, max_log_rows=1)
    (sequence,) = engine._scheduler.running
    switch = sequence.num_computed
    assert engine._recorder.num_rows == 0 and sequence.history.past  # sealed after every pass
    engine.update_weights(new.state_dict(), version=1, recompute=True)
    engine.step()
    assert engine._recorder.num_rows == 2 and sequence.rebuild is not None
    (c,) = finish(engine)
    by_old, by_new = forced_record(old, c), forced_record(new, c)
    assert differing(c.record, by_new, sites=CACHED, routing=False) == []
    assert differing(c.record, by_old, sites=DRAWN, end=switch) == []
    assert differing(c.record, by_new, begin=switch) == []
    assert_nothing_left(engine)


def test_abort_in_the_middle_of_a_recomputation_brings_no_finished_sample_back(old, new):
    # Mutation: samples that were drawn long ago are taken for those of a prompt that is not done yet.
    engine = make_engine(old, control=True, max_tokens_per_step=2, max_batch=2)
    (job,) = forced_jobs([PROMPT], completions=[[[1], [1, 2, 3, 4, 5]]], temperature=1.0)
    request = engine._submit(job, prompt_index=0)
    while not engine._ledger.finished:
        engine.step()
    engine.step()
    engine.update_weights(new.state_dict(), version=1, recompute=True)
    engine.step()
    engine.abort(request)
    found = engine.take_finished()
    assert [(c.sample_index, c.finish_reason) for c in found] == [(0, "length"), (1, "abort")]
    assert_nothing_left(engine)

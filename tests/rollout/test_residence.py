"""K and V of a position never change: pages come back by swap, from whole codes, or are computed again and compared."""

import pytest
import torch
from tests.models.tiny_models import BF16_LAYER, FP4_LAYER, tiny_model
from tests.rollout.engines import make_engine, make_prompts, outputs, sampled
from tests.rollout.recorded import (
    assert_frames_add_up,
    assert_nothing_left,
    assert_pages_hold_the_record,
    assert_recorded,
    differing,
    forced_record,
    shifted,
)

from tracefp4.errors import ConfigError
from tracefp4.guidance import Site

HALF = (Site("x", 0), Site("x", 1), Site("k", 1), Site("v", 1))
"""Not enough to write pages from: layer 0 is cached in FP4 and not recorded."""


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def run(engine, prompts, params):
    """Generate step by step, and look at every page and frame after every step."""
    ids = [engine.submit(p, params, prompt_index=i) for i, p in enumerate(prompts)]
    while engine.has_work:
        engine.step()
        assert_frames_add_up(engine)
        for sequence in engine._scheduler.running:
            assert_pages_hold_the_record(engine, sequence)
    found = engine.take_finished()
    return [found[i * params.n : (i + 1) * params.n] for i in range(len(ids))]


@pytest.mark.parametrize("max_swapped", [0, 2])
def test_lost_pages_come_back_from_whole_codes_bit_for_bit(model, max_swapped):
    # Mutation: slots of write_back one position off; pages restored up to num_cached - 1.
    prompts, params = make_prompts(4, shortest=6, longest=10), sampled(14, n=2, seed=1)
    expected = make_engine(model, control=True).generate(prompts, params)
    engine = make_engine(model, control=True, num_pages=9, max_swapped_pages=max_swapped)
    found = run(engine, prompts, params)
    assert outputs(found) == outputs(expected)
    stats = engine.stats
    assert stats.pages_lost > 0 and stats.positions_restored > 0 and stats.positions_recomputed == 0
    assert (stats.pages_swapped_out > 0) == (max_swapped > 0)
    for row in found:
        for completion in row:
            assert completion.record.valid.all()
    assert_recorded(found[3][1], model)
    assert_nothing_left(engine)


@pytest.mark.parametrize(
    "changes",
    [{"records": HALF}, {"records": False}, {"precision": (FP4_LAYER, BF16_LAYER)}],
    ids=["half-recorded", "nothing-recorded", "bf16-layer"],
)
def test_what_no_record_holds_is_computed_again_and_compared(model, changes):
    # In the control arithmetic a recomputation gives the same codes, so nothing but the counter shows it.
    prompts, params = make_prompts(4, shortest=6, longest=10), sampled(14, n=2, seed=1)
    expected = make_engine(model, control=True, **changes).generate(prompts, params)
    engine = make_engine(model, control=True, num_pages=9, max_swapped_pages=0, **changes)
    found = run(engine, prompts, params)
    assert outputs(found) == outputs(expected)
    stats = engine.stats
    assert stats.positions_recomputed > 0 and stats.positions_restored == 0 and stats.positions_recoded == 0
    assert stats.prefill_tokens == sum(map(len, prompts))
    if changes.get("records") is not False:
        assert all(c.record.valid.all() for row in found for c in row)
        assert_recorded(found[3][0], model, **changes)
    assert_nothing_left(engine)


def lose_everything(engine):
    """Make every resting page lose its bytes."""
    taken = [engine._allocator.allocate() for _ in range(engine._allocator.num_available)]
    for page in taken:
        engine._allocator.rest(page)
        engine._allocator.drop(page)


def test_a_recomputation_with_other_codes_is_counted_and_later_tokens_are_not_followed(model):
    # Mutation: `follows` left True; or the record takes the recomputed K and V.
    engine = make_engine(model, control=True, max_swapped_pages=0, records=HALF)
    engine.submit([5, 1, 3, 2, 6], sampled(10, seed=2))
    for _ in range(4):
        engine.step()
    engine.pause()
    # other weights make other codes, as other kernels or another batch would
    new = tiny_model(seed=9)
    engine.update_weights(new.state_dict(), version=1)
    lose_everything(engine)
    engine.resume()
    while engine.has_work:
        engine.step()
    (c,) = engine.take_finished()
    computed = 5 + 3  # prompt, and three of the four tokens drawn so far
    assert engine.stats.positions_recomputed == engine.stats.positions_recoded == computed
    assert c.record.valid.tolist() == [True] * computed + [False] * (c.record.length - computed)
    assert c.record.versions().tolist() == [0] * computed + [1] * (c.record.length - computed)
    assert c.weight_versions == [0] * 4 + [1] * 6
    # what earlier tokens were computed from stays on record
    old = forced_record(model, c, records=HALF)
    assert differing(c.record, old, end=computed) == []
    assert differing(shifted(c.record), old, end=computed - 1) == list(range(computed - 1))
    assert_nothing_left(engine)


def test_pages_are_lost_only_beyond_the_limit_and_negative_limits_are_refused(model):
    prompts, params = make_prompts(4, shortest=6, longest=10), sampled(14, n=2, seed=1)
    engine = make_engine(model, num_pages=9, max_swapped_pages=1000)
    engine.generate(prompts, params)
    assert engine.stats.pages_lost == 0 < engine.stats.pages_swapped_out
    with pytest.raises(ConfigError, match="max_swapped_pages"):
        make_engine(model, max_swapped_pages=-1)


def test_a_sequence_that_rests_in_the_middle_of_a_recomputation_begins_it_again(model):
    engine = make_engine(model, control=True, max_swapped_pages=0, records=HALF, max_tokens_per_step=8)
    expected = make_engine(model, control=True, records=HALF).generate([[5, 1, 3] * 6], sampled(6, seed=2))
    engine.submit([5, 1, 3] * 6, sampled(6, seed=2))
    for _ in range(5):
        engine.step()
    for _ in range(2):  # each time after one chunk of 8 of the 20 positions
        engine.pause()
        lose_everything(engine)
        engine.resume()
        engine.step()
    while engine.has_work:
        engine.step()
    (c,) = engine.take_finished()
    assert outputs([[c]]) == outputs(expected) and c.record.valid.all()
    assert engine.stats.positions_recomputed == 8 + c.record.length - 3
    assert engine.stats.positions_recoded == 0
    assert_recorded(c, model, records=HALF)
    assert_nothing_left(engine)


def test_abort_of_a_sequence_whose_pages_are_lost_leaves_nothing(model):
    engine = make_engine(model, control=True, max_swapped_pages=0)
    request = engine.submit([5, 1, 3, 2, 6], sampled(10, n=3, seed=2))
    for _ in range(4):
        engine.step()
    engine.pause()
    lose_everything(engine)
    engine.abort(request)
    found = engine.take_finished()
    assert [c.finish_reason for c in found] == ["abort"] * 3
    assert all(c.record.length == 5 + len(c.token_ids) - 1 for c in found)
    assert torch.equal(found[0].record.valid, torch.ones(8, dtype=torch.bool))
    assert_nothing_left(engine)

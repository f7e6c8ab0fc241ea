"""Trajectories that go on: an environment's tokens between turns, one record for all of them, nothing twice."""

import math
from dataclasses import replace

import pytest
from tests.models.tiny_models import tiny_model
from tests.rollout.engines import make_engine, sampled
from tests.rollout.recorded import (
    assert_nothing_left,
    assert_recorded,
    differing,
    forced_record,
    shifted,
)

from tracefp4.errors import ConfigError, RecordError
from tracefp4.guidance import Site, records_equal

PROMPTS = [[5, 1, 3, 2, 6], [4, 4]]
HALF = (Site("x", 0), Site("x", 1), Site("k", 1), Site("v", 1))


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def two_turns(engine, *, added=([7, 7, 2], [9])):
    first = [row[0] for row in engine.generate(PROMPTS, sampled(5, seed=1))]
    return first, engine.extend(first, [list(tokens) for tokens in added], sampled(4, seed=2))


def test_a_second_turn_has_one_record_for_all_positions(model):
    # Mutation: the record of the second turn alone; rows of the first turn computed again.
    engine = make_engine(model, control=True)
    first, second = two_turns(engine)
    for old, c, added in zip(first, second, ([7, 7, 2], [9]), strict=True):
        assert c.prompt_ids == old.prompt_ids and c.prompt_index == old.prompt_index
        assert c.token_ids[:5] == old.token_ids and c.token_ids[5 : 5 + len(added)] == added
        assert c.sampled_mask == [True] * 5 + [False] * len(added) + [True] * 4
        assert c.logprobs[:5] == old.logprobs
        assert all(math.isnan(p) for p in c.logprobs[5 : 5 + len(added)])
        assert all(p <= 0 for p in c.logprobs[-4:])
        assert c.weight_versions == [0] * 5 + [-1] * len(added) + [0] * 4
        assert_recorded(c, model)
        assert differing(c.record, old.record, end=old.record.length) == []
    assert old.sampled_mask is None and old.sampled_flags == [True] * 5
    assert_nothing_left(engine)


def test_only_new_positions_are_computed(model):
    engine = make_engine(model, control=True)
    first = [row[0] for row in engine.generate(PROMPTS, sampled(5, seed=1))]
    before, rows = engine.stats, []
    run = engine._runner.run
    decoding = engine._scheduler.rows
    engine._runner.run = lambda chunks: (
        rows.append(len(decoding) + sum(w.count for w in chunks)) or run(chunks)
    )
    engine.extend(first, [[7, 7, 2], [9]], sampled(4, seed=2))
    # the last sampled token, the added ones, and the new ones but the last
    assert sum(rows) == (1 + 3 + 3) + (1 + 1 + 3)
    after = engine.stats
    assert after.positions_restored - before.positions_restored == (5 + 4) + (2 + 4)
    assert after.positions_recomputed == 0 and after.prefill_tokens - before.prefill_tokens == 4 + 2


def test_log_probs_of_a_later_turn_are_those_of_the_whole_context(model):
    engine = make_engine(model, control=True)
    _, second = two_turns(engine)
    for c in second:
        context, last = [*c.prompt_ids, *c.token_ids[:-4]], c.token_ids[-4:]
        ((forced,),) = engine.force([context], [[last]])
        assert forced.logprobs == c.logprobs[-4:]


def test_many_turns_and_an_engine_that_has_never_seen_the_trajectory(model):
    engine, other = make_engine(model, control=True), make_engine(model, control=True, page_size=8)
    trajectories = [row[0] for row in engine.generate(PROMPTS, sampled(3, seed=1))]
    for turn in range(4):
        where = other if turn % 2 else engine
        trajectories = where.extend(trajectories, [[turn], []], sampled(3, seed=turn))
        assert_nothing_left(where)
    for c, per_turn in zip(trajectories, (4, 3), strict=True):
        assert len(c.token_ids) == 3 + 4 * per_turn and sum(c.sampled_flags) == 15
        assert_recorded(c, model)


def test_the_given_trajectory_is_left_as_it_was_and_may_branch(model):
    engine = make_engine(model, control=True)
    ((first,),) = engine.generate(PROMPTS[:1], sampled(5, seed=1))
    ids, record = list(first.token_ids), first.record
    branches = engine.extend([first] * 3, [[7], [7], [8]], sampled(4, seed=2))
    assert first.token_ids == ids and first.record is record
    assert branches[0].token_ids == branches[1].token_ids != branches[2].token_ids
    for c in branches:
        assert_recorded(c, model)
    assert_nothing_left(engine)


def test_each_turn_keeps_its_weights(model):
    engine = make_engine(model, control=True)
    ((first,),) = engine.generate(PROMPTS[:1], sampled(3, seed=1))
    engine.update_weights(tiny_model(seed=9).state_dict(), version=2)
    (c,) = engine.extend([first], [[7, 7]], sampled(2, seed=1))
    assert c.weight_versions == [0, 0, 0, -1, -1, 2, 2]
    assert c.record.versions().tolist() == [0] * 7 + [2] * 4
    assert differing(c.record, forced_record(model, c), end=7) == []


def test_where_the_record_cannot_give_every_layer_k_and_v_are_computed_again(model):
    engine = make_engine(model, control=True, records=HALF)
    _, second = two_turns(engine)
    assert engine.stats.positions_recomputed == (5 + 4) + (2 + 4) and engine.stats.positions_restored == 0
    assert engine.stats.positions_recoded == 0
    for c in second:
        assert c.record.valid.all()
        assert_recorded(c, model, records=HALF)
    assert_nothing_left(engine)


def test_other_k_and_v_than_recorded_are_counted_and_the_new_turn_is_not_followed(model):
    engine = make_engine(model, control=True, records=HALF)
    ((first,),) = engine.generate(PROMPTS[:1], sampled(3, seed=1))
    engine.update_weights(tiny_model(seed=9).state_dict(), version=2)
    (c,) = engine.extend([first], [[7, 7]], sampled(2, seed=1))
    assert engine.stats.positions_recoded == 7
    assert c.record.valid.tolist() == [True] * 7 + [False] * 4
    assert differing(c.record, forced_record(model, c, records=HALF), end=7) == []


def test_a_trajectory_without_a_record_is_computed_again_and_its_positions_are_not_followed(model):
    engine = make_engine(model, control=True)
    ((first,),) = engine.generate(PROMPTS[:1], sampled(3, seed=1))
    (c,) = engine.extend([replace(first, record=None)], [[7]], sampled(3, seed=1))
    assert c.record.length == 5 + 7 - 1
    # the pass that drew token i of the first turn was another one; the new turn's own rows are followed
    assert c.record.valid.tolist() == [False] * 7 + [True] * 4
    assert_nothing_left(engine)


def test_an_engine_without_records_goes_on_too(model):
    with_records, without = make_engine(model, control=True), make_engine(model, control=True, records=False)
    (_, expected), (_, found) = two_turns(with_records), two_turns(without)
    assert [c.token_ids for c in found] == [c.token_ids for c in expected]
    assert [c.sampled_mask for c in found] == [c.sampled_mask for c in expected]
    assert all(c.record is None for c in found)


def test_turns_find_cached_prefixes_for_prompts_only_and_chunks_do_not_matter(model):
    plain = two_turns(make_engine(model, control=True))[1]
    for changes in ({"prefix_cache": True}, {"max_tokens_per_step": 3, "max_batch": 2}, {"num_pages": 8}):
        engine = make_engine(model, control=True, **changes)
        for c, expected in zip(two_turns(engine)[1], plain, strict=True):
            assert c.token_ids == expected.token_ids and c.logprobs[-4:] == expected.logprobs[-4:]
            assert differing(c.record, expected.record) == []
            assert not records_equal(shifted(c.record), expected.record)
        assert_nothing_left(engine)


def test_a_log_that_is_sealed_again_and_again_gives_the_same_records(model):
    expected = make_engine(model, control=True).generate(PROMPTS, sampled(9, n=3, seed=1))
    engine = make_engine(model, control=True, max_log_rows=8)
    found = engine.generate(PROMPTS, sampled(9, n=3, seed=1))
    for row, others in zip(found, expected, strict=True):
        for c, other in zip(row, others, strict=True):
            assert c.token_ids == other.token_ids and differing(c.record, other.record) == []
            assert c.record.identity.trajectory == other.record.identity.trajectory
    assert_nothing_left(engine)


def with_a_negative_scale(record):
    """One byte of V that would be written into a page, at a position that is not followed."""
    part, valid = record.sites[Site("v", 1)], record.valid.clone()
    block_scales = part.block_scales.clone()
    block_scales[2 * part.rows_per_token, 0] |= 0x80
    valid[2] = False
    sites = {**record.sites, Site("v", 1): replace(part, block_scales=block_scales)}
    return replace(record, sites=sites, valid=valid)


def test_what_cannot_go_on_is_refused_before_anything_is_queued(model):
    engine = make_engine(model, control=True)
    ((first,),) = engine.generate(PROMPTS[:1], sampled(3, seed=1))
    with pytest.raises(ConfigError, match="n must be 1"):
        engine.extend([first], [[7]], sampled(2, n=2))
    with pytest.raises(ConfigError, match="unknown ids"):
        engine.extend([first, first], [[7], [40]], sampled(2))
    with pytest.raises(ConfigError, match="can never fit"):
        engine.extend([first], [[7]], sampled(1000))
    with pytest.raises(RecordError, match="recode it then"):
        engine.extend([replace(first, record=first.record.recode("mantissa"))], [[7]], sampled(2))
    with pytest.raises(RecordError, match="plan digest"):
        make_engine(model, plan_digest="other").extend([first], [[7]], sampled(2))
    with pytest.raises(RecordError, match="cannot go on"):
        make_engine(model, records=HALF).extend([first], [[7]], sampled(2))
    with pytest.raises(RecordError, match=r"impossible scales at position 2, layers\.1\.v"):
        engine.extend([replace(first, record=with_a_negative_scale(first.record))], [[7]], sampled(2))
    with pytest.raises(ValueError, match="zip"):
        engine.extend([first], [], sampled(2))
    assert_nothing_left(engine)


def test_one_version_joins_several(model):
    """A turn under one version, then one in which the weights change."""
    engine = make_engine(model, control=True)
    ((first,),) = engine.generate(PROMPTS[:1], sampled(3, seed=1))
    engine.resubmit(first, [7, 7], sampled(4, seed=1))
    engine.step()
    engine.step()
    engine.update_weights(tiny_model(seed=9).state_dict(), version=2)
    while engine.has_work:
        engine.step()
    (c,) = engine.take_finished()
    assert c.record.versions().tolist() == [0] * 11 + [2] * 2
    assert c.weight_versions == [0, 0, 0, -1, -1, 0, 0, 2, 2]


def test_aln_3_a_trajectory_that_was_cut_goes_on_if_its_record_was_cut_with_it(model):
    engine = make_engine(model, control=True)
    ((first,),) = engine.generate(PROMPTS[:1], sampled(6, seed=1))
    cut = replace(first, token_ids=first.token_ids[:3], logprobs=first.logprobs[:3], weight_versions=[0] * 3)
    with pytest.raises(RecordError, match="got 10 positions for 8 tokens"):
        engine.extend([cut], [[7]], sampled(2))
    for rows in (8, 7, 4):  # one for every token, for every input, and fewer
        (c,) = engine.extend([replace(cut, record=first.record.truncate(rows))], [[7]], sampled(3, seed=2))
        assert c.token_ids[:4] == [*first.token_ids[:3], 7]
        # rows that led to sampled tokens and are missing come from another pass; the last token led to none
        assert c.record.valid.tolist() == [p < rows or p >= 7 for p in range(11)]
        assert_recorded(c, model)
    # with nothing added the last kept token is computed again, and the rest is drawn as before
    (again,) = engine.extend([replace(cut, record=first.record.truncate(8))], [[]], sampled(3, seed=1))
    assert again.token_ids == first.token_ids and again.logprobs == first.logprobs
    assert differing(again.record, first.record) == []
    assert_nothing_left(engine)


def test_added_tokens_that_nothing_was_drawn_from_are_followed_after_an_abort(model):
    engine = make_engine(model, control=True, max_tokens_per_step=2, max_batch=2)
    ((first,),) = engine.generate(PROMPTS[:1], sampled(3, seed=1))
    engine.resubmit(first, [7, 7, 7, 7], sampled(3, seed=2))
    engine.step()
    (part,) = engine.suspend()
    assert part.finish_reason == "abort" and part.record.length == 9 and len(part.token_ids) == 7
    assert part.sampled_mask == [True] * 3 + [False] * 4
    (c,) = engine.extend([part], [[]], sampled(3, seed=2))
    (whole,) = engine.extend([first], [[7, 7, 7, 7]], sampled(3, seed=2))
    assert c.token_ids == whole.token_ids and c.sampled_mask == whole.sampled_mask
    assert c.record.valid.all()
    assert_recorded(c, model)
    assert_nothing_left(engine)

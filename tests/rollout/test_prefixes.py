"""The prefix cache: pages and records of finished sequences serve requests that begin with the same tokens."""

import pytest
import torch
from tests.models.tiny_models import tiny_model
from tests.rollout.engines import make_engine, outputs, sampled
from tests.rollout.recorded import (
    assert_frames_add_up,
    assert_nothing_left,
    assert_pages_hold_the_record,
    assert_recorded,
    differing,
    forced_record,
)

from tracefp4.kvcache import PageAllocator
from tracefp4.rollout.prefixes import PrefixCache

SHARED = [7, 3, 9, 1, 4, 4, 2, 8, 5]  # two pages of four, and one token


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def caching(model, **changes):
    return make_engine(model, control=True, prefix_cache=True, **changes)


def test_a_second_request_computes_only_what_is_new_and_draws_the_same(model):
    # Mutation: entry.start one page off, or the last prompt token taken from the cache.
    engine, plain = caching(model), make_engine(model, control=True)
    first = engine.generate([[*SHARED, 1, 2]], sampled(6, seed=1))
    assert engine.stats.prefix_hits == 0 and engine._recorder.num_rows == 0  # records outlive the log
    before = engine.stats.prefill_tokens
    prompts = [[*SHARED, 6, 6, 6], SHARED]
    found = engine.generate(prompts, sampled(6, n=2, seed=2))
    assert outputs(found) == outputs(plain.generate(prompts, sampled(6, n=2, seed=2)))
    assert engine.stats.prefix_hits == 4 and engine.stats.prefix_tokens == 16
    assert engine.stats.prefill_tokens - before == 12 + 9 - 16
    for completion in (first[0][0], *found[0], *found[1]):
        assert_recorded(completion, model)
    assert_nothing_left(engine)


def test_a_prompt_that_is_one_full_page_still_computes_its_last_token(model):
    engine = caching(model)
    prompt = SHARED[:8]
    first = engine.generate([prompt], sampled(4))
    again = engine.generate([prompt], sampled(4))
    assert outputs(again) == outputs(first) and engine.stats.prefix_hits == 1
    assert_recorded(again[0][0], model)


def test_requests_of_one_log_share_pages_that_are_still_running(model):
    engine = caching(model)
    engine.submit([*SHARED, 1], sampled(9, seed=1), prompt_index=0)
    engine.step()
    engine.step()
    engine.submit([*SHARED, 2], sampled(9, seed=1), prompt_index=1)
    while engine.has_work:
        engine.step()
        assert_frames_add_up(engine)
        for sequence in engine._scheduler.running:
            assert_pages_hold_the_record(engine, sequence)
    found = engine.take_finished()
    assert engine.stats.prefix_hits == 2
    for completion in found:
        assert_recorded(completion, model)
    assert_nothing_left(engine)


def test_completions_are_prefixes_too_and_chunks_meet_hits(model):
    engine = caching(model, max_tokens_per_step=3, max_batch=2)
    (row,) = engine.generate([SHARED], sampled(8, seed=3))
    longer = [*row[0].prompt_ids, *row[0].token_ids, 1, 2, 3, 4, 5]
    (again,) = engine.generate([longer], sampled(5, seed=3))
    # 9 + 8 tokens, of which 16 were inputs: four full pages
    assert engine.stats.prefix_hits == 4
    assert_recorded(again[0], model)


def test_pages_in_use_are_never_evicted_and_the_longest_unused_goes_first(model):
    engine = caching(model, num_pages=10, max_batch=2)
    prompts = [[i, *SHARED[1:8], i] for i in range(6)]
    expected = make_engine(model, control=True).generate(prompts, sampled(12, seed=4))
    for index, prompt in enumerate(prompts):
        engine.submit(prompt, sampled(12, seed=4), prompt_index=index)
    while engine.has_work:
        engine.step()
        assert_frames_add_up(engine)
        for sequence in engine._scheduler.running:
            assert_pages_hold_the_record(engine, sequence)
    found = engine.take_finished()
    assert outputs([[c] for c in found]) == outputs(expected)
    assert 0 < len(engine._prefixes.entries) <= 10
    hits = engine.stats.prefix_hits
    engine.generate(prompts[-1:], sampled(2))
    assert engine.stats.prefix_hits == hits + 2  # the newest is there
    engine.generate(prompts[:1], sampled(2))
    assert engine.stats.prefix_hits == hits + 2  # the oldest is gone
    assert_nothing_left(engine)


def test_pages_that_a_hit_takes_are_no_longer_there_for_others(model):
    # Mutation: cached pages count as free to the request that needs them.
    engine = caching(model, num_pages=6)
    prompt = [*SHARED, 3, 3, 3, 1]  # three full pages
    engine.generate([prompt], sampled(1))
    engine.submit([1], sampled(4, seed=1), prompt_index=0)
    engine.step()
    longer = [*prompt[:12], *range(12)]  # three hits and three pages more, one of which is taken
    engine.submit(longer, sampled(1, seed=1), prompt_index=1)
    while engine.has_work:
        engine.step()
        assert_frames_add_up(engine)
    short, found = engine.take_finished()
    assert len(short.token_ids) == 4 and engine.stats.prefix_hits == 3
    assert_recorded(found, model)
    assert_nothing_left(engine)


def test_an_update_empties_the_cache_or_keeps_it_with_its_versions(model):
    new = tiny_model(seed=9)
    for keeps in (False, True):
        engine = caching(model)
        engine.generate([[*SHARED, 1]], sampled(3))
        engine.update_weights(new.state_dict(), version=5, keep_prefixes=keeps)
        (row,) = engine.generate([[*SHARED, 2]], sampled(4))
        assert row[0].weight_versions == [5] * 4
        if not keeps:
            assert engine.stats.prefix_hits == 0 and row[0].record.versions().unique().tolist() == [5]
            assert_recorded(row[0], new)
            continue
        assert row[0].record.versions().tolist() == [0] * 8 + [5] * 5
        # the record of a hit is that of the computation that made the page
        assert differing(row[0].record, forced_record(model, row[0]), end=8) == []
        assert differing(row[0].record, forced_record(new, row[0]), end=8) == list(range(8))
        assert engine._recorder.num_rows == 0
        assert_nothing_left(engine)


def test_pages_that_were_computed_again_are_not_offered(model):
    """Their K and V are those of new weights, the rows of their sequence those of the passes that drew its tokens."""
    new = tiny_model(seed=9)
    engine = caching(model)
    engine.submit([*SHARED, 1], sampled(6, seed=1), prompt_index=0)
    engine.step()
    engine.step()
    engine._prefixes.clear(weight_version=0)  # as if its pages had been evicted
    engine.update_weights(new.state_dict(), version=1, recompute=True, keep_prefixes=True)
    while engine.has_work:
        engine.step()
    engine.take_finished()
    engine.update_weights(model.state_dict(), version=2, keep_prefixes=True)
    (row,) = engine.generate([[*SHARED, 2]], sampled(3, seed=1))
    assert engine.stats.prefix_hits == 0
    assert_recorded(row[0], model)
    assert_nothing_left(engine)


def test_lif_1_a_page_that_comes_back_in_another_frame_keeps_its_own_record(model):
    # Side data by frame would give the rows of the frame's last owner.
    engine = caching(model, num_pages=8)
    engine.submit([*SHARED, 1], sampled(14, seed=1), prompt_index=0)
    engine.step()
    (sequence,) = engine._scheduler.running
    page = sequence.table.pages[0]
    frame = page.frame
    engine.pause()
    allocator = engine._allocator
    taken = [allocator.allocate() for _ in range(8)]  # another owner has every frame
    assert page.frame is None and page.saved is not None
    (stays,) = [other for other in taken if other.frame == frame]
    for other in taken:
        if other is not stays:
            allocator.rest(other)
            allocator.drop(other)
    engine.resume()
    engine.step()
    assert page.frame not in (None, frame)
    assert_pages_hold_the_record(engine, sequence)
    engine.submit([*SHARED, 2], sampled(3, seed=1), prompt_index=1)
    while engine.has_work:
        engine.step()
        for running in engine._scheduler.running:
            assert_pages_hold_the_record(engine, running)
    assert engine.stats.prefix_hits == 2
    allocator.rest(stays)
    allocator.drop(stays)
    for completion in engine.take_finished():
        assert_recorded(completion, model)
    assert_nothing_left(engine)


def test_nothing_is_kept_by_default(model):
    engine = make_engine(model)
    engine.generate([SHARED], sampled(4))
    assert engine._prefixes is None and engine._allocator.num_used == 0


def test_without_records_pages_are_shared_all_the_same(model):
    engine = caching(model, records=False)
    first = engine.generate([SHARED], sampled(5, seed=1))
    again = engine.generate([SHARED], sampled(5, seed=1))
    assert outputs(again) == outputs(first) and engine.stats.prefix_hits == 2
    assert again[0][0].record is None


def test_trajectories_that_go_on_share_the_pages_of_their_prompt(model):
    # Mutation: pages adopted by their tokens alone, although another computation made them.
    engine, plain = caching(model), make_engine(model, control=True)
    (group,) = engine.generate([SHARED], sampled(4, n=3, seed=1))
    (others,) = plain.generate([SHARED], sampled(4, n=3, seed=1))
    before = engine.stats
    found = engine.extend(group, [[7], [8], [9]], sampled(4, seed=2))
    expected = plain.extend(others, [[7], [8], [9]], sampled(4, seed=2))
    assert outputs([found])[0] != [] and [c.token_ids for c in found] == [c.token_ids for c in expected]
    # two pages of the prompt from the cache, for each; a third page of nine positions and three tokens at the front
    assert engine.stats.prefix_hits - before.prefix_hits >= 6
    assert engine.stats.positions_restored < plain.stats.positions_restored
    for c in found:
        assert_recorded(c, model)
    again = engine.extend(found, [[1], [1], [1]], sampled(2, seed=2))
    for c in again:
        assert_recorded(c, model)
    assert_nothing_left(engine)


def test_pages_of_another_computation_do_not_serve_a_trajectory(model):
    """The same tokens under other weights: K and V on record are not those of the cached page."""
    engine = caching(model)
    ((first,),) = engine.generate([SHARED], sampled(4, seed=1))
    engine.update_weights(tiny_model(seed=9).state_dict(), version=1)
    engine.generate([SHARED], sampled(4, seed=1))
    hits, restored = engine.stats.prefix_hits, engine.stats.positions_restored
    engine.resubmit(first, [7], sampled(3, seed=2))
    while engine.has_work:
        engine.step()
        for sequence in engine._scheduler.running:
            assert_pages_hold_the_record(engine, sequence)
    (c,) = engine.take_finished()
    assert engine.stats.prefix_hits == hits and engine.stats.positions_restored - restored == 12
    assert differing(c.record, forced_record(model, c), end=12) == []
    assert_nothing_left(engine)


def test_pages_with_log_rows_lie_before_pages_with_records(model):
    """One prefix: its first page was computed under the running log, the next written from a trajectory's record."""
    ((elsewhere,),) = make_engine(model, control=True).generate([SHARED], sampled(6, seed=3))
    engine = caching(model)
    engine.submit([2], sampled(40))  # keeps the log
    engine.submit([*SHARED[:4], 1, 1], sampled(2))
    engine.step()
    engine.resubmit(elsewhere, [1, 2], sampled(4, seed=4))
    for _ in range(6):
        engine.step()
    longer = next(c for c in engine.take_finished() if len(c.token_ids) == 12)
    kinds = {(entry.start, entry.record is None) for entry in engine._prefixes.entries}
    assert {(0, True), (4, False), (8, False)} <= kinds
    hits = engine.stats.prefix_hits
    engine.submit([*longer.prompt_ids, *longer.token_ids], sampled(2))
    while engine.has_work:
        engine.step()
    assert engine.stats.prefix_hits - hits == 3  # the fourth page lies across both turns
    for c in engine.take_finished():
        assert_recorded(c, model)
    assert_recorded(longer, model)
    assert_nothing_left(engine)


@pytest.fixture
def cache():
    allocator = PageAllocator(8, save=lambda frame: frame, load=lambda frame, saved: None)
    return PrefixCache(allocator, page_size=2, rules=("plan",), weight_version=3)


def enter(cache, pages, index, ids, versions=(3, 3)):
    cache.enter(pages, index, ids=ids, versions=list(versions), source=[])


def found(cache, ids):
    return [entry.start for entry in cache.find(ids)]


def test_entries_are_found_behind_the_very_page_they_were_computed_after(cache):
    # Mutation: keys without the predecessor.
    pages = [cache._allocator.allocate() for _ in range(4)]
    enter(cache, pages[:2], 0, [1, 2])
    enter(cache, pages[:2], 1, [3, 4])
    enter(cache, pages[2:], 1, [3, 4])  # its predecessor is not cached
    assert len(cache.entries) == 2
    assert found(cache, [1, 2, 3, 4, 5]) == [0, 2]
    assert found(cache, [1, 2, 3, 4]) == [0]  # the last token is left to compute
    assert found(cache, [3, 4, 1, 2, 5]) == found(cache, [9, 2, 3, 4, 5]) == []


def test_the_same_prefix_is_entered_once(cache):
    first, second = cache._allocator.allocate(), cache._allocator.allocate()
    enter(cache, [first], 0, [1, 2])
    enter(cache, [second], 0, [1, 2])
    assert [entry.page for entry in cache.entries] == [first] and second.holders == 1


def test_positions_older_than_the_last_update_are_not_entered(cache):
    # A page that was begun before an update and filled after it holds positions of both.
    page = cache._allocator.allocate()
    enter(cache, [page], 0, [1, 2], versions=(2, 3))
    assert cache.entries == []
    enter(cache, [page], 0, [1, 2], versions=(3, 4))
    assert len(cache.entries) == 1


def test_a_page_goes_with_all_that_was_computed_after_it(cache):
    allocator = cache._allocator
    pages = [allocator.allocate() for _ in range(3)]
    for index in range(3):
        enter(cache, pages, index, [index, index])
    for page in pages:
        allocator.rest(page)
        allocator.drop(page)
    assert allocator.num_spare == 3 and allocator.num_available == 8
    allocator.evict(pages[1])
    assert [entry.page for entry in cache.entries] == [pages[0]]
    assert allocator.num_used == allocator.num_spare == 1
    cache.clear(weight_version=4)
    assert allocator.num_used == 0 and cache.entries == []


def test_sealed_entries_have_records_and_name_no_rows(model):
    engine = caching(model)
    engine.generate([SHARED], sampled(8))
    assert engine._prefixes.entries
    for entry in engine._prefixes.entries:
        assert entry.rows == [] and (entry.record.start, entry.record.length) == (entry.start, 4)
        assert torch.equal(entry.record.valid, torch.ones(4, dtype=torch.bool))

"""PageAllocator: frames are counted once, shared by reference, and given away only when nobody runs on
them."""

import pytest

from tracefp4.errors import ConfigError
from tracefp4.kvcache import PageAllocator


@pytest.fixture
def moves():
    return []


@pytest.fixture
def allocator(moves):
    def save(frame):
        moves.append(("save", frame))
        return f"bytes of {frame}"

    def load(frame, saved):
        moves.append(("load", frame, saved))

    return PageAllocator(3, save=save, load=load)


def test_frames_are_handed_out_and_come_back(allocator):
    pages = [allocator.allocate() for _ in range(3)]
    assert {page.frame for page in pages} == {0, 1, 2} and allocator.num_available == 0
    for page in pages:
        allocator.rest(page)
        allocator.drop(page)
    assert allocator.num_used == 0 and allocator.num_available == 3 and allocator.peak_pages == 3


def test_a_shared_page_is_freed_by_its_last_holder(allocator):
    page = allocator.allocate()
    allocator.hold(page)
    allocator.rest(page)
    allocator.drop(page)
    assert allocator.num_used == 1 and page.frame is not None
    allocator.drop(page)
    assert allocator.num_used == 0 and page.frame is None


def test_an_idle_page_moves_out_and_comes_back_with_its_bytes(allocator, moves):
    first, *_ = pages = [allocator.allocate() for _ in range(3)]
    frame = first.frame
    allocator.rest(first)
    assert allocator.num_available == 1 and first.frame == frame
    taken = allocator.allocate()
    assert taken.frame == frame and first.frame is None and moves == [("save", frame)]
    allocator.rest(pages[1])
    allocator.drop(pages[1])
    allocator.use(first)
    assert moves[-1] == ("load", first.frame, f"bytes of {frame}") and first.saved is None
    assert allocator.num_swapped_out == 1


def test_all_frames_are_emptied_as_if_others_needed_them(allocator, moves):
    idle, spare, gone = (allocator.allocate() for _ in range(3))
    allocator.cache(spare)
    for page in (idle, spare, gone):
        allocator.rest(page)
    for page in (spare, gone):
        allocator.drop(page)
    frame = idle.frame
    allocator.vacate()
    assert allocator.num_used == allocator.num_spare == 0 and allocator.num_available == 3
    assert moves == [("save", frame)] and not spare.is_cached and spare.holders == 0
    assert allocator.use(idle) and moves[-1] == ("load", idle.frame, f"bytes of {frame}")
    with pytest.raises(AssertionError, match="running"):
        allocator.vacate()


def test_a_page_in_use_never_moves_out(allocator):
    for _ in range(3):
        allocator.allocate()
    with pytest.raises(AssertionError):
        allocator.allocate()


def test_resting_and_coming_back_without_pressure_moves_nothing(allocator, moves):
    page = allocator.allocate()
    allocator.rest(page)
    allocator.use(page)
    assert moves == [] and allocator.num_available == 2


def test_a_pool_without_pages_is_refused():
    with pytest.raises(ConfigError, match="num_pages 0"):
        PageAllocator(0, save=lambda frame: None, load=lambda frame, saved: None)


def test_spare_pages_go_before_idle_ones_the_longest_unused_first(allocator, moves):
    pages = [allocator.allocate() for _ in range(3)]
    gone = []
    allocator.evict = lambda page: gone.append(page) or allocator.uncache(page)
    allocator.rest(pages[0])  # a sequence that rests holds it: idle
    for page in (pages[2], pages[1]):  # only the cache holds them: spare
        allocator.cache(page)
        allocator.rest(page)
        allocator.drop(page)
    assert allocator.num_spare == 2 and allocator.num_available == 3
    allocator.allocate()
    allocator.allocate()
    assert gone == [pages[2], pages[1]] and moves == []
    allocator.allocate()
    assert len(moves) == 1 and pages[0].frame is None and not pages[0].is_lost


def test_a_cached_page_that_is_used_again_is_no_longer_spare(allocator):
    page = allocator.allocate()
    allocator.cache(page)
    allocator.rest(page)
    allocator.drop(page)
    assert allocator.is_idle(page)
    allocator.hold(page)
    assert allocator.use(page) and allocator.num_spare == 0 and not allocator.is_idle(page)
    allocator.rest(page)
    allocator.uncache(page)
    assert allocator.is_idle(page) and allocator.num_used == 1
    allocator.drop(page)
    assert allocator.num_used == 0


def test_a_full_host_memory_loses_pages_and_says_so(moves):
    allocator = PageAllocator(
        2,
        save=lambda frame: f"bytes of {frame}",
        load=lambda frame, saved: moves.append(saved),
        max_saved=1,
    )
    first, second = allocator.allocate(), allocator.allocate()
    allocator.rest(first)
    allocator.rest(second)
    others = [allocator.allocate(), allocator.allocate()]
    assert first.saved == "bytes of 0" or first.saved == "bytes of 1"
    assert second.is_lost and (allocator.num_saved, allocator.num_lost) == (1, 1)
    for page in others:
        allocator.rest(page)
        allocator.drop(page)
    assert allocator.use(first) and moves and allocator.num_saved == 0
    assert not allocator.use(second) and second.frame is not None and not second.is_lost
    allocator.rest(first)
    allocator.drop(first)
    allocator.rest(second)
    allocator.drop(second)
    assert allocator.num_used == 0 and allocator.num_saved == 0


def test_a_cached_page_does_not_stay_in_host_memory_for_the_cache_alone(allocator):
    page = allocator.allocate()
    gone = []
    allocator.evict = lambda found: gone.append(found) or allocator.uncache(found)
    allocator.cache(page)
    allocator.rest(page)  # its sequence rests, and the page moves out
    taken = [allocator.allocate() for _ in range(3)]
    assert page.saved is not None and allocator.num_saved == 1
    allocator.drop(page)  # the sequence is aborted
    assert gone == [page] and page.saved is None and allocator.num_saved == 0 and page.holders == 0
    assert len(taken) == 3

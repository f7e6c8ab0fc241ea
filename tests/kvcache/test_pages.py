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

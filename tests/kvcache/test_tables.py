"""PageTable: growth by position, copy before a shared page is written, and questions that match actions."""

import pytest

from tracefp4.kvcache import PageAllocator, PageTable


class Frames:
    """Bytes of a pool, as labels."""

    def __init__(self, num_pages):
        self.content = ["?"] * num_pages
        self.allocator = PageAllocator(
            num_pages, save=self.content.__getitem__, load=self.content.__setitem__
        )

    def copy(self, source, target):
        self.content[target] = self.content[source]

    def clear(self, frame):
        self.content[frame] = ""

    def table(self):
        return PageTable(self.allocator, page_size=4, copy=self.copy, clear=self.clear)


@pytest.fixture
def frames():
    return Frames(4)


def test_pages_follow_positions(frames):
    table = frames.table()
    assert table.num_frames_to_write(0, 6) == 2
    table.prepare_write(0, 6)
    assert len(table.frames) == 2 and frames.allocator.num_used == 2
    assert table.num_frames_to_write(6, 8) == 0 and table.num_frames_to_write(8, 9) == 1
    assert [frames.content[f] for f in table.frames] == ["", ""]


def test_the_partly_filled_shared_page_is_copied_and_the_full_one_is_not(frames):
    table = frames.table()
    table.prepare_write(0, 6)
    for frame, label in zip(table.frames, "ab", strict=True):
        frames.content[frame] = label
    sibling = table.fork()
    sibling.resume()
    assert sibling.frames == table.frames and frames.allocator.num_used == 2
    assert sibling.num_frames_to_write(6, 7) == 1
    sibling.prepare_write(6, 7)
    assert sibling.frames[0] == table.frames[0] and sibling.frames[1] != table.frames[1]
    assert frames.content[sibling.frames[1]] == "b"
    # the last holder writes in place
    assert table.num_frames_to_write(6, 7) == 0


def test_a_fork_at_a_page_boundary_copies_nothing(frames):
    table = frames.table()
    table.prepare_write(0, 4)
    sibling = table.fork()
    sibling.resume()
    sibling.prepare_write(4, 5)
    assert sibling.frames[0] == table.frames[0] and frames.allocator.num_used == 2


def test_swapped_pages_return_shared_and_unchanged(frames):
    table = frames.table()
    table.prepare_write(0, 6)
    for frame, label in zip(table.frames, "ab", strict=True):
        frames.content[frame] = label
    sibling = table.fork()
    table.rest()
    other = frames.table()
    other.prepare_write(0, 16)
    assert frames.allocator.num_swapped_out == 2 and table.num_frames_to_resume() == 2
    other.release()
    for resumed in (sibling, table):
        resumed.resume()
        assert [frames.content[f] for f in resumed.frames] == ["a", "b"]
    assert sibling.frames == table.frames and frames.allocator.num_used == 2


def test_resume_never_pushes_out_its_own_pages(frames):
    table = frames.table()
    table.prepare_write(0, 16)
    for frame, label in zip(table.frames, "abcd", strict=True):
        frames.content[frame] = label
    table.rest()
    other = frames.table()
    other.prepare_write(0, 4)
    other.release()
    assert table.num_frames_to_resume() == 4 == frames.allocator.num_available
    table.resume()
    assert [frames.content[f] for f in table.frames] == list("abcd")


def test_release_gives_everything_back(frames):
    table = frames.table()
    table.prepare_write(0, 6)
    sibling = table.fork()
    table.release()
    assert frames.allocator.num_used == 2
    sibling.release()
    assert frames.allocator.num_used == 0

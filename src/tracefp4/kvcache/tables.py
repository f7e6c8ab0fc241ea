"""One sequence's pages in order: growing, sharing with siblings, copying before a write, leaving and coming
back.

Every change that can need frames has a question beside it (`num_frames_to_...`) that changes nothing, so the
scheduler decides before it acts. Running out of frames inside an action is a programming error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tracefp4.kvcache.pages import Page, PageAllocator


class PageTable:
    """The pages of one sequence; position p lives in pages[p // page_size] at offset p % page_size.

    Args:
        allocator: shared by all tables of a pool.
        page_size: positions per page.
        copy: called with (source frame, target frame) to duplicate a shared page.
        clear: called with a frame that was just handed out, so that no other sequence's bytes remain in it.
    """

    def __init__(
        self,
        allocator: PageAllocator,
        *,
        page_size: int,
        copy: Callable[[int, int], None],
        clear: Callable[[int], None],
    ) -> None:
        self.pages: list[Page] = []
        self.is_resident = True
        """True while the sequence runs: all of its pages are in frames and stay there."""
        self._allocator = allocator
        self._page_size = page_size
        self._copy = copy
        self._clear = clear

    @property
    def frames(self) -> list[int]:
        """Frames in order of position; only meaningful while resident."""
        return [-1 if page.frame is None else page.frame for page in self.pages]

    def num_frames_to_resume(self) -> int:
        """Frames that `resume` takes from the allocator's available ones: idle pages stop being available
        too."""
        if self.is_resident:
            return 0
        return sum(page.frame is None or self._allocator.is_idle(page) for page in self.pages)

    def num_frames_to_write(self, begin: int, end: int) -> int:
        """Frames that `prepare_write(begin, end)` takes: new pages, and one copy if `begin` is on a shared
        page."""
        num_new = max(0, -(-end // self._page_size) - len(self.pages))
        return num_new + self._is_shared_at(begin)

    def prepare_write(self, begin: int, end: int) -> None:
        """Make positions begin .. end-1 writable: copy the page of `begin` if it is shared, then append
        pages."""
        if self._is_shared_at(begin):
            self._own(begin // self._page_size)
        while len(self.pages) * self._page_size < end:
            page = self._allocator.allocate()
            assert page.frame is not None
            self._clear(page.frame)
            self.pages.append(page)

    def fork(self) -> PageTable:
        """Return a table that shares all pages and is not resident."""
        other = PageTable(self._allocator, page_size=self._page_size, copy=self._copy, clear=self._clear)
        other.is_resident = False
        other.pages = list(self.pages)
        for page in other.pages:
            self._allocator.hold(page)
        return other

    def rest(self) -> None:
        """Stop running: pages that nobody else uses may now leave their frames, with their bytes."""
        assert self.is_resident
        self.is_resident = False
        for page in reversed(self.pages):  # the tail leaves first; a shared prompt is at the front
            self._allocator.rest(page)

    def resume(self) -> list[int]:
        """Run again: every page back in a frame, with the bytes it had.

        Returns: indices of the pages whose bytes were lost; their frames are clear, and the caller must write
            what they held before anything reads them.
        """
        assert not self.is_resident
        self.is_resident = True
        return self._use(self.pages)

    def num_frames_to_adopt(self, pages: Sequence[Page]) -> int:
        """Frames that `adopt` takes from the allocator's available ones."""
        return sum(page.frame is None or self._allocator.is_idle(page) for page in pages)

    def adopt(self, pages: Sequence[Page]) -> None:
        """Begin with pages that others have filled; this table must be empty and running."""
        assert self.is_resident and not self.pages
        for page in pages:
            self._allocator.hold(page)
        self.pages = list(pages)
        lost = self._use(self.pages)
        assert not lost, "a lost page is in no cache"

    def first_lost(self) -> int | None:
        """Index of the first page whose bytes are nowhere; None if there is none."""
        return next((index for index, page in enumerate(self.pages) if page.is_lost), None)

    def truncate(self, num_pages: int) -> None:
        """Give up all pages but the first `num_pages`; the table must not be running."""
        assert not self.is_resident
        for page in reversed(self.pages[num_pages:]):
            self._allocator.drop(page)
        del self.pages[num_pages:]

    def release(self) -> None:
        """Give every page up; the table is empty afterwards, and not running."""
        if self.is_resident:
            self.rest()
        self.truncate(0)

    def _use(self, pages: Sequence[Page]) -> list[int]:
        """Use pages of this table; returns the indices of those whose bytes were lost."""
        lost = []
        # Pages still in frames first: bringing one back must not push out another of this table.
        for index, page in sorted(enumerate(pages), key=lambda found: found[1].frame is None):
            if not self._allocator.use(page):
                assert page.frame is not None
                self._clear(page.frame)
                lost.append(index)
        return sorted(lost)

    def _is_shared_at(self, position: int) -> bool:
        index = position // self._page_size
        return index < len(self.pages) and self.pages[index].holders > 1

    def _own(self, index: int) -> None:
        shared = self.pages[index]
        own = self._allocator.allocate()
        assert shared.frame is not None and own.frame is not None
        self._copy(shared.frame, own.frame)
        self.pages[index] = own
        self._allocator.rest(shared)
        self._allocator.drop(shared)

"""Which page sits in which frame, and who still needs it: accounting only, no tensors.

A *page* is logical: the K and V of page_size consecutive positions of some token sequence. A *frame* is a
place in the pool. A page is listed by `holders` page tables (and the prefix cache, which counts as one);
`users` of them belong to sequences that are running. A page without users but with holders keeps its frame until
someone else needs it. If only the prefix cache holds it, it is *spare* and simply goes, the longest unused first.
Otherwise it is *idle* and moves to host memory with its bytes, so what a position's K and V are never changes. Where
host memory is bounded and full, its bytes are given up: the page is *lost*, and whoever uses it next must write the
same bytes again. A page without holders is gone and its frame is free.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tracefp4.errors import ConfigError


@dataclass(eq=False, kw_only=True, slots=True)
class Page:
    """One logical page."""

    frame: int | None
    """Frame in the pool, or None while the bytes are elsewhere."""
    holders: int = 1
    """Page tables that list this page, plus one for the prefix cache; above 1 the page is shared and may not be
    written."""
    users: int = 1
    """Holders that are running, so that the page must stay in its frame."""
    saved: Any = None
    """The bytes in host memory while `frame` is None; opaque here. None there: the page is lost."""
    is_cached: bool = False
    """True while the prefix cache is one of the holders."""

    @property
    def is_lost(self) -> bool:
        """True if the bytes are nowhere."""
        return self.frame is None and self.saved is None


class PageAllocator:
    """Frames, a free list, and the pages without users that can be moved out to make room.

    Args:
        num_pages: frames, numbered 0 .. num_pages-1.
        save: called with a frame before its page moves out; returns what `load` needs.
        load: called with a frame and what `save` returned.
        max_saved: most pages in host memory at once, 0 or more; None: no limit.

    Raises: ConfigError if num_pages is below 1, or max_saved below 0.
    """

    def __init__(
        self,
        num_pages: int,
        *,
        save: Callable[[int], Any],
        load: Callable[[int, Any], None],
        max_saved: int | None = None,
    ) -> None:
        if num_pages < 1:
            raise ConfigError(
                f"A KV pool needs pages; got num_pages {num_pages}. At least 1. Raise num_pages."
            )
        if max_saved is not None and max_saved < 0:
            raise ConfigError(
                f"Pages in host memory cannot be limited to {max_saved}; got a negative number. 0 or more, or None "
                "for no limit. Correct max_swapped_pages."
            )
        self.num_pages = num_pages
        self.peak_pages = 0
        """Most frames that were ever in use at once."""
        self.num_swapped_out = 0
        """Pages moved to host memory so far."""
        self.num_lost = 0
        """Pages whose bytes were given up because host memory was full, so far."""
        self.num_saved = 0
        """Pages in host memory now."""
        self.evict: Callable[[Page], None] = self.uncache
        """Called with a cached page that must leave the prefix cache; must call `uncache` for it."""
        self._save = save
        self._load = load
        self._max_saved = max_saved
        self._free = list(range(num_pages - 1, -1, -1))
        self._idle: dict[Page, None] = {}  # in the order in which they became idle
        self._spare: dict[Page, None] = {}  # likewise; only the prefix cache holds them

    @property
    def num_used(self) -> int:
        """Frames in use, idle and spare pages included."""
        return self.num_pages - len(self._free)

    @property
    def num_spare(self) -> int:
        """Frames of pages that only the prefix cache holds."""
        return len(self._spare)

    @property
    def num_available(self) -> int:
        """Frames that `allocate` can hand out: free ones and those of idle and spare pages."""
        return len(self._free) + len(self._idle) + len(self._spare)

    def is_idle(self, page: Page) -> bool:
        """True if the page has a frame that it may lose."""
        return page in self._idle or page in self._spare

    def allocate(self) -> Page:
        """Return a new page with one holder and one user; its frame's bytes are whatever they were."""
        return Page(frame=self._take_frame())

    def hold(self, page: Page) -> None:
        """Add a holder that is not running."""
        page.holders += 1
        self._settle(page)

    def use(self, page: Page) -> bool:
        """Add a user; brings the bytes back into a frame if they had moved out.

        Returns: False if the page was lost: its frame holds anything, and the caller must write all of it.
        """
        page.users += 1
        self._settle(page)
        if page.frame is not None:
            return True
        saved, page.saved = page.saved, None
        page.frame = self._take_frame()
        if saved is None:
            return False
        self.num_saved -= 1
        self._load(page.frame, saved)
        return True

    def rest(self, page: Page) -> None:
        """Remove a user; the last one leaves the page idle or spare."""
        page.users -= 1
        self._settle(page)

    def drop(self, page: Page) -> None:
        """Remove a holder that is not (or no longer) a user; the last one frees the frame."""
        page.holders -= 1
        if page.holders == 0:
            self._forget_saved(page)
        elif page.is_cached and page.holders == 1 and page.frame is None:
            self.evict(page)  # host memory is for sequences that come back, not for the prefix cache
            return
        self._settle(page)

    def cache(self, page: Page) -> None:
        """Make the prefix cache a holder."""
        page.is_cached = True
        self.hold(page)

    def uncache(self, page: Page) -> None:
        """The prefix cache gives the page up."""
        page.is_cached = False
        self.drop(page)

    def vacate(self) -> None:
        """Empty all frames, as if others needed every one of them; no page may have users."""
        while self._spare:
            self.evict(next(iter(self._spare)))
        while self._idle:
            self._move_out()
        assert self.num_used == 0, "pages of running sequences stay in their frames"

    def _settle(self, page: Page) -> None:
        """Put the page where its holders and users say: nowhere, idle, spare, or among the free frames."""
        place = None
        if page.frame is not None and not page.users and page.holders:
            place = self._spare if page.is_cached and page.holders == 1 else self._idle
        for other in (self._idle, self._spare):
            if other is not place:
                other.pop(page, None)
        if place is not None:
            place.setdefault(page)
        elif page.frame is not None and page.holders == 0:
            self._free.append(page.frame)
            page.frame = None

    def _take_frame(self) -> int:
        if not self._free and self._spare:
            self.evict(next(iter(self._spare)))
        if not self._free:
            self._move_out()
        frame = self._free.pop()
        self.peak_pages = max(self.peak_pages, self.num_used)
        return frame

    def _move_out(self) -> None:
        """Move the page that has been idle longest to host memory, or give its bytes up if that is full; it belongs
        to the youngest sequence that rests."""
        assert self._idle, "callers ask num_available first"
        page = next(iter(self._idle))
        is_full = self._max_saved is not None and self.num_saved >= self._max_saved
        if is_full and page.is_cached:
            self.evict(page)  # still held by a sequence: it only leaves the cache
        del self._idle[page]
        assert page.frame is not None
        if is_full:
            self.num_lost += 1
        else:
            page.saved = self._save(page.frame)
            self.num_saved += 1
            self.num_swapped_out += 1
        self._free.append(page.frame)
        page.frame = None

    def _forget_saved(self, page: Page) -> None:
        if page.saved is not None:
            page.saved = None
            self.num_saved -= 1

"""Which page sits in which frame, and who still needs it: accounting only, no tensors.

A *page* is logical: the K and V of page_size consecutive positions of some token sequence. A *frame* is a
place in the pool. A page is listed by `holders` page tables; `users` of them belong to sequences that are
running. A page without users but with holders is idle: it keeps its frame until someone else needs it, and
then moves to host memory with its bytes, so what a position's K and V are never changes. A page without
holders is gone and its frame is free.
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
    """Frame in the pool, or None while the bytes are in host memory."""
    holders: int = 1
    """Page tables that list this page; above 1 the page is shared and may not be written."""
    users: int = 1
    """Holders that are running, so that the page must stay in its frame."""
    saved: Any = None
    """The bytes in host memory while `frame` is None; opaque here."""


class PageAllocator:
    """Frames, a free list, and the idle pages that can be moved out to make room.

    Args:
        num_pages: frames, numbered 0 .. num_pages-1.
        save: called with a frame before its page moves out; returns what `load` needs.
        load: called with a frame and what `save` returned.

    Raises: ConfigError if num_pages is below 1.
    """

    def __init__(
        self, num_pages: int, *, save: Callable[[int], Any], load: Callable[[int, Any], None]
    ) -> None:
        if num_pages < 1:
            raise ConfigError(
                f"A KV pool needs pages; got num_pages {num_pages}. At least 1. Raise num_pages."
            )
        self.num_pages = num_pages
        self.peak_pages = 0
        """Most frames that were ever in use at once."""
        self.num_swapped_out = 0
        """Pages moved to host memory so far."""
        self._save = save
        self._load = load
        self._free = list(range(num_pages - 1, -1, -1))
        self._idle: dict[Page, None] = {}  # in the order in which they became idle

    @property
    def num_used(self) -> int:
        """Frames in use, idle pages included."""
        return self.num_pages - len(self._free)

    @property
    def num_available(self) -> int:
        """Frames that `allocate` can hand out: free ones and those of idle pages."""
        return len(self._free) + len(self._idle)

    def is_idle(self, page: Page) -> bool:
        """True if the page has a frame that it may lose."""
        return page in self._idle

    def allocate(self) -> Page:
        """Return a new page with one holder and one user; its frame's bytes are whatever they were."""
        return Page(frame=self._take_frame())

    def hold(self, page: Page) -> None:
        """Add a holder that is not running."""
        page.holders += 1

    def use(self, page: Page) -> None:
        """Add a user; brings the bytes back into a frame if they had moved out."""
        if page.frame is None:
            page.frame = self._take_frame()
            self._load(page.frame, page.saved)
            page.saved = None
        self._idle.pop(page, None)
        page.users += 1

    def rest(self, page: Page) -> None:
        """Remove a user; the last one leaves the page idle."""
        page.users -= 1
        if page.users == 0:
            self._idle[page] = None

    def drop(self, page: Page) -> None:
        """Remove a holder that is not (or no longer) a user; the last one frees the frame."""
        page.holders -= 1
        if page.holders == 0:
            self._idle.pop(page, None)
            page.saved = None
            if page.frame is not None:
                self._free.append(page.frame)
                page.frame = None

    def _take_frame(self) -> int:
        if not self._free:
            self._move_out()
        frame = self._free.pop()
        self.peak_pages = max(self.peak_pages, self.num_used)
        return frame

    def _move_out(self) -> None:
        """Move the page that has been idle longest to host memory; it belongs to the youngest sequence that
        rests."""
        assert self._idle, "callers ask num_available first"
        page = next(iter(self._idle))
        del self._idle[page]
        assert page.frame is not None
        page.saved = self._save(page.frame)
        self._free.append(page.frame)
        page.frame = None
        self.num_swapped_out += 1

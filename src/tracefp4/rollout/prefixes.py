"""The prefix cache: full pages that outlive their sequence, found again by the tokens that lead to them.

A page is entered behind the page that it was computed after, so an entry stands for one computation of one token
prefix: its key is its predecessor's number and its own tokens, and the first key also names the plan and the schemes.
Keys hold the tokens themselves, so no two prefixes are ever mistaken for each other. An entry keeps what a record
needs: log rows while the step log lives, then a Record of its positions, and the weight version of each. Pages that
were computed again are not offered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tracefp4.guidance.record import Record
from tracefp4.kvcache.pages import Page, PageAllocator
from tracefp4.kvcache.pool import CacheShape

Key = tuple[object, tuple[int, ...]]


@dataclass(kw_only=True, eq=False, slots=True)
class Entry:
    """One cached page."""

    page: Page
    """Full, and never written again."""
    key: Key
    """Predecessor and tokens."""
    serial: int
    """Number of the entry, never used twice."""
    before: Entry | None
    """Entry of the page that this one was computed after; None for the first page."""
    start: int
    """First position of the page."""
    versions: list[int]
    """Weight version that computed each position."""
    rows: list[int]
    """Log rows of the positions; empty once `record` is set, or if the engine does not record."""
    record: Record | None = None
    """The positions' decisions, after the log was dropped."""
    followers: set[Entry] = field(default_factory=set)
    """Entries of pages computed after this one."""


class PrefixCache:
    """Entries by key; the allocator decides when a page that nobody else holds must go.

    Args:
        allocator: of the pages.
        page_size: positions per page.
        rules: digests of plan and schemes, the root of every key.
        weight_version: oldest version whose pages are entered.
    """

    def __init__(
        self, allocator: PageAllocator, *, page_size: int, rules: tuple[str, ...], weight_version: int
    ) -> None:
        self.num_hits = 0
        """Pages found so far."""
        self._allocator = allocator
        self._page_size = page_size
        self._rules = rules
        self._oldest_version = weight_version
        self._entries: dict[Key, Entry] = {}
        self._by_page: dict[Page, Entry] = {}
        self._num_entered = 0
        allocator.evict = self._evict

    @property
    def entries(self) -> list[Entry]:
        """All entries, oldest first."""
        return list(self._entries.values())

    def find(self, ids: Sequence[int]) -> list[Entry]:
        """Entries of the longest cached prefix; at least the last token is left to compute."""
        found: list[Entry] = []
        predecessor: object = self._rules
        for begin in range(0, len(ids) - self._page_size, self._page_size):
            entry = self._entries.get((predecessor, tuple(ids[begin : begin + self._page_size])))
            if entry is None:
                break
            found.append(entry)
            predecessor = entry.serial
        return found

    def enter(
        self,
        pages: Sequence[Page],
        index: int,
        *,
        ids: Sequence[int],
        versions: list[int],
        source: list[int] | Record,
    ) -> None:
        """Offer a full page.

        Nothing happens if its predecessor is not cached, if the same prefix already is, or if a position is older
        than the cache.

        Args:
            pages: of the sequence, from the first on.
            index: which page.
            ids: tokens of the page.
            versions: weight version of each of its positions.
            source: log row of each, or their record; an empty list if nothing is recorded.
        """
        before = self._by_page.get(pages[index - 1]) if index else None
        if (index and before is None) or min(versions) < self._oldest_version:
            return
        key: Key = (self._rules if before is None else before.serial, tuple(ids))
        if key in self._entries or pages[index].is_cached:
            return
        entry = Entry(
            page=pages[index],
            key=key,
            serial=self._num_entered,
            before=before,
            start=index * self._page_size,
            versions=versions,
            rows=[] if isinstance(source, Record) else source,
            record=source if isinstance(source, Record) else None,
        )
        self._num_entered += 1
        self._entries[key] = self._by_page[entry.page] = entry
        if before is not None:
            before.followers.add(entry)
        self._allocator.cache(entry.page)

    def clear(self, *, weight_version: int) -> None:
        """Forget every page, and enter none older than `weight_version` from now on."""
        self._oldest_version = weight_version
        for entry in self.entries:
            if entry.page in self._by_page:
                self._evict(entry.page)

    def forget_unsealed(self) -> None:
        """Forget every page whose log rows never came, and those computed after it."""
        for entry in self.entries:
            if entry.rows and entry.page in self._by_page:
                self._evict(entry.page)

    def seal(
        self, build: Callable[[list[Entry]], list[Record]], entries: Sequence[Entry] | None = None
    ) -> None:
        """Give entries that still name log rows a record; after all of them (None) the log can be dropped."""
        named = [entry for entry in (self.entries if entries is None else entries) if entry.rows]
        for entry, record in zip(named, build(named) if named else [], strict=True):
            entry.record, entry.rows = record, []

    def _evict(self, page: Page) -> None:
        """Forget a page and every page computed after it: no lookup could reach them."""
        entry = self._by_page.pop(page)
        del self._entries[entry.key]
        for follower in list(entry.followers):
            if follower.page in self._by_page:
                self._evict(follower.page)
        if entry.before is not None:
            entry.before.followers.discard(entry)
        self._allocator.uncache(page)


def build_prefixes(
    is_wanted: bool,
    allocator: PageAllocator,
    *,
    shape: CacheShape,
    rules: tuple[str, ...],
    weight_version: int,
) -> PrefixCache | None:
    """Return an empty prefix cache for a pool, or None if none is wanted."""
    if not is_wanted:
        return None
    return PrefixCache(allocator, page_size=shape.page_size, rules=rules, weight_version=weight_version)

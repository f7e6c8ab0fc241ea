"""How a sequence's K and V get into pages, stay there, and come back: the rules of guidance for cached positions.

K and V of a position are immutable as long as the trajectory lasts. So a sequence that runs again finds its pages in
place, or gets them back from host memory, or has them written from the whole codes of its record, in this order and
always with the same bytes. Only where no record holds the codes of every layer are positions computed again; if a
recorded code or scale then comes out differently, this is counted, the record keeps what it had, and tokens computed
from then on are recorded as not valid: a trainer rounds them to nearest.

A flush is something else: after an update of the weights, K and V of every position are computed again on purpose.
Later tokens read the new ones, so the record's K and V become the new ones; its expert inputs and routing stay those of
the passes whose logits were sampled from, with their versions.

A state (`kvcache.states`) is there or is made again from the first position: no record holds it. Where the record gives
K and V, these are written first, and computing the positions again moves the state alone.

This file counts frames and moves sequences; it chooses no order among them (that is the scheduler's work).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tracefp4.guidance.record import Record
from tracefp4.kvcache.pages import Page, PageAllocator
from tracefp4.kvcache.pool import KVPool
from tracefp4.kvcache.states import State, StatePool
from tracefp4.kvcache.tables import PageTable
from tracefp4.rollout.prefixes import Entry, PrefixCache
from tracefp4.rollout.recorder import Recorder
from tracefp4.rollout.restoring import Restorer
from tracefp4.rollout.sequence import Rebuild
from tracefp4.rollout.sequence import Sequence as Running


class Residence:
    """Pages of sequences: entering them, forgetting them, making them again.

    Args:
        allocator: the pool's pages.
        new_table: makes an empty page table over them.
        page_size: positions per page.
        recorder: knows what the record holds; None: nothing is recorded.
        restorer: puts recorded codes into frames.
        prefixes: the prefix cache; None: there is none.
        states: of the layers without pages; as many slots as sequences run. None: all layers have pages.
    """

    def __init__(
        self,
        allocator: PageAllocator,
        *,
        new_table: Callable[[], PageTable],
        page_size: int,
        recorder: Recorder | None,
        restorer: Restorer,
        prefixes: PrefixCache | None,
        states: StatePool | None,
    ) -> None:
        assert prefixes is None or states is None, "no page of a prompt has a state"
        self.page_size = page_size
        self.prefixes = prefixes
        self.new_table = new_table
        self.num_restored = 0
        """Positions written from recorded codes so far."""
        self.num_recomputed = 0
        """Positions computed again so far."""
        self.num_recoded = 0
        """Of those, the ones whose recorded K or V came out differently."""
        self._allocator = allocator
        self._recorder = recorder
        self._restorer = restorer
        self._states = states

    @property
    def num_available(self) -> int:
        """Frames that can be had."""
        return self._allocator.num_available

    @property
    def num_free(self) -> int:
        """Those of them that no page is in."""
        return self._allocator.num_pages - self._allocator.num_used

    @property
    def num_frames(self) -> int:
        """Frames of the pool."""
        return self._allocator.num_pages

    def counts(self) -> dict[str, Any]:
        """Counters since the engine was made, by their names in EngineStats."""
        num_hits = 0 if self.prefixes is None else self.prefixes.num_hits
        return {
            "peak_pages": self._allocator.peak_pages,
            "pages_swapped_out": self._allocator.num_swapped_out,
            "pages_lost": self._allocator.num_lost,
            "states_swapped_out": 0 if self._states is None else self._states.num_swapped_out,
            "positions_restored": self.num_restored,
            "positions_recomputed": self.num_recomputed,
            "positions_recoded": self.num_recoded,
            "prefix_hits": num_hits,
            "prefix_tokens": num_hits * self.page_size,
        }

    def num_pages(self, num_positions: int) -> int:
        """Pages of that many positions."""
        return -(-num_positions // self.page_size)

    def num_frames_to_enter(self, sequence: Running) -> int:
        """Available frames that `enter` takes."""
        table, end = sequence.table, len(sequence.ids)
        if not table.pages:
            found = self._hits(sequence)
            pages = [entry.page for entry in found]
            return table.num_frames_to_adopt(pages) + self.num_pages(end) - len(found)
        kept = self._num_kept(sequence)
        resumed = table.num_frames_to_adopt(table.pages[:kept])
        if kept < len(table.pages):
            return resumed + self.num_pages(end) - kept
        return resumed + table.num_frames_to_write(sequence.num_stored, end)

    def enter(self, sequence: Running) -> None:
        """Make a waiting sequence's pages resident, with room for all of its tokens."""
        table = sequence.table
        if table.pages:
            kept = self._num_kept(sequence)
            if kept < len(table.pages):
                table.truncate(kept)
                sequence.lose(kept * self.page_size)
                self._drop_state(sequence)
            self._restore(sequence, table.resume())
        else:
            self._adopt(sequence, self._hits(sequence))
            self._begin_earlier(sequence)
        table.prepare_write(sequence.num_stored, len(sequence.ids))
        self._enter_state(sequence)

    def fork(self, sequence: Running) -> list[Running]:
        """Return a sequence's siblings, one for every further sample; they share its pages, and none runs."""
        count = sequence.request.params.n - 1
        states: list[State | None] = [None] * count
        if self._states is not None and sequence.state is not None:
            states = list(self._states.fork(sequence.state, count))
        return [sequence.fork(i, state=state) for i, state in enumerate(states, start=1)]

    def rest(self, sequence: Running) -> None:
        """Let a running sequence rest: pages and state may leave the device now, with their bytes."""
        sequence.table.rest()
        if self._states is not None and sequence.state is not None:
            self._states.rest(sequence.state)

    def release(self, sequence: Running) -> None:
        """Give everything up that a sequence has, running or not."""
        sequence.table.release()
        self._drop_state(sequence)

    def advance(self, sequence: Running, count: int, *, version: int, first_log_row: int | None) -> None:
        """Note that the next `count` positions of a sequence were computed, some of them perhaps again."""
        begin, again = sequence.num_cached, min(count, sequence.num_computed - sequence.num_cached)
        if again:
            sequence.recompute(again, first_log_row=first_log_row)
            self.num_recomputed += again
            first_log_row = None if first_log_row is None else first_log_row + again
            if sequence.num_cached == sequence.num_computed:
                self._finish_rebuild(sequence)
        sequence.advance(count - again, version=version, first_log_row=first_log_row)
        if self.prefixes is not None:
            for index in range(begin // self.page_size, sequence.num_cached // self.page_size):
                self._offer(sequence, index)

    def advance_each(self, sequences: Sequence[Running], *, version: int, first_log_row: int | None) -> None:
        """Note that each of some decoding sequences computed its newest token; their log rows follow each other. Those
        that have ended meanwhile are left alone."""
        for place, sequence in enumerate(sequences):
            if sequence.finish_reason is None:
                sequence.advance_one(
                    version, log_row=None if first_log_row is None else first_log_row + place
                )
        if self.prefixes is not None:
            for sequence in sequences:
                if sequence.finish_reason is None and sequence.num_cached % self.page_size == 0:
                    self._offer(sequence, sequence.num_cached // self.page_size - 1)

    def flush(self, sequence: Running) -> None:
        """Forget all pages of a waiting sequence; its computed positions will be computed again."""
        self.release(sequence)
        sequence.table = self.new_table()
        sequence.num_cached = 0
        sequence.rebuild = Rebuild(begin=0, replaces=True) if sequence.num_computed else None

    def _hits(self, sequence: Running) -> list[Entry]:
        """Cached pages that a new sequence can begin with."""
        is_unfollowed = self._recorder is not None and sequence.num_unfollowed > 0
        if self.prefixes is None or sequence.num_computed or is_unfollowed:
            return []
        return self.prefixes.find(sequence.ids)

    def _adopt(self, sequence: Running, entries: Sequence[Entry]) -> None:
        """Begin with cached pages: their positions count as computed, by whoever made them."""
        if not entries:
            return
        assert self.prefixes is not None
        self.prefixes.num_hits += len(entries)
        sequence.table.adopt([entry.page for entry in entries])
        if self._recorder is not None:
            # Records come before log rows in a history; a trajectory that went on enters its pages with records.
            num_sealed = max((i for i, entry in enumerate(entries) if entry.record is not None), default=0)
            self.prefixes.seal(self._recorder.build_entries, entries[:num_sealed])
        for entry in entries:
            sequence.num_computed += self.page_size
            sequence.versions += entry.versions
            if entry.record is not None:
                sequence.history.past.append(entry.record)
            sequence.history.append(entry.rows, valid=[True] * len(entry.rows))
        sequence.num_cached = sequence.num_computed

    def _begin_earlier(self, sequence: Running) -> None:
        """Write or start to compute K and V of the positions that an earlier turn has computed; a state is in no record
        and is made again by computing all of them."""
        if sequence.num_cached == sequence.num_computed or sequence.rebuild is not None:
            return
        if sequence.request.recomputes or not self._can_restore(sequence):
            sequence.rebuild = Rebuild(begin=0, replaces=sequence.request.recomputes)
            return
        if self._states is None:
            sequence.num_cached = sequence.num_computed
        else:
            sequence.rebuild = Rebuild(begin=0, replaces=False, is_of_state=True)
        record = self._record(sequence)
        shared = self._pages_that_hold(sequence, record)
        begin = len(shared) * self.page_size
        sequence.table.adopt(shared)
        sequence.table.prepare_write(begin, len(sequence.ids))
        self._write(sequence, record, range(begin, sequence.num_computed))
        if self.prefixes is not None:
            for index in range(len(shared), sequence.num_computed // self.page_size):
                first, last = index * self.page_size, (index + 1) * self.page_size
                self.prefixes.enter(
                    sequence.table.pages,
                    index,
                    ids=sequence.ids[first:last],
                    versions=sequence.versions[first:last],
                    source=record.rows(first, last),
                )

    def _pages_that_hold(self, sequence: Running, record: Record) -> list[Page]:
        """Cached pages with the very K and V that a trajectory's record begins with: its siblings' prompt, mostly."""
        pages: list[Page] = []
        found = [] if self.prefixes is None else self.prefixes.find(sequence.ids[: sequence.num_computed + 1])
        for entry in found:
            if entry.page.frame is None or not self._restorer.holds(record, entry.start, entry.page.frame):
                break
            pages.append(entry.page)
        if self.prefixes is not None:
            self.prefixes.num_hits += len(pages)
        return pages

    def _num_kept(self, sequence: Running) -> int:
        """Pages of a waiting sequence that it can have back as they were; those after them are computed again."""
        lost = sequence.table.first_lost()
        is_empty = lost is None or lost * self.page_size >= sequence.num_stored
        if lost is None or is_empty or self._can_restore(sequence):
            return len(sequence.table.pages)
        return lost if self._states is None else 0  # a state is never that of an earlier position

    def _can_restore(self, sequence: Running) -> bool:
        keeps = self._recorder is not None and self._recorder.keeps_cache
        is_recorded = sequence.rebuild is None or sequence.rebuild.is_of_state
        return keeps and sequence.follows and is_recorded

    def _restore(self, sequence: Running, lost: Sequence[int]) -> None:
        """Write the pages that `resume` named from the record's codes."""
        size, end = self.page_size, sequence.num_stored
        positions = [p for index in lost for p in range(index * size, min((index + 1) * size, end))]
        if positions:
            self._write(sequence, self._record(sequence), positions)

    def _record(self, sequence: Running) -> Record:
        """The record of a sequence so far."""
        assert self._recorder is not None
        (record,) = self._recorder.build([sequence])
        assert record is not None
        return record

    def _write(self, sequence: Running, record: Record, positions: Sequence[int]) -> None:
        if positions:
            self._restorer.write(record, positions, sequence.table.frames)
            self.num_restored += len(positions)

    def _finish_rebuild(self, sequence: Running) -> None:
        """Compare what was computed again with what was recorded, and draw the consequences."""
        rebuild = sequence.rebuild
        assert rebuild is not None
        changed = 0
        if self._recorder is not None and not rebuild.is_of_state:
            changed = self._recorder.rebuilt_differently(sequence)
        self.num_recoded += changed
        if rebuild.replaces:
            sequence.history.cache_rows = rebuild.rows
            sequence.follows = True
        elif changed:
            sequence.follows = False
        sequence.rebuild = None

    def _enter_state(self, sequence: Running) -> None:
        """Bring the state of a sequence into a slot: that of no positions, or the one that it had."""
        if self._states is None:
            return
        if sequence.state is None:
            sequence.state = self._states.begin()
        else:
            self._states.resume(sequence.state)

    def _drop_state(self, sequence: Running) -> None:
        if self._states is not None and sequence.state is not None:
            self._states.release(sequence.state)
            sequence.state = None

    def _offer(self, sequence: Running, index: int) -> None:
        """Offer a page to the prefix cache if every position was computed once, under this log."""
        assert self.prefixes is not None
        begin, end = index * self.page_size, (index + 1) * self.page_size
        history = sequence.history
        rows: list[int] = []
        if self._recorder is not None:
            first = begin - history.num_past
            if first < 0 or begin < len(history.cache_rows):
                return
            rows = history.rows[first : first + self.page_size]
        if sequence.rebuild is None and sequence.follows:
            self.prefixes.enter(
                sequence.table.pages,
                index,
                ids=sequence.ids[begin:end],
                versions=sequence.versions[begin:end],
                source=rows,
            )


def build_residence(
    allocator: PageAllocator, *, pool: KVPool, recorder: Recorder | None, prefixes: PrefixCache | None
) -> Residence:
    """Return the residence of sequences in a pool."""
    page_size = pool.shape.page_size
    return Residence(
        allocator,
        new_table=lambda: PageTable(allocator, page_size=page_size, copy=pool.copy, clear=pool.clear),
        page_size=page_size,
        recorder=recorder,
        restorer=Restorer(pool),
        prefixes=prefixes,
        states=pool.states,
    )

"""Who runs next: requests wait, join the running batch when pages and places allow, and give way when pages
run out.

Older sequences come first wherever something is short. A pass holds every decoding sequence (one token each, `rows.py`)
and prompt chunks up to the token budget; what is done for decoding sequences at every step is done for all rows
together, and only those at a new page are asked one by one. When a decoding sequence needs a page and none is
available, the youngest running sequence rests: its pages may move to host memory and come back with the same bytes,
because the K and V of a position never change and a recomputation could round differently (`residence.py` has the
rules).
"""

from __future__ import annotations

from bisect import insort
from operator import attrgetter

from tracefp4.rollout.residence import Residence
from tracefp4.rollout.rows import DecodeRows
from tracefp4.rollout.runner import Computed, Drawn
from tracefp4.rollout.sequence import Draw, Request, Sequence, Work
from tracefp4.rollout.stopping import Decode, stop_at_text

BY_AGE = attrgetter("order")


class Scheduler:
    """Waiting and running queues over one pool of pages.

    Args:
        residence: pages of the sequences.
        rows: takes the decoding sequences; as many as may run at once.
        max_tokens_per_step: most tokens of a pass; at least as many as sequences.
        decode: tokens to text, for requests with stop texts; None refuses nothing here.
    """

    def __init__(
        self, residence: Residence, *, rows: DecodeRows, max_tokens_per_step: int, decode: Decode | None
    ) -> None:
        self.waiting: list[Sequence] = []
        """Oldest first; not resident, or new."""
        self.running: list[Sequence] = []
        """Oldest first; resident."""
        self.rows = rows
        """Those of them that decode, in any order."""
        self.num_preemptions = 0
        self._residence = residence
        self._decode_text = decode
        self._max_tokens = max_tokens_per_step

    @property
    def has_work(self) -> bool:
        """True until every sequence has finished."""
        return bool(self.waiting or self.running)

    @property
    def request_ids(self) -> set[int]:
        """Requests with unfinished sequences."""
        return {sequence.request.request_id for sequence in (*self.waiting, *self.running)}

    def add(self, request: Request) -> None:
        """Queue a request that fits (`jobs.check_fits`)."""
        given = request.given
        sequence = Sequence(
            request=request,
            sample_index=request.first_sample,
            table=self._residence.new_table(),
            ids=given,
            num_given=len(given),
        )
        if request.earlier is not None:
            sequence.go_on(request.earlier)
        insort(self.waiting, sequence, key=BY_AGE)

    def schedule(self) -> list[Work]:
        """Choose the next pass: all of `rows`, and the chunks returned, shortest first. Every sequence in it is
        resident and may write its positions."""
        num_preemptions = self.num_preemptions
        for sequence in self.running if len(self.rows) < len(self.running) else ():
            if sequence.is_decoding and sequence not in self.rows:
                self.rows.enter(sequence)  # its last chunk ended a recomputation and drew nothing
        self._turn_pages(self.rows.at_new_page())
        if self.num_preemptions == num_preemptions:
            self._admit()
        chunks = self._prefill(self._max_tokens - len(self.rows))
        self.rows.place()
        return sorted(chunks, key=attrgetter("count"))

    def advance(self, computed: Computed, *, version: int) -> list[Draw]:
        """Note what a pass computed under a version of the weights, before its tokens are known; rows go on to their
        next position, and have its page at once if frames are free.

        Returns: the tokens to draw beside one for every row. A prompt's end brings its other samples into being.
        """
        self._residence.advance_each(computed.rows, version=version, first_log_row=computed.row_log)
        turning = self.rows.at_new_page(ahead=1)
        if len(turning) <= self._residence.num_free:
            self._turn_pages(turning)
        self.rows.advance()
        draws: list[Draw] = []
        logit_row, chunk_log = 0, computed.chunk_log
        for work in computed.chunks:
            sequence, is_drawing = work.sequence, work.draws
            self._residence.advance(sequence, work.count, version=version, first_log_row=chunk_log)
            if chunk_log is not None:
                chunk_log += work.count
            if not is_drawing:
                continue
            draws.append(Draw(sequence=sequence, logit_row=logit_row))
            if not sequence.logprobs:
                siblings = self._fork(sequence)
                draws += [Draw(sequence=sibling, logit_row=logit_row) for sibling in siblings]
            logit_row += 1
        return draws

    def place(self, computed: Computed) -> bool:
        """Ready a pass of the same rows alone, before the tokens of the last one are known; False if `schedule` must
        choose the next one: one may end or has ended, pages are short, or somebody else runs or may enter."""
        is_alone = computed.rows == self.rows.sequences and 0 < len(self.rows) == len(self.running)
        if not is_alone or self.rows.may_end:
            return False
        turning = self.rows.at_new_page()
        if len(turning) > self._residence.num_available:  # one page each at most
            return False
        self._turn_pages(turning)
        if self._next_to_enter() is not None:
            return False
        self.rows.place()
        return True

    def accept(self, drawn: Drawn, *, ended: list[Sequence]) -> list[Sequence]:
        """Append drawn tokens; sequences that end give up pages and place, go to `ended`, and are returned. Those that
        go on have a row from now on. Who had ended before the pass was over gets nothing.

        Where `decode` fails, every sequence still has its token, and those that have ended are in `ended`.
        """
        self.rows.write(drawn.rows, drawn.token_ids)
        receivers = []
        for sequence, token_id, logprob in drawn.each():
            if sequence.finish_reason is None:
                sequence.accept(token_id, logprob)
                receivers.append(sequence)
        self.rows.force_next()
        try:
            if self._decode_text is not None:
                for sequence in receivers:
                    stop_at_text(sequence, decode=self._decode_text)
        finally:
            finished = [sequence for sequence in receivers if sequence.finish_reason is not None]
            for sequence in finished:
                self._leave(sequence)
            for sequence in drawn.joining:
                if sequence.table.is_resident:
                    self.rows.enter(sequence)
            ended += finished
        return finished

    def abort(self, request_id: int) -> list[Sequence]:
        """End every unfinished sequence of a request; returns them, oldest first, with reason `abort`."""
        found = [s for s in (*self.running, *self.waiting) if s.request.request_id == request_id]
        if len(found) == 1 and found[0].num_computed < found[0].num_given:
            found += self._fork(found[0])
        for sequence in found:
            sequence.finish_reason = "abort"
            self._leave(sequence)
        return sorted(found, key=BY_AGE)

    def pause(self) -> None:
        """Let every running sequence rest; it keeps its age and comes back with the same pages."""
        self.rows.clear()
        for sequence in self.running:
            self._residence.rest(sequence)
            insort(self.waiting, sequence, key=BY_AGE)
        self.running = []

    def flush(self) -> None:
        """Forget what every sequence has; its positions are computed again when it runs."""
        self.pause()
        for sequence in self.waiting:
            self._residence.flush(sequence)

    def _turn_pages(self, turning: list[Sequence]) -> None:
        """Give decoding sequences a page for their next position, oldest first; the youngest rest if pages run out."""
        for sequence in sorted(turning, key=BY_AGE):
            if sequence.table.is_resident and self._make_room(sequence):
                sequence.table.prepare_write(sequence.num_cached, sequence.num_cached + 1)
                self.rows.turn_page(sequence)

    def _make_room(self, sequence: Sequence) -> bool:
        """Make pages available for one more position; False if the sequence itself had to rest."""
        position = sequence.num_cached
        while sequence.table.num_frames_to_write(position, position + 1) > self._residence.num_available:
            youngest = self.running[-1]
            self._preempt(youngest)
            if youngest is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.rows.leave(sequence)
        self._residence.rest(sequence)
        insort(self.waiting, sequence, key=BY_AGE)
        self.num_preemptions += 1

    def _admit(self) -> None:
        """Let waiting sequences run, oldest first, while places, pages and tokens last; who decodes gets a row."""
        while (sequence := self._next_to_enter()) is not None:
            self.waiting.pop(0)
            insort(self.running, sequence, key=BY_AGE)
            self._residence.enter(sequence)
            if sequence.is_decoding:
                self.rows.enter(sequence)

    def _next_to_enter(self) -> Sequence | None:
        """The oldest waiting sequence, if it may run now."""
        has_place = len(self.running) < self.rows.capacity and len(self.rows) < self._max_tokens
        if not self.waiting or not has_place:
            return None
        needed = self._residence.num_frames_to_enter(self.waiting[0])
        # the next step's decoding will ask for pages, too
        needed += len(self.running) // self._residence.page_size
        return self.waiting[0] if needed <= self._residence.num_available else None

    def _prefill(self, budget: int) -> list[Work]:
        """Chunks of prompts and of what is computed again, oldest first; pages for them were taken on admission."""
        works: list[Work] = []
        for sequence in self.running if len(self.rows) < len(self.running) else ():  # else everybody decodes
            count = min(sequence.num_uncached, budget)
            if count and not sequence.is_decoding:
                work = Work(sequence=sequence, start=sequence.num_cached, count=count)
                sequence.table.prepare_write(work.stores_from, work.start + count)
                works.append(work)
                budget -= count
        return works

    def _fork(self, sequence: Sequence) -> list[Sequence]:
        siblings = self._residence.fork(sequence)
        self.waiting = sorted(self.waiting + siblings, key=BY_AGE)
        return siblings

    def _leave(self, sequence: Sequence) -> None:
        self.rows.leave(sequence)
        queue = self.running if sequence in self.running else self.waiting
        queue.remove(sequence)
        self._residence.release(sequence)

"""Who runs next: requests wait, join the running batch when pages and places allow, and give way when pages
run out.

Older sequences come first everywhere. A pass holds every decoding sequence (one token each) and then prompt
chunks up to the token budget. When a decoding sequence needs a page and none is available, the youngest
running sequence rests: its pages may move to host memory and come back with the same bytes, because the K
and V of a position never change and a recomputation could round differently (`residence.py` has the rules).
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from operator import attrgetter

from tracefp4.errors import ConfigError
from tracefp4.rollout.residence import Residence
from tracefp4.rollout.sequence import Draw, Request, Sequence, Work
from tracefp4.rollout.stopping import Decode, stop_cut

BY_AGE = attrgetter("order")


class Scheduler:
    """Waiting and running queues over one pool of pages.

    Args:
        residence: pages of the sequences.
        max_batch: most sequences that run at once.
        max_tokens_per_step: most tokens of a pass; at least max_batch.
        decode: tokens to text, for requests with stop texts; None refuses nothing here.

    Raises: ConfigError if a limit is out of range.
    """

    def __init__(
        self, residence: Residence, *, max_batch: int, max_tokens_per_step: int, decode: Decode | None
    ) -> None:
        if not 1 <= max_batch <= max_tokens_per_step:
            raise ConfigError(
                f"Engine limits out of range; got max_batch {max_batch} and max_tokens_per_step "
                f"{max_tokens_per_step}. max_batch is at least 1 and at most max_tokens_per_step. Raise "
                "max_tokens_per_step."
            )
        self.waiting: list[Sequence] = []
        """Oldest first; not resident, or new."""
        self.running: list[Sequence] = []
        """Oldest first; resident."""
        self.num_preemptions = 0
        self._residence = residence
        self._decode_text = decode
        self._max_batch = max_batch
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
        """Queue a request.

        Raises: ConfigError if its longest completion could not fit into the pool even alone.
        """
        given, params = request.given, request.params
        needed = self._residence.num_pages(len(given) + params.max_tokens - 1)
        needed += params.n > 1 and len(given) % self._residence.page_size > 0  # its own copy of a shared page
        if needed > self._residence.num_frames:
            raise ConfigError(
                f"A request can never fit into the KV pool; got a prompt of {len(given)} tokens with "
                f"max_tokens {params.max_tokens} and n {params.n}, which needs {needed} pages. The pool has "
                f"{self._residence.num_frames} pages of {self._residence.page_size} positions. Raise num_pages or "
                "lower max_tokens."
            )
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
        """Choose the next pass; every sequence in it is resident and may write its positions. Shortest works
        first."""
        num_preemptions = self.num_preemptions
        works = self._decode()
        budget = self._max_tokens - len(works)
        if self.num_preemptions == num_preemptions:
            works += self._admit(budget)
        budget = self._max_tokens - len(works)
        works += self._prefill(budget)
        return sorted(works, key=attrgetter("count"))

    def advance(self, works: Iterable[Work], *, version: int, first_log_row: int | None) -> list[Draw]:
        """Note what a pass computed; returns the tokens to draw. A prompt's end brings its other samples
        into being."""
        draws: list[Draw] = []
        logit_row = 0
        for work in works:
            sequence, is_drawing = work.sequence, work.draws
            self._residence.advance(sequence, work.count, version=version, first_log_row=first_log_row)
            if first_log_row is not None:
                first_log_row += work.count
            if not is_drawing:
                continue
            draws.append(Draw(sequence=sequence, logit_row=logit_row))
            if not sequence.logprobs:
                siblings = self._fork(sequence)
                draws += [Draw(sequence=sibling, logit_row=logit_row) for sibling in siblings]
            logit_row += 1
        return draws

    def accept(
        self, draws: list[Draw], token_ids: list[int], logprobs: list[float], *, ended: list[Sequence]
    ) -> list[Sequence]:
        """Append the drawn tokens; sequences that end give up pages and place, go to `ended`, and are returned.

        Where `decode` fails, every sequence still has its token, and those that have ended are in `ended`.
        """
        finished = []
        for draw, token_id, logprob in zip(draws, token_ids, logprobs, strict=True):
            draw.sequence.accept(token_id, logprob)
        try:
            for draw in draws:
                self._stop_at_text(draw.sequence)
        finally:
            for draw in draws:
                if draw.sequence.finish_reason is not None:
                    self._leave(draw.sequence)
                    finished.append(draw.sequence)
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
        for sequence in self.running:
            sequence.table.rest()
            insort(self.waiting, sequence, key=BY_AGE)
        self.running = []

    def flush(self) -> None:
        """Forget the pages of every sequence; K and V of its positions are computed again when it runs."""
        self.pause()
        for sequence in self.waiting:
            self._residence.flush(sequence)

    def _stop_at_text(self, sequence: Sequence) -> None:
        """End a sequence whose text now contains a stop text, unless a stop token has ended it."""
        if (
            self._decode_text is None
            or sequence.finish_reason == "stop"
            or sequence.request.forced is not None
        ):
            return
        kept = stop_cut(sequence.turn_ids, sequence.request.params, decode=self._decode_text)
        if kept is not None:
            sequence.stop_after(kept)

    def _decode(self) -> list[Work]:
        """One token for every running sequence past its prompt, oldest first; the youngest rest if pages run
        out."""
        works = []
        for sequence in [s for s in self.running if s.is_decoding]:
            if sequence.table.is_resident and self._make_room(sequence):
                works.append(self._work(sequence, 1))
        return works

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
        sequence.table.rest()
        insort(self.waiting, sequence, key=BY_AGE)
        self.num_preemptions += 1

    def _admit(self, budget: int) -> list[Work]:
        """Let waiting sequences run, oldest first, while places, pages and tokens last; returns those that
        decode."""
        works: list[Work] = []
        while self.waiting and len(self.running) < self._max_batch and len(works) < budget:
            sequence = self.waiting[0]
            needed = self._residence.num_frames_to_enter(sequence)
            spare = (
                len(self.running) // self._residence.page_size
            )  # what the next step's decoding will ask for
            if needed + spare > self._residence.num_available:
                break
            self.waiting.pop(0)
            insort(self.running, sequence, key=BY_AGE)
            self._residence.enter(sequence)
            if sequence.is_decoding:
                works.append(self._work(sequence, 1))
        return works

    def _prefill(self, budget: int) -> list[Work]:
        """Chunks of prompts and of what is computed again, oldest first; pages for them were taken on admission."""
        works = []
        for sequence in self.running:
            count = min(sequence.num_uncached, budget)
            if count and not sequence.is_decoding:
                works.append(self._work(sequence, count))
                budget -= count
        return works

    def _work(self, sequence: Sequence, count: int) -> Work:
        start = sequence.num_cached
        sequence.table.prepare_write(start, start + count)
        return Work(sequence=sequence, start=start, count=count)

    def _fork(self, sequence: Sequence) -> list[Sequence]:
        siblings = [sequence.fork(i) for i in range(1, sequence.request.params.n)]
        for sibling in siblings:
            insort(self.waiting, sibling, key=BY_AGE)
        return siblings

    def _leave(self, sequence: Sequence) -> None:
        queue = self.running if sequence in self.running else self.waiting
        queue.remove(sequence)
        sequence.table.release()

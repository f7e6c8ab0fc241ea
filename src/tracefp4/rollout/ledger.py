"""What an engine still owes: finished sequences that nobody has taken, and the log that their records come from.

The log goes as soon as no sequence refers to it; cached prefixes then keep records of their own. Where an engine never
runs dry, the log is sealed when it has grown too long. Nothing here runs or schedules.
"""

from __future__ import annotations

from collections.abc import Collection

from tracefp4.guidance.record import Record
from tracefp4.rollout.completion import Completion
from tracefp4.rollout.prefixes import PrefixCache
from tracefp4.rollout.recorder import Recorder
from tracefp4.rollout.scheduler import Scheduler
from tracefp4.rollout.sequence import Sequence


class Ledger:
    """Finished sequences of one engine.

    Args:
        scheduler: has the unfinished ones.
        recorder: builds records; None gives none.
        prefixes: the prefix cache, if there is one.
        max_log_rows: positions that the log may hold before it is sealed.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        recorder: Recorder | None,
        prefixes: PrefixCache | None,
        max_log_rows: int,
    ) -> None:
        self.finished: list[Sequence] = []
        """Not yet taken, in the order in which they ended."""
        self._scheduler = scheduler
        self._recorder = recorder
        self._prefixes = prefixes
        self._max_log_rows = max_log_rows

    def take(self, request_ids: Collection[int]) -> list[tuple[int, Completion]]:
        """Turn the finished sequences of some requests into completions, oldest first, and forget them.

        After an error nothing is forgotten: the same call may be made again.
        """
        taken = sorted(
            (s for s in self.finished if s.request.request_id in request_ids), key=lambda s: s.order
        )
        records: list[Record | None] = [None] * len(taken)
        if self._recorder is not None:
            records = self._recorder.build(taken)
        completions = [
            (sequence.request.request_id, sequence.completion(record))
            for sequence, record in zip(taken, records, strict=True)
        ]
        self.finished = [s for s in self.finished if s.request.request_id not in request_ids]
        self._tidy()
        return completions

    def peek(self, request_id: int) -> list[Completion]:
        """Completions of a request's finished sequences, in order of samples, without their records; nothing is
        forgotten."""
        found = sorted(
            (s for s in self.finished if s.request.request_id == request_id), key=lambda s: s.order
        )
        return [sequence.completion(None) for sequence in found]

    def drop(self, request_ids: Collection[int]) -> None:
        """Forget requests that have ended."""
        self.finished = [s for s in self.finished if s.request.request_id not in request_ids]
        self._tidy()

    @property
    def is_long(self) -> bool:
        """True if the log has grown beyond its limit."""
        return self._recorder is not None and self._recorder.num_rows > self._max_log_rows

    def seal_if_long(self) -> None:
        """Turn the log into records if it is long, unless a sequence is being computed again."""
        recorder = self._recorder
        if recorder is None or not self.is_long:
            return
        known = [*self._scheduler.running, *self._scheduler.waiting, *self.finished]
        if all(sequence.rebuild is None for sequence in known):
            recorder.seal(known, self._prefixes)

    def _tidy(self) -> None:
        if self._recorder is not None and not self.finished and not self._scheduler.has_work:
            self._recorder.forget(self._prefixes)

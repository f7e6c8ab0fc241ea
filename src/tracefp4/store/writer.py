"""The asynchronous writer of a directory: a bounded queue before a thread that writes, syncs and finishes.

`append` counts a segment's bytes against the bound, copies what it must and returns; the thread takes everything
queued, writes it, and lets all trajectories that finish together share one sync. When the queue is full, a policy
decides: wait, for a bounded time, or give up the trajectory as a whole. What is given up is counted and named, and no
reader sees a part of it. Never holds the lock that `append` needs while it waits for the disk, and never reads a wall
clock.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from tracefp4.errors import BackendError, RecordError, TraceFP4Error
from tracefp4.store.pending import Pending, WriterOptions, complete, dropped, lost, promise
from tracefp4.store.protocol import Handle, Segment, WriterStats
from tracefp4.store.refusals import DroppedError, unknown_trajectory
from tracefp4.store.trajectory_log import TrajectoryLog, Written

# Names of given-up trajectories that the counters keep.
MAX_NAMED = 10_000


@dataclass(kw_only=True, slots=True, eq=False)
class _Job:
    """One thing for the thread: write a segment, finish a trajectory, close a given-up one, or a flush."""

    pending: Pending | None = None
    segment: Segment | None = None
    num_bytes: int = 0
    finished: Future[Handle] | None = None
    flushed: Future[None] | None = None


class DirectoryWriter:
    """Writer of one directory; call it from any thread of the process that opened it, and close it."""

    def __init__(self, path: str | os.PathLike[str], options: WriterOptions | None = None) -> None:
        """Open a writer with chunks of its own.

        Args:
            path: directory of the store, created if absent.
            options: how it behaves.

        Raises: BackendError if the directory cannot be used; RecordError for a store of another schema.
        """
        self.options = options or WriterOptions()
        self._log = TrajectoryLog(
            Path(path), chunk_bytes=self.options.chunk_bytes, durable=self.options.durable
        )
        self.uri = self._log.uri
        self._process = os.getpid()
        self._changed = threading.Condition()
        self._jobs: deque[_Job] = deque()
        self._pending: dict[str, Pending] = {}
        self._lost: list[str] = []
        self._dropped: dict[str, str] = {}
        self._counts = {"bytes_queued": 0, "bytes_written": 0, "segments_written": 0, "num_finished": 0}
        self._num_dropped, self._num_waits, self._wait_seconds = 0, 0, 0.0
        self._is_closed, self._broken = False, ""
        self._thread = threading.Thread(target=self._run, name="tracefp4-store-writer", daemon=True)
        self._thread.start()

    def append(self, segment: Segment) -> bool:
        """Take a segment; see Writer.append. The bound counts columns and meta.

        Raises: also RecordError for a segment larger than the queue, for a column whose bytes per row changed,
        and for a closed writer.
        """
        num_bytes = segment.num_bytes + len(segment.meta)
        with self._changed:
            self._check_usable()
            if num_bytes > self.options.max_queue_bytes:
                raise RecordError(
                    f"Segment of trajectory {segment.trajectory!r} refused: it has {num_bytes} bytes and the queue "
                    f"takes {self.options.max_queue_bytes}. A segment must fit the queue. Append shorter spans or "
                    "raise max_queue_bytes."
                )
            pending = self._reserve(segment, num_bytes)
        if pending is None:
            return False
        job = _Job(pending=pending, num_bytes=num_bytes)
        try:
            job.segment = segment.owned()
        finally:
            # The copy is made outside the lock; what happened meanwhile decides whether it still counts.
            with self._changed:
                if job.segment is None or self._is_closed or pending.is_finishing:
                    self._give_up(pending, lost(pending.name, "it was finished, or closed, during an append"))
                    self._release(num_bytes)
                else:
                    self._jobs.append(job)
                    self._changed.notify_all()
        if pending.refusal is not None and not isinstance(pending.refusal, DroppedError):
            raise pending.refusal
        return pending.refusal is None

    def _reserve(self, segment: Segment, num_bytes: int) -> Pending | None:
        """Find room and note the rows; None if the trajectory is dropped. Raises: what append raises."""
        name = segment.trajectory
        pending = self._pending.get(name)
        if pending is None:
            if self._log.knows_complete(name):
                raise complete(name)
            pending = self._pending[name] = Pending(written=Written(trajectory=name))
        try:
            self._await_room(pending, num_bytes)
            if pending.refusal is None and not pending.is_finishing:
                pending.register(segment)
                self._counts["bytes_queued"] += num_bytes
        finally:
            if not pending.spans and pending.refusal is None and self._pending.get(name) is pending:
                del self._pending[name]
        if isinstance(pending.refusal, DroppedError):
            return None
        if pending.refusal is not None:
            raise pending.refusal
        if pending.is_finishing:
            raise complete(name)
        return pending

    def _await_room(self, pending: Pending, num_bytes: int) -> None:
        """Wait for room, or give the trajectory up as the policy says."""
        room = self.options.max_queue_bytes - num_bytes
        if self._counts["bytes_queued"] <= room or pending.refusal is not None:
            return
        if self.options.policy == "drop_trajectory":
            self._give_up(pending, dropped(pending.name))
            return
        began = time.monotonic()
        self._num_waits += 1
        is_woken = self._changed.wait_for(
            lambda: (
                self._counts["bytes_queued"] <= room
                or pending.refusal is not None
                or self._is_closed
                or bool(self._broken)
            ),
            self.options.max_wait_s,
        )
        self._wait_seconds += time.monotonic() - began
        self._check_usable()
        if not is_woken:
            reason = f"the queue of {self.options.max_queue_bytes} bytes was full for {self.options.max_wait_s:g} s"
            self._give_up(pending, lost(pending.name, reason))

    def give_up(self, trajectory: str, refusal: TraceFP4Error) -> bool:
        """Give up an unfinished trajectory for a reason of the caller's, counted and named; False if there is none."""
        with self._changed:
            pending = self._pending.get(trajectory)
            if pending is None or pending.is_finishing:
                return False
            self._give_up(pending, refusal)
            return True

    def _give_up(self, pending: Pending, refusal: TraceFP4Error) -> None:
        """Mark a trajectory as given up, count and name it, and free what is queued of it. Holds the lock."""
        if pending.refusal is not None:
            return
        self._num_dropped += 1
        self._dropped.pop(pending.name, None)
        self._dropped[pending.name] = str(refusal)
        if len(self._dropped) > MAX_NAMED:
            del self._dropped[next(iter(self._dropped))]
        if isinstance(refusal, BackendError):
            self._lost.append(pending.name)
        self._discard(pending, refusal)

    def _discard(self, pending: Pending, refusal: TraceFP4Error) -> None:
        pending.refusal = refusal
        for job in [job for job in self._jobs if job.pending is pending and job.segment is not None]:
            self._jobs.remove(job)
            self._release(job.num_bytes)
        self._jobs.append(_Job(pending=pending))
        self._changed.notify_all()

    def _release(self, num_bytes: int) -> None:
        self._counts["bytes_queued"] -= num_bytes
        self._changed.notify_all()

    def finish(self, trajectory: str) -> Handle:
        """Make a trajectory complete and durable; see Writer.finish. Again: the same handle."""
        return self.finish_soon(trajectory).result()

    def finish_soon(self, trajectory: str) -> Future[Handle]:
        """`finish` without waiting. A trajectory that was given up fails, and its name is then free again."""
        finished: Future[Handle] = promise()
        with self._changed:
            self._check_usable()
            pending = self._pending.get(trajectory)
            if pending is None:
                known = self._log.finished(trajectory)
                if known is not None:
                    finished.set_result(known)
                else:
                    finished.set_exception(unknown_trajectory(trajectory, self.uri))
            elif pending.is_finishing:
                finished.set_exception(complete(trajectory))
            else:
                # A trajectory that was given up goes this way too: once it has failed, no reader sees it any more.
                pending.is_finishing = True
                self._jobs.append(_Job(pending=pending, finished=finished))
                self._changed.notify_all()
        return finished

    def abandon(self, trajectory: str) -> None:
        """Give up an unfinished trajectory, not counted as dropped; one that is finishing is left alone.

        Readers see it no more once the thread has come to it, at the latest after the next flush.
        """
        with self._changed:
            self._check_usable()
            pending = self._pending.get(trajectory)
            if pending is None or pending.is_finishing:
                return
            del self._pending[trajectory]
            if pending.refusal is None:
                self._discard(pending, unknown_trajectory(trajectory, self.uri))

    def flush(self) -> None:
        """Wait until everything taken is durable. Raises: BackendError naming what was lost since the last call."""
        flushed: Future[None] = promise()
        with self._changed:
            self._check_usable()
            self._jobs.append(_Job(flushed=flushed))
            self._changed.notify_all()
        flushed.exception()
        self._raise_lost()

    def close(self) -> None:
        """Write what is queued, sync and stop. Raises: BackendError naming what was lost since the last flush.

        In a process that was forked from the writer's it does nothing: the files are that writer's.
        """
        if os.getpid() != self._process:
            return
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            self._jobs.append(_Job(flushed=Future()))
            self._changed.notify_all()
        self._thread.join()
        self._log.close()
        self._raise_lost()

    def _raise_lost(self) -> None:
        with self._changed:
            names, self._lost = self._lost, []
            reason = self._dropped.get(names[0], "") if names else self._broken
        if names or reason:
            more = f" and {len(names) - 20} more" if len(names) > 20 else ""
            raise BackendError(
                f"{len(names)} trajectories were lost: {', '.join(map(repr, names[:20]))}{more}. First reason: "
                f"{reason} What is finished is safe. Treat these records as missing."
            )

    @property
    def stats(self) -> WriterStats:
        """Counters now."""
        with self._changed:
            return WriterStats(
                bytes_queued=self._counts["bytes_queued"],
                bytes_written=self._counts["bytes_written"],
                segments_written=self._counts["segments_written"],
                num_finished=self._counts["num_finished"],
                num_dropped=self._num_dropped,
                dropped=dict(self._dropped),
                num_waits=self._num_waits,
                wait_seconds=self._wait_seconds,
            )

    def __enter__(self) -> DirectoryWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_usable(self) -> None:
        if self._broken:
            raise BackendError(self._broken)
        if self._is_closed or os.getpid() != self._process:
            reason = "it is closed" if self._is_closed else "it was opened by another process"
            raise RecordError(
                f"Writer of {self._log.directory} refused: {reason}. A writer takes segments from the process "
                "that opened it until it is closed. Open a writer of your own."
            )

    def _run(self) -> None:
        jobs: list[_Job] = []
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: bool(self._jobs) or self._is_closed)
                    jobs = list(self._jobs)
                    self._jobs.clear()
                if not jobs:
                    return
                self._work(jobs)
        except BaseException as error:
            self._stop(jobs, error)

    def _stop(self, jobs: list[_Job], error: BaseException) -> None:
        """Refuse everything from now on, count and name what was unfinished, and tell whoever waits."""
        broken = BackendError(
            f"The writer of {self._log.directory} stopped: {error!r}. It takes nothing more. Report this."
        )
        with self._changed:
            self._broken = str(broken)
            left = [*jobs, *self._jobs]
            for pending in self._pending.values():
                self._give_up(pending, broken)
            self._jobs.clear()
            self._changed.notify_all()
        for future in [future for job in left for future in (job.finished, job.flushed)]:
            if future is not None and not future.done():
                future.set_exception(broken)

    def _work(self, jobs: list[_Job]) -> None:
        for job in jobs:
            if job.segment is not None:
                self._write(job, job.segment)
                job.segment = None
            elif job.pending is not None and job.finished is None:
                self._log.close_trajectory(job.pending.name)
        if all(job.finished is None and job.flushed is None for job in jobs):
            return
        try:
            self._log.sync()
        except BackendError as refusal:
            with self._changed:
                for name in self._log.unsynced & self._pending.keys():
                    self._give_up(self._pending[name], refusal)
            self._log.unsynced.clear()
        self._finish([job for job in jobs if job.finished is not None])
        for job in jobs:
            if job.flushed is not None:
                job.flushed.set_result(None)

    def _write(self, job: _Job, segment: Segment) -> None:
        pending = job.pending
        assert pending is not None
        try:
            if pending.refusal is None:
                self._log.append(segment, pending.written)
                with self._changed:
                    self._counts["bytes_written"] += segment.num_bytes
                    self._counts["segments_written"] += 1
        except BackendError as refusal:
            with self._changed:
                self._give_up(pending, refusal)
        finally:
            with self._changed:
                self._release(job.num_bytes)

    def _finish(self, jobs: list[_Job]) -> None:
        ready = [job.pending.written for job in jobs if job.pending and job.pending.refusal is None]
        results = self._log.commit(ready) if ready else {}
        for job in jobs:
            pending, finished = job.pending, job.finished
            assert pending is not None and finished is not None
            # What is committed stays, even if it was given up meanwhile by an append that came too late.
            result = results.get(pending.name) or pending.refusal
            assert result is not None
            with self._changed:
                self._pending.pop(pending.name, None)
                if isinstance(result, Handle):
                    self._counts["num_finished"] += 1
                else:
                    self._give_up(pending, result)
            if isinstance(result, Handle):
                finished.set_result(result)
            else:
                finished.set_exception(result)

"""A store on another host, written to through its server: a Writer over `store.connection`.

The writer queues segments in bounded memory and sends them from a thread of its own, one request after the other.
Segments above the message size travel in several messages, cut between rows. What the server acknowledged
is in its local writer, not yet on its disk; what `finish` returned a handle for is durable there. When the server is
started anew, or forgets a client that was silent for too long, every trajectory of which it held rows is given up as a
whole, counted and named; when it cannot be reached, every one that had begun. The writer goes on with the next ones.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from tracefp4.errors import BackendError, ConfigError, RecordError, TraceFP4Error
from tracefp4.store.connection import Line, LineSettings
from tracefp4.store.pending import promise
from tracefp4.store.protocol import POLICIES, Handle, Policy, Segment, WriterStats
from tracefp4.store.refusals import DroppedError
from tracefp4.store.sending import Sender, dropped
from tracefp4.store.wire import ForgottenError, UnreachableError, raise_error

DEFAULT_QUEUE_BYTES = 1 << 28
"""Segments that wait for the network, 256 MiB."""
MAX_FINISHES_AT_ONCE = 256
MAX_NAMES_KEPT = 10_000


@dataclass(frozen=True, kw_only=True, slots=True)
class _Job:
    """One thing to send, in order."""

    kind: str
    """"append", "finish", "abandon" or "flush"."""
    trajectory: str = ""
    """Whose; "" for a flush."""
    segment: Segment | None = None
    """Of an append."""
    future: Future[Any] | None = None
    """Where a finish or a flush reports."""


class RemoteWriter:
    """Writer of the store behind a server; may be called from several threads.

    Args:
        address: of the server.
        policy: what an append does when max_queue_bytes wait already: "wait" blocks, "drop_trajectory" gives
            up the whole trajectory.
        max_queue_bytes: column bytes that wait for the network, at most; one segment is always taken.
        max_wait_s: longest wait of one append.
        settings: of the line.
    """

    def __init__(
        self,
        address: str,
        *,
        policy: Policy = "wait",
        max_queue_bytes: int = DEFAULT_QUEUE_BYTES,
        max_wait_s: float = 600.0,
        settings: LineSettings | None = None,
    ) -> None:
        if policy not in POLICIES or max_queue_bytes < 1 or max_wait_s <= 0:
            raise ConfigError(
                f"Remote writer refused: got policy {policy!r}, max_queue_bytes {max_queue_bytes}, max_wait_s "
                f"{max_wait_s}. Policies are {', '.join(POLICIES)}; bounds are above 0. Use one of them."
            )
        self._line = Line(address, settings)
        self._sender = Sender(self._line)  # the sending thread's
        self._policy, self._max_bytes, self._max_wait_s = policy, max_queue_bytes, max_wait_s
        self._jobs: deque[_Job] = deque()
        self._changed = threading.Condition()
        self._begun: set[str] = set()
        self._lost: dict[str, TraceFP4Error] = {}
        self._dropped: dict[str, str] = {}
        self._unreported: dict[str, str] = {}
        self._counts = {"bytes_queued": 0, "bytes_written": 0, "segments_written": 0, "num_finished": 0}
        self._num_dropped, self._num_waits, self._wait_s = 0, 0, 0.0
        self._is_closed, self._process = False, os.getpid()
        self._thread = threading.Thread(target=self._send_all, name="tracefp4-remote-writer", daemon=True)
        self._thread.start()

    def append(self, segment: Segment) -> bool:
        """Take a segment; see `protocol.Writer`."""
        size, name = segment.num_bytes, segment.trajectory
        with self._changed:
            self._check_open()
            if not self._is_taken(name) or not self._has_room(size, name):
                return False
            self._counts["bytes_queued"] += size
            self._begun.add(name)
            self._jobs.append(_Job(kind="append", trajectory=name, segment=segment.owned()))
            self._changed.notify_all()
        return True

    def finish(self, trajectory: str) -> Handle:
        """Wait until the trajectory is durable at the server; see `protocol.Writer`."""
        return self.finish_soon(trajectory).result()

    def finish_soon(self, trajectory: str) -> Future[Handle]:
        """`finish` without waiting."""
        future: Future[Handle] = promise()
        with self._changed:
            self._check_open()
            self._jobs.append(_Job(kind="finish", trajectory=trajectory, future=future))
            self._changed.notify_all()
        return future

    def abandon(self, trajectory: str) -> None:
        """Give up an unfinished trajectory; its name may be used again."""
        with self._changed:
            self._check_open()
            self._remove_queued(trajectory)
            self._lost.pop(trajectory, None)
            self._begun.discard(trajectory)
            self._jobs.append(_Job(kind="abandon", trajectory=trajectory))
            self._changed.notify_all()

    def flush(self) -> None:
        """Wait until all that was taken is durable at the server; see `protocol.Writer`."""
        future: Future[None] = promise()
        with self._changed:
            self._check_open()
            self._jobs.append(_Job(kind="flush", future=future))
            self._changed.notify_all()
        future.result()
        with self._changed:
            lost, self._unreported = self._unreported, {}
        if lost:
            shown = "; ".join(f"{name}: {reason}" for name, reason in list(lost.items())[:3])
            raise BackendError(
                f"{len(lost)} trajectories did not reach the store at {self._line.address} ({shown}). Records that "
                "were lost round to nearest. Check the server and its disk."
            )

    def close(self) -> None:
        """Flush and stop; a second call does nothing, nor does one in a process that was forked from the writer's."""
        if self._is_closed or os.getpid() != self._process:
            return
        try:
            self.flush()
        finally:
            with self._changed:
                self._is_closed = True
                self._changed.notify_all()
            self._thread.join()
            self._line.close()

    @property
    def stats(self) -> WriterStats:
        """Counters now."""
        with self._changed:
            return WriterStats(
                **self._counts,
                num_dropped=self._num_dropped,
                dropped=dict(self._dropped),
                num_waits=self._num_waits,
                wait_seconds=self._wait_s,
            )

    def _check_open(self) -> None:
        if self._is_closed or os.getpid() != self._process:
            reason = "is closed" if self._is_closed else "was opened by another process"
            raise BackendError(
                f"The writer of the store at {self._line.address} {reason}; got another call. It takes segments from "
                "the process that opened it until it is closed. Open a new one."
            )

    def _is_taken(self, name: str) -> bool:
        """False for a trajectory that back-pressure dropped. Raises what it was lost to otherwise."""
        lost = self._lost.get(name)
        if lost is None:
            return True
        if isinstance(lost, DroppedError):
            return False
        raise lost

    def _has_room(self, size: int, name: str) -> bool:
        """Wait for room, or drop the trajectory, as the policy says; one that waited too long is lost as a whole."""
        until, is_waiting = time.monotonic() + self._max_wait_s, False
        while self._counts["bytes_queued"] and self._counts["bytes_queued"] + size > self._max_bytes:
            if self._policy == "drop_trajectory":
                self._remove_queued(name)
                bound = f"the bound of {self._max_bytes} bytes here"
                self._lose(name, dropped(name, self._line.address, bound=bound))
                self._jobs.append(_Job(kind="abandon", trajectory=name))
                return False
            started = time.monotonic()
            self._num_waits += not is_waiting
            is_waiting = True
            self._changed.wait(timeout=1.0)
            self._wait_s += time.monotonic() - started
            if time.monotonic() > until:
                error = BackendError(
                    f"Append to trajectory {name!r} waited {self._max_wait_s:g} s for {self._line.address}. "
                    f"{self._counts['bytes_queued']} of {self._max_bytes} bytes wait already. Check the server, "
                    'or set policy = "drop_trajectory".'
                )
                self._remove_queued(name)
                self._lose(name, error)
                self._unreported.pop(name, None)  # whoever appends is told
                self._jobs.append(_Job(kind="abandon", trajectory=name))
                raise error
            if not self._is_taken(name):
                return False
        return True

    def _lose(self, name: str, error: TraceFP4Error) -> None:
        """Note that a trajectory was given up, once."""
        if name in self._lost:
            return
        self._lost[name] = error
        self._begun.discard(name)
        self._num_dropped += 1
        self._dropped[name] = str(error)
        if not isinstance(error, DroppedError):
            self._unreported[name] = str(error)
        while len(self._dropped) > MAX_NAMES_KEPT:
            del self._dropped[next(iter(self._dropped))]

    def _remove_queued(self, name: str) -> None:
        """Take a trajectory's segments out of the queue."""
        for job in [job for job in self._jobs if job.segment is not None and job.trajectory == name]:
            assert job.segment is not None
            self._counts["bytes_queued"] -= job.segment.num_bytes
            self._jobs.remove(job)

    def _send_all(self) -> None:
        """The thread that sends: jobs in order, finishes that stand together in one request."""
        while True:
            with self._changed:
                while not self._jobs and not self._is_closed:
                    self._changed.wait()
                if not self._jobs:
                    return
                jobs = [self._jobs.popleft()]
                while (
                    jobs[0].kind == "finish"
                    and self._jobs
                    and self._jobs[0].kind == "finish"
                    and len(jobs) < MAX_FINISHES_AT_ONCE
                ):
                    jobs.append(self._jobs.popleft())
            self._do(jobs)
            with self._changed:
                done = [job.segment.num_bytes for job in jobs if job.segment is not None]
                self._counts["bytes_queued"] -= sum(done)
                self._changed.notify_all()

    def _do(self, jobs: list[_Job]) -> None:
        """Do what stands together, whatever happens: this thread must not end before the writer is closed."""
        while True:
            try:
                return self._send(jobs)
            except ForgottenError as error:
                # What the server held is lost; the rest goes on, so these jobs are tried again.
                with self._changed:
                    lost = self._sender.forgotten() & self._begun
                self._give_up(lost, error)
            except UnreachableError as error:
                # All at once: to wait for a dead server once for every trajectory would hold the rollout for hours.
                return self._settle(jobs, error, lost=set(self._begun))
            except TraceFP4Error as error:
                return self._settle(jobs, error)
            except Exception as error:
                odd = RecordError(
                    f"A request to the store server at {self._line.address} came to nothing: {error!r}. Both ends must "
                    "be tracefp4 of one version. Start that one, or report this."
                )
                return self._settle(jobs, odd)

    def _send(self, jobs: list[_Job]) -> None:
        first = jobs[0]
        if first.segment is not None:
            with self._changed:
                if first.trajectory in self._lost:
                    return
            self._sender.append(first.segment)
            with self._changed:
                self._counts["bytes_written"] += first.segment.num_bytes
                self._counts["segments_written"] += 1
        elif first.kind == "finish":
            self._send_finishes(jobs)
        elif first.kind == "abandon":
            self._sender.abandon(first.trajectory)
        else:
            assert first.future is not None
            self._sender.flush()
            first.future.set_result(None)

    def _send_finishes(self, jobs: list[_Job]) -> None:
        """Finish trajectories; each job's future gets its own handle or error."""
        with self._changed:
            lost = {job.trajectory: self._lost.get(job.trajectory) for job in jobs}
        names = [name for name, error in lost.items() if error is None]
        found = self._sender.finish(names) if names else {}
        for job in jobs:
            assert job.future is not None
            error = lost[job.trajectory]
            if error is None:
                error = self._finished(job.trajectory, found[job.trajectory], job.future)
            if error is not None:
                self._refuse(job.trajectory, error, job.future)

    def _finished(self, name: str, answer: Mapping[str, Any], future: Future[Handle]) -> TraceFP4Error | None:
        """Give one handle to its future; or return the error that the server answered with."""
        if "handle" in answer:
            handle = Handle.from_json(answer["handle"])
            with self._changed:
                self._begun.discard(name)
                self._counts["num_finished"] += 1
            future.set_result(handle)
            return None
        try:
            raise_error(answer)
        except TraceFP4Error as error:
            return error

    def _refuse(self, name: str, error: TraceFP4Error, future: Future[Any]) -> None:
        """Tell whoever waits for a finish that it failed; the trajectory is over, and counted if it had begun."""
        with self._changed:
            if name in self._begun:
                self._lose(name, error)
            self._lost.pop(name, None)
            self._unreported.pop(name, None)
        future.set_exception(error)

    def _give_up(self, names: Collection[str], error: TraceFP4Error) -> None:
        with self._changed:
            for name in names:
                self._lose(name, error)

    def _settle(self, jobs: list[_Job], error: TraceFP4Error, *, lost: Collection[str] = ()) -> None:
        """Give up what some jobs were about, and `lost`; tell whoever waits for a finish or a flush what happened."""
        names = {*lost, *(job.trajectory for job in jobs if job.kind == "append")}
        self._sender.give_up({*names, *(job.trajectory for job in jobs if job.kind != "flush")})
        self._give_up(names, error)
        for job in jobs:
            if job.future is None or job.future.done():
                continue
            if job.kind == "finish":
                self._refuse(job.trajectory, error, job.future)
                continue
            with self._changed:
                if not self._unreported:
                    self._unreported["(flush)"] = str(error)
            job.future.set_result(None)

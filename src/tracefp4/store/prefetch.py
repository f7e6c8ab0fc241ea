"""Reading ahead: the slices of the next micro-batches, in the background, with bounded memory, from any Reader.

A batch reserves its bytes before it is read and holds them until its result is taken or it is cancelled. Batches are
read in the order in which they were asked for. Never returns anything but what `read_available` said, absent spans
included.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import CancelledError
from types import TracebackType

from tracefp4.errors import ConfigError, RecordError
from tracefp4.store.protocol import Reader, Request, Slices

DEFAULT_BYTES = 256 << 20


class Batch:
    """Slices that are being read; `result` takes them, once."""

    def __init__(self, prefetcher: Prefetcher, requests: Sequence[Request]) -> None:
        self.requests = tuple(requests)
        self._prefetcher = prefetcher
        self._ended = threading.Event()
        self._slices: tuple[Slices, ...] | None = None
        self._refusal: BaseException | None = None
        self.num_bytes = 0

    def result(self, timeout_s: float | None = None) -> tuple[Slices, ...]:
        """One Slices per request, in order; waits for them.

        Raises: what the read raised (BackendError, RecordError); TimeoutError; CancelledError after `cancel`, and for
        a second call.
        """
        if not self._ended.wait(timeout_s):
            raise TimeoutError(f"{len(self.requests)} slices were not read within {timeout_s} s")
        slices, refusal = self._slices, self._refusal
        self.cancel()
        if refusal is not None:
            raise refusal
        if slices is None:
            raise CancelledError
        return slices

    def is_ready(self) -> bool:
        """Whether `result` would return without waiting."""
        return self._ended.is_set()

    def cancel(self) -> None:
        """Give up the batch and its memory."""
        self._prefetcher._release(self)


class Prefetcher:
    """Background reads of one Reader; close it, or use it in a `with`."""

    def __init__(self, reader: Reader, *, max_bytes: int = DEFAULT_BYTES) -> None:
        """Start the reading thread.

        Args:
            reader: where slices come from; stays the caller's to close.
            max_bytes: bytes of slices that may be read and not yet taken.

        Raises: ConfigError if max_bytes is below 1.
        """
        if max_bytes < 1:
            raise ConfigError(
                f"Prefetcher refused; got max_bytes {max_bytes}. It is at least 1. Correct the recipe."
            )
        self.reader, self.max_bytes = reader, max_bytes
        # Most bytes ever held.
        self.peak_bytes = 0
        self._held = 0
        self._changed = threading.Condition()
        self._batches: deque[Batch] = deque()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="tracefp4-store-prefetch", daemon=True)
        self._thread.start()

    def submit(self, requests: Sequence[Request]) -> Batch:
        """Ask for slices; returns at once. A batch that alone exceeds max_bytes fails with RecordError."""
        batch = Batch(self, requests)
        with self._changed:
            if self._is_closed:
                raise RecordError("Prefetcher refused: it is closed. Reads need an open one. Make another.")
            self._batches.append(batch)
            self._changed.notify_all()
        return batch

    def _release(self, batch: Batch) -> None:
        with self._changed:
            if batch in self._batches:
                self._batches.remove(batch)
            if batch._ended.is_set():
                self._held -= batch.num_bytes
                batch.num_bytes = 0
            batch._slices, batch._refusal = None, None
            batch._ended.set()
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._batches) or self._is_closed)
                if self._is_closed:
                    return
                batch = self._batches.popleft()
            slices: tuple[Slices, ...] | None = None
            refusal: BaseException | None = None
            try:
                if self._reserve(batch):
                    slices = tuple(self.reader.read_available(request) for request in batch.requests)
            except Exception as error:
                refusal = error
            with self._changed:
                is_cancelled = batch._ended.is_set()
                if is_cancelled or slices is None:
                    self._held -= batch.num_bytes
                    batch.num_bytes = 0
                if not is_cancelled:
                    batch._slices, batch._refusal = slices, refusal
                    batch._ended.set()
                self._changed.notify_all()

    def _reserve(self, batch: Batch) -> bool:
        """Wait until the batch fits; False if it was cancelled. Raises: RecordError if it never can."""
        needed = sum(self._bytes_of(request) for request in batch.requests)
        if needed > self.max_bytes:
            raise RecordError(
                f"Prefetch refused: the batch has {needed} bytes and max_bytes is {self.max_bytes}. A batch must fit. "
                "Ask for fewer rows or columns, or read it directly."
            )
        with self._changed:
            self._changed.wait_for(
                lambda: self._held + needed <= self.max_bytes or batch._ended.is_set() or self._is_closed
            )
            if batch._ended.is_set() or self._is_closed:
                return False
            self._held += needed
            self.peak_bytes = max(self.peak_bytes, self._held)
            batch.num_bytes = needed
        return True

    def _bytes_of(self, request: Request) -> int:
        try:
            columns = self.reader.stat(request.trajectory).columns
        except RecordError:
            # Gone, missing or damaged: the read will say so and return next to nothing.
            return 0
        rows = max(0, request.stop - request.start)
        return rows * sum(columns.get(column, 0) for column in set(request.columns))

    def close(self) -> None:
        """Cancel what is waiting and stop; a second call does nothing."""
        with self._changed:
            self._is_closed = True
            waiting = list(self._batches)
            self._changed.notify_all()
        for batch in waiting:
            batch.cancel()
        self._thread.join()

    def __enter__(self) -> Prefetcher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

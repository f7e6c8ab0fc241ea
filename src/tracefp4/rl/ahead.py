"""Make the next item in a thread of its own, when the caller says that it has time.

Training on a GPU is launching: while a backward pass is, Python waits for it, and what the next micro-batch needs from
records can be looked up. During a forward pass both would want the interpreter.
"""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Generic, TypeVar

import torch

Item = TypeVar("Item")


class Ahead(Generic[Item]):
    """The items of an iterator, each made between `begin` and `take`; a context, which ends the thread."""

    def __init__(self, items: Iterator[Item], device: torch.device) -> None:
        """Make nothing yet.

        Args:
            items: are made one after the other, in the thread; what an item raises, `take` raises.
            device: a GPU, where items are copied in the stream that is the caller's now. On a processor, which the pass
                keeps busy, items are made when they are taken.
        """
        self._items = items
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tracefp4-ahead")
        self._next: Future[Item | None] | None = None

    def begin(self) -> None:
        """Begin the next item, unless it was begun."""
        if self._next is None and self._stream is not None:
            self._next = self._pool.submit(self._make)

    def take(self) -> Item | None:
        """Return the next item, which may have to be waited for; None after the last one."""
        if self._next is None:
            return next(self._items, None)
        found, self._next = self._next.result(), None
        return found

    def _make(self) -> Item | None:
        with torch.cuda.stream(self._stream):
            return next(self._items, None)

    def __enter__(self) -> "Ahead[Item]":
        """Begin the first item."""
        self.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

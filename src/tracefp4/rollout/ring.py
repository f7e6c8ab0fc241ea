"""From the device into the log, behind the back of the decode stream: a ring of host buffers and one thread.

The bytes that a pass recorded are copied into a slot of pinned memory by a stream of their own, and from there into the
log by a thread, while the next passes run. Nobody waits, unless all slots are full: then the host does, counted. Row
numbers are given out at once and in order, and who reads the log calls `drain` first. A copy that fails makes the rows
after it meaningless, so from then on `push` and `drain` raise until the rows are given up (`reset`). Without a GPU the
same happens without streams.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from queue import Empty, SimpleQueue

import torch
from torch import Tensor

from tracefp4.errors import RecordError
from tracefp4.models.taps import StackedTaps

Sink = Callable[[StackedTaps, int], None]
"""Takes the bytes of some tokens, in host memory that is written again afterwards, and their number."""
NUM_SLOTS = 3
"""Passes whose bytes may be on their way to an engine's log."""
_ALIGNMENT = 64


class RecordRing:
    """Slots on the way to a log.

    Args:
        device: where passes run.
        num_slots: passes that may be on their way, at least 1.
        slot_tokens: tokens of a slot, at least 1; a longer pass takes several slots. Their bytes are those of the first
            pass.
    """

    def __init__(self, device: torch.device, *, num_slots: int, slot_tokens: int) -> None:
        self.num_waits = 0
        """Times that a pass had to wait for a slot."""
        self._is_cuda = device.type == "cuda"
        self._num_slots = num_slots
        self._slot_tokens = slot_tokens
        self._free: SimpleQueue[Tensor] | None = None
        self._stream = torch.cuda.Stream(device) if self._is_cuda else None
        self._copied: torch.cuda.Event | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tracefp4-record")
        self._pending: deque[Future[None]] = deque()
        self._failure: BaseException | None = None

    def push(self, taps: StackedTaps, *, num_tokens: int, num_rows: int, sink: Sink) -> None:
        """Start to copy what a pass recorded; the thread gives it to `sink`, pass after pass.

        Args:
            taps: of the pass.
            num_tokens: its tokens, at least 1; they come first.
            num_rows: the same with padding, `num_tokens` or more.
            sink: takes it.

        Raises: RecordError if an earlier copy failed.
        """
        while self._pending and self._pending[0].done():
            self._settle()
        self._check()
        if self._free is None:
            self._free = self._slots(taps, num_rows)
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        for begin in range(0, num_tokens, self._slot_tokens):
            count = min(self._slot_tokens, num_tokens - begin)
            self._copy(_tokens(taps, begin, count, num_rows=num_rows), count, sink, self._free)

    def hold(self) -> None:
        """Let the current stream wait until nothing pushed is read any more: before its tensors are written again."""
        if self._stream is not None and self._copied is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(self._copied)

    def drain(self) -> None:
        """Wait until everything pushed has arrived.

        Raises: RecordError if a copy failed.
        """
        while self._pending:
            self._settle()
        self._check()

    def reset(self) -> bool:
        """Wait for what is on its way, and forget failures; the caller gives the rows up.

        Returns: True if a copy had failed.
        """
        while self._pending:
            self._settle()
        has_failed, self._failure = self._failure is not None, None
        return has_failed

    def _slots(self, taps: StackedTaps, num_rows: int) -> SimpleQueue[Tensor]:
        """Empty slots for passes like this one."""
        parts = [part.numel() * part.element_size() // num_rows for part in tensors_of(taps)]
        num_bytes = sum(_padded(size * self._slot_tokens) for size in parts)
        slots: SimpleQueue[Tensor] = SimpleQueue()
        for _ in range(self._num_slots):
            slots.put(torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=self._is_cuda))
        return slots

    def _copy(self, taps: StackedTaps, count: int, sink: Sink, slots: SimpleQueue[Tensor]) -> None:
        """Fill a slot and have it delivered."""
        try:
            slot = slots.get_nowait()
        except Empty:
            self.num_waits += 1
            slot = slots.get()
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            kept = _into(taps, slot)
            if self._stream is not None:
                self._copied = self._stream.record_event()
        copied = self._copied

        def deliver(read: StackedTaps = taps) -> None:
            """In the thread. `read` is the pass's own memory, which nobody else may be given before it was copied."""
            try:
                if copied is not None:
                    copied.synchronize()
                if self._failure is None:
                    sink(kept, count)
            except BaseException as problem:
                self._failure = problem
            finally:
                slots.put(slot)

        self._pending.append(self._thread.submit(deliver))

    def _settle(self) -> None:
        """Wait for the oldest delivery; `_failure` knows how it ended."""
        self._pending.popleft().result()

    def _check(self) -> None:
        if self._failure is not None:
            raise RecordError(
                f"The bytes of a pass did not reach the log; got {type(self._failure).__name__}: {self._failure}. "
                "No record can be built of what runs. generate, force and extend drop their requests, and the next "
                "call is recorded again; otherwise make the engine anew."
            ) from self._failure


def tensors_of(taps: StackedTaps) -> list[Tensor]:
    """Return all tensors of a pass, in one order."""
    found = [
        part for rows in taps.sites.values() for part in (rows.packed, rows.block_scales, rows.exponents)
    ]
    return [part for part in (*found, taps.ids) if part is not None]


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _mapped(taps: StackedTaps, change: Callable[[Tensor], Tensor]) -> StackedTaps:
    """The same taps with every tensor changed."""

    def changed(part: Tensor | None) -> Tensor | None:
        return None if part is None else change(part)

    sites = {
        kind: replace(
            rows,
            packed=change(rows.packed),
            block_scales=change(rows.block_scales),
            exponents=changed(rows.exponents),
        )
        for kind, rows in taps.sites.items()
    }
    return replace(taps, sites=sites, ids=changed(taps.ids))


def _tokens(taps: StackedTaps, begin: int, count: int, *, num_rows: int) -> StackedTaps:
    """`count` tokens from `begin` on of a pass of `num_rows`, views; a token may have several rows of a part."""

    def cut(part: Tensor) -> Tensor:
        per_token = part.shape[1] // num_rows
        return part.narrow(1, begin * per_token, count * per_token)

    return _mapped(taps, cut)


def _into(taps: StackedTaps, slot: Tensor) -> StackedTaps:
    """Copy taps into a slot, tensor after tensor; returns them there."""
    offset = 0

    def placed(part: Tensor) -> Tensor:
        nonlocal offset
        num_bytes = part.numel() * part.element_size()
        target = slot[offset : offset + num_bytes].view(part.dtype).view(part.shape)
        offset += _padded(num_bytes)
        target.copy_(part, non_blocking=True)
        return target

    return _mapped(taps, placed)

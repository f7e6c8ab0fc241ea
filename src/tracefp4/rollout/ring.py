"""From the device into the log, behind the back of the decode stream: a ring of host buffers and one thread.

The bytes that a pass recorded are moved aside on the device, which takes microseconds and lets the next pass write
where they were. A stream of its own copies them to pinned memory, and a thread from there into the log, while the next
passes run. Nobody waits, unless all slots are full: then the host does, counted. Row numbers are given out at once and
in order, and who reads the log calls `drain` first. A copy that fails makes the rows after it meaningless, so from then
on `push` and `drain` raise until the rows are given up (`reset`). Without a GPU the same happens without streams.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import NamedTuple

import torch
from torch import Tensor

from tracefp4.errors import RecordError
from tracefp4.models.taps import StackedTaps

Sink = Callable[[StackedTaps, int], None]
"""Takes the bytes of some tokens, in host memory that is written again afterwards, and their number."""
NUM_SLOTS = 3
"""Passes whose bytes may be on their way to an engine's log."""
_ALIGNMENT = 64


class _Slot(NamedTuple):
    """Memory of one pass."""

    host: Tensor
    """uint8, where the device writes without waiting."""
    aside: Tensor
    """The same on the device; `host` itself where there is no other device."""


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
        self.num_slots = num_slots
        """Passes that may be on their way."""
        self._slot_tokens = slot_tokens
        self._free: SimpleQueue[_Slot] | None = None
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tracefp4-record")
        self._pending: deque[Future[None]] = deque()
        self._failure: BaseException | None = None

    def push(self, taps: StackedTaps, *, num_tokens: int, num_rows: int, sink: Sink) -> None:
        """Start to copy what a pass recorded; the thread gives it to `sink`, pass after pass. What the current stream
        does afterwards may write the pass's tensors again.

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
        for begin in range(0, num_tokens, self._slot_tokens):
            count = min(self._slot_tokens, num_tokens - begin)
            self._copy(_tokens(taps, begin, count, num_rows=num_rows), count, sink, self._free)

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

    def _slots(self, taps: StackedTaps, num_rows: int) -> SimpleQueue[_Slot]:
        """Empty slots for passes like this one."""
        parts = [part.numel() * part.element_size() // num_rows for part in tensors_of(taps)]
        num_bytes = sum(_padded(size * self._slot_tokens) for size in parts)
        slots: SimpleQueue[_Slot] = SimpleQueue()
        for _ in range(self.num_slots):
            is_cuda = self._stream is not None
            host = torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=is_cuda)
            slots.put(_Slot(host, torch.empty_like(host, device=self._device) if is_cuda else host))
        return slots

    def _copy(self, taps: StackedTaps, count: int, sink: Sink, slots: SimpleQueue[_Slot]) -> None:
        """Fill a slot and have it delivered."""
        try:
            slot = slots.get_nowait()
        except Empty:
            self.num_waits += 1
            slot = slots.get()
        _into(taps, slot.aside)
        kept, used = _views(taps, slot.host)
        copied: torch.cuda.Event | None = None
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                slot.host[:used].copy_(slot.aside[:used], non_blocking=True)
                copied = self._stream.record_event()

        def deliver() -> None:
            """In the thread."""
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


def _views(taps: StackedTaps, memory: Tensor) -> tuple[StackedTaps, int]:
    """Places for taps in some memory, tensor after tensor, and the bytes up to their end."""
    offset = 0

    def place(part: Tensor) -> Tensor:
        nonlocal offset
        begin, end = offset, offset + part.numel() * part.element_size()
        offset = _padded(end)
        return memory[begin:end].view(part.dtype).view(part.shape)

    return _mapped(taps, place), offset


def _into(taps: StackedTaps, memory: Tensor) -> None:
    """Copy taps to their places."""
    places, _ = _views(taps, memory)
    for place, part in zip(tensors_of(places), tensors_of(taps), strict=True):
        place.copy_(part)

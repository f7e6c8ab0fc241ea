"""A compiled library of one op: loaded once, checked against the reference, called over spans of rows by threads.

Every C function takes the bounds [first, last) of a span of rows, blocks or bytes, and then whole tensors; spans
write disjoint parts, so any split into threads gives the same bytes. ctypes releases the interpreter lock during a
call. Alternative not taken: OpenMP, whose threads would spin beside those of torch.
"""

import ctypes
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from tracefp4.errors import BackendError
from tracefp4.ops import compiler

DTYPE = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""`enum dtype` of e2m1.h: what the kernels read without a copy."""

_HEADERS = (Path(__file__).with_name("e2m1.h"), Path(__file__).with_name("scaling.h"))
_C_TYPES = {"i": ctypes.c_int, "f": ctypes.c_float, "q": ctypes.c_int64, "p": ctypes.c_void_p}
_LEAST_ELEMENTS = 1 << 17
"""Elements that are worth handing to a thread: about 0.1 ms of work, several times the cost of the handover."""
_SPANS_PER_THREAD = 4
"""More spans than threads, so that a thread which the machine holds up does not hold up the rest."""
_HUGE_BYTES = 8 << 20
"""Results from this size on ask the system for large pages: otherwise most of the time goes to page faults."""


class Status(NamedTuple):
    """Whether a library can be used."""

    is_usable: bool
    """True when it is loaded and equals the reference."""
    reason: str
    """Who compiled it, or why it cannot be used; a sentence part for `tracefp4 doctor` and errors."""


class Library:
    """The compiled functions of one op."""

    def __init__(
        self,
        source: Path,
        signatures: dict[str, str],
        check: Callable[[], str | None],
        *,
        headers: tuple[str, ...] = (),
    ) -> None:
        """Declare a library; nothing is compiled before `status` is asked for.

        Args:
            source: The C file, which includes headers of this folder.
            signatures: Arguments of each function after the bounds: "p" pointer, "i" int, "q" int64,
                "f" float. Every function
                returns int64 or nothing.
            check: Compares a few calls with the reference; returns what differs, or None.
            headers: What the source includes beyond e2m1.h and scaling.h: paths relative to this folder.
        """
        self._headers = (*_HEADERS, *(_HEADERS[0].parent / name for name in headers))
        self._source, self._signatures, self._check = source, signatures, check
        self._functions: dict[str, Callable[..., int]] = {}
        self._status: Status | None = None
        self._lock = threading.RLock()
        _libraries.append(self)

    def status(self) -> Status:
        """Return whether the library can be used; the first call compiles, loads and checks, once per process."""
        if self._status is None:
            with self._lock:
                self._status = self._status or self._open()
        return self._status

    def call(self, name: str, count: int, elements: int, *arguments: Tensor | float | None) -> int:
        """Run a function over [0, count), by as many threads as torch uses and the work is worth.

        Args:
            name: The function.
            count: How many rows, blocks or bytes there are.
            elements: How many elements they hold in all.
            arguments: What follows the bounds; tensors are passed by address and must be contiguous.

        Returns:
            The sum of what the spans return; meaningless for functions that return nothing.
        """
        if count == 0:
            return 0
        function = self._functions[name]
        values = tuple(a.data_ptr() if isinstance(a, Tensor) else a for a in arguments)
        threads = min(torch.get_num_threads(), elements // _LEAST_ELEMENTS, count)
        if threads <= 1:
            return function(0, count, *values)
        num_spans = min(count, threads * _SPANS_PER_THREAD)
        spans = iter([(count * i // num_spans, count * (i + 1) // num_spans) for i in range(num_spans)])

        # A helper that outlives an interrupted caller still writes: it keeps the tensors behind the addresses alive.
        def work(_kept: tuple[Tensor | float | None, ...] = arguments) -> int:
            return sum(function(first, last, *values) for first, last in spans)

        helpers = [_pool().submit(work) for _ in range(threads - 1)]
        return work() + sum(helper.result() for helper in helpers)

    def _open(self) -> Status:
        try:
            built = compiler.load(self._source, self._headers)
        except BackendError as problem:
            return Status(False, str(problem))
        for name, arguments in self._signatures.items():
            function = getattr(built.functions, name)
            function.argtypes = [_C_TYPES[letter] for letter in "qq" + arguments]
            function.restype = ctypes.c_int64
            self._functions[name] = function
        problem_found = self._check()
        if problem_found is not None:
            return Status(False, f"{built.made_by}, refused: {problem_found} differ from the reference")
        return Status(True, built.made_by)


def readable(x: Tensor) -> Tensor:
    """Return x as the kernels read it: detached, contiguous, float32, bfloat16 or float16; float64 is rounded."""
    x = x.detach().resolve_neg()  # a lazily negated view holds the other signs in memory
    return (x if x.dtype in DTYPE else x.to(torch.float32)).contiguous()


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return an uninitialised tensor on the CPU, in large pages where the system has them and it is large."""
    tensor = torch.empty(shape, dtype=dtype, device="cpu")
    size = tensor.numel() * tensor.itemsize
    if size >= _HUGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        _ = _c_library().madvise(
            start, tensor.data_ptr() + size - start, mmap.MADV_HUGEPAGE
        )  # advice: may fail
    return tensor


def first_difference(parts: Iterator[tuple[str, Tensor, Tensor]]) -> str | None:
    """Return the name of the first pair of tensors that differ in shape, dtype or bits; NaN equals NaN."""
    for name, got, wanted in parts:
        if got.dtype != wanted.dtype or got.shape != wanted.shape:
            return name
        both_nan = (got != got) & (wanted != wanted)
        if bool(((_integers(got) != _integers(wanted)) & ~both_nan).any()):
            return name
    return None


def _integers(tensor: Tensor) -> Tensor:
    widths = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(widths[tensor.itemsize])


def check_values() -> Tensor:
    """Return float32 [8, 64] for checks against the reference: ties, zeros of both signs, subnormals, the extremes,
    blocks with NaN and Inf, and ordinary values over many binades."""
    ties = torch.tensor(
        [6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 0.0, 0.1, 1.0, 4.0, 5.9, 2.0, 3.0, 1.5], device="cpu"
    )
    x = torch.stack([ties, -ties, ties * 448.0, ties * 2.0**-149]).repeat(2, 1).repeat(1, 4)
    wave = (
        torch.sin(torch.arange(4 * 64, dtype=torch.float64, device="cpu") * 1.7).to(torch.float32).view(4, 64)
    )
    x[4:] = wave * torch.exp2(
        torch.arange(-12, 52, device="cpu").to(torch.float32).view(4, 16).repeat_interleave(4, 1) - 20.0
    )
    x[5, 16:32], x[5, 40], x[6, 3], x[7, 63] = -0.0, 3.4e38, float("nan"), float("-inf")
    x[7, 16:32] = ties * 2.0**-20
    return x


_the_pool: ThreadPoolExecutor | None = None
_pool_lock = threading.Lock()
_libraries: "list[Library]" = []


def _pool() -> ThreadPoolExecutor:
    """Return the helper threads, which start as they are needed."""
    global _the_pool
    with _pool_lock:
        if _the_pool is None:
            _the_pool = ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="tracefp4-kernel")
        return _the_pool


def _forget_pool() -> None:
    """A forked child has the executor but none of its threads: it starts its own."""
    global _the_pool, _pool_lock
    _the_pool, _pool_lock = None, threading.Lock()
    for library in _libraries:  # another thread of the parent may have been compiling
        library._lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_pool)


def _c_library() -> ctypes.CDLL:
    library = ctypes.CDLL(None)
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return library

"""The few calls that a store makes on files: write all, sync, lock. One place, so that faults can be injected.

Nothing here knows what is written. Locks are `flock` locks: the kernel drops them when their process dies, however
it dies, so no lock outlives its holder. They need a local file system.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tracefp4.errors import BackendError

# How long one process waits for another that appends to the manifest, which takes milliseconds.
LOCK_TIMEOUT_S = 60.0
_LOCK_POLL_S = 0.002


def write_all(descriptor: int, data: bytes, offset: int) -> None:
    """Write every byte at `offset`. Raises: OSError; some bytes may then be written."""
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written


def read_at(descriptor: int, num_bytes: int, offset: int) -> bytes:
    """Read up to `num_bytes` at `offset`; fewer only at the end of the file."""
    parts = []
    while num_bytes > 0:
        part = os.pread(descriptor, num_bytes, offset)
        if not part:
            break
        parts.append(part)
        num_bytes, offset = num_bytes - len(part), offset + len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def sync(descriptor: int) -> None:
    """Make written bytes of a file survive a loss of power."""
    os.fsync(descriptor)


def sync_directory(path: Path) -> None:
    """Make created, renamed and removed names of a directory survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def locked(path: Path, *, timeout_s: float = LOCK_TIMEOUT_S) -> Iterator[None]:
    """Hold the exclusive lock of the file `path`, which is created if absent and never removed.

    Raises: BackendError if another process holds it for `timeout_s` seconds (measured by a monotonic clock).
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        deadline = time.monotonic() + timeout_s
        while not _try_flock(descriptor):
            if time.monotonic() > deadline:
                raise BackendError(
                    f"Cannot lock {path}: another process has held it for {timeout_s:g} s. It may be held for "
                    "milliseconds only. Find the stopped process (fuser), end or continue it, then try again."
                )
            time.sleep(_LOCK_POLL_S)
        yield
    finally:
        os.close(descriptor)


def hold(path: Path) -> int:
    """Create `path` and hold its lock until the descriptor that is returned is closed or the process dies."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    if not _try_flock(descriptor):
        os.close(descriptor)
        raise BackendError(
            f"Cannot hold {path}: another process holds it. Every writer has a file of its own. "
            "Open the writer again."
        )
    return descriptor


def is_held(path: Path) -> bool:
    """Say whether a living process holds the lock of `path`; False if there is no such file."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        return not _try_flock(descriptor)
    finally:
        os.close(descriptor)


def refused(path: Path, error: OSError, *, needed: int) -> BackendError:
    """The error for a medium that did not take `needed` bytes at `path`."""
    reason = error.strerror or str(error)
    free = ""
    with suppress(OSError):
        stat = os.statvfs(path if path.exists() else path.parent)
        free = f", {stat.f_bavail * stat.f_frsize} bytes are free there"
    what = "No space: " if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
    return BackendError(
        f"Could not write to {path}: {what}{reason}. The medium must take {needed} bytes{free}. Free space or "
        "move the store; trajectories that were lost are named and nothing else is affected."
    )


def _try_flock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True

"""Shared memory of one host as a store: a directory on the memory file system, bounded, gone with its last user.

The bytes are those of a directory store, so chunks, checksums, manifest and every reader are the same; what differs
is that nothing is synced, that a capacity bounds it, and that it does not outlive its users. A writer takes a segment
only if it fits: it waits until retention has made room, or gives up the whole trajectory, as its policy says.
Files are written with calls that report a full memory file system as an error; nothing maps them, so a process
is never killed for touching a page that is not there.

Every user holds a lock on the file `users`, which the kernel drops however the user dies. Whoever leaves last removes
the directory; what a killed last user left behind is removed when the next shared memory of any name is opened.
Python's `multiprocessing.shared_memory` is not used: its resource tracker removes a segment when any process
that only looked at it ends, and leaves it when all are killed. Never removes a directory that somebody uses.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

from tracefp4.errors import BackendError, ConfigError, RecordError, TraceFP4Error
from tracefp4.store.pending import WriterOptions
from tracefp4.store.protocol import Handle, Segment, WriterStats
from tracefp4.store.refusals import DroppedError
from tracefp4.store.writer import DirectoryWriter

ROOT = Path("/dev/shm")
PREFIX = "tracefp4-records-"
USERS, SIZE = "users", "capacity.json"
DEFAULT_CAPACITY = 1 << 30
MIN_CAPACITY = 1 << 20
# Space comes back chunk by chunk: small chunks follow retention closely.
CHUNKS_IN_CAPACITY = 64
OPEN_TIMEOUT_S = 30.0
MAX_NAMED = 10_000
_POLL_S = 0.005


class SharedMemory:
    """One user's hold on a named directory in shared memory.

    Args:
        name: any text; the same name is the same memory.
        capacity_bytes: size if it does not exist yet, at least 1 MiB; None only joins what exists.
        root: the memory file system.

    Raises:
        BackendError: it does not exist and capacity_bytes is None; the file system has not that much room.
        ConfigError: an unusable name or size, or one that exists with another capacity.
    """

    def __init__(
        self, name: str, *, capacity_bytes: int | None = DEFAULT_CAPACITY, root: Path = ROOT
    ) -> None:
        file_name = PREFIX + quote(name, safe="")
        if not name or len(file_name) > 200 or (capacity_bytes is not None and capacity_bytes < MIN_CAPACITY):
            raise ConfigError(
                f"Shared memory refused: got name {name[:80]!r} and capacity {capacity_bytes}. A name has 1 to 200 "
                f"characters when escaped, a capacity at least {MIN_CAPACITY} bytes. Choose others."
            )
        self.name, self.path, self._process = name, root / file_name, os.getpid()
        self.removed_leftovers = remove_leftovers(root, but=self.path)
        self._users = self._joined(capacity_bytes)
        try:
            self.capacity_bytes = self._agreed(capacity_bytes)
        except BaseException:
            self.close()
            raise

    def used_bytes(self) -> int:
        """Memory that its files take now."""
        total = 0
        with suppress(FileNotFoundError):
            for entry in os.scandir(self.path):
                with suppress(FileNotFoundError):
                    total += entry.stat().st_blocks * 512
        return total

    def close(self) -> None:
        """Leave; the last user removes the directory. A second call does nothing.

        A process that was forked from a user shares that user's lock and takes nothing with it.
        """
        if self._users < 0:
            return
        if os.getpid() == self._process and _try_lock(self._users, fcntl.LOCK_EX):
            _remove(self.path)
        os.close(self._users)
        self._users = -1

    def _joined(self, capacity_bytes: int | None) -> int:
        """Descriptor of the file `users`, locked as one of them; leftovers of the same name are cleared first."""
        until = time.monotonic() + OPEN_TIMEOUT_S
        while time.monotonic() < until:
            try:
                if capacity_bytes is not None:
                    self.path.mkdir(exist_ok=True)
                users = os.open(
                    self.path / USERS, os.O_RDWR | (os.O_CREAT if capacity_bytes is not None else 0)
                )
            except FileNotFoundError as error:
                if capacity_bytes is not None and self.path.parent.is_dir():
                    continue  # its last user removed it a moment ago
                raise BackendError(
                    f"No shared memory {self.name!r} at {self.path}. Its first user, who gives a capacity, makes it, "
                    "on a memory file system that exists. Start that process first, or correct the path."
                ) from error
            except OSError as error:
                raise BackendError(
                    f"Cannot use {self.path} as shared memory: {error.strerror}. It needs a memory file system that "
                    "this user may write. Choose a directory instead."
                ) from error
            # A file that somebody removed meanwhile says nothing about the directory that is there now.
            is_first = capacity_bytes is not None and _try_lock(users, fcntl.LOCK_EX)
            if is_first and _is_at(users, self.path / USERS):
                _clear(self.path)
            if _try_lock(users, fcntl.LOCK_SH) and _is_at(users, self.path / USERS):
                return users
            os.close(users)
            time.sleep(_POLL_S)
        raise BackendError(
            f"Cannot join the shared memory at {self.path}: it has been locked for {OPEN_TIMEOUT_S:g} s. It may "
            "be locked for milliseconds only. Find the stopped process (fuser), end or continue it, then try again."
        )

    def _agreed(self, capacity_bytes: int | None) -> int:
        """The capacity that all users share."""
        file = self.path / SIZE
        try:
            found = int(json.loads(file.read_text(encoding="ascii"))["capacity_bytes"])
        except FileNotFoundError:
            return self._make(capacity_bytes or DEFAULT_CAPACITY)
        except (ValueError, KeyError) as error:
            raise RecordError(
                f"{file} is damaged: {error}. Remove {self.path} when nobody uses it."
            ) from error
        if capacity_bytes not in (None, found):
            raise ConfigError(
                f"Shared memory {self.name!r} has a capacity of {found} bytes; got {capacity_bytes}. All users share "
                "one capacity. Give the same one, or choose another name."
            )
        return found

    def _make(self, capacity_bytes: int) -> int:
        found = os.statvfs(self.path)
        free = found.f_bavail * found.f_frsize
        if free < capacity_bytes:
            raise BackendError(
                f"No room for shared memory at {self.path}: {free} bytes are free, {capacity_bytes} are needed. Lower "
                "the capacity, or enlarge the memory file system (of a container: --shm-size)."
            )
        temporary = self.path / f".{SIZE}.{os.getpid()}"
        temporary.write_text(json.dumps({"capacity_bytes": capacity_bytes}), encoding="ascii")
        try:
            os.link(temporary, self.path / SIZE)
        except FileExistsError:
            return self._agreed(capacity_bytes)
        finally:
            temporary.unlink()
        return capacity_bytes


class SharedMemoryWriter:
    """Writer into shared memory; a DirectoryWriter that also keeps the capacity.

    All files and this writer's queue together stay below the capacity; other writers' queues, each at most an eighth
    of it, come on top while they are being written.

    Args:
        memory: where to.
        options: of the writer; chunks are small and nothing is synced, whatever they say.
    """

    def __init__(self, memory: SharedMemory, options: WriterOptions | None = None) -> None:
        given = options or WriterOptions()
        self._memory, self._policy, self._max_wait_s = memory, given.policy, given.max_wait_s
        self._writer = DirectoryWriter(
            memory.path,
            replace(
                given,
                durable=False,
                chunk_bytes=max(1 << 14, memory.capacity_bytes // CHUNKS_IN_CAPACITY),
                max_queue_bytes=min(given.max_queue_bytes, memory.capacity_bytes // 8),
            ),
        )
        self._lock = threading.Lock()
        self._given_up: dict[str, TraceFP4Error] = {}
        self._dropped: dict[str, str] = {}
        self._num_dropped, self._num_waits, self._wait_s = 0, 0, 0.0
        self._is_closed = False

    def append(self, segment: Segment) -> bool:
        """Take a segment if there is room for it; see `protocol.Writer`.

        Raises: also RecordError for a segment that can never fit.
        """
        name = segment.trajectory
        refusal = self._given_up.get(name)
        if refusal is None:
            refusal = self._await_room(segment.num_bytes + len(segment.meta), name)
        if refusal is None:
            return self._writer.append(segment)
        if isinstance(refusal, DroppedError):
            return False
        raise refusal

    def finish(self, trajectory: str) -> Handle:
        """Wait until the trajectory is complete for readers; see `protocol.Writer`."""
        return self.finish_soon(trajectory).result()

    def finish_soon(self, trajectory: str) -> Future[Handle]:
        """`finish` without waiting."""
        refusal = self._given_up.pop(trajectory, None)
        if refusal is None:
            return self._writer.finish_soon(trajectory)
        future: Future[Handle] = Future()
        future.set_exception(refusal)
        return future

    def abandon(self, trajectory: str) -> None:
        """Give up an unfinished trajectory; its name may be used again."""
        if self._given_up.pop(trajectory, None) is None:
            self._writer.abandon(trajectory)

    def flush(self) -> None:
        """Wait until all that was taken is in the shared memory."""
        self._writer.flush()

    def close(self) -> None:
        """Flush and stop; a second call does nothing."""
        self._is_closed = True
        self._writer.close()

    @property
    def stats(self) -> WriterStats:
        """Counters now."""
        found = self._writer.stats
        with self._lock:
            return replace(
                found,
                num_dropped=found.num_dropped + self._num_dropped,
                dropped={**found.dropped, **self._dropped},
                num_waits=found.num_waits + self._num_waits,
                wait_seconds=found.wait_seconds + self._wait_s,
            )

    def _await_room(self, num_bytes: int, name: str) -> TraceFP4Error | None:
        """Wait for room as the policy says; returns what the trajectory is given up for, if it is."""
        capacity, started = self._memory.capacity_bytes, time.monotonic()
        if num_bytes > self._writer.options.max_queue_bytes:
            raise RecordError(
                f"Segment of trajectory {name!r} refused: it has {num_bytes} bytes. One in shared memory of {capacity} "
                f"bytes has at most {self._writer.options.max_queue_bytes}. Append shorter spans, or enlarge it."
            )
        is_waiting = False
        while (used := self._memory.used_bytes() + self._writer.stats.bytes_queued) + num_bytes > capacity:
            place = f"the shared memory at {self._memory.path} holds {used} of {capacity} bytes"
            if self._policy == "drop_trajectory":
                return self._give_up(
                    name,
                    DroppedError(
                        f"Trajectory {name!r} was dropped: {place} and needs {num_bytes} more. Whole trajectories are "
                        "dropped, never parts. Keep fewer versions, enlarge the capacity, or let the rollout wait."
                    ),
                )
            with self._lock:
                self._num_waits += not is_waiting
            is_waiting = True
            if time.monotonic() - started > self._max_wait_s:
                return self._give_up(
                    name,
                    BackendError(
                        f"Trajectory {name!r} was given up after {self._max_wait_s:g} s: {place} and needs {num_bytes} "
                        "more. Room comes from retention. Keep fewer versions, or enlarge the capacity."
                    ),
                )
            if self._is_closed:
                break  # the writer below refuses
            time.sleep(_POLL_S)
        if is_waiting:
            with self._lock:
                self._wait_s += time.monotonic() - started
        return None

    def _give_up(self, name: str, refusal: TraceFP4Error) -> TraceFP4Error:
        if self._writer.give_up(name, refusal):
            return refusal
        with self._lock:  # nothing of it had been appended
            self._given_up[name] = refusal
            self._dropped[name] = str(refusal)
            self._num_dropped += 1
            while len(self._dropped) > MAX_NAMED:
                del self._dropped[next(iter(self._dropped))]
        return refusal


def remove_leftovers(root: Path = ROOT, *, but: Path | None = None) -> list[str]:
    """Remove the shared memory that nobody uses any more, and return the names of its directories.

    Args:
        root: the memory file system.
        but: directory that is left alone.
    """
    removed = []
    for path in sorted(root.glob(PREFIX + "*")):
        if path == but or not path.is_dir():
            continue
        try:
            users = os.open(path / USERS, os.O_RDWR)
        except FileNotFoundError:
            with suppress(OSError):
                path.rmdir()  # empty: its maker died at once, or makes it again
            continue
        except OSError:
            continue  # another account's
        try:
            if _try_lock(users, fcntl.LOCK_EX) and _is_at(users, path / USERS):
                _remove(path)
                removed.append(path.name)
        finally:
            os.close(users)
    return removed


def _try_lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether the open file is still the one of that name."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _clear(path: Path) -> None:
    """Remove everything but the file `users`, whose lock the caller holds alone."""
    for entry in list(os.scandir(path)):
        if entry.name != USERS:
            shutil.rmtree(entry.path) if entry.is_dir(follow_symlinks=False) else os.unlink(entry.path)


def _remove(path: Path) -> None:
    """Remove the directory; `users`, by which others know that it is there, goes last."""
    with suppress(FileNotFoundError):
        _clear(path)
        os.unlink(path / USERS)
        with suppress(OSError):
            path.rmdir()  # not empty: somebody has just begun to make it again

"""Two ways to stop a verifier that does not come back.

`call_with_timeout` interrupts by a SIGALRM timer: no overhead, but it needs the main thread of a POSIX
process, and it ends neither a single long call into C, such as 9**9**9 (it takes effect when the call
returns), nor a loop that catches BaseException. `VerifierProcess` runs the verifier in a worker process and
kills it when the time is up, which ends everything, from any thread; starting the worker costs seconds, once
and again after each kill.
"""

from __future__ import annotations

import json
import multiprocessing
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any

from tracefp4.errors import ConfigError, RecordError
from tracefp4.rl.tasks import Task
from tracefp4.rl.verifiers import Verifier

REPEAT_S = 0.05
START_LIMIT_S = 120.0

# The worker is not a fork: forking after torch has started its threads can deadlock. It gets our sys.path, so
# that a
# reward function importable here is importable there.
WORKER = """
import json, sys
sys.path[:] = json.loads(sys.argv[2])
from tracefp4.rl.time_limit import serve
serve(int(sys.argv[1]), sys.argv[3], sys.argv[4])
"""


class RewardTimeout(BaseException):
    """Raised inside a verifier when its time is up; a BaseException so that `except Exception` lets it
    through."""


def call_with_timeout(function: Callable[[], Any], *, timeout_s: float) -> Any:
    """Call a function and interrupt it after timeout_s seconds of wall-clock time.

    The timer fires again every 0.05 s, so an interruption swallowed by a bare `except` is not the last. A
    SIGALRM timer that was already running is suspended and continued afterwards.

    Raises:
        RewardTimeout: the time was up.
        ConfigError: not in the main thread, or a platform without setitimer.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        raise ConfigError(
            "The reward time limit needs the main thread of a POSIX process; got thread "
            f"{threading.current_thread().name!r}. Score in the main thread, or set isolation to 'process'."
        )
    is_armed = True

    def interrupt(signum: int, frame: FrameType | None) -> None:
        if is_armed:
            raise RewardTimeout

    previous = signal.signal(signal.SIGALRM, interrupt)
    running_s, interval_s = signal.setitimer(signal.ITIMER_REAL, timeout_s, REPEAT_S)
    try:
        return function()
    finally:
        is_armed = False
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, previous)
        if running_s > 0.0:
            signal.setitimer(signal.ITIMER_REAL, running_s, interval_s)


class VerifierProcess:
    """A verifier in a worker process, started at the first call and after each kill."""

    def __init__(self, name: str, *, function: str = "") -> None:
        """Keep what the worker's Verifier is made of; nothing is started."""
        self.name, self.function = name, function
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    def verify(self, task: Task, *, answer: str, timeout_s: float) -> Any:
        """Return what the verifier returned.

        Args:
            task: picklable.
            answer: the answer's text.
            timeout_s: wall-clock limit of the verification; starting the worker and its imports is not
                counted.

        Raises:
            RewardTimeout: the time was up; the worker has been killed.
            RecordError: the verifier raised, or the worker died.
            ConfigError: the worker cannot be started, or the dataset cannot be created.
        """
        connection = self._start()
        try:
            connection.send((task, answer))
            self._receive(connection, limit_s=START_LIMIT_S)  # the dataset exists: the clock starts now
            return self._receive(connection, limit_s=timeout_s)
        except (EOFError, OSError) as error:
            self.close()
            raise RecordError(f"the verifier's process died ({type(error).__name__})") from error

    def close(self) -> None:
        """Kill the worker, if there is one."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._connection is not None:
            self._connection.close()
        self._process = self._connection = None

    def _start(self) -> Connection:
        if self._connection is not None:
            return self._connection
        ours, theirs = multiprocessing.Pipe()
        arguments = [str(theirs.fileno()), json.dumps(sys.path), self.name, self.function]
        self._process = subprocess.Popen(
            [sys.executable, "-c", WORKER, *arguments], pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL
        )
        theirs.close()
        weakref.finalize(self, self._process.kill)  # a worker in an endless loop must not outlive us
        self._connection = ours
        try:
            self._receive(ours, limit_s=START_LIMIT_S)
        except (EOFError, OSError, RewardTimeout) as error:
            self.close()
            raise ConfigError(
                f"The reward worker did not start ({type(error).__name__}); its messages are on stderr. "
                "Check that its imports work, or set isolation to 'timer'."
            ) from error
        return ours

    def _receive(self, connection: Connection, *, limit_s: float) -> Any:
        """One answer of the worker: (kind, content)."""
        if not connection.poll(limit_s):
            self.close()
            raise RewardTimeout
        kind, content = connection.recv()
        if kind == "config":
            raise ConfigError(content)
        if kind == "error":
            raise RecordError(content)
        return content


def serve(descriptor: int, name: str, function: str) -> None:
    """Run in the worker: verify what arrives until the other end closes.

    Sends ("ok", None) when ready, then for every (task, answer): ("ok", None) when prepared and ("ok",
    value), or in place of either ("config", text) or ("error", text).
    """
    connection = Connection(descriptor)
    try:
        verifier = Verifier(name, function=function)
    except ConfigError as error:
        connection.send(("config", str(error)))
        return
    connection.send(("ok", None))
    while True:
        try:
            task, answer = connection.recv()
        except EOFError:
            return
        try:
            verifier.prepare(task)
            connection.send(("ok", None))
            connection.send(("ok", verifier.verify(task, answer=answer)))
        except ConfigError as error:
            connection.send(("config", str(error)))
        except (
            Exception
        ) as error:  # the boundary to foreign code: any failure is an outcome, counted by the parent
            connection.send(("error", f"{type(error).__name__}: {error}"))

"""Calls into environments: with a time limit, a stated outcome for every failure, and without holding up the engine.

`CallsHere` calls in this thread between two engine steps and interrupts by a timer: the order of everything is fixed.
`CallsInThreads` hands calls to threads and is asked for results between steps, so that other trajectories sample
meanwhile; which trajectories share a step then depends on how quickly an environment answers. A thread that outlives
its limit cannot be stopped: its trajectory ends, and whatever it returns later is not looked at.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from tracefp4.errors import ConfigError
from tracefp4.rl.time_limit import RewardTimeout, call_with_timeout


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What became of one call."""

    key: Any
    """Whose call it was."""
    value: Any = None
    """What it returned; None after a failure."""
    failure: str = ""
    """`timeout`, `error`, or empty."""
    detail: str = ""
    """The failure's text; empty without one."""


class Calls(Protocol):
    """Calls that are under way."""

    @property
    def num_open(self) -> int:
        """Calls whose outcome has not been handed over."""

    def post(self, key: Any, function: Callable[[], Any]) -> None:
        """Begin a call, or queue it."""

    def ready(self) -> list[Outcome]:
        """Hand over the outcomes that have arrived."""

    def wait(self) -> None:
        """Block until `ready` has something, if anything is open."""


def build_calls(*, workers: int, timeout_s: float) -> Calls:
    """Return calls in this thread (workers 0) or in that many threads.

    Args:
        workers: 0 or more.
        timeout_s: limit of one call, seconds of wall-clock time, > 0; waiting for a free thread is not counted.
    """
    return CallsInThreads(workers, timeout_s=timeout_s) if workers else CallsHere(timeout_s=timeout_s)


class CallsHere:
    """Calls in this thread, one after another."""

    def __init__(self, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._done: list[Outcome] = []

    @property
    def num_open(self) -> int:
        """Outcomes that nobody has taken."""
        return len(self._done)

    def post(self, key: Any, function: Callable[[], Any]) -> None:
        """Call now.

        Raises:
            ConfigError: outside the main thread, where a timer cannot interrupt; or the environment's own.
        """
        if threading.current_thread() is not threading.main_thread():
            raise ConfigError(
                f"Environments cannot be interrupted in thread {threading.current_thread().name!r}; allowed is the "
                "main thread, or task.environment_workers of 1 or more. Set the latter."
            )
        try:
            value = call_with_timeout(function, timeout_s=self._timeout_s)
        except RewardTimeout:
            self._done.append(_timed_out(key, timeout_s=self._timeout_s))
        except ConfigError:
            raise
        # the boundary to foreign code: any failure is an outcome, counted or raised by the caller
        except Exception as error:
            self._done.append(_failed(key, error))
        else:
            self._done.append(Outcome(key=key, value=value))

    def ready(self) -> list[Outcome]:
        """Hand over the outcomes, in order of the calls."""
        done, self._done = self._done, []
        return done

    def wait(self) -> None:
        """Return at once: calls are over when `post` returns."""


class CallsInThreads:
    """Calls in daemon threads, at most `workers` of them within their time at once."""

    def __init__(self, workers: int, *, timeout_s: float) -> None:
        self._workers, self._timeout_s = workers, timeout_s
        self._queued: deque[tuple[Any, Callable[[], Any]]] = deque()
        self._running: dict[int, tuple[Any, float]] = {}
        self._arrived: SimpleQueue[tuple[int, Outcome | ConfigError]] = SimpleQueue()
        self._done: list[Outcome] = []
        self._num_started = 0

    @property
    def num_open(self) -> int:
        """Calls that are queued, running, or have outcomes that nobody has taken."""
        return len(self._queued) + len(self._running) + len(self._done)

    def post(self, key: Any, function: Callable[[], Any]) -> None:
        """Queue a call; it begins as soon as a thread is free."""
        self._queued.append((key, function))
        self._start()

    def ready(self) -> list[Outcome]:
        """Hand over what has arrived, and what has taken too long, in the order of arrival.

        Raises:
            ConfigError: an environment's own, which is no outcome.
        """
        while True:
            try:
                self._take(*self._arrived.get_nowait())
            except Empty:
                break
        now = time.monotonic()
        for ticket, (key, started) in list(self._running.items()):
            if now - started >= self._timeout_s:
                del self._running[ticket]
                self._done.append(_timed_out(key, timeout_s=self._timeout_s))
        self._start()
        done, self._done = self._done, []
        return done

    def wait(self) -> None:
        """Block until a call ends or has taken too long."""
        if self._done or not self._running:
            return
        first = min(started for _, started in self._running.values())
        try:
            arrived = self._arrived.get(timeout=max(0.0, first + self._timeout_s - time.monotonic()))
        except Empty:
            return
        self._take(*arrived)

    def _take(self, ticket: int, outcome: Outcome | ConfigError) -> None:
        if self._running.pop(ticket, None) is None:
            return  # its time was up
        if isinstance(outcome, ConfigError):
            raise outcome
        self._done.append(outcome)

    def _start(self) -> None:
        while self._queued and len(self._running) < self._workers:
            key, function = self._queued.popleft()
            ticket = self._num_started
            self._num_started += 1
            self._running[ticket] = (key, time.monotonic())
            threading.Thread(
                target=self._run, args=(ticket, key, function), name=f"environment-{ticket}", daemon=True
            ).start()

    def _run(self, ticket: int, key: Any, function: Callable[[], Any]) -> None:
        try:
            found: Outcome | ConfigError = Outcome(key=key, value=function())
        except ConfigError as error:
            found = error
        # the boundary to foreign code, in a thread that has no caller: SystemExit is a failure of the environment too
        except BaseException as error:
            found = _failed(key, error)
        self._arrived.put((ticket, found))


def _failed(key: Any, error: BaseException) -> Outcome:
    return Outcome(key=key, failure="error", detail=f"{type(error).__name__}: {error}")


def _timed_out(key: Any, *, timeout_s: float) -> Outcome:
    return Outcome(key=key, failure="timeout", detail=f"no answer within {timeout_s} s")

"""Does another step fit into a run's limit of time? Judged by how long its parts took last; stops nothing itself."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager


class Pace:
    """The clock of one process that trains.

    has_time is: spent + last step + last evaluation + last checkpoint < limit, all in wall-clock seconds.
    """

    def __init__(self, *, limit_s: float) -> None:
        """Start the clock; a limit of 0 is none."""
        self._limit_s = limit_s or math.inf
        self._started_s = time.monotonic()
        self._seconds: dict[str, float] = {}
        self._has_stepped = False

    @property
    def has_time(self) -> bool:
        """Whether another step fits before the end, which evaluates and saves."""
        spent_s = time.monotonic() - self._started_s
        return spent_s + sum(self._seconds.values()) < self._limit_s

    @contextmanager
    def step(self) -> Iterator[None]:
        """Time a step. The first says nothing about others: it compiles, captures and chooses."""
        with self.part("step"):
            yield
        if not self._has_stepped:
            self._has_stepped = True
            del self._seconds["step"]

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time something that the end of the run has to repeat."""
        started_s = time.monotonic()
        yield
        self._seconds[name] = time.monotonic() - started_s

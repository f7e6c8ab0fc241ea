"""The one ambient object: is this forward pass recorded, does it follow a record, or neither?

Exactly one context variable holds the Session; sites ask `current()`. Sessions do not nest: a pass either
makes decisions or follows them. Replay is addressed by position (guidance.replay), so a session may be
entered again for a recomputation, in any order, without changing any answer.

Recomputation under activation checkpointing must see the session of its own forward pass. Decoder layers of a
patched model carry it along (`qat.recomputation`); for other pieces of a model give the checkpoint
`bind(function)`, or keep backward inside `with replay(...)` (context variables do not cross threads).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, ParamSpec, Protocol, TypeVar

from torch import Tensor

from tracefp4.errors import ConfigError
from tracefp4.guidance.record import Site
from tracefp4.guidance.replay import ReplayBatch

if TYPE_CHECKING:
    from tracefp4.ops.guided_quantize import Rounded

__all__ = ["ReplayBatch", "Session", "Sink", "bind", "current", "record", "replay", "resumed"]

P = ParamSpec("P")
R = TypeVar("R")


class Sink(Protocol):
    """Receives decisions while a pass is recorded."""

    def observe(self, site: Site, rounded: Rounded) -> None:
        """Take one site's rounding of one step."""

    def observe_routing(self, layer: int, expert_ids: Tensor) -> None:
        """Take one layer's routed expert ids [N, top_k]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Session:
    """What the running pass does with decisions; exactly one field is set."""

    sink: Sink | None = None
    """Where decisions go, under record."""
    batch: ReplayBatch | None = None
    """The decisions to follow, under replay."""


_SESSION: ContextVar[Session | None] = ContextVar("tracefp4_session", default=None)


def current() -> Session | None:
    """The session of the running pass; None outside record and replay."""
    return _SESSION.get()


@contextmanager
def record(sink: Sink) -> Iterator[Session]:
    """Send every decision made inside to `sink`. Raises: ConfigError inside another session."""
    with _entered(Session(sink=sink)) as session:
        yield session


@contextmanager
def replay(batch: ReplayBatch) -> Iterator[Session]:
    """Follow the decisions of `batch` inside. Raises: ConfigError inside another session."""
    with _entered(Session(batch=batch)) as session:
        yield session


def bind(function: Callable[P, R]) -> Callable[P, R]:
    """Tie a function to the session that is current now, whenever and on whichever thread it runs.

    Meant for what a checkpoint recomputes: `checkpoint(bind(layer), x)`. The bound session replaces any other
    for the duration of the call, because a recomputation belongs to its own forward pass. Outside a session
    the function is bound to no session.
    """
    session = current()

    @wraps(function)
    def bound(*args: P.args, **kwargs: P.kwargs) -> R:
        with resumed(session):
            return function(*args, **kwargs)

    return bound


@contextmanager
def resumed(session: Session | None) -> Iterator[None]:
    """Put a session (or none) in the place of whatever is current, and put that back at the end.

    For recomputations, which belong to the forward pass that they repeat and not to what runs around them.
    """
    token = _SESSION.set(session)
    try:
        yield
    finally:
        _SESSION.reset(token)


@contextmanager
def _entered(session: Session) -> Iterator[Session]:
    running = current()
    if running is not None:
        kind = "record" if running.sink is not None else "replay"
        raise ConfigError(
            f"Sessions do not nest; got record or replay inside `with {kind}(...)`. One session at a time is "
            "allowed. Leave the outer one first."
        )
    token = _SESSION.set(session)
    try:
        yield session
    finally:
        _SESSION.reset(token)

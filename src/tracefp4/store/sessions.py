"""Who speaks to a store server: a session for every client, with the number of its newest request and its answer.

A client opens a session, counts its requests and ends the session when it closes. One that is silent for too long is
gone: its place is free again. Called from the server's thread alone; knows no sockets and no store.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from tracefp4.errors import BackendError


@dataclass(kw_only=True, slots=True)
class Session:
    """One client."""

    last_seq: int = 0
    """Number of its newest request."""
    is_running: bool = False
    """Whether that request is being worked on."""
    is_leaving: bool = False
    """Whether it said goodbye meanwhile."""
    answer: list[bytes] | None = None
    """Answer to it, kept while it may be asked for again; None for reads, which are simply done again."""
    heard: float = 0.0
    """When it was last heard, on a clock that never goes back."""
    unfinished: set[str] = field(default_factory=set)
    """Trajectories that it has begun and not finished."""


class Sessions:
    """The clients of one server.

    Args:
        max_sessions: clients at once.
        idle_s: silence after which a client is gone.
    """

    def __init__(self, *, max_sessions: int, idle_s: float) -> None:
        self._max_sessions, self._idle_s = max_sessions, idle_s
        self._known: dict[str, Session] = {}

    def greet(self, name: str, seq: int) -> None:
        """Open a session, or go on with it. Raises: BackendError if every place is taken."""
        if name not in self._known and len(self._known) >= self._max_sessions:
            raise BackendError(
                f"Client refused: this server has {len(self._known)} clients. At most {self._max_sessions} are served "
                "at once. Close some: a place is free as soon as its client closes the store, or after "
                f"{self._idle_s:g} s without a message from it. Or start another server."
            )
        session = self._known.setdefault(name, Session())
        session.last_seq, session.heard = max(session.last_seq, seq), time.monotonic()
        session.is_leaving = False

    def heard(self, name: str) -> Session | None:
        """The session of a client that has just been heard; None for a stranger."""
        session = self._known.get(name)
        if session is not None:
            session.heard = time.monotonic()
        return session

    def begin(self, session: Session, seq: int) -> None:
        """Note that a request is being worked on."""
        session.last_seq, session.is_running, session.answer = seq, True, None

    def end(self, session: Session, answer: list[bytes] | None) -> None:
        """Note that it is done, with the answer to keep."""
        session.is_running, session.answer, session.heard = False, answer, time.monotonic()

    def gone(self) -> list[Session]:
        """Take out the sessions of clients that said goodbye or were silent for too long, unless a request of theirs
        is being worked on."""
        last = time.monotonic() - self._idle_s
        found = {
            name: session
            for name, session in self._known.items()
            if not session.is_running and (session.is_leaving or session.heard <= last)
        }
        for name in found:
            del self._known[name]
        return list(found.values())

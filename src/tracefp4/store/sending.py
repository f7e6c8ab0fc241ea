"""What one remote writer has at its server, and the requests that change it; called from one thread.

The server may lose what it holds unfinished: it is started anew, or forgets a client that was silent for too long. What
it had acknowledged is then lost, and no more: the request that was told so may be asked again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

from tracefp4.store.connection import Line
from tracefp4.store.protocol import Segment
from tracefp4.store.refusals import ConflictError, DroppedError
from tracefp4.store.wire import Message, cut_segment, segment_message


class Sender:
    """Requests of one writer.

    Args:
        line: to the server.
    """

    def __init__(self, line: Line) -> None:
        self._line = line
        self._held: set[str] = set()
        # Given up here, perhaps unfinished at the server.
        self._stale: set[str] = set()

    def append(self, segment: Segment) -> None:
        """Send a segment, in as many messages as it takes. Raises: DroppedError, and what `Line.ask` raises."""
        for part in cut_segment(segment, max_bytes=self._line.settings.message_bytes):
            message = segment_message(part)
            answer = self._ask("append", message.content, body=message.body)
            if not answer.content["is_taken"]:
                raise dropped(segment.trajectory, self._line.address, bound="the server's own bound")
            self._held.add(segment.trajectory)

    def finish(self, names: Sequence[str]) -> Mapping[str, Mapping[str, Any]]:
        """Finish trajectories; name -> its handle or its error, as the server answered."""
        found: Mapping[str, Mapping[str, Any]] = self._ask("finish", {"trajectories": names}).content[
            "finished"
        ]
        self._held.difference_update(names)
        return found

    def abandon(self, name: str) -> None:
        """Give up a trajectory."""
        self._held.discard(name)
        self._ask("abandon", {"trajectories": [name]})

    def flush(self) -> None:
        """Make what the server took durable."""
        self._ask("flush", {})

    def forgotten(self) -> set[str]:
        """What a server that forgot this writer had held; it holds nothing now."""
        found, self._held = self._held, set()
        self._stale.clear()
        return found

    def give_up(self, names: Collection[str]) -> None:
        """Note what is over here; the server, which would keep it open, is told before anything else is asked of it."""
        self._stale |= set(names)
        self._held.difference_update(names)

    def _ask(self, operation: str, content: Mapping[str, Any], *, body: bytes = b"") -> Message:
        for name in sorted(self._stale):
            with suppress(ConflictError):  # another client's by now
                self._line.ask("abandon", {"trajectories": [name]})
            self._stale.discard(name)
        return self._line.ask(operation, content, body=body)


def dropped(name: str, address: str, *, bound: str) -> DroppedError:
    """The error for a trajectory that back-pressure gave up on its way to a server."""
    return DroppedError(
        f"Trajectory {name!r} was dropped: the store at {address} could not keep up, and {bound} was reached. Whole "
        'trajectories are dropped, never parts. Raise max_queue_bytes, or set policy = "wait".'
    )

"""What a store server does for each kind of request: from a checked message to a call of the local store and back.

Trajectories that are not finished belong to the session that began them: a second client that appends under the same
name is refused, so rows of two writers never meet. Nothing here knows sockets or sessions' numbering.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

from tracefp4.errors import RecordError, TraceFP4Error
from tracefp4.store.backends import OpenStore
from tracefp4.store.protocol import Removed, Request
from tracefp4.store.refusals import ConflictError
from tracefp4.store.wire import (
    NAMES_PER_MESSAGE,
    Message,
    error_content,
    removed_content,
    segment_of,
    slices_message,
    stat_content,
    target_of,
)

FINISH_TIMEOUT_S = 600.0


class Requests:
    """The operations of one server on its local store; called from several threads."""

    def __init__(self, store: OpenStore, *, message_bytes: int) -> None:
        self._writer, self._reader, self._retention = store.writer, store.reader, store.retention
        self._message_bytes = message_bytes
        self._owners: dict[str, str] = {}
        self._lock = threading.Lock()
        self._operations: dict[str, Callable[[Message, str, set[str]], Message]] = {
            "append": self._append,
            "finish": self._finish,
            "abandon": self._abandon,
            "flush": self._flush,
            "trajectories": self._trajectories,
            "stat": self._stat,
            "read": self._read,
            "retain": self._retain,
        }

    def answer(self, kind: str, message: Message, *, session: str, unfinished: set[str]) -> Message:
        """Do one request.

        Args:
            kind: name of the operation.
            message: its content and body.
            session: who asks.
            unfinished: the asker's unfinished trajectories; kept up to date here.

        Raises:
            RecordError: no such operation; and what the store raises.
        """
        operation = self._operations.get(kind)
        if operation is None:
            raise RecordError(
                f"Request refused: operation {kind[:40]!r}. A store server does {', '.join(self._operations)}. Use "
                "the same tracefp4 on both sides."
            )
        return operation(message, session, unfinished)

    def forget_session(self, unfinished: Iterable[str]) -> dict[str, TraceFP4Error]:
        """Abandon what a client that is gone had begun; returns what the store could not give up, and why."""
        failed: dict[str, TraceFP4Error] = {}
        for name in list(unfinished):
            self._release(name)
            try:
                self._abandoned(name)
            except TraceFP4Error as error:
                failed[name] = error
        return failed

    def _append(self, message: Message, session: str, unfinished: set[str]) -> Message:
        segment = segment_of(message)
        with self._lock:
            owner = self._owners.setdefault(segment.trajectory, session)
        if owner != session:
            raise ConflictError(
                f"Trajectory {segment.trajectory!r} refused: another client of this server is writing it. One client "
                "writes a trajectory. Give trajectories names that are unique among all clients."
            )
        unfinished.add(segment.trajectory)
        return Message(content={"is_taken": self._writer.append(segment)})

    def _finish(self, message: Message, session: str, unfinished: set[str]) -> Message:
        """Finish several at once, so that they share one sync; every one has its own answer."""
        names = [str(name) for name in message.content["trajectories"]]
        futures = {}
        answers: dict[str, dict[str, Any]] = {}
        for name in names:
            try:
                self._check_owner(name, session)
                futures[name] = self._writer.finish_soon(name)
            except TraceFP4Error as error:
                answers[name] = error_content(error)
        for name, future in futures.items():
            try:
                answers[name] = {"handle": future.result(timeout=FINISH_TIMEOUT_S).to_json()}
            except TraceFP4Error as error:
                answers[name] = error_content(error)
            unfinished.discard(name)
            self._release(name)
        return Message(content={"finished": answers})

    def _abandon(self, message: Message, session: str, unfinished: set[str]) -> Message:
        for name in message.content["trajectories"]:
            self._check_owner(str(name), session)
            unfinished.discard(name)
            self._release(name)
            self._abandoned(name)
        return Message(content={})

    def _flush(self, message: Message, session: str, unfinished: set[str]) -> Message:
        self._writer.flush()
        return Message(content={})

    def _trajectories(self, message: Message, session: str, unfinished: set[str]) -> Message:
        after = message.content["after"]
        found = sorted((name, done) for name, done in self._reader.trajectories().items() if name > after)
        part = found[:NAMES_PER_MESSAGE]
        return Message(content={"names": part, "is_last": len(part) == len(found)})

    def _stat(self, message: Message, session: str, unfinished: set[str]) -> Message:
        return Message(content={"stat": stat_content(self._reader.stat(target_of(message.content)))})

    def _read(self, message: Message, session: str, unfinished: set[str]) -> Message:
        content = message.content
        start, stop = int(content["start"]), int(content["stop"])
        columns = tuple(str(name) for name in content["columns"])
        target = target_of(content)
        if (
            start < stop
            and stop - start > 1
            and self._row_bytes(content, columns) * (stop - start) > self._message_bytes
        ):
            return Message(content={"too_large": True})
        found = self._reader.read_available(
            Request(trajectory=target, columns=columns, start=start, stop=stop)
        )
        return slices_message(found)

    def _row_bytes(self, content: dict[str, Any], columns: Iterable[str]) -> int:
        try:
            known = self._reader.stat(target_of(content)).columns
        except RecordError:
            return 0  # nothing is there: the answer names the absent rows and has no bytes
        return sum(known.get(name, 0) for name in columns)

    def _retain(self, message: Message, session: str, unfinished: set[str]) -> Message:
        kind, value = message.content["rule"], message.content["value"]
        rules: dict[str, Callable[[Any], Removed]] = {
            "forget": self._retention.forget,
            "keep_last": self._retention.keep_last,
            "discard": self._retention.discard,
            "remove": self._retention.remove,
        }
        return Message(content={"removed": removed_content(rules[kind](value))})

    def _check_owner(self, name: str, session: str) -> None:
        with self._lock:
            owner = self._owners.get(name, session)
        if owner != session:
            raise ConflictError(
                f"Trajectory {name!r} refused: another client of this server is writing it. Only the client that began "
                "a trajectory ends it. Give trajectories names that are unique among all clients."
            )

    def _release(self, name: str) -> None:
        with self._lock:
            self._owners.pop(name, None)

    def _abandoned(self, name: str) -> None:
        try:
            self._writer.abandon(name)
        except RecordError:
            return  # it was never written or is finished: there is nothing to give up

"""One client's line to a store server: one request after the other, asked again until it is answered or given up.

A request that gets no answer in time is sent again over a new socket under the same number, so the server can tell a
repetition from a new request and does nothing twice. A server that is still working says so, and the wait begins
again. A server that was started anew, or that heard nothing for so long that it forgot this client, says which: the
client is greeted again, and what may be repeated is asked again. Everything else raises ForgottenError, because what
the server held unfinished is lost.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import zmq

from tracefp4.errors import ConfigError, TraceFP4Error
from tracefp4.store.keys import StoreKey
from tracefp4.store.protocol import STORE_SCHEMA
from tracefp4.store.wire import (
    DEFAULT_MESSAGE_BYTES,
    FRAME_OVERHEAD,
    ForgottenError,
    Message,
    UnreachableError,
    pack,
    raise_error,
    unpack,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class LineSettings:
    """How long a client waits, and how much it sends at once."""

    timeout_s: float = 5.0
    """Wait for an answer, or for a sign that the server is still working, before asking again."""
    retries: int = 3
    """Times that a request is asked again before the server counts as unreachable."""
    patience_s: float = 600.0
    """Longest wait for a server that keeps saying that it is working."""
    message_bytes: int = DEFAULT_MESSAGE_BYTES
    """Largest body of one message; the server's must be equal."""
    key: StoreKey | None = None
    """The server's key, if it has one."""

    def __post_init__(self) -> None:
        if not (
            self.timeout_s > 0 and self.retries >= 0 and self.patience_s > 0 and self.message_bytes >= 4096
        ):
            raise ConfigError(
                f"Settings of a store's line refused: got {self}. Times are above 0, retries 0 or more, messages 4096 "
                "bytes or more. Use the defaults."
            )


class Line:
    """Requests to one server, one at a time; may be called from several threads.

    Args:
        address: where the server listens, such as "tcp://10.0.0.5:5555".
        settings: waits and sizes.

    Nothing is sent before the first request.
    """

    def __init__(self, address: str, settings: LineSettings | None = None) -> None:
        if not address.startswith(("tcp://", "ipc://")):
            raise ConfigError(
                f"Address of a store server refused: got {address!r}. Allowed is tcp://<host>:<port>, or ipc://<path> "
                "on one host. Start one with `tracefp4 store serve`."
            )
        self.address, self.settings = address, settings or LineSettings()
        self.num_retries = 0
        self._session, self._process = secrets.token_hex(16), os.getpid()
        self._epoch: str | None = None
        self._seq = 0
        self._socket: zmq.Socket[bytes] | None = None
        self._lock = threading.Lock()

    def ask(
        self, operation: str, content: Mapping[str, Any], *, body: bytes = b"", is_repeatable: bool = False
    ) -> Message:
        """Send a request and return its answer.

        Args:
            operation: name of the request.
            content: JSON values.
            body: raw bytes.
            is_repeatable: the request may be asked again of a server that no longer knows this client.

        Raises:
            UnreachableError: no answer. ForgottenError: the server no longer knows this client, and the request may
            not be repeated. And every error that the server answers with.
        """
        with self._lock:
            if os.getpid() != self._process:
                # Forked: the session and the socket are the other process's.
                self._session, self._process = secrets.token_hex(16), os.getpid()
                self._socket, self._epoch = None, None
            while True:
                if self._epoch is None:
                    self._greet()
                answer = self._asked(operation, {**content, "epoch": self._epoch}, body)
                if "forgotten" not in answer.content:
                    break
                self._epoch = None
                if not is_repeatable:
                    raise self._forgotten(answer.content)
        if "error" in answer.content:
            raise_error(answer.content)
        return answer

    def close(self) -> None:
        """Tell the server, so that it keeps no place for this client, and close the socket; a second call does nothing.

        A server that does not answer within `timeout_s` finds out by itself.
        """
        with self._lock:
            if self._epoch is not None and os.getpid() == self._process:
                with suppress(TraceFP4Error):
                    self._asked("bye", {"epoch": self._epoch}, b"", retries=0)
            self._hang_up()
            self._epoch = None

    def _greet(self) -> None:
        own = {"schema": STORE_SCHEMA, "message_bytes": self.settings.message_bytes}
        answer = self._asked("hello", own, b"")
        if "error" in answer.content:
            raise_error(answer.content)
        self._epoch = answer.content["epoch"]

    def _asked(
        self, operation: str, content: Mapping[str, Any], body: bytes, *, retries: int | None = None
    ) -> Message:
        retries = self.settings.retries if retries is None else retries
        self._seq += 1
        whole = {**content, "op": operation, "session": self._session, "seq": self._seq}
        frames = pack(Message(content=whole, body=body), max_bytes=self.settings.message_bytes)
        num_silent, last = 0, time.monotonic() + self.settings.patience_s
        while num_silent <= retries and time.monotonic() < last:
            try:
                self._dial().send_multipart(frames)
                answer, is_alive = self._awaited(last)
            except zmq.ZMQError as error:
                self._hang_up()
                raise self._unreachable(str(error)) from error
            if answer is not None:
                return answer
            self._hang_up()
            self.num_retries += 1
            num_silent = 0 if is_alive else num_silent + 1
        raise self._unreachable(f"no answer to {operation!r}")

    def _awaited(self, last: float) -> tuple[Message | None, bool]:
        """The answer to the newest request, or None after a silence; and whether the server said that it is busy."""
        socket, is_alive = self._dial(), False
        until = time.monotonic() + self.settings.timeout_s
        while (left := min(until, last) - time.monotonic()) > 0:
            if not socket.poll(max(1, int(left * 1000)), zmq.POLLIN):
                continue
            answer = unpack(socket.recv_multipart(), max_bytes=self.settings.message_bytes)
            seq = answer.content.get("seq")
            if seq is None:
                raise_error(answer.content)
            if seq != self._seq:
                continue  # an answer that came after its request was given up
            if not answer.content.get("busy"):
                return answer, True
            is_alive, until = True, time.monotonic() + self.settings.timeout_s
        return None, is_alive

    def _dial(self) -> zmq.Socket[bytes]:
        if self._socket is None:
            socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.MAXMSGSIZE, max(self.settings.message_bytes, FRAME_OVERHEAD))
            socket.setsockopt(zmq.SNDTIMEO, int(self.settings.timeout_s * 1000))
            socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
            if (key := self.settings.key) is not None:
                socket.setsockopt(zmq.CURVE_SERVERKEY, key.public)
                socket.setsockopt(zmq.CURVE_PUBLICKEY, key.public)
                socket.setsockopt(zmq.CURVE_SECRETKEY, key.secret)
            try:
                socket.connect(self.address)
            except zmq.ZMQError:
                socket.close(linger=0)
                raise
            self._socket = socket
        return self._socket

    def _hang_up(self) -> None:
        if self._socket is not None:
            self._socket.close(linger=0)
            self._socket = None

    def _forgotten(self, content: Mapping[str, Any]) -> ForgottenError:
        happened = "was started anew"
        if content["forgotten"] == "expired":
            happened = f"forgot this client, from which it had heard nothing for {content['idle_s']:g} s"
        return ForgottenError(
            f"The store server at {self.address} {happened}. What it held unfinished is lost; what was finished is "
            "kept. Write those trajectories again under new names, or go on without them."
        )

    def _unreachable(self, what: str) -> UnreachableError:
        self._epoch = (
            None  # whoever answers next is greeted first: the caller counts what was unfinished as lost
        )
        tries, seconds = 1 + self.settings.retries, self.settings.timeout_s
        return UnreachableError(
            f"The store server at {self.address} cannot be reached: {what}, asked {tries} times, {seconds:g} s each. "
            "It must run there, with the same message size and the same key, or without one. Start `tracefp4 store "
            "serve`, or check address and key."
        )

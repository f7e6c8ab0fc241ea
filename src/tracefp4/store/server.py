"""A server that lets other hosts write to and read from a local store, through messages of `store.wire`.

One thread owns the socket; a few workers call the local writer and reader, so a finish that waits for the disk does
not hold up a read. At most `max_in_flight` requests are taken from the network at once, so memory is bounded by
that number times the message size, plus the local writer's own bound; what cannot be taken stays with the senders.

Every client has a session (`store.sessions`) and counts its requests. A request that comes again (its answer was lost)
is answered with the kept answer and not done twice. A stranger is told whether the server was started anew or has
forgotten it, and counts as lost what it had unfinished. Nothing here trusts a frame before its checks passed. With a
key (`store.keys`) only its holders are let in; without one a server listens on its own host only. What fails here and
is no client's fault is counted and reported, and the serving goes on.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import zmq
from zmq.utils import z85

from tracefp4.errors import BackendError, ConfigError, RecordError, TraceFP4Error
from tracefp4.store.backends import OpenStore
from tracefp4.store.keys import StoreKey
from tracefp4.store.protocol import STORE_SCHEMA
from tracefp4.store.requests import Requests
from tracefp4.store.sessions import Session, Sessions
from tracefp4.store.wire import DEFAULT_MESSAGE_BYTES, FRAME_OVERHEAD, Message, error_content, pack, unpack

POLL_MS = 100
_READ_ONLY = frozenset({"trajectories", "stat", "read"})
_LOOPBACK = ("tcp://127.", "tcp://localhost:", "tcp://[::1]:", "ipc://")
_DOOR = "inproc://zeromq.zap.01"  # where the library asks whether a client is let in (ZeroMQ RFC 27)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerLimits:
    """Bounds of a server."""

    message_bytes: int = DEFAULT_MESSAGE_BYTES
    """Largest body of one message, either way."""
    max_in_flight: int = 8
    """Requests that are held at once."""
    max_sessions: int = 256
    """Clients at once; each costs one kept answer of a few KiB."""
    idle_s: float = 3600.0
    """A client that says nothing for so long is forgotten, and its unfinished trajectories are abandoned."""


@dataclass(kw_only=True, slots=True)
class ServerStats:
    """Counters of a server since it was started."""

    requests: int = 0
    """Requests taken."""
    repeated: int = 0
    """Requests that came again and were not done again."""
    refused: int = 0
    """Messages that failed their checks."""
    sessions_expired: int = 0
    """Clients forgotten, because they were silent for too long."""
    faults: int = 0
    """Things that failed at the server itself; every one was reported."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Answer:
    """What a worker hands to the thread that owns the socket."""

    identity: bytes
    """Route to the client."""
    session: Session
    """Its session."""
    frames: list[bytes]
    """The answer."""
    is_kept: bool
    """Whether it must be kept: doing the request again would not be the same."""
    fault: str
    """What went wrong that is not the client's fault; "" if nothing did."""


class StoreServer:
    """Serves one store.

    Args:
        store: the local store; stays the caller's to close.
        bind: address to listen on, such as "tcp://10.0.0.5:5555"; port 0 lets the system choose.
        limits: bounds.
        key: clients must hold it; without one only this host's clients are served.
        report: told of every fault of the server itself, in a sentence; None: they are only counted.

    Raises:
        ConfigError: an address that other hosts reach, without a key.
        BackendError: the address cannot be bound.
    """

    def __init__(
        self,
        store: OpenStore,
        *,
        bind: str,
        limits: ServerLimits | None = None,
        key: StoreKey | None = None,
        report: Callable[[str], None] | None = None,
    ) -> None:
        if key is None and not bind.startswith(_LOOPBACK):
            raise ConfigError(
                f"Address {bind!r} refused: other hosts reach it, and nobody would be asked for a key. Without one a "
                "server listens on its own host: tcp://127.0.0.1:<port>, tcp://[::1]:<port> or ipc://<path>. Make a "
                "key with `tracefp4 store key FILE`, and give it to the server and to its clients."
            )
        self.limits = limits or ServerLimits()
        self.epoch = secrets.token_hex(8)
        self.stats = ServerStats()
        self._requests = Requests(store, message_bytes=self.limits.message_bytes)
        self._sessions = Sessions(max_sessions=self.limits.max_sessions, idle_s=self.limits.idle_s)
        self._report, self._key = report, key
        self._answers: SimpleQueue[_Answer] = SimpleQueue()
        self._in_flight = 0
        self._stop = threading.Event()
        self._context = zmq.Context[zmq.Socket[bytes]]()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._door: zmq.Socket[bytes] = self._context.socket(zmq.REP)
        self._socket = self._bound(bind)
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)

    def start(self) -> StoreServer:
        """Serve in a thread of its own; returns this server."""
        self._thread = threading.Thread(target=self._serve_alone, name="tracefp4-store-server", daemon=True)
        self._thread.start()
        return self

    def stop(self) -> None:
        """Stop serving after the requests that are being worked on; a second call does nothing.

        Raises: what ended the thread of `start`, if it ended before.
        """
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def serve(self) -> None:
        """Serve until `stop`. Raises: BackendError if the socket fails."""
        poller = zmq.Poller()
        poller.register(self._wake_read, zmq.POLLIN)
        poller.register(self._door, zmq.POLLIN)
        try:
            with ThreadPoolExecutor(max_workers=4, thread_name_prefix="tracefp4-store") as pool:
                while not self._stop.is_set():
                    # A socket that is not polled is not read: what waits there waits with its sender.
                    poller.register(
                        self._socket, zmq.POLLIN if self._in_flight < self.limits.max_in_flight else 0
                    )
                    self._turn(dict(poller.poll(POLL_MS)), pool)
            self._send_answers()
        except zmq.ZMQError as error:
            raise BackendError(
                f"The store server at {self.address} stopped: {error}. It needs its socket. Start it anew; what was "
                "finished is kept."
            ) from error
        finally:
            self._socket.close(linger=POLL_MS)
            self._door.close(linger=0)
            self._context.term()  # returns once the address is free
            os.close(self._wake_read)
            os.close(self._wake_write)

    def _serve_alone(self) -> None:
        try:
            self.serve()
        except BaseException as error:
            self._failure = error
            self._fault(str(error))

    def _turn(self, ready: Mapping[Any, int], pool: ThreadPoolExecutor) -> None:
        """One round: answers out, newcomers in, one message, clients that are gone; a fault ends none of the others."""
        steps: list[tuple[bool, Callable[[], None]]] = [
            (self._wake_read in ready, self._send_answers),
            (self._door in ready, self._admit),
            (self._socket in ready, lambda: self._take(pool)),
            (True, self._forget_gone),
        ]
        for is_due, step in steps:
            try:
                if is_due:
                    step()
            except zmq.Again:
                continue  # announced, and gone since
            except zmq.ZMQError:
                raise
            except Exception as error:
                self._fault(f"The store server at {self.address} failed at a message: {error!r}.")

    def _fault(self, text: str) -> None:
        self.stats.faults += 1
        if self._report is not None:
            with suppress(Exception):  # counted above; who cannot be told must not end the serving
                self._report(text)

    def _bound(self, bind: str) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.MAXMSGSIZE, max(self.limits.message_bytes, FRAME_OVERHEAD))
        socket.setsockopt(zmq.RCVHWM, 1)
        socket.setsockopt(zmq.SNDHWM, 4)
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        try:
            if self._key is not None:
                socket.setsockopt(zmq.CURVE_SERVER, 1)
                socket.setsockopt(zmq.CURVE_SECRETKEY, self._key.secret)
                socket.setsockopt_string(zmq.ZAP_DOMAIN, "tracefp4")  # nobody is let in unasked
                self._door.bind(_DOOR)
            socket.bind(bind)
        except zmq.ZMQError as error:
            socket.close(linger=0)
            self._door.close(linger=0)
            self._context.term()
            raise BackendError(
                f"Cannot serve a store at {bind!r}: {error}. An address is tcp://<interface or IP>:<port>, and the "
                "port must be free. Choose another one, or port 0."
            ) from error
        return socket

    def _admit(self) -> None:
        """Let a client in if it holds the key; one without it never gets as far as a message."""
        version, number, _, _, _, mechanism, *credentials = self._door.recv_multipart(zmq.NOBLOCK)
        is_known = self._key is not None and [mechanism, *credentials] == [
            b"CURVE",
            z85.decode(self._key.public),
        ]
        self.stats.refused += not is_known
        self._door.send_multipart([version, number, b"200" if is_known else b"400", b"", b"", b""])

    def _take(self, pool: ThreadPoolExecutor) -> None:
        """Take one message: answer it at once, or give it to a worker."""
        identity, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
        self.stats.requests += 1
        try:
            message = unpack(frames, max_bytes=self.limits.message_bytes)
            name, seq, kind = (message.content[key] for key in ("session", "seq", "op"))
            if not (isinstance(name, str) and isinstance(kind, str) and type(seq) is int and len(name) == 32):
                raise RecordError(
                    f"Message refused: session {str(name)[:40]!r}, seq {seq!r}, op {kind!r}. A message has a session "
                    "of 32 characters, a number and an operation. Use tracefp4's own client."
                )
        except (RecordError, KeyError) as error:
            self.stats.refused += 1
            refused = error if isinstance(error, RecordError) else RecordError(f"Message without {error}.")
            self._reply(identity, pack(Message(content={"seq": None, **error_content(refused)})))
            return
        answer = self._without_work(name, seq, kind, message)
        if answer is not None:
            self._reply(identity, answer)
            return
        session = self._sessions.heard(name)
        assert session is not None
        pool.submit(self._work, identity, message, session, name)
        self._sessions.begin(session, seq)
        self._in_flight += 1

    def _without_work(self, name: str, seq: int, kind: str, message: Message) -> list[bytes] | None:
        """The answer that needs no worker: greetings, repetitions, strangers; None if there is work to do."""
        if kind == "hello":
            return self._greet(name, seq, message.content)
        session = self._sessions.heard(name)
        if session is None or message.content.get("epoch") != self.epoch:
            reason = "expired" if message.content.get("epoch") == self.epoch else "restarted"
            return pack(Message(content={"seq": seq, "forgotten": reason, "idle_s": self.limits.idle_s}))
        if kind == "bye":
            session.is_leaving = True
            return pack(Message(content={"seq": seq}))
        if seq == session.last_seq and session.is_running:
            self.stats.repeated += 1
            return pack(Message(content={"seq": seq, "busy": True}))
        if seq == session.last_seq and session.answer is not None:
            self.stats.repeated += 1
            return session.answer
        if seq < session.last_seq or session.is_running:
            self.stats.refused += 1
            late = RecordError(
                f"Message refused: request {seq} came after request {session.last_seq}. A client sends one request "
                "after the other. Use tracefp4's own client, one session each."
            )
            return pack(Message(content={"seq": seq, **error_content(late)}))
        return None

    def _greet(self, name: str, seq: int, content: Mapping[str, Any]) -> list[bytes]:
        """Open a session, if both ends speak of the same things."""
        found = (content.get("schema"), content.get("message_bytes"))
        own = (STORE_SCHEMA, self.limits.message_bytes)
        try:
            if found != own:
                raise RecordError(
                    f"Client refused: its store schema and message size are {found}, this server's are {own}. Both "
                    "must be equal. Use the same tracefp4 and the same message size on both sides."
                )
            self._sessions.greet(name, seq)
        except TraceFP4Error as problem:
            self.stats.refused += 1
            return pack(Message(content={"seq": seq, **error_content(problem)}))
        return pack(Message(content={"seq": seq, "epoch": self.epoch}))

    def _work(self, identity: bytes, message: Message, session: Session, name: str) -> None:
        """Do one request in a worker; whatever happens, an answer goes out."""
        seq, kind, fault = message.content["seq"], message.content["op"], ""
        frames: list[bytes] = []
        try:
            answer = self._requests.answer(kind, message, session=name, unfinished=session.unfinished)
            frames = pack(
                Message(content={"seq": seq, **answer.content}, body=answer.body),
                max_bytes=self.limits.message_bytes,
            )
        except TraceFP4Error as error:
            frames = pack(Message(content={"seq": seq, **error_content(error)}))
        except (KeyError, TypeError, ValueError, OSError) as error:
            odd = RecordError(f"Request {kind!r} could not be done: {type(error).__name__}: {error}.")
            frames = pack(Message(content={"seq": seq, **error_content(odd)}))
        except BaseException as error:
            fault = f"Request {kind[:40]!r} failed at the store server at {self.address}: {error!r}."
            failed = BackendError(f"{fault} It does every other request. Report this, and ask again.")
            frames = pack(Message(content={"seq": seq, **error_content(failed)}))
        finally:
            is_kept = kind not in _READ_ONLY
            self._answers.put(
                _Answer(identity=identity, session=session, frames=frames, is_kept=is_kept, fault=fault)
            )
            os.write(self._wake_write, b"1")

    def _send_answers(self) -> None:
        """Send what workers have finished, and keep the answers that must not be computed twice."""
        with suppress(BlockingIOError):
            os.read(self._wake_read, 4096)
        while not self._answers.empty():
            done = self._answers.get()
            self._in_flight -= 1
            self._sessions.end(done.session, done.frames if done.is_kept else None)
            if done.fault:
                self._fault(done.fault)
            self._reply(done.identity, done.frames)

    def _reply(self, identity: bytes, frames: list[bytes]) -> None:
        try:
            self._socket.send_multipart([identity, *frames], zmq.NOBLOCK)
        except zmq.ZMQError:
            return  # the client is gone or does not read; it will ask again

    def _forget_gone(self) -> None:
        """Forget the clients that are gone, and give up what they had begun."""
        for session in self._sessions.gone():
            self.stats.sessions_expired += not session.is_leaving
            failed = self._requests.forget_session(session.unfinished)
            if failed:
                name, error = next(iter(failed.items()))
                self._fault(
                    f"{len(failed)} trajectories of a client that is gone could not be given up, first {name!r}: "
                    f"{error}"
                )

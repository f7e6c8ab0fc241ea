"""A store behind a server: what is lost when either side dies is named, and nothing is ever read wrong.

The server that is killed is a process of its own, `tracefp4 store serve`; everything speaks over the loopback.
"""

import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import ClassVar

import pytest
import zmq

from tracefp4.errors import BackendError, ConfigError, RecordError
from tracefp4.store import ConflictError, DroppedError, GoneError, Request, Segment
from tracefp4.store.backends import open_directory, open_remote
from tracefp4.store.connection import Line, LineSettings
from tracefp4.store.remote import RemoteReader
from tracefp4.store.remote_writer import RemoteWriter
from tracefp4.store.server import ServerLimits, StoreServer
from tracefp4.store.wire import ForgottenError, Message, pack, unpack

QUICK = LineSettings(timeout_s=0.3, retries=1)


def data_of(name, num_rows=8, width=16):
    seed = sum(map(ord, name))
    return bytes((seed + i * 7) % 256 for i in range(num_rows * width))


def segment(name, *, num_rows=8, start=0, width=16, generation=0):
    whole = data_of(name, num_rows, width)
    return Segment(
        trajectory=name, start=start, num_rows=num_rows, columns={"x": whole}, generation=generation
    )


class Served:
    """A server in this process over a directory."""

    def __init__(self, path, *, bind="tcp://127.0.0.1:0", **limits):
        self.local = open_directory(path)
        self.server = StoreServer(
            self.local,
            bind=bind,
            limits=ServerLimits(**limits),
        ).start()
        self.address = self.server.address

    def stop(self):
        self.server.stop()
        self.local.close()


@pytest.fixture
def served(tmp_path):
    found = Served(tmp_path / "served")
    yield found
    found.stop()


@pytest.fixture(autouse=True)
def _no_process_stays():
    yield
    while Process.running:
        Process.running.pop().kill()


class Process:
    """`tracefp4 store serve` as a child process."""

    running: ClassVar = []

    def __init__(self, path, *, port=0):
        command = [sys.executable, "-m", "tracefp4", "store", "serve", str(path)]
        self.child = subprocess.Popen(
            [*command, "--bind", f"tcp://127.0.0.1:{port}"],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        self.running.append(self)
        self.line = self.child.stdout.readline()
        self.address = re.search(r"tcp://\S+\d", self.line)[0].rstrip(",")
        self.port = int(self.address.rpartition(":")[2])

    def kill(self):
        self.child.kill()
        self.child.wait()

    def stop(self):
        self.child.send_signal(signal.SIGINT)
        return self.child.communicate(timeout=30)[0]


def test_a_killed_server_loses_what_was_unfinished_and_says_so(tmp_path):
    process = Process(tmp_path / "served")
    writer = RemoteWriter(process.address, settings=QUICK)
    reader = RemoteReader(process.address, settings=QUICK)
    writer.append(segment("done"))
    kept = writer.finish("done")
    writer.append(segment("begun", num_rows=4))
    while writer.stats.bytes_queued:
        time.sleep(0.01)
    process.kill()
    with pytest.raises(BackendError, match="cannot be reached"):
        reader.read(kept, ["x"], 0, 8)
    writer.append(segment("down"))
    with pytest.raises(BackendError, match=r"cannot be reached: no answer to 'append', asked 2 times"):
        writer.finish("down")
    again = Process(tmp_path / "served", port=process.port)
    assert ", 1 trajectories" in again.line or ", 2 trajectories" in again.line
    for call in (
        lambda: writer.append(segment("begun", num_rows=4, start=4)),
        lambda: writer.finish("begun"),
    ):
        with pytest.raises(BackendError, match="cannot be reached"):
            call()
    writer.append(segment("after"))
    handle = writer.finish("after")
    assert dict(reader.read(kept, ["x"], 0, 8)) == {"x": data_of("done")}
    assert dict(reader.read(handle, ["x"], 2, 3)) == {"x": data_of("after")[32:48]}
    assert [name for name, is_finished in reader.trajectories().items() if is_finished] == ["after", "done"]
    stats = writer.stats
    assert sorted(stats.dropped) == ["begun", "down"] and stats.num_dropped == 2
    writer.close()
    reader.close()
    assert "asked again" in again.stop()


@pytest.mark.slow
def test_servers_killed_at_random_moments_give_nothing_wrong(tmp_path):
    """Twenty kills under one client that keeps writing: every handle reads exactly; the rest is counted as lost."""
    draws = random.Random(0)
    process = Process(tmp_path / "served")
    writer = RemoteWriter(process.address, settings=QUICK)
    handles, lost, count = {}, set(), 0
    for _ in range(20):
        until = time.monotonic() + draws.uniform(0.0, 0.3)
        stopper = threading.Timer(until - time.monotonic(), process.child.kill)
        stopper.start()
        while process.child.poll() is None or time.monotonic() < until + 0.1:
            name, count = f"t{count}", count + 1
            try:
                writer.append(segment(name, num_rows=4))
                writer.append(segment(name, num_rows=4, start=4))
                handles[name] = writer.finish(name)
            except BackendError:
                lost.add(name)
        stopper.join()
        process.kill()
        process = Process(tmp_path / "served", port=process.port)
    reader = RemoteReader(process.address)
    for name, handle in handles.items():
        assert dict(reader.read(handle, ["x"], 0, 8)) == {"x": data_of(name, 4) * 2}
    for name, is_finished in reader.trajectories().items():
        # An answer that was lost with the server: the client counts as lost what the server had finished.
        assert not is_finished or name in handles or name in lost
        if is_finished:
            assert dict(reader.read(name, ["x"], 0, 8)) == {"x": data_of(name, 4) * 2}
    assert set(writer.stats.dropped) <= lost and len(handles) + len(lost) == count
    reader.close()
    writer.close()
    process.stop()


def test_a_dead_server_is_waited_for_once(served):
    writer = RemoteWriter(served.address, settings=QUICK)
    writer.append(segment("first"))
    writer.finish("first")
    served.server.stop()
    futures = []
    for i in range(20):
        writer.append(segment(f"t{i}"))
        futures.append(writer.finish_soon(f"t{i}"))
    began = time.monotonic()
    assert all("cannot be reached" in str(future.exception(timeout=30)) for future in futures)
    assert time.monotonic() - began < 10 * QUICK.timeout_s * (1 + QUICK.retries)
    assert writer.stats.num_dropped == 20 and writer.stats.bytes_queued == 0
    with pytest.raises(BackendError, match="did not reach the store"):
        writer.close()


def test_a_fault_inside_the_server_is_answered(served, monkeypatch):
    def broken(self):
        raise ZeroDivisionError

    monkeypatch.setattr(type(served.local.reader), "trajectories", broken)
    reader = RemoteReader(served.address, settings=QUICK)
    with pytest.raises(BackendError, match="Request 'trajectories' failed at the store server.*ZeroDivision"):
        reader.trajectories()
    assert served.server.stats.faults == 1
    monkeypatch.undo()
    assert dict(reader.trajectories()) == {}
    reader.close()


def test_a_lost_name_may_be_used_again_after_it_is_abandoned(served, tmp_path):
    writer = RemoteWriter(served.address, settings=QUICK)
    writer.append(segment("a"))
    while writer.stats.bytes_queued:
        time.sleep(0.01)
    served.server.stop()
    served.server = StoreServer(
        served.local,
        bind=served.address,
    ).start()
    with pytest.raises(ForgottenError):
        writer.finish("a")
    served.local.writer.abandon("a")
    writer.append(segment("a", num_rows=3))
    handle = writer.finish("a")
    assert handle.num_rows == 3
    writer.close()


def test_a_killed_client_leaves_nothing_that_reads_as_finished(served):
    code = f"""
import sys
from tracefp4.store import Segment
from tracefp4.store.remote_writer import RemoteWriter
writer = RemoteWriter({served.address!r})
for i in range(10000):
    writer.append(Segment(trajectory=f"t{{i}}", start=0, num_rows=4, columns={{"x": bytes([i % 256]) * 64}}))
    writer.append(Segment(trajectory=f"t{{i}}", start=4, num_rows=4, columns={{"x": bytes([i % 256]) * 64}}))
    if i % 2:
        print(writer.finish(f"t{{i}}").to_json(), flush=True)
"""
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    handles = [child.stdout.readline() for _ in range(3)]
    child.kill()
    rest = child.communicate()[0].splitlines()
    reader = RemoteReader(served.address)
    from tracefp4.store import Handle

    for line in [*handles, *[line for line in rest if line.endswith("}")]]:
        handle = Handle.from_json(line)
        value = int(handle.trajectory[1:]) % 256
        assert dict(reader.read(handle, ["x"], 0, 8)) == {"x": bytes([value]) * 128}
    for name, is_finished in reader.trajectories().items():
        assert not is_finished or int(name[1:]) % 2 == 1
        assert not is_finished or reader.stat(name).num_rows == 8
    reader.close()


class Middle:
    """A proxy that loses answers: the first `lost` of them never arrive."""

    def __init__(self, address, *, lost):
        context = zmq.Context.instance()
        self._front, self._back = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
        port = self._front.bind_to_random_port("tcp://127.0.0.1")
        self.address = f"tcp://127.0.0.1:{port}"
        self._back.connect(address)
        self._lost, self._ended = lost, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        routes = {}
        while not self._ended.is_set():
            if self._front.poll(5):
                identity, *frames = self._front.recv_multipart()
                message = unpack(frames)
                routes[message.content["session"], message.content["seq"]] = identity
                self._back.send_multipart([*frames])
                self._newest = identity
            if self._back.poll(5):
                frames = self._back.recv_multipart()
                content = unpack(frames).content
                if self._lost and "epoch" not in content:
                    self._lost -= 1
                    continue
                self._front.send_multipart([self._newest, *frames])

    def close(self):
        self._ended.set()
        self._thread.join()
        self._front.close(linger=0)
        self._back.close(linger=0)


def test_a_lost_answer_is_asked_for_again_and_nothing_is_done_twice(served):
    middle = Middle(served.address, lost=2)
    writer = RemoteWriter(middle.address, settings=LineSettings(timeout_s=0.3, retries=3))
    writer.append(segment("a"))
    writer.append(segment("a", start=8))
    handle = writer.finish("a")
    assert handle.num_rows == 16
    assert served.server.stats.repeated == 2 and writer.stats.num_dropped == 0
    assert dict(served.local.reader.read(handle, ["x"], 0, 16)) == {"x": data_of("a") * 2}
    writer.close()
    middle.close()


def test_a_slow_server_is_waited_for(served, monkeypatch):
    finish_soon = served.local.writer.finish_soon

    def slow(name):
        time.sleep(1.0)
        return finish_soon(name)

    monkeypatch.setattr(served.local.writer, "finish_soon", slow)
    writer = RemoteWriter(served.address, settings=LineSettings(timeout_s=0.15, retries=1))
    writer.append(segment("a"))
    assert writer.finish("a").num_rows == 8
    assert served.server.stats.repeated >= 2
    writer.close()


def test_large_segments_and_answers_travel_in_parts(tmp_path):
    settings = LineSettings(message_bytes=4096)
    found = Served(tmp_path / "served", message_bytes=4096)
    writer = RemoteWriter(found.address, settings=settings)
    reader = RemoteReader(found.address, settings=settings)
    writer.append(segment("a", num_rows=100, width=100))
    writer.append(segment("a", num_rows=3, start=101, width=100))
    handle = writer.finish("a")
    part = reader.read_available(Request(trajectory=handle, columns=("x", "y"), start=0, stop=110))
    assert part.data["x"][:10_000] == data_of("a", 100, 100)
    assert [(s.column, s.start, s.stop) for s in part.absent] == [
        ("x", 100, 101),
        ("x", 104, 110),
        ("y", 0, 110),
    ]
    assert part.data["x"][10_100:10_400] == data_of("a", 3, 100) and part.data["x"][10_000:10_100] == bytes(
        100
    )
    writer.append(segment("wide", num_rows=1, width=5000))
    with pytest.raises(RecordError, match="one row has 5000 bytes"):
        writer.finish("wide")
    writer.close()
    reader.close()
    found.stop()


def test_two_clients_never_mix_rows_under_one_name(served):
    first, second = RemoteWriter(served.address), RemoteWriter(served.address)
    first.append(segment("a", num_rows=4))
    first.flush()
    second.append(segment("a", num_rows=4, start=4))
    with pytest.raises(ConflictError, match="another client"):
        second.finish("a")
    assert first.finish("a").num_rows == 4
    first.close()
    second.close()


@pytest.mark.parametrize("policy", ["wait", "drop_trajectory"])
def test_back_pressure_is_bounded_and_counted(served, monkeypatch, policy):
    append = served.local.writer.append

    def slow(part):
        time.sleep(0.03)
        return append(part)

    monkeypatch.setattr(served.local.writer, "append", slow)
    writer = RemoteWriter(served.address, policy=policy, max_queue_bytes=300)
    taken = {}
    for i in range(10):
        taken[f"t{i}"] = writer.append(segment(f"t{i}"))
        assert writer.stats.bytes_queued <= 300
    for name, is_taken in taken.items():
        if is_taken:
            assert writer.finish(name).num_rows == 8
        else:
            assert writer.append(segment(name, start=8)) is False
            with pytest.raises(DroppedError, match="Whole trajectories are dropped"):
                writer.finish(name)
    stats = writer.stats
    if policy == "wait":
        assert all(taken.values()) and stats.num_waits > 0 and stats.wait_seconds > 0
    else:
        assert 0 < stats.num_dropped == 10 - sum(taken.values()) and set(stats.dropped) == {
            name for name in taken if not taken[name]
        }
    writer.close()
    assert set(served.local.reader.trajectories()) == {name for name in taken if taken[name]}


def test_an_append_that_waits_too_long_is_an_error(served, monkeypatch):
    monkeypatch.setattr(served.local.writer, "append", lambda part: time.sleep(1.5) or True)
    writer = RemoteWriter(served.address, max_queue_bytes=200, max_wait_s=0.2)
    writer.append(segment("a"))
    with pytest.raises(BackendError, match="waited 0.2 s"):
        writer.append(segment("b"))
    writer.close()


def raw(address, frames, *, answers=1):
    """Send frames as they are and return the answer, or None after half a second."""
    found = zmq.Context.instance().socket(zmq.DEALER)
    found.connect(address)
    found.send_multipart(frames)
    answer = unpack(found.recv_multipart()) if found.poll(500) else None
    found.close(linger=0)
    return answer


def test_malformed_messages_are_refused_and_counted(served):
    good = pack(Message(content={"op": "stat", "session": "0" * 32, "seq": 1, "trajectory": "a"}))
    torn = [good[0][:-1] + b"?", good[1]]
    bad = [
        torn,
        [b"hello"],
        [b"", b""],
        [*good, b""],
        pack(Message(content={"op": "stat"})),
        pack(Message(content={"op": "stat", "session": "short", "seq": 1})),
        pack(Message(content={"op": 3, "session": "0" * 32, "seq": "x"})),
    ]
    for frames in bad:
        answer = raw(served.address, frames)
        assert answer.content["error"] == "RecordError" and answer.content["seq"] is None
    assert served.server.stats.refused == len(bad)
    assert raw(served.address, good).content["forgotten"] == "restarted"
    writer = RemoteWriter(served.address)
    writer.append(segment("a"))
    assert writer.finish("a").num_rows == 8
    writer.close()


def test_an_oversized_frame_never_reaches_memory(served):
    assert raw(served.address, [b"TFP4NET\n" + bytes(32), bytes((1 << 24) + 1)]) is None
    reader = RemoteReader(served.address)
    assert dict(reader.trajectories()) == {}
    reader.close()


def test_bytes_that_are_no_messages_at_all_do_no_harm(served):
    host, port = served.address.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port))) as plain:
        plain.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
    reader = RemoteReader(served.address)
    assert dict(reader.trajectories()) == {}
    reader.close()


@pytest.mark.parametrize(
    "content",
    [
        {"op": "append", "trajectory": "a"},
        {
            "op": "append",
            "trajectory": "a",
            "start": 0,
            "num_rows": 1,
            "generation": 0,
            "meta": 0,
            "columns": 5,
        },
        {"op": "read", "trajectory": "a", "columns": ["x"], "start": "q", "stop": 2},
        {"op": "retain", "rule": "drop table", "value": 1},
        {"op": "fly"},
        {"op": "stat", "handle": "{}"},
    ],
)
def test_requests_that_make_no_sense_are_answered(served, content):
    line = Line(served.address)
    name = content["op"]
    with pytest.raises(RecordError):
        line.ask(name, {key: value for key, value in content.items() if key != "op"})
    assert line.ask("trajectories", {"after": ""}).content["is_last"]
    line.close()


def test_other_schemas_and_sizes_are_named(served, monkeypatch):
    line = Line(served.address, LineSettings(message_bytes=8192))
    with pytest.raises(
        RecordError, match=r"its store schema and message size are \(1, 8192\), this server's"
    ):
        line.ask("trajectories", {"after": ""})
    line.close()


def test_many_names_travel_in_pages(served, monkeypatch):
    monkeypatch.setattr("tracefp4.store.requests.NAMES_PER_MESSAGE", 3)
    store = open_remote(served.address)
    for i in range(8):
        store.writer.append(segment(f"t{i}"))
        store.writer.finish(f"t{i}")
    assert list(store.reader.trajectories()) == [f"t{i}" for i in range(8)]
    store.close()


def test_handles_of_removed_trajectories_are_gone_through_a_server(served):
    store = open_remote(served.address)
    store.writer.append(segment("a", generation=2))
    handle = store.writer.finish("a")
    assert store.retention.forget(3).trajectories == ("a",)
    with pytest.raises(GoneError):
        store.reader.read(handle, ["x"], 0, 1)
    store.close()


@pytest.mark.parametrize("address", ["http://host", "host:5555", ""])
def test_addresses_that_are_none_are_refused(address):
    with pytest.raises(ConfigError, match="Allowed is tcp://"):
        open_remote(address)


def test_an_address_in_use_is_refused(served, tmp_path):
    local = open_directory(tmp_path / "other")
    with pytest.raises(BackendError, match="Cannot serve a store at .*Address already in use"):
        StoreServer(local, bind=served.address)
    local.close()


@pytest.mark.parametrize("change", [{"policy": "hope"}, {"max_queue_bytes": 0}, {"max_wait_s": 0.0}])
def test_options_that_are_none_are_refused(change):
    with pytest.raises(ConfigError, match="Remote writer refused"):
        RemoteWriter("tcp://127.0.0.1:9", **change)


def test_settings_that_are_none_are_refused():
    with pytest.raises(ConfigError, match="messages 4096"):
        LineSettings(message_bytes=1)

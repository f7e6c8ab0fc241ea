"""Clients of a store server: who is forgotten and when, what that costs, and what the server survives."""

import os
import subprocess
import sys
import threading
import time

import pytest
from tests.store.material import segment, write, wrong_bytes

from tracefp4.errors import BackendError
from tracefp4.store import Removed
from tracefp4.store.backends import open_directory
from tracefp4.store.connection import Line, LineSettings
from tracefp4.store.remote import RemoteReader
from tracefp4.store.remote_writer import RemoteWriter
from tracefp4.store.server import ServerLimits, StoreServer
from tracefp4.store.wire import ForgottenError

QUICK = LineSettings(timeout_s=0.3, retries=1)


class Served:
    """A server in this process over a directory."""

    def __init__(self, path, *, bind="tcp://127.0.0.1:0", **limits):
        self.local, self.reports = open_directory(path), []
        limits = ServerLimits(**limits)
        self.server = StoreServer(self.local, bind=bind, limits=limits, report=self.reports.append).start()
        self.address = self.server.address

    @property
    def num_clients(self):
        return len(self.server._sessions._known)

    def stop(self):
        self.server.stop()
        self.local.close()


@pytest.fixture
def serve(tmp_path):
    made = []

    def make(**limits):
        made.append(Served(tmp_path / f"served{len(made)}", **limits))
        return made[-1]

    yield make
    for found in made:
        found.stop()


def until(condition):
    last = time.monotonic() + 10
    while not condition() and time.monotonic() < last:
        time.sleep(0.01)
    assert condition()


def test_an_idle_client_with_nothing_unfinished_loses_nothing(serve):
    found = serve(idle_s=0.2)
    writer = RemoteWriter(found.address, settings=QUICK)
    write(writer, "a")
    until(lambda: found.server.stats.sessions_expired == 1)
    assert write(writer, "b").num_rows == 12
    assert writer.stats.num_dropped == 0
    writer.close()


def test_a_server_started_anew_costs_only_what_it_held(serve, tmp_path):
    found = serve()
    writer = RemoteWriter(found.address, settings=QUICK)
    writer.append(segment("held", 0, 4))
    writer.flush()
    found.server.stop()
    found.server = StoreServer(found.local, bind=found.address).start()
    writer.append(segment("next", 0, 4))
    writer.append(segment("held", 4, 4))
    with pytest.raises(ForgottenError, match="was started anew. What it held unfinished is lost"):
        writer.finish("held")
    assert wrong_bytes(found.local.reader, writer.finish("next"), 4) == ([], ())
    assert set(writer.stats.dropped) == {"held"} and writer.stats.bytes_queued == 0
    writer.close()


def test_a_client_that_was_silent_for_too_long_is_told_so(serve):
    found = serve(idle_s=0.2)
    writer = RemoteWriter(found.address, settings=QUICK)
    writer.append(segment("a", 0, 4))
    until(lambda: found.server.stats.sessions_expired == 1)
    with pytest.raises(
        ForgottenError, match=r"forgot this client, from which it had heard nothing for 0\.2 s"
    ):
        writer.finish("a")
    until(lambda: not dict(found.local.reader.trajectories()))  # the writer works in the background
    assert set(writer.stats.dropped) == {"a"}
    assert "had heard nothing" in writer.stats.dropped["a"]
    assert write(writer, "a").num_rows == 12  # the name is free again
    writer.close()


def test_what_is_lost_to_silence_is_lost_as_a_whole(serve):
    found = serve(idle_s=0.2)
    writer = RemoteWriter(found.address, settings=QUICK)
    writer.append(segment("a", 0, 4))
    until(lambda: found.server.stats.sessions_expired == 1)
    writer.append(segment("a", 4, 4))
    until(lambda: writer.stats.bytes_queued == 0)
    with pytest.raises(ForgottenError):
        writer.append(segment("a", 8, 4))
    with pytest.raises(BackendError, match="1 trajectories did not reach.*had heard nothing"):
        writer.flush()
    with pytest.raises(ForgottenError):
        writer.finish("a")
    until(lambda: not dict(found.local.reader.trajectories()))  # the writer works in the background
    writer.close()


def test_a_client_that_closes_frees_its_place_at_once(serve):
    found = serve(max_sessions=2)
    for i in range(20):
        reader, writer = RemoteReader(found.address), RemoteWriter(found.address)
        assert sum(reader.trajectories().values()) == i
        write(writer, f"t{i}")
        writer.append(segment("unfinished", 0, 4))
        writer.close()
        reader.close()
    until(lambda: found.num_clients == 0)
    assert found.server.stats.sessions_expired == 0 and found.server.stats.refused == 0
    found.local.writer.flush()
    assert "unfinished" not in found.local.reader.trajectories()


def test_a_client_that_closes_while_its_request_is_done_is_forgotten_afterwards(serve, monkeypatch):
    found = serve()
    is_open = threading.Event()
    flush = found.local.writer.flush
    monkeypatch.setattr(found.local.writer, "flush", lambda: is_open.wait(20) and flush())
    line = Line(found.address, LineSettings(timeout_s=0.2, retries=0, patience_s=0.3))
    with pytest.raises(BackendError, match="cannot be reached"):
        line.ask("flush", {})
    line._epoch = found.server.epoch  # as if the request had been given up without doubts about the server
    line.close()
    assert found.num_clients == 1
    is_open.set()
    until(lambda: found.num_clients == 0)


def test_the_place_of_a_killed_client_is_free_after_its_silence(serve):
    found = serve(max_sessions=1, idle_s=1.0)
    code = f"""
from tracefp4.store.remote import RemoteReader
reader = RemoteReader({found.address!r})
reader.trajectories()
print("there", flush=True)
input()
"""
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout.readline() == "there\n"
    child.kill()
    child.communicate()
    reader = RemoteReader(found.address)
    with pytest.raises(BackendError, match=r"At most 1 are served at once. Close some: .* after 1 s without"):
        reader.trajectories()
    until(lambda: found.num_clients == 0)
    assert dict(reader.trajectories()) == {}
    reader.close()


def test_closing_does_not_wait_long_for_a_server_that_is_gone(serve):
    found = serve()
    reader = RemoteReader(found.address, settings=LineSettings(timeout_s=0.2, retries=50))
    reader.trajectories()
    found.server.stop()
    began = time.monotonic()
    reader.close()
    reader.close()
    assert time.monotonic() - began < 5


def test_a_forked_process_does_not_say_goodbye_for_its_parent(serve):
    found = serve()
    reader = RemoteReader(found.address)
    reader.trajectories()
    child = os.fork()
    if not child:
        reader.close()
        os._exit(0)
    os.waitpid(child, 0)
    time.sleep(0.3)
    assert found.num_clients == 1
    reader.close()


def test_a_store_that_cannot_give_up_does_not_end_the_server(serve, monkeypatch):
    found = serve(idle_s=0.2)
    writer = RemoteWriter(found.address, settings=QUICK)
    writer.append(segment("a", 0, 4))
    writer.flush()

    def broken(*arguments):
        raise BackendError("the writer stopped")

    monkeypatch.setattr(found.local.writer, "abandon", broken)
    until(lambda: found.server.stats.sessions_expired == 1)
    until(lambda: found.server.stats.faults == 1)
    assert "1 trajectories of a client that is gone could not be given up, first 'a'" in found.reports[0]
    monkeypatch.undo()
    with pytest.raises(ForgottenError):
        writer.finish("a")
    assert write(writer, "b").num_rows == 12
    writer.close()


def test_a_fault_of_the_server_at_one_message_ends_nothing(serve, monkeypatch):
    found = serve()
    monkeypatch.setattr("tracefp4.store.server.unpack", lambda *a, **n: 1 / 0)
    monkeypatch.setattr(found.server, "_report", lambda text: found.reports.append(text) or 1 / 0)
    line = Line(found.address, LineSettings(timeout_s=0.2, retries=0))
    with pytest.raises(BackendError, match="cannot be reached"):
        line.ask("flush", {})
    monkeypatch.undo()
    assert found.server.stats.faults == 1 and "ZeroDivisionError" in found.reports[0]
    line.ask("flush", {})
    line.close()


def test_a_server_whose_thread_ended_says_so_when_it_is_stopped(serve, monkeypatch):
    found = serve()

    def broken(ready, pool):
        raise SystemError("no more")

    monkeypatch.setattr(found.server, "_turn", broken)
    until(lambda: not found.server._thread.is_alive())
    with pytest.raises(SystemError, match="no more"):
        found.server.stop()
    assert found.reports == ["no more"]


def test_a_sending_thread_outlives_whatever_happens_to_one_request(serve, monkeypatch):
    found = serve()
    writer = RemoteWriter(found.address, settings=QUICK)
    monkeypatch.setattr(writer._line, "ask", lambda *a, **n: 1 / 0)
    writer.append(segment("a", 0, 4))
    future = writer.finish_soon("a")
    assert not future.cancel()
    until(future.done)
    assert "came to nothing: ZeroDivisionError" in str(future.exception())
    with pytest.raises(BackendError, match="came to nothing"):
        writer.flush()
    monkeypatch.undo()
    assert write(writer, "b").num_rows == 12
    assert set(writer.stats.dropped) == {"a"} and writer.stats.bytes_queued == 0
    writer.close()


LONG = "\U0001f600" * 156


def test_any_number_of_names_is_removed_and_the_answer_fits_a_message(serve, monkeypatch):
    found = serve()
    names, asked = [f"{i:05d}" + LONG for i in range(10_000)], []

    def remove(some):
        asked.append(sorted(some))
        return Removed(num_trajectories=len(asked[-1]), trajectories=tuple(asked[-1]), num_bytes=3)

    monkeypatch.setattr(found.local.retention, "remove", remove)
    reader = RemoteReader(found.address)
    removed = reader.remove(reversed(names))
    assert [name for some in asked for name in some] == names and len(asked) == 5
    assert removed == Removed(num_trajectories=10_000, trajectories=tuple(names), num_bytes=15)
    assert reader.remove([]).num_trajectories == 0
    reader.close()


@pytest.mark.parametrize("rule", ["forget", "keep_last", "discard"])
def test_a_rule_that_removes_very_many_names_the_first_and_counts_all(serve, monkeypatch, rule):
    found = serve()
    names = tuple(f"{i:05d}" + LONG for i in range(10_000))
    whole = Removed(num_trajectories=10_000, trajectories=names, num_bytes=7)
    monkeypatch.setattr(found.local.retention, rule, lambda number: whole)
    reader = RemoteReader(found.address)
    removed = getattr(reader, rule)(4)
    assert removed == Removed(num_trajectories=10_000, trajectories=names[:2048], num_bytes=7)
    reader.close()

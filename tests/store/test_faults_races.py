"""Users of a store that come, leave or fork at the worst moment, and servers that are silent for a while."""

import fcntl
import os
import shutil
import threading
import time

import pytest
import zmq
from tests.store.material import segment, write, wrong_bytes

from tracefp4.errors import BackendError, RecordError
from tracefp4.store import inspection, shared_memory
from tracefp4.store.backends import open_directory
from tracefp4.store.connection import LineSettings
from tracefp4.store.pending import WriterOptions
from tracefp4.store.reader import DirectoryReader
from tracefp4.store.remote import RemoteReader
from tracefp4.store.remote_writer import RemoteWriter
from tracefp4.store.retention import DirectoryRetention
from tracefp4.store.server import StoreServer
from tracefp4.store.shared_memory import MIN_CAPACITY, PREFIX, SharedMemory, SharedMemoryWriter
from tracefp4.store.writer import DirectoryWriter

pytestmark = pytest.mark.timeout(60)
QUICK = LineSettings(timeout_s=0.3, retries=0)


def in_fork(work):
    """Run `work` in a forked process; returns the error that it raised there, as text, or ""."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            work()
        except BaseException as error:
            os.write(write, f"{type(error).__name__}: {error}"[:4096].encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as opened:
        text = opened.read()
    os.waitpid(child, 0)
    return text


def test_a_user_that_comes_while_the_last_one_leaves_gets_a_directory(tmp_path, monkeypatch):
    last, unlink, come = SharedMemory("race", capacity_bytes=MIN_CAPACITY, root=tmp_path), os.unlink, []

    def unlink_then_come(path, *rest, **more):
        unlink(path, *rest, **more)
        if str(path).endswith("/users") and not come:
            come.append(os.open(path, os.O_RDWR | os.O_CREAT))

    monkeypatch.setattr(os, "unlink", unlink_then_come)
    last.close()
    monkeypatch.undo()
    os.close(come[0])
    assert last.path.is_dir()
    SharedMemory("race", capacity_bytes=MIN_CAPACITY, root=tmp_path).close()
    assert not last.path.exists()


def test_a_user_that_was_late_clears_nothing_of_those_who_came_before(tmp_path, monkeypatch):
    path = tmp_path / (PREFIX + "late")
    try_lock, found = shared_memory._try_lock, {}

    def others_come_first(descriptor, kind):
        if kind == fcntl.LOCK_EX and not found:
            found["handle"] = None
            shutil.rmtree(path)  # its last user left while this one stood before the lock
            found["memory"] = SharedMemory("late", capacity_bytes=MIN_CAPACITY, root=tmp_path)
            found["writer"] = SharedMemoryWriter(found["memory"])
            found["writer"].append(segment("t", 0, 4))
            found["handle"] = found["writer"].finish("t")
        return try_lock(descriptor, kind)

    monkeypatch.setattr(shared_memory, "_try_lock", others_come_first)
    late = SharedMemory("late", capacity_bytes=MIN_CAPACITY, root=tmp_path)
    with DirectoryReader(late.path) as reader:
        assert wrong_bytes(reader, found["handle"], 4) == ([], ())
    found["writer"].close()
    found["memory"].close()
    late.close()
    assert not path.exists()


def test_a_forked_process_takes_nothing_with_it(tmp_path):
    memory = SharedMemory("fork", capacity_bytes=MIN_CAPACITY, root=tmp_path)
    writer = SharedMemoryWriter(memory)
    writer.append(segment("t", 0, 4))
    writer.flush()

    def work():
        writer.close()
        memory.close()

    assert in_fork(work) == ""
    retention = DirectoryRetention(memory.path)
    assert retention.discard(0).trajectories == ()
    writer.append(segment("t", 4, 4))
    with DirectoryReader(memory.path) as reader:
        assert wrong_bytes(reader, writer.finish("t"), 8) == ([], ())
    retention.close()
    writer.close()
    memory.close()


def test_closing_ends_an_append_that_waits_for_room(tmp_path):
    memory = SharedMemory("closed", capacity_bytes=MIN_CAPACITY, root=tmp_path)
    writer = SharedMemoryWriter(memory, WriterOptions(max_wait_s=30))
    (memory.path / "filler").write_bytes(bytes(MIN_CAPACITY))
    refusals = []

    def wait():
        with pytest.raises(RecordError, match="it is closed") as found:
            writer.append(segment("t", 0, 4))
        refusals.append(found.value)

    waiting = threading.Thread(target=wait)
    waiting.start()
    while not writer.stats.num_waits:
        time.sleep(0.005)
    writer.close()
    waiting.join(timeout=10)
    assert len(refusals) == 1
    memory.close()


def test_a_forked_process_reads_from_a_server_on_a_line_of_its_own(tmp_path):
    local = open_directory(tmp_path)
    local.writer.append(segment("t", 0, 4))
    handle = local.writer.finish("t")
    server = StoreServer(local, bind="tcp://127.0.0.1:0").start()
    reader, writer = RemoteReader(server.address), RemoteWriter(server.address)
    assert wrong_bytes(reader, handle, 4) == ([], ())
    writer.append(segment("own", 0, 4))
    writer.flush()

    def work():
        assert wrong_bytes(reader, handle, 4) == ([], ())
        with pytest.raises(BackendError, match="another process"):
            writer.append(segment("own", 4, 4))
        writer.close()

    assert in_fork(work) == ""
    assert wrong_bytes(reader, handle, 4) == ([], ())
    assert writer.finish("own").num_rows == 4
    writer.close()
    reader.close()
    server.stop()
    local.close()


class Gate:
    """A proxy before a server that can be shut: what comes meanwhile is lost."""

    def __init__(self, address):
        context = zmq.Context.instance()
        self._front, self._back = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
        self.address = f"tcp://127.0.0.1:{self._front.bind_to_random_port('tcp://127.0.0.1')}"
        self._back.connect(address)
        self.is_shut, self._ended = False, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        newest = b""
        while not self._ended.is_set():
            if self._front.poll(2):
                newest, *frames = self._front.recv_multipart()
                if not self.is_shut:
                    self._back.send_multipart(frames)
            if self._back.poll(2):
                frames = self._back.recv_multipart()
                self._front.send_multipart([newest, *frames])

    def close(self):
        self._ended.set()
        self._thread.join()
        self._front.close(linger=0)
        self._back.close(linger=0)


@pytest.fixture
def gate(tmp_path):
    local = open_directory(tmp_path / "local")
    server = StoreServer(local, bind="tcp://127.0.0.1:0").start()
    found = Gate(server.address)
    found.local = local
    yield found
    found.close()
    server.stop()
    local.close()


def test_a_server_keeps_nothing_of_what_its_client_gave_up(gate):
    writer = RemoteWriter(gate.address, settings=QUICK)
    writer.append(segment("lost", 0, 4))
    writer.flush()
    gate.is_shut = True
    with pytest.raises(BackendError, match="cannot be reached"):
        writer.finish("lost")
    gate.is_shut = False
    assert dict(gate.local.reader.trajectories()) == {"lost": False}
    writer.append(segment("next", 0, 4))
    assert writer.finish("next").num_rows == 4
    gate.local.writer.flush()
    assert dict(gate.local.reader.trajectories()) == {"next": True}
    writer.append(segment("lost", 0, 4))  # the name is free again
    assert wrong_bytes(gate.local.reader, writer.finish("lost"), 4) == ([], ())
    writer.close()


def test_an_abandoned_trajectory_is_not_counted_as_lost_later(gate):
    writer = RemoteWriter(gate.address, settings=QUICK)
    writer.append(segment("given up", 0, 4))
    writer.abandon("given up")
    writer.append(segment("t", 0, 4))
    writer.flush()
    gate.is_shut = True
    with pytest.raises(BackendError, match="cannot be reached"):
        writer.finish("t")
    assert set(writer.stats.dropped) == {"t"} and writer.stats.num_dropped == 1
    gate.is_shut = False
    writer.close()


def test_a_trajectory_with_an_append_that_waited_too_long_is_lost_as_a_whole(gate, monkeypatch):
    is_open = threading.Event()
    append = gate.local.writer.append
    monkeypatch.setattr(gate.local.writer, "append", lambda part: is_open.wait(20) and append(part))
    size = segment("t", 0, 4).num_bytes
    writer = RemoteWriter(gate.address, max_queue_bytes=size, max_wait_s=0.1)
    writer.append(segment("t", 0, 4))
    with pytest.raises(BackendError, match=r"waited 0\.1 s"):
        writer.append(segment("t", 4, 4))
    is_open.set()
    with pytest.raises(BackendError, match=r"waited 0\.1 s"):
        writer.append(segment("t", 8, 4))
    with pytest.raises(BackendError, match=r"waited 0\.1 s"):
        writer.finish("t")
    writer.close()
    gate.local.writer.flush()
    assert not dict(gate.local.reader.trajectories())


def test_a_check_goes_on_while_retention_removes_what_it_has_not_seen(tmp_path, monkeypatch):
    options = WriterOptions(chunk_bytes=1 << 12)
    with DirectoryWriter(tmp_path, options) as writer:
        for i in range(40):
            write(writer, f"t{i}", generation=i)
    trajectories, retention = DirectoryReader.trajectories, DirectoryRetention(tmp_path)
    numbers = inspection.chunk_numbers

    def names_then_remove(reader):
        found = trajectories(reader)
        retention.forget(10)
        return found

    def chunks_then_remove(directory):
        found = numbers(directory)
        if len(found) > 1:
            retention.forget(30)
        return found

    monkeypatch.setattr(DirectoryReader, "trajectories", names_then_remove)
    monkeypatch.setattr(inspection, "chunk_numbers", chunks_then_remove)
    assert inspection.check_store(tmp_path).is_intact
    retention.close()


def test_a_page_of_the_longest_names_fits_one_message(gate, monkeypatch):
    names = {f"{i:04d}" + "\U0001f600" * 156: True for i in range(5000)}
    monkeypatch.setattr(gate.local.reader, "trajectories", lambda: names)
    reader = RemoteReader(gate.address)
    assert reader.trajectories() == names
    reader.close()

"""Shared memory: bounded, given back by the last user, and cleared after users that were killed."""

import os
import subprocess
import sys
import time

import pytest

from tracefp4.errors import BackendError, ConfigError, RecordError
from tracefp4.store import DroppedError, Segment
from tracefp4.store.backends import open_shared
from tracefp4.store.pending import WriterOptions
from tracefp4.store.reader import DirectoryReader
from tracefp4.store.shared_memory import MIN_CAPACITY, PREFIX, SharedMemory, remove_leftovers

CAPACITY = MIN_CAPACITY


def segment(name, *, num_bytes=1 << 14, generation=0):
    value = sum(map(ord, name)) % 256
    columns = {"x": bytes([value]) * num_bytes}
    return Segment(trajectory=name, start=0, num_rows=16, columns=columns, generation=generation)


def content(reader, name, *, num_bytes=1 << 14):
    return dict(reader.read(name, ["x"], 0, 16)) == {"x": bytes([sum(map(ord, name)) % 256]) * num_bytes}


def child(root, code):
    """A process that uses the shared memory "m" and then does what `code` says."""
    head = f"""
import os, signal, sys, time
from pathlib import Path
from tracefp4.store import Segment
from tracefp4.store.backends import open_shared
store = open_shared("m", capacity_bytes={CAPACITY}, root=Path({str(root)!r}))
def segment(name, n={1 << 14}):
    return Segment(trajectory=name, start=0, num_rows=16, columns={{"x": bytes([sum(map(ord, name)) % 256]) * n}})
"""
    return subprocess.Popen([sys.executable, "-c", head + code], stdout=subprocess.PIPE, text=True)


def fill(store, *, generation=0, limit=1000):
    """Append until a segment is refused; names that were taken."""
    taken = []
    for i in range(limit):
        if not store.writer.append(segment(f"t{i}", generation=generation)):
            return taken
        store.writer.finish(f"t{i}")
        taken.append(f"t{i}")
    raise AssertionError("never full")


def test_the_capacity_is_kept_and_whole_trajectories_are_dropped(tmp_path):
    store = open_shared(
        "m", capacity_bytes=CAPACITY, root=tmp_path, options=WriterOptions(policy="drop_trajectory")
    )
    taken = fill(store)
    assert 40 <= len(taken) <= CAPACITY >> 14
    assert store.memory.used_bytes() <= CAPACITY
    lost = f"t{len(taken)}"
    assert store.writer.append(segment(lost)) is False
    with pytest.raises(DroppedError, match=rf"{lost}.*holds \d+ of {CAPACITY} bytes and needs"):
        store.writer.finish(lost)
    stats = store.writer.stats
    assert (stats.num_dropped, list(stats.dropped)) == (1, [lost])
    assert all(content(store.reader, name) for name in taken) and lost not in store.reader.trajectories()
    store.close()
    assert list(tmp_path.iterdir()) == []


def test_a_trajectory_that_no_longer_fits_is_dropped_as_a_whole(tmp_path):
    options = WriterOptions(policy="drop_trajectory")
    store = open_shared("m", capacity_bytes=CAPACITY, root=tmp_path, options=options)
    first = segment("half")
    assert store.writer.append(first)
    taken = fill(store)
    second = Segment(trajectory="half", start=16, num_rows=16, columns=first.columns)
    assert store.writer.append(second) is False
    with pytest.raises(DroppedError):
        store.writer.finish("half")
    assert "half" not in store.reader.trajectories() and len(taken) > 10
    store.close()


def test_a_waiting_append_goes_on_when_retention_makes_room(tmp_path):
    code = """
names = []
for i in range(70):
    store.writer.append(segment(f"t{i}"))
    store.writer.finish(f"t{i}")
print(store.writer.stats.num_waits, store.writer.stats.wait_seconds, flush=True)
time.sleep(60)
"""
    memory = SharedMemory("m", capacity_bytes=CAPACITY, root=tmp_path)
    from tracefp4.store.retention import DirectoryRetention

    process = child(tmp_path, code)
    retention = DirectoryRetention(memory.path)
    reader = None
    until = time.monotonic() + 30
    while memory.used_bytes() < CAPACITY * 0.9 and time.monotonic() < until:
        time.sleep(0.01)
    time.sleep(0.1)
    reader = DirectoryReader(memory.path)
    full = list(reader.trajectories())
    assert all(content(reader, name) for name in full) and len(full) < 70
    retention.remove([f"t{i}" for i in range(30)])
    waits, seconds = process.stdout.readline().split()
    assert int(waits) >= 1 and float(seconds) > 0.05
    kept = list(reader.trajectories())
    assert len(kept) == 40 and all(content(reader, name) for name in kept)
    process.kill()
    process.communicate()
    reader.close()
    retention.close()
    memory.close()
    assert list(tmp_path.iterdir()) == []


def test_waiting_too_long_gives_the_trajectory_up(tmp_path):
    options = WriterOptions(max_wait_s=0.1)
    store = open_shared("m", capacity_bytes=CAPACITY, root=tmp_path, options=options)
    with pytest.raises(BackendError, match="given up after 0.1 s: .* Room comes from retention"):
        fill(store)
    lost = list(store.writer.stats.dropped)
    assert len(lost) == 1
    with pytest.raises(BackendError, match="given up"):
        store.writer.append(segment(lost[0]))
    with pytest.raises(BackendError, match="given up"):
        store.writer.finish(lost[0])
    assert lost[0] not in store.reader.trajectories()
    store.close()


@pytest.mark.parametrize("leaves", ["os.kill(os.getpid(), signal.SIGKILL)", "store.close()", "os._exit(0)"])
def test_a_reader_outlives_its_writer_and_the_last_user_cleans_up(tmp_path, leaves):
    code = f"""
store.writer.append(segment("a"))
store.writer.finish("a")
store.writer.append(segment("open"))
store.writer.flush()
print("ready", flush=True)
sys.stdin.readline()
{leaves}
"""
    memory = SharedMemory("m", capacity_bytes=CAPACITY, root=tmp_path)
    process = child(tmp_path, code)
    assert process.stdout.readline() == "ready\n"
    process.communicate(timeout=30)
    reader = DirectoryReader(memory.path)
    assert content(reader, "a") and reader.trajectories()["a"]
    assert not reader.trajectories().get("open", False)
    reader.close()
    memory.close()
    assert list(tmp_path.iterdir()) == []


def test_a_killed_reader_takes_nothing_with_it(tmp_path):
    """The resource tracker of multiprocessing would remove the memory here."""
    store = open_shared("m", capacity_bytes=CAPACITY, root=tmp_path)
    store.writer.append(segment("a"))
    handle = store.writer.finish("a")
    code = 'print(len(store.reader.read("a", ["x"], 0, 16)["x"]), flush=True)\nos.kill(os.getpid(), signal.SIGKILL)'
    process = child(tmp_path, code)
    assert process.communicate(timeout=30)[0] == f"{1 << 14}\n"
    assert dict(store.reader.read(handle, ["x"], 0, 16)) == {"x": segment("a").columns["x"]}
    store.writer.append(segment("b"))
    store.writer.finish("b")
    assert content(store.reader, "b")
    store.close()


def test_res_4_leftovers_of_the_dead_are_removed_and_those_of_the_living_are_not(tmp_path):
    dead = child(tmp_path, 'store.writer.append(segment("a"))\nstore.writer.finish("a")\nprint(1, flush=True)\n'
                           "os.kill(os.getpid(), signal.SIGKILL)")  # fmt: skip
    dead.communicate(timeout=30)
    assert (tmp_path / f"{PREFIX}m").is_dir()
    living = SharedMemory("living", capacity_bytes=CAPACITY, root=tmp_path)
    assert living.removed_leftovers == [f"{PREFIX}m"]
    (tmp_path / "tracefp4-of-others").mkdir()
    (tmp_path / f"{PREFIX}empty").mkdir()
    assert remove_leftovers(tmp_path) == []
    assert {path.name for path in tmp_path.iterdir()} == {f"{PREFIX}living", "tracefp4-of-others"}
    living.close()


def test_res_4_a_restart_under_the_same_name_begins_empty(tmp_path):
    dead = child(tmp_path, 'store.writer.append(segment("a"))\nstore.writer.finish("a")\n'
                           "os.kill(os.getpid(), signal.SIGKILL)")  # fmt: skip
    dead.communicate(timeout=30)
    store = open_shared("m", capacity_bytes=2 * CAPACITY, root=tmp_path)
    assert dict(store.reader.trajectories()) == {} and store.memory.capacity_bytes == 2 * CAPACITY
    store.writer.append(segment("a"))
    assert store.writer.finish("a").num_rows == 16
    store.close()


def test_kills_at_any_moment_leave_nothing_wrong(tmp_path):
    code = """
for i in range(100000):
    store.writer.append(segment(f"t{i}", 1 << 12))
    store.writer.finish(f"t{i}")
    store.retention.remove([f"t{i - 20}"])
    if not i % 10:
        print(i, flush=True)
"""
    for turn in range(3):
        memory = SharedMemory("m", capacity_bytes=CAPACITY, root=tmp_path)
        process = child(tmp_path, code)
        for _ in range(2 + turn):
            process.stdout.readline()
        time.sleep(0.003 * turn)
        process.kill()
        process.communicate()
        reader = DirectoryReader(memory.path)
        finished = [name for name, is_finished in reader.trajectories().items() if is_finished]
        assert finished and all(content(reader, name, num_bytes=1 << 12) for name in finished)
        assert memory.used_bytes() <= CAPACITY
        reader.close()
        memory.close()
    assert list(tmp_path.iterdir()) == []


def test_memory_of_removed_records_is_not_held_by_a_reader(tmp_path):
    store = open_shared("m", capacity_bytes=CAPACITY, root=tmp_path)
    for i in range(60):
        store.writer.append(segment(f"t{i}"))
        store.writer.finish(f"t{i}")
        assert content(store.reader, f"t{i}")
        store.retention.remove([f"t{i - 5}"])
    files = [
        os.readlink(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd") if _is_open(number)
    ]
    assert sum(str(tmp_path) in name and name.endswith("(deleted)") for name in files) <= 2
    store.close()


def _is_open(number):
    return os.path.lexists(f"/proc/self/fd/{number}")


def test_users_share_one_capacity(tmp_path):
    memory = SharedMemory("m", capacity_bytes=CAPACITY, root=tmp_path)
    assert SharedMemory("m", capacity_bytes=None, root=tmp_path).capacity_bytes == CAPACITY
    with pytest.raises(ConfigError, match=rf"has a capacity of {CAPACITY} bytes; got {2 * CAPACITY}"):
        SharedMemory("m", capacity_bytes=2 * CAPACITY, root=tmp_path)
    memory.close()
    memory.close()


def test_what_cannot_be_had_is_refused(tmp_path):
    with pytest.raises(BackendError, match="No shared memory 'm'"):
        SharedMemory("m", capacity_bytes=None, root=tmp_path)
    with pytest.raises(BackendError, match=r"\d+ bytes are free, \d+ are needed.*--shm-size"):
        SharedMemory("m", capacity_bytes=1 << 60, root=tmp_path)
    assert list(tmp_path.iterdir()) == []
    for name, size in (("", CAPACITY), ("m", 10), ("x" * 300, CAPACITY)):
        with pytest.raises(ConfigError, match="Shared memory refused"):
            SharedMemory(name, capacity_bytes=size, root=tmp_path)
    with pytest.raises(BackendError, match="on a memory file system that exists"):
        SharedMemory("m", capacity_bytes=CAPACITY, root=tmp_path / "absent" / "deeper")


def test_a_segment_that_can_never_fit_is_refused(tmp_path):
    store = open_shared("m", capacity_bytes=CAPACITY, root=tmp_path)
    with pytest.raises(RecordError, match="has at most 131072"):
        store.writer.append(segment("big", num_bytes=CAPACITY // 4))
    store.close()


def test_a_name_of_any_text_stays_inside_the_root(tmp_path):
    memory = SharedMemory("../x/\u00e9", capacity_bytes=CAPACITY, root=tmp_path)
    assert memory.path.parent == tmp_path and os.listdir(tmp_path) == [memory.path.name]
    memory.close()

"""Full, slow and failing disks, back-pressure, two writers on one name, clocks: bounded, counted, named."""

import errno
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from tests.store.material import WIDTHS, segment, write, wrong_bytes

from tracefp4.errors import BackendError
from tracefp4.store import (
    ConflictError,
    DirectoryReader,
    DirectoryRetention,
    DirectoryWriter,
    DroppedError,
    WriterOptions,
    disk,
)
from tracefp4.store.inspection import check_store

ROOT = Path(__file__).parents[2]
ROW_BYTES = sum(WIDTHS.values())

ON_A_SMALL_DISK = """
import sys
sys.modules["torch"] = None
from pathlib import Path
from tests.store.material import segment, write, wrong_bytes
from tracefp4.errors import BackendError
from tracefp4.store import DirectoryReader, DirectoryRetention, DirectoryWriter, Segment, WriterOptions
place = Path(sys.argv[1])
other = place / "another writer's.running"
dead, own_rewrite = place / "00000009.running", place / "manifest.rewrite"
for path in (dead, own_rewrite):
    path.write_bytes(b"left by a dead process")
writer = DirectoryWriter(place, WriterOptions(chunk_bytes=1 << 18))
assert not dead.exists() and not own_rewrite.exists()
handles, refusals = {}, {}
for index in range(60):
    name = f"t{index}"
    try:
        big = Segment(trajectory=name, start=12, num_rows=64, columns={"big": bytes([index]) * 65536}, generation=index)
        writer.append(big)
        handles[name] = write(writer, name, generation=index)
    except BackendError as error:
        refusals[name] = str(error)
        try:
            writer.finish(name)
        except ValueError:
            pass
assert len(handles) > 8 and len(refusals) > 30, (len(handles), len(refusals))
first = next(iter(refusals.values()))
assert "No space left on device" in first and str(place) in first and "must take" in first, first
assert set(writer.stats.dropped) == set(refusals), writer.stats.dropped
assert writer.stats.bytes_queued == 0
try:
    writer.flush()
    raise SystemExit("flush said nothing")
except BackendError as error:
    assert f"{len(refusals)} trajectories were lost: 't" in str(error), error
writer.flush()
reader = DirectoryReader(place)
assert {name for name, finished in reader.trajectories().items() if finished} == handles.keys()
for name, handle in handles.items():
    assert wrong_bytes(reader, handle, 12) == ([], ())
    index = int(name[1:])
    assert reader.read(handle, ["big"], 12, 76)["big"] == bytes([index]) * 65536
freed = DirectoryRetention(place).forget(6)
assert freed.num_bytes > 1 << 17, freed
late = write(writer, "late", generation=99)
writer.close()
assert wrong_bytes(DirectoryReader(place), late, 12) == ([], ())
from tracefp4.store.inspection import check_store
assert check_store(place).is_intact
print(len(handles), len(refusals))
"""


def test_res_4_a_small_disk_fills_up_and_the_process_goes_on(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(ON_A_SMALL_DISK)
    place = tmp_path / "mount"
    place.mkdir()
    mount = f"mount -t tmpfs -o size=1m tmpfs {place} && exec {sys.executable} {script} {place}"
    if subprocess.run(["unshare", "-Urm", "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("no user namespaces here: a small tmpfs cannot be mounted")
    done = subprocess.run(
        ["unshare", "-Urm", "sh", "-c", mount], capture_output=True, text=True, timeout=120, check=False, cwd=ROOT,
        env={"PATH": "/usr/bin:/bin:/usr/sbin:/sbin", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
    )  # fmt: skip
    if "mount:" in done.stderr:
        pytest.skip(f"a small tmpfs cannot be mounted here: {done.stderr.strip()[:100]}")
    assert done.returncode == 0, done.stderr
    handles, refusals = map(int, done.stdout.split())
    assert handles + refusals == 60


def test_res_4_leftovers_of_the_dead_go_and_those_of_the_living_stay(tmp_path):
    living = DirectoryWriter(tmp_path)
    living.append(segment("a", 0, 4))
    dead = tmp_path / "00000077.running"
    dead.touch()
    foreign = tmp_path / "notes.txt"
    foreign.touch()
    DirectoryWriter(tmp_path).close()
    names = {path.name for path in tmp_path.iterdir()}
    assert "00000001.running" in names and "notes.txt" in names
    assert dead.name not in names
    assert living.finish("a").num_rows == 4
    living.close()


class Budget:
    """Lets a number of bytes reach the disk and then says that it is full, after a part of what was asked."""

    def __init__(self, num_bytes):
        self.left, self.real = num_bytes, disk.write_all

    def __call__(self, descriptor, data, offset):
        taken = min(len(data), self.left)
        self.real(descriptor, bytes(data)[:taken], offset)
        self.left -= taken
        if taken < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_disk_that_is_full_after_any_number_of_bytes_loses_whole_trajectories_by_name(
    memory_path, monkeypatch
):
    outcomes = set()
    for budget in range(150, 4000, 29):
        place = memory_path / str(budget)
        writer = DirectoryWriter(place)
        monkeypatch.setattr(disk, "write_all", Budget(budget))
        handles, lost = {}, set()
        for name in ("a", "b", "c"):
            try:
                handles[name] = write(writer, name)
            except BackendError as refusal:
                assert "No space left on device" in str(refusal) and str(place) in str(refusal)
                lost.add(name)
                with pytest.raises(ValueError):
                    writer.finish(name)
        assert lost == set(writer.stats.dropped) and writer.stats.num_dropped == len(lost)
        monkeypatch.setattr(disk, "write_all", disk.write_all.real)
        if lost:
            with pytest.raises(BackendError, match="trajectories were lost"):
                writer.close()
        else:
            writer.close()
        reader = DirectoryReader(place)
        for name, finished in reader.trajectories().items():
            wrong, absent = wrong_bytes(reader, name, 12)
            assert not wrong and not (finished and absent)
        for handle in handles.values():
            assert wrong_bytes(reader, handle, 12) == ([], ())
        # The entry may be there although finish could not say so; what is not finished is closed, not half there.
        assert set(reader.trajectories()) - handles.keys() <= lost
        assert all(reader.trajectories().values())
        assert not [gap for gap in check_store(place).damaged if not gap.is_tail]
        outcomes.add(len(handles))
    assert outcomes == {0, 1, 2, 3}


def test_a_write_that_fails_once_loses_the_one_trajectory_that_it_belongs_to(memory_path, monkeypatch):
    real, lost_counts = disk.write_all, []
    for failing in range(1, 20):
        place, calls = memory_path / str(failing), []
        writer = DirectoryWriter(place)

        def fail_once(descriptor, data, offset, calls=calls, failing=failing):
            calls.append(offset)
            real(descriptor, bytes(data)[: len(data) // 2] if len(calls) == failing else data, offset)
            if len(calls) == failing:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(disk, "write_all", fail_once)
        handles, lost = {}, set()
        for name in ("a", "b", "c"):
            try:
                handles[name] = write(writer, name)
            except BackendError:
                lost.add(name)
                writer.abandon(name)
        monkeypatch.setattr(disk, "write_all", real)
        assert set(writer.stats.dropped) == lost and len(lost) <= 1
        try:
            writer.close()
        except BackendError as refusal:
            assert f"1 trajectories were lost: {min(lost)!r}" in str(refusal)
        reader = DirectoryReader(place)
        assert dict(reader.trajectories()) == dict.fromkeys(sorted(handles), True)
        for handle in handles.values():
            assert wrong_bytes(reader, handle, 12) == ([], ())
        assert check_store(place).is_intact and not check_store(place).damaged
        lost_counts.append(len(lost))
    assert 10 <= sum(lost_counts) < 19


def test_a_torn_tail_of_the_manifest_is_cut_off_by_the_next_writer(tmp_path):
    with DirectoryWriter(tmp_path) as writer:
        first = write(writer, "a")
    with open(tmp_path / "manifest", "ab") as file:
        file.write(b"\x93TFrame\n torn")
    reader = DirectoryReader(tmp_path)
    assert [gap.is_tail for gap in check_store(tmp_path).damaged] == [True]
    with DirectoryWriter(tmp_path) as writer:
        second = write(writer, "b")
    assert check_store(tmp_path).damaged == ()
    assert all(wrong_bytes(reader, handle, 12) == ([], ()) for handle in (first, second))


def test_a_lost_trajectory_refuses_further_segments_until_it_is_ended(tmp_path, monkeypatch):
    writer = DirectoryWriter(tmp_path)
    monkeypatch.setattr(disk, "write_all", Budget(40))
    writer.append(segment("a", 0, 4))
    with pytest.raises(BackendError, match=r"1 trajectories were lost: 'a'"):
        writer.flush()
    with pytest.raises(BackendError, match="must take"):
        writer.append(segment("a", 4, 4))
    monkeypatch.setattr(disk, "write_all", disk.write_all.real)
    writer.abandon("a")
    handle = write(writer, "a")
    assert wrong_bytes(DirectoryReader(tmp_path), handle, 12) == ([], ())
    writer.close()


def test_a_failed_sync_loses_all_that_it_covered_and_is_not_tried_again(tmp_path, monkeypatch):
    writer = DirectoryWriter(tmp_path)
    early = write(writer, "early")
    writer.append(segment("a", 0, 4))
    writer.append(segment("b", 0, 4))
    real, calls = disk.sync, []

    def fail_once(descriptor):
        calls.append(descriptor)
        if len(calls) == 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(descriptor)

    monkeypatch.setattr(disk, "sync", fail_once)
    with pytest.raises(BackendError, match="Input/output error"):
        writer.finish("a")
    with pytest.raises(BackendError, match="Input/output error"):
        writer.append(segment("b", 4, 4))
    assert set(writer.stats.dropped) == {"a", "b"}
    later = write(writer, "later")
    with pytest.raises(BackendError, match="2 trajectories were lost: 'a', 'b'|2 .*: 'b', 'a'"):
        writer.close()
    reader = DirectoryReader(tmp_path)
    assert dict(reader.trajectories()) == {"early": True, "later": True}
    for handle in (early, later):
        assert wrong_bytes(reader, handle, 12) == ([], ())


def test_data_is_synced_before_the_manifest_names_it(tmp_path, monkeypatch):
    events = []
    real_directory_sync = disk.sync_directory
    monkeypatch.setattr(
        disk, "sync_directory", lambda path: (events.append(("sync", path.name)), real_directory_sync(path))
    )
    for name in ("write_all", "sync"):
        real = getattr(disk, name)

        def noted(descriptor, *arguments, name=name, real=real):
            events.append((name, os.readlink(f"/proc/self/fd/{descriptor}").rpartition("/")[2]))
            real(descriptor, *arguments)

        monkeypatch.setattr(disk, name, noted)
    place = tmp_path / "new" / "store"
    with DirectoryWriter(place) as writer:
        assert events[:2] == [("sync", "new"), ("sync", tmp_path.name)]
        events.clear()
        write(writer, "a", num_rows=4)
        order = [event for event in events if event[0] == "sync" or event[1] == "manifest"]
        chunk = "00000001-00000000.chunk"
        assert order == [("sync", chunk), ("sync", "store"), ("write_all", "manifest"), ("sync", "manifest")]
    with DirectoryWriter(place, WriterOptions(durable=False)) as writer:
        events.clear()
        write(writer, "b", num_rows=4)
        assert [event for event in events if event[0] == "sync"] == []


class Gate:
    """A disk that writes only while it is open."""

    def __init__(self):
        self.real, self.opened, self.entered = disk.write_all, threading.Event(), threading.Event()

    def __call__(self, descriptor, data, offset):
        self.entered.set()
        assert self.opened.wait(30)
        self.real(descriptor, data, offset)


@pytest.fixture
def gate(monkeypatch):
    """A gate that is shut once the writer of a test is open."""
    made = Gate()
    made.opened.set()
    monkeypatch.setattr(disk, "write_all", made)
    yield made
    made.opened.set()


def test_a_slow_disk_makes_append_wait_within_its_bound_and_counts_it(tmp_path, monkeypatch):
    real = disk.write_all

    def slow(descriptor, data, offset):
        time.sleep(0.01)
        real(descriptor, data, offset)

    bound = 20 * (ROW_BYTES + 1)
    writer = DirectoryWriter(tmp_path, WriterOptions(max_queue_bytes=bound))
    monkeypatch.setattr(disk, "write_all", slow)
    peak = 0
    for start in range(0, 200, 5):
        assert writer.append(segment("a", start, 5))
        peak = max(peak, writer.stats.bytes_queued)
    stats = writer.stats
    assert bound * 0.7 < peak <= bound
    assert stats.num_waits > 20 and stats.wait_seconds > 0.1
    handle = writer.finish("a")
    assert wrong_bytes(DirectoryReader(tmp_path), handle, 200) == ([], ())
    assert writer.stats.num_dropped == 0 and writer.stats.bytes_queued == 0
    writer.close()


def test_a_full_queue_drops_whole_trajectories_by_name_and_never_blocks(tmp_path, gate):
    bound = 10 * ROW_BYTES + 2
    writer = DirectoryWriter(tmp_path, WriterOptions(max_queue_bytes=bound, policy="drop_trajectory"))
    gate.opened.clear()
    began = time.monotonic()
    assert writer.append(segment("a", 0, 5))
    assert gate.entered.wait(10)
    assert writer.append(segment("b", 0, 5))
    assert not writer.append(segment("c", 0, 5))
    assert not writer.append(segment("b", 5, 5))
    # What was queued of b has left with it: there is room for others.
    assert writer.append(segment("d", 0, 5))
    for late in ("b", "c"):
        assert not writer.append(segment(late, 10, 1))
    assert time.monotonic() - began < 5
    assert writer.stats.bytes_queued <= bound
    gate.opened.set()
    for name in ("a", "d"):
        assert writer.finish(name).num_rows == 5
    for name in ("b", "c"):
        with pytest.raises(DroppedError, match=f"'{name}' was dropped as a whole"):
            writer.finish(name)
    assert (writer.stats.num_dropped, set(writer.stats.dropped)) == (2, {"b", "c"})
    writer.append(segment("b", 0, 3, salt="again"))
    handle = writer.finish("b")
    writer.close()
    reader = DirectoryReader(tmp_path)
    assert dict(reader.trajectories()) == {"a": True, "b": True, "d": True}
    assert wrong_bytes(reader, handle, 3, salts=["again"]) == ([], ())


def test_a_dropped_trajectory_is_not_read_even_where_a_part_was_written(tmp_path, gate):
    writer = DirectoryWriter(
        tmp_path, WriterOptions(max_queue_bytes=5 * ROW_BYTES + 1, policy="drop_trajectory")
    )
    writer.append(segment("a", 0, 5))
    writer.flush()
    assert dict(DirectoryReader(tmp_path).trajectories()) == {"a": False}
    gate.opened.clear()
    gate.entered.clear()
    writer.append(segment("b", 0, 5))
    assert gate.entered.wait(10)
    assert not writer.append(segment("a", 5, 5))
    gate.opened.set()
    writer.close()
    assert dict(DirectoryReader(tmp_path).trajectories()) == {"b": False}


def test_waiting_ends_after_its_time_with_an_error_that_names_the_trajectory(tmp_path, gate):
    writer = DirectoryWriter(tmp_path, WriterOptions(max_queue_bytes=5 * ROW_BYTES + 1, max_wait_s=0.05))
    gate.opened.clear()
    writer.append(segment("a", 0, 5))
    with pytest.raises(
        BackendError, match=r"Trajectory 'b' was lost: the queue of \d+ bytes was full for 0.05 s"
    ):
        writer.append(segment("b", 0, 5))
    assert writer.stats.num_waits == 1 and 0.04 < writer.stats.wait_seconds < 5
    gate.opened.set()
    writer.finish("a")
    with pytest.raises(BackendError, match="'b'"):
        writer.close()


def test_of_two_writers_of_one_name_the_first_to_finish_stays_and_nothing_is_mixed(tmp_path):
    one, two = DirectoryWriter(tmp_path), DirectoryWriter(tmp_path)
    one.append(segment("a", 0, 6, salt="one"))
    two.append(segment("a", 0, 6, salt="two"))
    two.append(segment("a", 6, 6, salt="two"))
    one.flush()
    two.flush()
    reader = DirectoryReader(tmp_path)
    # Unfinished, the writer that was opened last is read, alone.
    assert reader.stat("a").num_writers == 2
    assert wrong_bytes(reader, "a", 12, salts=["two"]) == ([], ())
    handle = one.finish("a")
    with pytest.raises(ConflictError, match="it is complete there already, and the first stays"):
        two.finish("a")
    assert set(two.stats.dropped) == {"a"} and two.stats.num_dropped == 1
    wrong, absent = wrong_bytes(reader, "a", 12, salts=["one"])
    assert not wrong
    assert {(span.start, span.stop) for span in absent} == {(6, 12)}
    assert reader.stat(handle).num_writers == 1
    with pytest.raises(ConflictError):
        one.append(segment("a", 6, 6))
    one.close()
    two.close()
    assert dict(DirectoryReader(tmp_path).trajectories()) == {"a": True}


def test_writers_that_race_for_names_get_each_name_once(memory_path):
    names = [f"t{index}" for index in range(40)]
    won, errors = {0: {}, 1: {}, 2: {}}, []

    def work(number):
        try:
            with DirectoryWriter(memory_path, WriterOptions(chunk_bytes=1000)) as writer:
                for name in names:
                    try:
                        won[number][name] = write(writer, name, salt=str(number))
                    except ConflictError:
                        continue
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in won]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert sorted(name for mine in won.values() for name in mine) == sorted(names)
    reader = DirectoryReader(memory_path)
    for number, mine in won.items():
        for handle in mine.values():
            assert wrong_bytes(reader, handle, 12, salts=[str(number)]) == ([], ())
    assert dict(reader.trajectories()) == dict.fromkeys(sorted(names), True)


def test_a_clock_that_goes_backwards_changes_nothing(tmp_path, monkeypatch):
    now = [2e9]

    def earlier():
        now[0] -= 1000.0
        return now[0]

    monkeypatch.setattr(time, "time", earlier)
    handles = {}
    for index in range(4):
        with DirectoryWriter(tmp_path, WriterOptions(chunk_bytes=500)) as writer:
            handles[index] = write(writer, f"t{index}", generation=index)
        for path in tmp_path.iterdir():
            os.utime(path, (earlier(), earlier()))
    assert DirectoryRetention(tmp_path).keep_last(2).trajectories == ("t0", "t1")
    reader = DirectoryReader(tmp_path)
    assert list(reader.trajectories()) == ["t2", "t3"]
    assert all(wrong_bytes(reader, handles[index], 12) == ([], ()) for index in (2, 3))
    with DirectoryWriter(tmp_path) as writer:
        writer.append(segment("t0", 0, 2, salt="new"))
        writer.flush()
        assert wrong_bytes(reader, "t0", 2, salts=["new"]) == ([], ())

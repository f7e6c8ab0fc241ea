"""Writer, reader and retention of a directory beyond the contract of all stores: costs, bounds, space, concurrency."""

import gc
import os
import re
import threading
from pathlib import Path

import pytest
from tests.store.material import WIDTHS, rows, segment, write, wrong_bytes

from tracefp4.errors import BackendError, ConfigError, RecordError
from tracefp4.store import (
    ConflictError,
    DirectoryReader,
    DirectoryRetention,
    DirectoryWriter,
    GoneError,
    MissingTrajectoryError,
    Request,
    Segment,
    SpanError,
    WriterOptions,
)
from tracefp4.store.chunks import chunk_numbers
from tracefp4.store.manifest import Manifest
from tracefp4.store.trajectory_log import MAX_PIECE_BYTES

ROOT = Path(__file__).parents[2]


def test_res_1_a_read_takes_only_the_bytes_of_its_columns_and_rows_from_disk(tmp_path):
    columns = {f"{layer}.x": bytes([layer]) * (64 * 1000) for layer in range(40)}
    with DirectoryWriter(tmp_path) as writer:
        for start in range(0, 640, 64):
            writer.append(Segment(trajectory="a", start=start, num_rows=64, columns=columns))
        handle = writer.finish("a")
    reader = DirectoryReader(tmp_path)
    reader.stat(handle)
    before = reader.bytes_read
    got = reader.read(handle, ["3.x", "4.x"], 100, 140)
    assert got == {"3.x": bytes([3]) * 40_000, "4.x": bytes([4]) * 40_000}
    # Rows 100..139 lie in two appends of 64 rows, each cut at 1 MiB of all columns.
    rows_per_piece = MAX_PIECE_BYTES // (40 * 1000)
    num_pieces = sum(
        start < 140 and min(start + rows_per_piece, part + 64) > 100
        for part in (64, 128)
        for start in range(part, part + 64, rows_per_piece)
    )
    assert 80_000 < reader.bytes_read - before <= num_pieces * (rows_per_piece * 2000 + 1000)


def test_res_1_nothing_of_the_callers_buffer_stays_alive(tmp_path):
    buffer = bytearray(100_000 * 32)
    writer = DirectoryWriter(tmp_path)
    view = memoryview(buffer)[-3200:]
    writer.append(Segment(trajectory="a", start=0, num_rows=100, columns={"x": view}))
    assert writer.stats.bytes_queued <= 3200
    view.release()
    gc.collect()
    # A bytearray with a living view cannot change its size.
    buffer.clear()
    writer.append(Segment(trajectory="a", start=100, num_rows=100, columns={"x": b"y" * 3200}))
    handle = writer.finish("a")
    assert DirectoryReader(tmp_path).read(handle, ["x"], 99, 101)["x"] == bytes(32) + b"y" * 32
    writer.close()


def test_res_1_a_writer_keeps_nothing_of_finished_trajectories_but_their_entries(tmp_path):
    with DirectoryWriter(tmp_path) as writer:
        for index in range(20):
            write(writer, f"t{index}")
        assert writer.stats.bytes_queued == 0
        assert writer._pending == {} and not writer._jobs
        assert writer._log.unsynced == set() and writer._log._unclosed == {}


def test_long_segments_are_cut_and_put_together_again(tmp_path):
    data = os.urandom(3 * MAX_PIECE_BYTES)
    with DirectoryWriter(tmp_path) as writer:
        writer.append(
            Segment(trajectory="a", start=0, num_rows=3072, columns={"x": data, "y": data[:6144]}, meta=b"m")
        )
        handle = writer.finish("a")
    reader = DirectoryReader(tmp_path)
    assert reader.read(handle, ["x"], 0, 3072)["x"] == data
    assert reader.read(handle, ["y"], 1000, 2050)["y"] == data[2000:4100]
    assert len(reader.spans(handle)) == 4
    assert reader.stat(handle).meta == b"m"


def test_columns_may_come_in_segments_of_their_own(tmp_path):
    with DirectoryWriter(tmp_path) as writer:
        writer.append(segment("a", 0, 6, columns=("0.x",)))
        writer.append(segment("a", 0, 3, columns=("0.k", "valid")))
        writer.append(segment("a", 3, 3, columns=("valid", "0.k")))
        with pytest.raises(ConflictError, match=r"rows 2\.\.2 of column 'valid' overlap rows 0\.\.5"):
            writer.append(segment("a", 2, 1, columns=("routed", "valid")))
        writer.append(segment("a", 2, 1, columns=("routed",)))
        handle = writer.finish("a")
    reader = DirectoryReader(tmp_path)
    assert dict(reader.stat(handle).columns) == WIDTHS
    got = reader.read(handle, ["valid", "0.x", "0.k"], 1, 5)
    assert got == {column: rows("a", column, 1, 5) for column in ("valid", "0.x", "0.k")}


def test_bytes_per_row_are_fixed(tmp_path):
    with DirectoryWriter(tmp_path) as writer:
        writer.append(segment("a", 0, 4))
        with pytest.raises(RecordError, match="column 'valid' has 2 bytes per row. It had 1"):
            writer.append(Segment(trajectory="a", start=4, num_rows=2, columns={"valid": b"1234"}))


@pytest.mark.parametrize("fields", [
    {"num_rows": 0}, {"start": -1}, {"columns": {}}, {"columns": {"x": b"123"}}, {"columns": {"": b"12"}},
    {"generation": -1}, {"meta": bytes(70_000)}, {"trajectory": ""}, {"trajectory": "n" * 161},
    {"trajectory": "\ud800"}, {"columns": {"c" * 65: b"12"}}, {"num_rows": 1 << 21},
])  # fmt: skip
def test_segments_outside_the_limits_are_refused(fields):
    good = {"trajectory": "a", "start": 0, "num_rows": 2, "columns": {"x": b"12"}}
    Segment(**good)
    with pytest.raises(RecordError, match="refused"):
        Segment(**(good | fields))


def test_buffers_of_wider_items_count_in_bytes(tmp_path):
    wide = memoryview(bytes(range(24))).cast("I")
    with DirectoryWriter(tmp_path) as writer:
        writer.append(Segment(trajectory="a", start=0, num_rows=3, columns={"x": wide}))
        writer.append(Segment(trajectory="a", start=3, num_rows=1, columns={"x": bytes(8)}))
        handle = writer.finish("a")
    assert DirectoryReader(tmp_path).read(handle, ["x"], 1, 4)["x"] == bytes(range(8, 24)) + bytes(8)


def test_lif_4_what_was_never_recorded_is_no_record_of_zeros(tmp_path):
    with DirectoryWriter(tmp_path) as writer:
        with pytest.raises(MissingTrajectoryError, match="No trajectory 'nothing recorded'"):
            writer.finish("nothing recorded")
        writer.append(segment("a", 0, 4, columns=("0.x", "valid")))
        handle = writer.finish("a")
    reader = DirectoryReader(tmp_path)
    assert "nothing recorded" not in reader.trajectories()
    with pytest.raises(SpanError, match="rows 0..3 of column '1.x' of trajectory 'a' in .*: never written"):
        reader.read(handle, ["0.x", "1.x"], 0, 4)
    found = reader.read_available(Request(trajectory=handle, columns=("0.x", "1.x"), start=0, stop=4))
    assert set(found.data) == {"0.x"} and [span.column for span in found.absent] == ["1.x"]


def test_a_segment_larger_than_the_queue_is_refused_at_once(tmp_path):
    with DirectoryWriter(tmp_path, WriterOptions(max_queue_bytes=100)) as writer:
        with pytest.raises(RecordError, match="it has 140 bytes and the queue takes 100"):
            writer.append(segment("a", 0, 4, meta=b""))
        assert writer.append(segment("a", 0, 2))
        assert writer.finish("a").num_rows == 2


@pytest.mark.parametrize("fields", [
    {"policy": "hope"}, {"max_queue_bytes": 0}, {"max_wait_s": 0.0}, {"chunk_bytes": -1},
])  # fmt: skip
def test_options_that_cannot_be_are_refused(fields):
    with pytest.raises(ConfigError, match="Policies are wait, drop_trajectory"):
        WriterOptions(**fields)


def test_a_directory_that_cannot_be_used_is_refused(tmp_path):
    file = tmp_path / "file"
    file.touch()
    for open_it in (DirectoryWriter, DirectoryReader):
        with pytest.raises(BackendError):
            open_it(file)
    with pytest.raises(BackendError, match="is no directory"):
        DirectoryReader(tmp_path / "absent")
    assert DirectoryRetention(tmp_path / "absent").forget(3).trajectories == ()


def test_the_example_of_the_documentation_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / "store.md").read_text(encoding="utf-8")
    names = {}
    exec(re.search(r"```python\n(.*?)```", text, re.DOTALL)[1], names)
    assert len(names["handle"].to_json()) < 300
    names["reader"].close()


def test_finish_again_gives_the_same_handle(tmp_path):
    with DirectoryWriter(tmp_path) as writer:
        assert write(writer, "a") == writer.finish("a")


def test_chunks_have_about_the_size_asked_for_and_go_when_nothing_in_them_is_kept(tmp_path):
    with DirectoryWriter(tmp_path, WriterOptions(chunk_bytes=4000)) as writer:
        handles = {index: write(writer, f"t{index}", generation=index // 4) for index in range(40)}
        sizes = [path.stat().st_size for path in tmp_path.glob("*.chunk")]
        assert len(sizes) > 4 and max(sizes) < 6000
        retention = DirectoryRetention(tmp_path)
        removed = retention.keep_last(2)
        assert len(removed.trajectories) == 32
        left = chunk_numbers(tmp_path)
        assert removed.num_bytes > 0.6 * sum(sizes)
        assert sum(path.stat().st_size for path in tmp_path.glob("*.chunk")) < 0.4 * sum(sizes)
        assert left == [(1, number) for number in range(left[0][1], left[-1][1] + 1)]
        reader = DirectoryReader(tmp_path)
        for index, handle in handles.items():
            if index >= 32:
                assert wrong_bytes(reader, handle, 12) == ([], ())
            else:
                with pytest.raises(GoneError, match=f"'t{index}' is gone"):
                    reader.read(handle, ["valid"], 0, 1)
        write(writer, "later", generation=10)
    assert DirectoryReader(tmp_path).trajectories()["later"]


def test_what_a_running_writer_has_not_finished_is_kept_and_what_a_dead_one_left_goes(tmp_path):
    dead = DirectoryWriter(tmp_path)
    dead.append(segment("left", 0, 4, generation=1))
    dead.close()
    writer = DirectoryWriter(tmp_path, WriterOptions(chunk_bytes=300))
    writer.append(segment("growing", 0, 5, generation=1))
    for index in range(4):
        write(writer, f"t{index}", generation=1)
    retention = DirectoryRetention(tmp_path)
    assert set(retention.forget(5).trajectories) == {"left", "t0", "t1", "t2", "t3"}
    writer.append(segment("growing", 5, 7, generation=6))
    handle = writer.finish("growing")
    reader = DirectoryReader(tmp_path)
    assert dict(reader.trajectories()) == {"growing": True}
    assert wrong_bytes(reader, handle, 12) == ([], ())
    assert handle.generation == 6
    writer.close()
    assert retention.forget(7).trajectories == ("growing",)
    assert chunk_numbers(tmp_path) == []


def test_an_unfinished_trajectory_of_a_dead_writer_gives_its_name_back(tmp_path):
    for salt in ("first", "second"):
        with DirectoryWriter(tmp_path) as writer:
            writer.append(segment("a", 0, 12, salt=salt))
    reader = DirectoryReader(tmp_path)
    assert reader.stat("a").num_writers == 2
    assert wrong_bytes(reader, "a", 12, salts=["second"]) == ([], ())
    with DirectoryWriter(tmp_path) as writer:
        handle = write(writer, "a", salt="third")
    assert wrong_bytes(reader, handle, 12, salts=["third"]) == ([], ())
    assert DirectoryRetention(tmp_path).discard(0).trajectories == ("a",)
    assert dict(DirectoryReader(tmp_path).trajectories()) == {}


def test_ckp_1_a_resumed_run_discards_what_it_makes_again(tmp_path):
    with DirectoryWriter(tmp_path) as writer:
        old = {index: write(writer, f"{index}/a", generation=index, salt="old") for index in range(5)}
        writer.append(segment("5/a", 0, 4, generation=5, salt="old"))
    assert DirectoryRetention(tmp_path).discard(3).trajectories == ("3/a", "4/a", "5/a")
    with DirectoryWriter(tmp_path) as writer:
        new = {index: write(writer, f"{index}/a", generation=index, salt="new") for index in range(3, 6)}
    reader = DirectoryReader(tmp_path)
    for index in range(3):
        assert wrong_bytes(reader, old[index], 12, salts=["old"]) == ([], ())
    for index in (3, 4, 5):
        assert wrong_bytes(reader, new[index], 12, salts=["new"]) == ([], ())
    with pytest.raises(GoneError):
        reader.stat(old[4])


def test_the_manifest_is_rewritten_when_most_of_it_is_removed(memory_path, monkeypatch):
    monkeypatch.setattr("tracefp4.store.manifest.MIN_REWRITE_BYTES", 2000)
    retention, sizes, numbers = DirectoryRetention(memory_path), [], []
    reader = None
    with DirectoryWriter(memory_path, WriterOptions(chunk_bytes=2000)) as writer:
        for index in range(120):
            handle = write(writer, f"t{index}", generation=index)
            reader = reader or DirectoryReader(memory_path)
            if index % 5 == 4:
                retention.keep_last(3)
                sizes.append((memory_path / "manifest").stat().st_size)
                numbers.append((memory_path / "manifest").stat().st_ino)
            assert wrong_bytes(reader, handle, 12) == ([], ())
        assert list(reader.trajectories()) == ["t117", "t118", "t119"]
        assert writer.finish("t119") == handle
    assert len(set(numbers)) > 3
    assert max(sizes) < 6000
    manifest = Manifest(memory_path)
    manifest.refresh()
    assert manifest.next_writer == 2 and len(manifest.layouts) == 1
    with DirectoryWriter(memory_path) as writer:
        assert writer._log.writer == 2


def test_a_reader_that_holds_files_of_removed_trajectories_says_gone(tmp_path):
    with DirectoryWriter(tmp_path) as writer:
        handle = write(writer, "a")
    reader = DirectoryReader(tmp_path)
    assert wrong_bytes(reader, handle, 12) == ([], ())
    assert DirectoryRetention(tmp_path).remove(["a"]).num_bytes > 0
    assert chunk_numbers(tmp_path) == []
    with pytest.raises(GoneError):
        reader.read(handle, ["valid"], 0, 12)
    assert {span.reason for span in wrong_bytes(reader, handle, 12)[1]} == {"gone"}


def test_readers_writers_and_retention_at_the_same_time_never_see_wrong_bytes(memory_path):
    stop, errors, seen = threading.Event(), [], []

    def guarded(work):
        def run():
            try:
                work()
            except BaseException as error:
                errors.append(error)
                stop.set()

        return threading.Thread(target=run)

    def writing(number):
        with DirectoryWriter(memory_path, WriterOptions(chunk_bytes=1500)) as writer:
            for index in range(60):
                write(writer, f"{number}.{index}", generation=index)

    def reading():
        with DirectoryReader(memory_path) as reader:
            is_last = False
            while not is_last:
                is_last = stop.is_set()
                for name in reader.trajectories():
                    wrong, absent = wrong_bytes(reader, name, 12)
                    assert not wrong
                    assert {span.reason for span in absent} <= {"never_written", "gone"}, absent
                    seen.append(name)

    def removing():
        retention = DirectoryRetention(memory_path)
        while not stop.is_set():
            retention.keep_last(5)

    DirectoryWriter(memory_path).close()
    writers = [guarded(lambda number=number: writing(number)) for number in range(2)]
    others = [guarded(reading), guarded(removing)]
    for thread in [*writers, *others]:
        thread.start()
    for thread in writers:
        thread.join()
    stop.set()
    for thread in others:
        thread.join()
    assert errors == []
    assert len(set(seen)) >= 5
    DirectoryRetention(memory_path).keep_last(5)
    reader = DirectoryReader(memory_path)
    left = reader.trajectories()
    assert all(wrong_bytes(reader, name, 12) == ([], ()) for name in left)
    assert sorted(left) == sorted(f"{number}.{index}" for number in (0, 1) for index in range(55, 60))


def test_a_chunk_that_is_begun_and_ended_while_retention_looks_is_kept(tmp_path, monkeypatch):
    writer = DirectoryWriter(tmp_path, WriterOptions(chunk_bytes=200))
    write(writer, "old")
    retention = DirectoryRetention(tmp_path)
    scan, scans = retention._index.refresh, []

    def scan_and_be_late():
        scan()
        scans.append("before the lock" if not scans else "under the lock")
        if scans[-1] == "before the lock":
            return
        for start in range(0, 12, 4):
            writer.append(segment("growing", start, 4, generation=9))
        writer.flush()

    monkeypatch.setattr(retention._index, "refresh", scan_and_be_late)
    assert retention.forget(5).trajectories == ("old",)
    handle = writer.finish("growing")
    assert wrong_bytes(DirectoryReader(tmp_path), handle, 12) == ([], ())
    writer.close()


def test_a_listing_that_misses_a_deleted_chunk_is_made_again(tmp_path, monkeypatch):
    with DirectoryWriter(tmp_path, WriterOptions(chunk_bytes=200)) as writer:
        for start in range(0, 12, 4):
            writer.append(segment("a", start, 4))
        writer.flush()
        reader = DirectoryReader(tmp_path)
        assert not reader.stat("a").finished
        stale = chunk_numbers(tmp_path)
        writer.finish("a")
    DirectoryRetention(tmp_path).remove(["a"])
    listings = [stale[:-1]]
    monkeypatch.setattr(
        "tracefp4.store.scanning.chunk_numbers",
        lambda path: listings.pop() if listings else chunk_numbers(path),
    )
    assert dict(reader.trajectories()) == {}


def test_a_forked_child_may_not_use_its_parents_writer(tmp_path, monkeypatch):
    with DirectoryWriter(tmp_path) as writer:
        with monkeypatch.context() as elsewhere:
            elsewhere.setattr(os, "getpid", lambda: -1)
            with pytest.raises(RecordError, match="it was opened by another process"):
                writer.append(segment("a", 0, 1))
        writer.append(segment("a", 0, 1))


def test_a_fault_in_the_thread_reaches_every_caller(tmp_path, monkeypatch):
    writer = DirectoryWriter(tmp_path)
    monkeypatch.setattr(writer._log, "append", lambda *arguments: 1 // 0)
    writer.append(segment("a", 0, 1))
    with pytest.raises(BackendError, match=r"stopped: ZeroDivisionError"):
        writer.finish("a")
    for call in (lambda: writer.append(segment("b", 0, 1)), writer.flush, writer.close):
        with pytest.raises(BackendError, match="stopped"):
            call()

"""One suite that every store backend passes: a directory, shared memory of one host, and a server on another."""

import time
from dataclasses import replace

import pytest

from tracefp4.errors import RecordError
from tracefp4.store import (
    ConflictError,
    DroppedError,
    GoneError,
    Handle,
    MissingTrajectoryError,
    Request,
    Segment,
    SpanError,
)
from tracefp4.store.backends import OpenStore, open_directory, open_remote, open_shared
from tracefp4.store.reader import DirectoryReader
from tracefp4.store.retention import DirectoryRetention
from tracefp4.store.server import StoreServer
from tracefp4.store.writer import DirectoryWriter

BACKENDS = ("directory", "shared", "remote")


@pytest.fixture(params=BACKENDS)
def store(request, tmp_path):
    """An open store of each backend."""
    if request.param == "directory":
        found = open_directory(tmp_path / "records")
        yield found
        found.close()
    elif request.param == "shared":
        root = tmp_path / "shm"
        root.mkdir()
        found = open_shared("contract", capacity_bytes=1 << 22, root=root)
        yield found
        found.close()
        assert list(root.iterdir()) == []
    else:
        local = open_directory(tmp_path / "served")
        server = StoreServer(local, bind="tcp://127.0.0.1:0").start()
        found = open_remote(server.address)
        yield found
        found.close()
        server.stop()
        local.close()


def rows(seed, num_rows, width):
    return bytes((seed * 31 + i * 7 + i // 256) % 256 for i in range(num_rows * width))


def segment(name="a", start=0, num_rows=4, *, seed=1, generation=0, meta=b"meta", columns=None):
    widths = columns or {"3.x": 5, "valid": 1, "empty": 0}
    data = {column: rows(seed + i, num_rows, width) for i, (column, width) in enumerate(widths.items())}
    return Segment(
        trajectory=name, start=start, num_rows=num_rows, columns=data, meta=meta, generation=generation
    )


def written(store, *segments):
    for part in segments:
        assert store.writer.append(part)
    return store.writer.finish(segments[0].trajectory)


def test_what_was_appended_is_read(store):
    part = segment()
    handle = written(store, part)
    assert (handle.trajectory, handle.num_rows) == ("a", 4)
    for target in (handle, "a", Handle.from_json(handle.to_json())):
        assert dict(store.reader.read(target, ["valid", "3.x", "empty"], 0, 4)) == dict(part.columns)
    assert len(handle.to_json()) < 600


def test_a_read_gives_only_the_rows_and_columns_asked_for(store):
    first, second = segment(num_rows=3), segment(start=3, num_rows=5, seed=9)
    handle = written(store, first, second)
    whole = {name: data + second.columns[name] for name, data in first.columns.items()}
    for begin, end in ((0, 8), (2, 5), (3, 3), (7, 8)):
        assert dict(store.reader.read(handle, ["3.x"], begin, end)) == {
            "3.x": whole["3.x"][5 * begin : 5 * end]
        }


def test_stat_says_what_is_there_without_reading_it(store):
    written(
        store, segment(generation=4, meta=b"\x00\xff meta"), segment(start=4, generation=6, meta=b"later")
    )
    found = store.reader.stat("a")
    assert (found.num_rows, found.generation, found.finished, found.meta) == (8, 6, True, b"\x00\xff meta")
    assert dict(found.columns) == {"3.x": 5, "valid": 1, "empty": 0}


def test_names_of_any_text(store):
    names = ["0.1.2", "a/b", "..", "space and \u00e9\u4e16", "x" * 160]
    for name in names:
        written(store, segment(name, seed=len(name)))
    assert dict(store.reader.trajectories()) == dict.fromkeys(sorted(names), True)
    for name in names:
        assert dict(store.reader.read(name, ["3.x"], 0, 4)) == {"3.x": rows(len(name), 4, 5)}


def test_absent_rows_are_named_and_never_guessed(store):
    handle = written(store, segment(num_rows=2), segment(start=5, num_rows=2, columns={"3.x": 5}))
    found = store.reader.read_available(Request(trajectory=handle, columns=("3.x", "valid"), start=0, stop=8))
    assert {(s.column, s.start, s.stop, s.reason) for s in found.absent} == {
        ("3.x", 2, 5, "never_written"),
        ("3.x", 7, 8, "never_written"),
        ("valid", 2, 8, "never_written"),
    }
    assert found.data["3.x"][:10] == rows(1, 2, 5) and found.data["3.x"][25:35] == rows(1, 2, 5)
    assert {name: len(data) for name, data in found.data.items()} == {"3.x": 40, "valid": 8}
    with pytest.raises(SpanError, match="Cannot read rows") as caught:
        store.reader.read(handle, ["3.x", "valid"], 0, 8)
    assert set(caught.value.absent) == set(found.absent)


def test_a_column_that_nobody_wrote_has_no_bytes(store):
    handle = written(store, segment())
    found = store.reader.read_available(Request(trajectory=handle, columns=("9.x",), start=0, stop=4))
    assert dict(found.data) == {} and [(s.column, s.start, s.stop) for s in found.absent] == [("9.x", 0, 4)]


def test_unknown_trajectories(store):
    for ask in (store.reader.stat, lambda name: store.reader.read(name, ["3.x"], 0, 1), store.writer.finish):
        with pytest.raises(MissingTrajectoryError):
            ask("nobody")
    found = store.reader.read_available(Request(trajectory="nobody", columns=("3.x",), start=0, stop=1))
    assert len(found.absent) == 1 and not found.data


def test_an_unfinished_trajectory_is_marked(store):
    store.writer.append(segment())
    store.writer.flush()
    until = time.monotonic() + 5
    while "a" not in store.reader.trajectories() and time.monotonic() < until:
        time.sleep(0.01)
    assert dict(store.reader.trajectories()) == {"a": False}
    assert not store.reader.stat("a").finished
    assert dict(store.reader.read("a", ["valid"], 1, 3)) == {"valid": rows(2, 4, 1)[1:3]}


def test_the_same_rows_twice_are_refused(store):
    store.writer.append(segment())
    with pytest.raises(ConflictError):
        store.writer.append(segment(start=3, seed=5))
        store.writer.finish("a")


def test_a_finished_name_is_not_written_again(store):
    handle = written(store, segment())
    with pytest.raises(ConflictError):
        store.writer.append(segment(seed=5))
        store.writer.finish("a")
    assert dict(store.reader.read(handle, ["valid"], 0, 4)) == {"valid": rows(2, 4, 1)}


def test_abandoned_is_not_read_and_its_name_is_free(store):
    store.writer.append(segment())
    store.writer.abandon("a")
    handle = written(store, segment(seed=7))
    assert dict(store.reader.read(handle, ["3.x"], 0, 4)) == {"3.x": rows(7, 4, 5)}


def test_many_finish_together(store):
    futures = []
    for i in range(20):
        store.writer.append(segment(f"t{i}", seed=i))
        futures.append(store.writer.finish_soon(f"t{i}"))
    handles = [future.result(timeout=30) for future in futures]
    assert [handle.trajectory for handle in handles] == [f"t{i}" for i in range(20)]
    assert len({handle.digest for handle in handles}) == 20
    stats = store.writer.stats
    assert (stats.num_finished, stats.segments_written, stats.bytes_queued) == (20, 20, 0)
    assert stats.bytes_written == 20 * 24 and stats.num_dropped == 0


def test_the_callers_buffer_may_change_at_once(store):
    buffer = bytearray(b"abcd")
    store.writer.append(
        Segment(trajectory="a", start=0, num_rows=4, columns={"valid": memoryview(buffer)}, generation=0)
    )
    buffer[:] = b"XXXX"
    assert dict(store.reader.read(store.writer.finish("a"), ["valid"], 0, 4)) == {"valid": b"abcd"}


def test_retention_by_generation(store):
    handles = [written(store, segment(f"t{i}", generation=i)) for i in range(6)]
    assert set(store.retention.forget(2).trajectories) == {"t0", "t1"}
    assert set(store.retention.discard(5).trajectories) == {"t5"}
    assert set(store.retention.keep_last(2).trajectories) == {"t2"}
    assert list(store.reader.trajectories()) == ["t3", "t4"]
    assert set(store.retention.remove(["t3", "nobody"]).trajectories) == {"t3"}
    with pytest.raises(GoneError):
        store.reader.read(handles[3], ["valid"], 0, 4)
    with pytest.raises(GoneError):
        store.reader.stat(handles[0])
    gone = store.reader.read_available(Request(trajectory=handles[1], columns=("valid",), start=0, stop=4))
    assert [(s.start, s.stop, s.reason) for s in gone.absent] == [(0, 4, "gone")]
    assert dict(store.reader.read(handles[4], ["valid"], 0, 4)) == {"valid": rows(2, 4, 1)}


def test_a_name_written_anew_is_another_trajectory(store):
    old = written(store, segment())
    store.retention.remove(["a"])
    new = written(store, segment(seed=3))
    assert old.digest != new.digest
    assert dict(store.reader.read(new, ["3.x"], 0, 4)) == {"3.x": rows(3, 4, 5)}
    with pytest.raises(GoneError):
        store.reader.read(old, ["3.x"], 0, 4)


@pytest.mark.parametrize(("begin", "end"), [(-1, 2), (3, 2)])
def test_spans_that_are_none_are_refused(store, begin, end):
    handle = written(store, segment())
    with pytest.raises(RecordError):
        store.reader.read_available(Request(trajectory=handle, columns=("valid",), start=begin, stop=end))


def test_a_closed_writer_takes_nothing(store):
    written(store, segment())
    store.writer.close()
    store.writer.close()
    with pytest.raises((RecordError, ValueError), match="closed"):
        store.writer.append(segment("b"))
    assert list(store.reader.trajectories()) == ["a"]


def test_large_segments_travel_whole(store):
    part = segment("big", num_rows=300, columns={"3.x": 1024, "valid": 1})
    handle = written(store, part, replace(part, start=300))
    assert dict(store.reader.read(handle, ["3.x"], 100, 420)) == {
        "3.x": part.columns["3.x"][100 * 1024 :] + part.columns["3.x"][: 120 * 1024]
    }


def test_protocol_classes_are_what_backends_open(tmp_path):
    found = open_directory(tmp_path / "records")
    assert isinstance(found, OpenStore)
    kinds = (DirectoryWriter, DirectoryReader, DirectoryRetention)
    assert [type(side) for side in (found.writer, found.reader, found.retention)] == list(kinds)
    found.close()
    assert issubclass(DroppedError, RecordError)

"""Threads and openings that fail: nobody waits for a thread that is gone, and what it held is named."""

import pytest
from tests.store.material import segment, write

from tracefp4.errors import BackendError, RecordError
from tracefp4.store import DirectoryReader, DirectoryWriter, Prefetcher, Request
from tracefp4.store import backends as opening
from tracefp4.store.backends import open_directory, open_shared


def refuse(*arguments, **named):
    raise BackendError("the reader cannot open")


@pytest.mark.parametrize("side", ["DirectoryReader", "DirectoryRetention"])
def test_an_opening_that_fails_leaves_no_writer(tmp_path, monkeypatch, side):
    opened = []
    make = opening.DirectoryWriter
    monkeypatch.setattr(opening, "DirectoryWriter", lambda *a: opened.append(make(*a)) or opened[-1])
    monkeypatch.setattr(opening, side, refuse)
    with pytest.raises(BackendError, match="cannot open"):
        open_directory(tmp_path)
    assert not opened[0]._thread.is_alive() and not list(tmp_path.glob("*.running"))


def test_shared_memory_whose_opening_fails_is_given_back(tmp_path, monkeypatch):
    opened = []
    make = opening.SharedMemoryWriter
    monkeypatch.setattr(opening, "SharedMemoryWriter", lambda *a: opened.append(make(*a)) or opened[-1])
    monkeypatch.setattr(opening, "DirectoryReader", refuse)
    with pytest.raises(BackendError, match="cannot open"):
        open_shared("leak", capacity_bytes=1 << 22, root=tmp_path)
    with pytest.raises(RecordError, match="closed"):
        opened[0].append(segment("t", 0, 4))
    assert list(tmp_path.iterdir()) == []


def test_every_side_is_closed_although_one_cannot_be(tmp_path, monkeypatch):
    store = open_directory(tmp_path)
    closed = []
    monkeypatch.setattr(store.reader, "close", refuse)
    monkeypatch.setattr(store.retention, "close", lambda: closed.append("retention"))
    with pytest.raises(BackendError, match="cannot open"):
        store.close()
    assert closed == ["retention"] and not list(tmp_path.glob("*.running"))


def test_a_writer_whose_thread_ends_names_what_it_held(tmp_path, monkeypatch):
    writer = DirectoryWriter(tmp_path)
    write(writer, "done")
    writer.append(segment("begun", 0, 4))
    writer.flush()

    def broken(*arguments):
        raise MemoryError("no room")

    monkeypatch.setattr(writer._log, "append", broken)
    writer.append(segment("last", 0, 4))
    with pytest.raises(BackendError, match=r"stopped: MemoryError\('no room'\)"):
        writer.finish("last")
    assert set(writer.stats.dropped) == {"begun", "last"} and writer.stats.num_dropped == 2
    with pytest.raises(BackendError, match=r"2 trajectories were lost: 'begun', 'last'.*MemoryError"):
        writer.close()
    assert dict(DirectoryReader(tmp_path).trajectories())["done"]


def test_a_finish_that_nobody_waits_for_does_not_stop_the_writer(tmp_path):
    with DirectoryWriter(tmp_path) as writer:
        writer.append(segment("a", 0, 4))
        assert not writer.finish_soon("a").cancel()
        assert write(writer, "b").num_rows == 12
    assert dict(DirectoryReader(tmp_path).trajectories()) == {"a": True, "b": True}


def test_a_prefetched_read_that_ends_oddly_is_told_to_whoever_waits(tmp_path, monkeypatch):
    with DirectoryWriter(tmp_path) as writer:
        write(writer, "a")
    reader = DirectoryReader(tmp_path)
    with Prefetcher(reader) as ahead:
        monkeypatch.setattr(reader, "read_available", lambda request: 1 / 0)
        batch = ahead.submit([Request(trajectory="a", columns=("valid",), start=0, stop=4)])
        with pytest.raises(ZeroDivisionError):
            batch.result(timeout_s=10)
        monkeypatch.undo()
        again = ahead.submit([Request(trajectory="a", columns=("valid",), start=0, stop=4)])
        assert len(again.result(timeout_s=10)) == 1

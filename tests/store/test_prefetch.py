"""Reading ahead: right slices in order, within a bound of memory, and no batch that is forgotten."""

import threading
import time
from concurrent.futures import CancelledError

import pytest
from tests.store.material import WIDTHS, rows, segment, write

from tracefp4.errors import BackendError, ConfigError, RecordError
from tracefp4.store import DirectoryReader, DirectoryRetention, DirectoryWriter, Prefetcher, Request

ROW_BYTES = sum(WIDTHS.values())


def requests(*names, start=0, stop=12):
    return [Request(trajectory=name, columns=tuple(WIDTHS), start=start, stop=stop) for name in names]


@pytest.fixture
def reader(tmp_path):
    with DirectoryWriter(tmp_path) as writer:
        for index in range(8):
            write(writer, f"t{index}", generation=index)
        writer.append(segment("open", 3, 4))
    with DirectoryReader(tmp_path) as opened:
        yield opened


class Held:
    """A reader that reads only when it is let."""

    def __init__(self, reader):
        self.reader, self.let, self.begun = reader, threading.Event(), 0
        self.stat = reader.stat

    def read_available(self, request):
        self.begun += 1
        assert self.let.wait(30)
        return self.reader.read_available(request)


def until(condition):
    deadline = time.monotonic() + 10
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.002)
    return condition()


def test_batches_hold_the_slices_that_a_read_gives(reader):
    with Prefetcher(reader) as ahead:
        batches = [ahead.submit(requests(f"t{index}", "open", start=2, stop=9)) for index in range(8)]
        for index, batch in enumerate(batches):
            whole, part = batch.result(timeout_s=30)
            assert dict(whole.data) == {column: rows(f"t{index}", column, 2, 9) for column in WIDTHS}
            assert whole.absent == ()
            assert {(span.start, span.stop, span.reason) for span in part.absent} == {
                (2, 3, "never_written"),
                (7, 9, "never_written"),
            }


def test_what_is_read_and_not_taken_stays_within_the_bound(reader):
    bound = 3 * 12 * ROW_BYTES
    with Prefetcher(reader, max_bytes=bound) as ahead:
        batches = [ahead.submit(requests(f"t{index}")) for index in range(8)]
        assert until(lambda: sum(batch.is_ready() for batch in batches) == 3)
        time.sleep(0.05)
        assert [batch.is_ready() for batch in batches] == [True] * 3 + [False] * 5
        batches[0].result()
        assert until(lambda: batches[3].is_ready())
        assert not batches[4].is_ready()
        for batch in batches[1:]:
            assert len(batch.result(timeout_s=30)) == 1
        assert ahead.peak_bytes == bound


def test_a_cancelled_batch_gives_its_memory_back(reader):
    with Prefetcher(reader, max_bytes=12 * ROW_BYTES) as ahead:
        first, second, third = (ahead.submit(requests(f"t{index}")) for index in range(3))
        assert until(first.is_ready)
        second.cancel()
        first.cancel()
        assert third.result(timeout_s=30)[0].absent == ()
        for batch in (first, second, third):
            with pytest.raises(CancelledError):
                batch.result(timeout_s=30)


def test_a_batch_cancelled_while_it_is_read_gives_its_memory_back(reader):
    held = Held(reader)
    with Prefetcher(held, max_bytes=12 * ROW_BYTES) as ahead:
        first, second = ahead.submit(requests("t0")), ahead.submit(requests("t1"))
        assert until(lambda: held.begun == 1)
        first.cancel()
        held.let.set()
        assert second.result(timeout_s=30)[0].absent == ()
        assert ahead._held == 0


def test_a_batch_that_never_fits_is_refused_and_the_next_goes_on(reader):
    with Prefetcher(reader, max_bytes=12 * ROW_BYTES) as ahead:
        large, small = ahead.submit(requests("t0", "t1")), ahead.submit(requests("t2"))
        with pytest.raises(RecordError, match=rf"the batch has {24 * ROW_BYTES} bytes and max_bytes is"):
            large.result(timeout_s=30)
        assert small.result(timeout_s=30)[0].absent == ()
    with pytest.raises(ConfigError, match="at least 1"):
        Prefetcher(reader, max_bytes=0)


def test_gone_and_unknown_trajectories_are_absent_spans_of_the_batch(reader):
    DirectoryRetention(reader.directory).remove(["t0"])
    with Prefetcher(reader) as ahead:
        gone, right = ahead.submit(requests("t0", "t1")).result(timeout_s=30)
        assert len(gone.absent) == len(WIDTHS) and right.absent == ()


def test_an_error_of_the_medium_is_the_batchs_and_not_the_threads(reader):
    class Failing(Held):
        def read_available(self, request):
            if request.trajectory == "t0":
                raise BackendError("no medium")
            return self.reader.read_available(request)

    with Prefetcher(Failing(reader), max_bytes=12 * ROW_BYTES) as ahead:
        bad, good = ahead.submit(requests("t0")), ahead.submit(requests("t1"))
        with pytest.raises(BackendError, match="no medium"):
            bad.result(timeout_s=30)
        assert good.result(timeout_s=30)[0].absent == ()


def test_closing_ends_every_batch(reader):
    held = Held(reader)
    ahead = Prefetcher(held, max_bytes=12 * ROW_BYTES)
    batches = [ahead.submit(requests(f"t{index}")) for index in range(3)]
    assert until(lambda: held.begun == 1)
    closing = threading.Thread(target=ahead.close)
    closing.start()
    with pytest.raises(CancelledError):
        batches[2].result(timeout_s=30)
    with pytest.raises(TimeoutError):
        batches[0].result(timeout_s=0.01)
    held.let.set()
    closing.join()
    assert batches[0].result(timeout_s=30)[0].absent == ()
    with pytest.raises(CancelledError):
        batches[1].result(timeout_s=30)
    with pytest.raises(RecordError, match="it is closed"):
        ahead.submit([])
    ahead.close()

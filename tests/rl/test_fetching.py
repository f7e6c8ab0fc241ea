"""What the trainer reads of records: the positions asked for, and nothing where a store lost a record's head."""

import pytest
from tests.rl.test_records import opened
from tests.rl.test_rollouts import make

from tracefp4.guidance.joining import records_equal
from tracefp4.rl.fetching import RecordFetcher
from tracefp4.store.reader import DirectoryReader


@pytest.fixture(scope="module")
def samples(tiny, tmp_path_factory):
    return make(tiny, tmp_path_factory.mktemp("made") / "run")[1][0].samples[:2]


def spoil_head(path, handle):
    """Flip bits in the head of a trajectory's first segment on disk: its layout and meta are lost."""
    with DirectoryReader(path) as reader:
        located = reader._locate(handle)
        ref = located.segments[0]
        chunk = next(path.glob(f"{located.writer:08d}-{ref.chunk:08d}.chunk"))
    with open(chunk, "r+b") as file:
        file.seek(ref.offset + 8)
        data = file.read(8)
        file.seek(ref.offset + 8)
        file.write(bytes(byte ^ 1 for byte in data))


def test_lif_4_a_record_whose_head_is_damaged_rounds_to_nearest_and_is_counted(samples, tmp_path):
    # Mutation: only missing and removed trajectories are caught around stat.
    records = opened(tmp_path / "records")
    given = records.settled(records.put(samples, weight_version=0)[0])
    spoil_head(tmp_path / "records", given[0].handle)
    with DirectoryReader(tmp_path / "records") as reader:
        fetcher = RecordFetcher(reader)
        found = list(fetcher.batches([given[:1], given[1:]]))
    assert found[0] == (None,) and records_equal(found[1][0], samples[1].record)
    assert fetcher.take_metrics()["records/missing_positions"] == samples[0].record.length
    assert fetcher.followed_positions(given[0]) == set()
    records.close()


def test_ckp_1_a_run_is_resumed_over_a_damaged_record_which_leaves_first(samples, tmp_path):
    # Mutation: the generation of every held record is read without a guard.
    records = opened(tmp_path / "records")
    given = records.settled(records.put(samples, weight_version=3)[0])
    records.close()
    spoil_head(tmp_path / "records", given[0].handle)
    records = opened(tmp_path / "records", first_step=5, keep=2)
    assert set(records._store.reader.trajectories()) == {sample.trajectory for sample in samples}
    records.put([], weight_version=4)
    assert set(records._store.reader.trajectories()) == {samples[1].trajectory}
    records.close()


@pytest.mark.parametrize("span", [(0, None), (2, None), (2, 5), (0, 3), (4, 10**6), (10**6, None), (5, 2)])
def test_a_record_that_a_sample_holds_is_cut_to_the_positions_asked_for(samples, span):
    # Mutation: without a stop the whole record is returned, whatever the start.
    start, stop = span
    held = samples[0].record
    found = RecordFetcher(None).fetch(samples[0], start=start, stop=stop)
    positions = list(range(held.length))[start:stop]
    assert found.length == len(positions)
    assert not positions or records_equal(found, held.rows(positions[0], positions[-1] + 1))

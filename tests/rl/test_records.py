"""Records of a run on disk: found by step and trajectory, bounded, and cut where a run is resumed."""

import pytest
from tests.rl.tiny_runs import make_config, metrics_of

from tracefp4.errors import BackendError
from tracefp4.guidance.joining import records_equal
from tracefp4.rl.loop import train
from tracefp4.rl.records import RecordKeeper, record_key
from tracefp4.store.protocol import MissingKeyError


@pytest.fixture
def samples(tiny, tmp_path):
    from tests.rl.test_rollouts import make

    return make(tiny, tmp_path / "run")[1][0].samples


def test_a_record_comes_back_as_it_was(samples, tmp_path):
    keeper = RecordKeeper(tmp_path / "records", keep_steps=1)
    size = keeper.put(7, samples)
    assert size["records/count"] == 12
    found = keeper.get(7, samples[5].trajectory)
    assert records_equal(found, samples[5].record)
    assert size["records/bytes"] == sum(len(keeper.store.get(key)) for key in keeper.store.keys())  # noqa: SIM118
    with pytest.raises(MissingKeyError):
        keeper.get(7, "no such trajectory")


def test_old_steps_leave(samples, tmp_path):
    keeper = RecordKeeper(tmp_path / "records", keep_steps=2)
    for step in range(4):
        keeper.put(step, samples[:2])
    assert keeper.store.keys() == [
        record_key(step, sample.trajectory) for step in (2, 3) for sample in samples[:2]
    ]


def test_steps_that_will_be_made_again_leave(samples, tmp_path):
    keeper = RecordKeeper(tmp_path / "records", keep_steps=9)
    for step in range(4):
        keeper.put(step, samples[:1])
    again = RecordKeeper(tmp_path / "records", keep_steps=9, first_step=2)
    assert [key[:6] for key in again.store.keys()] == ["000000", "000001"]  # noqa: SIM118


def test_a_full_disk_is_an_error(samples, tmp_path, monkeypatch):
    keeper = RecordKeeper(tmp_path / "records", keep_steps=1)

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tracefp4.store.directory._write_synced", full)
    with pytest.raises(
        BackendError, match=r"000000/0.0.0.*No space left on device. The disk must take \d+ bytes"
    ):
        keeper.put(0, samples)


def test_a_run_keeps_its_records_when_asked(tiny, tmp_path):
    config = make_config(*tiny, tmp_path / "run", run__save_records=True, run__keep_records=2, train__steps=3)
    train(config)
    rows = metrics_of(config)
    assert all(row["records/count"] == 12 and row["records/bytes"] > 12 * 1000 for row in rows)
    keeper = RecordKeeper(tmp_path / "run" / "records", keep_steps=2, first_step=3)
    assert {key[:6] for key in keeper.store.keys()} == {"000001", "000002"}  # noqa: SIM118
    record = keeper.get(2, "2.0.0")
    assert {part.codec for part in record.sites.values()} == {"mantissa"}
    plain = train(make_config(*tiny, tmp_path / "plain", train__steps=1))
    assert plain["final"]["steps"] == 1
    assert not (tmp_path / "plain" / "records").exists()

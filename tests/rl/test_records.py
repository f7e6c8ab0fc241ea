"""Records of a run in a store: exact, bounded, cut where a run is resumed, and never followed where they are lost."""

import shutil
import time
import tracemalloc
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pytest
from tests.guidance.sample_records import recorded
from tests.rl.test_rollouts import make
from tests.rl.tiny_runs import changed, make_config, metrics_of

from tracefp4.errors import BackendError, ConfigError
from tracefp4.guidance.joining import records_equal
from tracefp4.rl.fetching import RecordFetcher
from tracefp4.rl.loop import train
from tracefp4.rl.opening import store_name
from tracefp4.rl.pending import samples_to_bytes
from tracefp4.rl.records import Retention, RunRecords
from tracefp4.rl.samples import TrainingSample
from tracefp4.store import Request
from tracefp4.store.backends import open_directory, open_remote, open_shared
from tracefp4.store.pending import WriterOptions
from tracefp4.store.reader import DirectoryReader
from tracefp4.store.server import StoreServer
from tracefp4.store.shared_memory import PREFIX, ROOT

PLAIN = "tests.rl.tiny_runs:share_plain"
TIMES = ("rollout_seconds", "rollout_tokens_per_s", "train_seconds")
# Two optimizer steps a rollout, so that old log-probs are scored in a pass of their own, one rollout ahead.
LOOP = {
    "task__reward": PLAIN,
    "train__steps": 4,
    "train__rollout_ahead": 1,
    "train__optimizer_steps_per_rollout": 2,
    "train__micro_batch_tokens": 64,
}


@pytest.fixture(scope="module")
def samples(tiny, tmp_path_factory):
    return make(tiny, tmp_path_factory.mktemp("made") / "run")[1][0].samples


@pytest.fixture(scope="module")
def in_memory(tiny, tmp_path_factory):
    """(config, final, rows) of the run whose records never leave the process."""
    config = make_config(*tiny, tmp_path_factory.mktemp("memory") / "run", **LOOP)
    return config, train(config)["final"], metrics_of(config)


def opened(path, *, keep=9, first_step=0, options=None, prefix=""):
    store = open_directory(path, options=options)
    return RunRecords(store, retention=Retention(keep_versions=keep, prefix=prefix), first_step=first_step)


def at_step(samples, step):
    """The same samples, as a later step would have made them."""
    found = []
    for sample in samples:
        name = f"{step}.{sample.trajectory.partition('.')[2]}"
        record = sample.record
        found.append(
            replace(
                sample,
                trajectory=name,
                record=replace(record, identity=replace(record.identity, trajectory=name)),
            )
        )
    return found


def names_in(path):
    reader = DirectoryReader(path)
    found = list(reader.trajectories())
    reader.close()
    return found


def comparable(rows):
    return [
        {name: value for name, value in row.items() if name not in TIMES and not name.startswith("records/")}
        for row in rows
    ]


def test_a_record_comes_back_as_it_was(samples, tmp_path):
    records = opened(tmp_path / "records")
    given, metrics = records.put(samples, weight_version=0)
    assert all(sample.record is None and sample.handle is None for sample in given)
    given = records.settled(given)
    assert all(len(sample.handle.to_json()) < 600 for sample in given)
    fetcher = RecordFetcher(records._store.reader)
    for sample, before in zip(given, samples, strict=True):
        assert records_equal(fetcher.fetch(sample), before.record)
    assert metrics["records/count"] == 12
    assert metrics["records/bytes"] > sum(sample.record.num_bytes().total for sample in samples)
    assert fetcher.take_metrics()["records/missing_positions"] == 0
    records.close()


def test_res_1_each_consumer_reads_only_its_positions_sites_and_layers(samples, tmp_path):
    records = opened(tmp_path / "records")
    given = records.settled(records.put(samples, weight_version=0)[0])
    reader = records._store.reader
    site = sorted(samples[0].record.sites)[0]
    fetcher = RecordFetcher(reader, sites={site}, routed_layers=[1])
    part = fetcher.fetch(given[0], start=2, stop=5)
    before = samples[0].record.rows(2, 5)
    assert set(part.sites) == {site} and part.layers_routed == (1,)
    assert (part.sites[site].payload == before.sites[site].payload).all()
    assert (part.routed[:, 0] == before.routed[:, 1]).all()
    row_bytes = fetcher.take_metrics()["records/read_bytes"] / 3
    size = before.sites[site].payload.shape[1] + before.sites[site].block_scales.shape[1]
    assert row_bytes <= size + 1 + 4 + 1 + before.routed.shape[2]
    records.close()


def test_old_versions_leave_and_the_newest_stay(samples, tmp_path):
    records = opened(tmp_path / "records", keep=2)
    for step in range(4):
        records.settled(records.put(at_step(samples[:2], step), weight_version=step)[0])
    records.close()
    assert names_in(tmp_path / "records") == ["2.0.0", "2.0.1", "3.0.0", "3.0.1"]
    again = opened(tmp_path / "records", keep=2, first_step=4)
    again.put(at_step(samples[:1], 4), weight_version=4)
    again.close()
    assert [name[0] for name in names_in(tmp_path / "records")][:2] == ["3", "3"]


def test_ckp_1_steps_that_will_be_made_again_leave_finished_or_not(samples, tmp_path):
    records = opened(tmp_path / "records")
    for step in range(3):
        records.settled(records.put(at_step(samples[:1], step), weight_version=0)[0])
    records._store.writer.append(replace_trajectory(records, at_step(samples[:1], 9)[0]))
    records._store.writer.flush()
    records.close()
    assert len(names_in(tmp_path / "records")) == 4
    again = opened(tmp_path / "records", first_step=2)
    made = again.settled(again.put(at_step(samples[:1], 2), weight_version=1)[0])
    found = RecordFetcher(again._store.reader).fetch(made[0])
    assert found is not None, "the new step's record was refused: the name was taken"
    assert records_equal(found, at_step(samples[:1], 2)[0].record)
    again.close()
    assert names_in(tmp_path / "records") == ["0.0.0", "1.0.0", "2.0.0"]


def replace_trajectory(records, sample):
    return records._segment(sample.record, generation=0)


def test_runs_that_share_a_store_leave_each_other_alone(samples, tmp_path):
    path = tmp_path / "records"
    first, second = opened(path, keep=1, prefix="a/"), opened(path, keep=1, prefix="b/")
    first.settled(first.put(samples[:1], weight_version=0)[0])
    second.settled(second.put(samples[:1], weight_version=7)[0])
    second.put(at_step(samples[:1], 1), weight_version=8)
    for records in (first, second):
        records.close()
    assert names_in(path) == ["a/0.0.0", "b/1.0.0"]
    opened(path, prefix="b/", first_step=0).close()
    assert names_in(path) == ["a/0.0.0"]


def long_sample(num_tokens):
    """A sample of one prompt token, with a record of 4 sites and 2 routed layers."""
    record = recorded(length=num_tokens - 1)
    return TrainingSample(
        trajectory=record.identity.trajectory,
        prompt_ids=(1,),
        token_ids=(2,) * (num_tokens - 1),
        rollout_logprobs=(-1.0,) * (num_tokens - 1),
        weight_versions=(0,) * (num_tokens - 1),
        record=record,
    )


def test_res_1_memory_does_not_grow_with_the_steps(tmp_path):
    sample = long_sample(500)
    records = opened(tmp_path / "records", keep=2)
    fetcher = RecordFetcher(records._store.reader)
    held, size = [], 0.0
    tracemalloc.start()
    for step in range(21):
        given, metrics = records.put(at_step([sample], step), weight_version=step)
        size = metrics["records/bytes"]
        given = records.settled(given)
        assert all(all(found) for found in fetcher.batches([given]))
        fetcher.take_metrics()
        del given
        held.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    # Fifteen records were written in between; what the store remembers of each is far less than the record.
    assert held[20] - held[5] < size, (held, size)
    assert not records._pending and len(records._generations) == 2
    records.close()


def test_a_checkpoint_holds_pending_records_itself(samples, tmp_path):
    records = opened(tmp_path / "records")
    given, _ = records.put(samples, weight_version=0)
    whole = records.loaded(given)
    assert samples_to_bytes([whole]) == samples_to_bytes([samples])
    assert all(sample.handle is not None for sample in records.settled(given))
    records.close()


def test_res_4_a_full_disk_stops_the_run_before_it_trains(tiny, tmp_path, monkeypatch):
    from tracefp4.store import disk

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    config = make_config(*tiny, tmp_path / "run", records__store="directory", **LOOP)
    written = disk.write_all
    calls = []

    def write_all(descriptor, data, offset):
        calls.append(len(data))
        return (full if len(calls) > 8 else written)(descriptor, data, offset)

    monkeypatch.setattr("tracefp4.store.disk.write_all", write_all)
    with pytest.raises(BackendError, match=r"records.*No space.*must take \d+ bytes"):
        train(config)
    monkeypatch.undo()
    assert train(config, resume=True)["final"]["steps"] == 4


@pytest.mark.parametrize("policy", ["wait", "drop_trajectory"])
def test_a_slow_store_waits_or_drops_whole_trajectories(samples, tmp_path, monkeypatch, policy):
    from tracefp4.store import disk

    written = disk.write_all

    def slow(descriptor, data, offset):
        time.sleep(0.02)
        written(descriptor, data, offset)

    one = replace_trajectory(opened(tmp_path / "size"), samples[0]).num_bytes
    options = WriterOptions(policy=policy, max_queue_bytes=4 * one + 2048)
    records = opened(tmp_path / "records", options=options)
    monkeypatch.setattr("tracefp4.store.disk.write_all", slow)
    given, metrics = records.put(samples, weight_version=0)
    assert records._store.writer.stats.bytes_queued <= options.max_queue_bytes
    given = records.settled(given)
    fetcher = RecordFetcher(records._store.reader)
    found = [fetcher.fetch(sample) for sample in given]
    if policy == "wait":
        assert metrics["records/wait_s"] > 0 and metrics["records/dropped_trajectories"] == 0
        assert all(records_equal(a, b.record) for a, b in zip(found, samples, strict=True))
    else:
        lost = [sample.trajectory for sample in given if sample.handle is None]
        assert lost and metrics["records/dropped_trajectories"] == len(lost) < 12
        assert sorted(records.dropped()) == sorted(lost)
        for record, sample in zip(found, samples, strict=True):
            assert record is None if sample.trajectory in lost else records_equal(record, sample.record)
    assert not records._store.writer._pending, "a writer remembers nothing of what is finished or dropped"
    records.close()


@pytest.fixture
def server(tmp_path):
    """A served directory: (address, its reader)."""
    local = open_directory(tmp_path / "served")
    found = StoreServer(local, bind="tcp://127.0.0.1:0").start()
    yield found.address, local.reader
    found.stop()
    local.close()


@pytest.mark.parametrize("store", ["directory", "shared", "remote"])
def test_a_run_is_bit_for_bit_the_one_with_records_in_memory(tiny, tmp_path, in_memory, server, store):
    address, served = server
    store = address if store == "remote" else store
    config = make_config(*tiny, tmp_path / "run", records__store=store, records__capacity_mb=8.0, **LOOP)
    assert train(config)["final"] == in_memory[1]
    rows = metrics_of(config)
    assert comparable(rows) == comparable(in_memory[2])
    assert all(row["records/count"] == 12 for row in rows)
    assert all(row["records/read_bytes"] > 0 and row["records/missing_positions"] == 0 for row in rows[1:])
    if store == address:
        assert {name.partition("/")[2][0] for name in served.trajectories()} >= {"2", "3"}
    assert not (ROOT / f"{PREFIX}{store_name(Path(config.run.dir))}").exists()


@pytest.mark.parametrize("store", ["shared", "remote"])
def test_ckp_1_a_run_that_stopped_continues_whatever_its_store_kept(tiny, tmp_path, in_memory, server, store):
    """Shared memory is gone with the first process; a server still has steps that the run makes again."""
    address, served = server
    store = address if store == "remote" else store
    settings = LOOP | {"train__steps": 2, "run__checkpoint_every": 1}
    config = make_config(*tiny, tmp_path / "run", records__store=store, records__capacity_mb=8.0, **settings)
    train(config)
    whole = changed(config, train__steps=4)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_000002")  # so that step 1 is made again
    assert train(whole, resume=True)["final"] == in_memory[1]
    assert comparable(metrics_of(whole)) == comparable(in_memory[2])
    if store == address:
        own = store_name(tmp_path / "run")
        assert {name.partition("/")[0] for name in served.trajectories()} == {own}
        assert all(served.trajectories().values())


def test_a_restarted_server_costs_guidance_and_not_the_run(samples, tmp_path, monkeypatch):
    local = open_directory(tmp_path / "served")
    server = StoreServer(local, bind="tcp://127.0.0.1:0").start()
    records = RunRecords(open_remote(server.address), retention=Retention(keep_versions=1))
    monkeypatch.setattr(records._store.writer, "finish_soon", lambda name: Future())
    records.put(samples[:3], weight_version=0)
    monkeypatch.undo()
    records._store.writer.flush()  # what was appended has arrived
    server.stop()
    server = StoreServer(local, bind=server.address).start()
    for sample in samples[:3]:
        records._pending[sample.trajectory] = records._store.writer.finish_soon(sample.trajectory)
    given = records.settled(samples[:3])
    assert [sample.handle for sample in given] == [None] * 3
    assert sorted(records.dropped()) == [sample.trajectory for sample in samples[:3]]
    again = records.settled(records.put(at_step(samples[:2], 1), weight_version=0)[0])
    assert all(sample.handle is not None for sample in again)
    records.close()
    server.stop()
    local.close()


def test_lost_spans_round_to_nearest_and_are_counted(tiny, tmp_path, in_memory, monkeypatch):
    """Every second trajectory of a step is damaged on disk: the run goes on as if those had never been recorded."""
    settled = RunRecords.settled

    def damaged(self, samples):
        found = settled(self, samples)
        for sample in found[::2]:
            spoil(Path(config.run.dir) / "records", sample.handle)
        return found

    def unrecorded(self, batch_samples):
        return [
            replace(s, handle=None) if i % 2 == 0 else s for i, s in enumerate(settled(self, batch_samples))
        ]

    config = make_config(*tiny, tmp_path / "run", records__store="directory", **LOOP)
    monkeypatch.setattr(RunRecords, "settled", damaged)
    final = train(config)["final"]
    rows = metrics_of(config)[1:]
    assert all(row["records/missing_positions"] > 0 for row in rows)
    assert final["weights_hash"] != in_memory[1]["weights_hash"]
    monkeypatch.setattr(RunRecords, "settled", unrecorded)
    bare = make_config(*tiny, tmp_path / "bare", records__store="directory", **LOOP)
    assert train(bare)["final"] == final
    assert [row["guidance/followed_fraction"] for row in metrics_of(bare)[1:]] == [
        row["guidance/followed_fraction"] for row in rows
    ]


def spoil(path, handle):
    """Flip a bit of every byte that the column "valid" of a trajectory has on disk."""
    reader = DirectoryReader(path)
    located = reader._locate(handle)
    for ref in located.segments:
        head = reader._head(located, ref)
        at = head.body_offset + head.num_rows * head.layout.places["valid"][1]
        chunk = next(path.glob(f"{located.writer:08d}-{ref.chunk:08d}.chunk"))
        with open(chunk, "r+b") as file:
            file.seek(at)
            data = file.read(head.num_rows)
            file.seek(at)
            file.write(bytes(byte ^ 1 for byte in data))
    reader.close()
    reader = DirectoryReader(path)
    found = reader.read_available(
        Request(trajectory=handle, columns=("valid",), start=0, stop=handle.num_rows)
    )
    assert [span.reason for span in found.absent] == ["damaged"]
    reader.close()


def test_lif_4_a_record_that_was_never_written_is_not_followed_as_zeros(samples, tmp_path):
    records = opened(tmp_path / "records")
    whole = replace_trajectory(records, samples[0])
    half = whole.num_rows // 2
    columns = {
        name: data[: len(data) // whole.num_rows * half] if name == "0.x" else data
        for name, data in whole.columns.items()
    }
    first = {name: data for name, data in columns.items() if name != "0.x"}
    records._store.writer.append(replace(whole, columns=first))
    records._store.writer.append(replace(whole, num_rows=half, columns={"0.x": columns["0.x"]}))
    handle = records._store.writer.finish(whole.trajectory)
    fetcher = RecordFetcher(records._store.reader)
    record = fetcher.fetch(replace(samples[0], record=None, handle=handle))
    assert record.valid.tolist() == [True] * half + [False] * (whole.num_rows - half)
    assert fetcher.take_metrics()["records/missing_positions"] == whole.num_rows - half
    records.close()


def test_a_removed_record_rounds_to_nearest(samples, tmp_path):
    records = opened(tmp_path / "records")
    given = records.settled(records.put(samples[:2], weight_version=0)[0])
    records._store.retention.remove([given[0].trajectory])
    fetcher = RecordFetcher(records._store.reader)
    found = list(fetcher.batches([given[:1], given[1:]]))
    assert found[0] == (None,) and records_equal(found[1][0], samples[1].record)
    assert fetcher.take_metrics()["records/missing_positions"] == samples[0].record.length
    records.close()


def test_the_next_group_is_read_meanwhile_and_no_further(samples, tmp_path):
    records = opened(tmp_path / "records")
    given = records.settled(records.put(samples, weight_version=0)[0])
    fetcher = RecordFetcher(records._store.reader)
    asked = []
    fetch = fetcher._group
    fetcher._group = lambda group: asked.append(group[0].trajectory) or fetch(group)
    groups = [given[i : i + 3] for i in range(0, 12, 3)]
    for place, _ in enumerate(fetcher.batches(groups)):
        time.sleep(0.05)
        assert len(asked) == min(place + 2, 4)
    records.close()


def test_records_that_would_leave_before_training_are_refused(tiny, tmp_path):
    config = make_config(*tiny, tmp_path / "run", train__rollout_ahead=3)
    with pytest.raises(ConfigError, match=r"records.keep_versions.*at least 4 with train.rollout_ahead = 3"):
        changed(config, records__store="directory", records__keep_versions=3)


def test_shared_memory_is_given_back(samples, tmp_path):
    store = open_shared("run", capacity_bytes=1 << 22, root=tmp_path)
    records = RunRecords(store, retention=Retention(keep_versions=1))
    records.settled(records.put(samples, weight_version=0)[0])
    records.close()
    assert list(tmp_path.iterdir()) == []

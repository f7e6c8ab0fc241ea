"""A stopped run continues bit for bit: weights, moments, prompts, pending rollouts, records and metrics."""

import json
import shutil
from pathlib import Path

import pytest
from tests.rl.tiny_runs import changed, make_config, metrics_of

from tracefp4.errors import ConfigError
from tracefp4.rl import checkpoint
from tracefp4.rl.loop import train
from tracefp4.rl.opening import open_run
from tracefp4.rl.rundir import RunDirectory
from tracefp4.store.reader import DirectoryReader

PLAIN = "tests.rl.tiny_runs:share_plain"
TIMES = ("rollout_seconds", "rollout_tokens_per_s", "train_seconds", "records/wait_s", "records/read_wait_s")
# Pending rollouts of a resumed run come from its checkpoint, not from the store.
READS = ("records/read_bytes",)
HARD = {
    "train__steps": 5,
    "train__rollout_ahead": 1,
    "train__optimizer_steps_per_rollout": 2,
    "train__warmup_steps": 6,
    "train__weight_decay": 0.1,
    "records__store": "directory",
    "records__keep_versions": 2,
    "loss__kl_coef": 0.01,
    "task__reward": PLAIN,
}


def timeless(rows):
    return [{name: value for name, value in row.items() if name not in (*TIMES, *READS)} for row in rows]


def stored(config):
    """Trajectory -> all its bytes in the run's store."""
    reader = DirectoryReader(Path(config.run.dir) / "records")
    found = {}
    for name, is_finished in reader.trajectories().items():
        stat = reader.stat(name)
        found[name] = (is_finished, stat.meta, dict(reader.read(name, stat.columns, 0, stat.num_rows)))
    reader.close()
    return found


@pytest.fixture(scope="module")
def whole(tiny, tmp_path_factory):
    """(config, manifest) of an uninterrupted run with every part of the state in use."""
    config = make_config(*tiny, tmp_path_factory.mktemp("whole") / "run", **HARD)
    return config, train(config)


def stopped(tiny, path, *, after, **changes):
    """A run that stopped after some steps (as if the rest had never been asked for)."""
    settings = HARD | {"train__steps": after} | changes
    config = make_config(*tiny, path, **settings)
    train(config)
    return changed(config, train__steps=5)


@pytest.mark.parametrize("after", [1, 3])
def test_ends_in_the_same_bytes(tiny, tmp_path, whole, after):
    config = stopped(tiny, tmp_path / "run", after=after)
    manifest = train(config, resume=True)
    assert manifest["final"] == whole[1]["final"]
    assert timeless(metrics_of(config)) == timeless(metrics_of(whole[0]))
    mine, theirs = (stored(found) for found in (config, whole[0]))
    assert {name[0] for name in theirs} == {"3", "4"}
    assert mine == theirs


def test_a_torn_newest_checkpoint_falls_back_to_the_one_before(tiny, tmp_path, whole):
    config = stopped(tiny, tmp_path / "run", after=3)
    newest = tmp_path / "run" / "checkpoints" / "step_000003"
    (newest / "model.safetensors").write_bytes(b"torn")
    seen = []
    manifest = train(config, resume=True, on_step=seen.append)
    assert [row["step"] for row in seen] == [2, 3, 4]
    assert manifest["final"] == whole[1]["final"]
    assert timeless(metrics_of(config)) == timeless(metrics_of(whole[0]))


def test_without_any_checkpoint_it_starts_again(tiny, tmp_path, whole):
    config = stopped(tiny, tmp_path / "run", after=2)
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    assert train(config, resume=True)["final"] == whole[1]["final"]
    assert timeless(metrics_of(config)) == timeless(metrics_of(whole[0]))


def test_killed_before_its_config_was_written_it_starts_again(tiny, tmp_path):
    config = make_config(*tiny, tmp_path / "run", train__steps=1)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "manifest.json").write_text("{}")
    manifest = train(config, resume=True)
    assert manifest["final"]["steps"] == 1


def test_a_finished_run_is_left_as_it_is(whole):
    before = metrics_of(whole[0])
    assert train(whole[0], resume=True) == whole[1]
    assert metrics_of(whole[0]) == before


def test_the_starting_checkpoint_may_be_gone(tiny, tmp_path):
    start = shutil.copytree(tiny[0], tmp_path / "start")
    config = make_config(start, tiny[1], tmp_path / "run", train__steps=1)
    train(config)
    shutil.rmtree(start)
    manifest = train(changed(config, train__steps=3), resume=True)
    again = train(make_config(*tiny, tmp_path / "whole", train__steps=3))
    assert manifest["final"]["weights_hash"] == again["final"]["weights_hash"]


@pytest.mark.parametrize(
    "changes",
    [
        {"train__lr": 1.0},
        {"task__seed": 5},
        {"quantization__guidance": "none"},
        {"loss__clip_high": 0.4},
        {"run__eval_items": 4},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_other_settings_are_refused(tiny, tmp_path, changes):
    # Mutations: a comparison of what does not count (run.keep_last), or of values that JSON changes (tuples).
    config = stopped(tiny, tmp_path / "run", after=1)
    ((name, value),) = changes.items()
    key = name.replace("__", r"\.")
    only = (
        rf"other settings: {key} was [^;]+, now {json.dumps(value)}\. Only rollout\.keep_pool, train\.steps"
    )
    with pytest.raises(ConfigError, match=rf"--resume: the run was started with {only}"):
        train(changed(config, **changes, run__keep_last=7), resume=True)


def test_output_settings_may_change(tiny, tmp_path, whole):
    config = stopped(tiny, tmp_path / "run", after=2)
    other = changed(config, run__checkpoint_every=2, run__keep_last=1, train__transmission_every=1)
    assert train(other, resume=True)["final"] == whole[1]["final"]
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_000005"]


def test_more_steps_are_evaluated_on_the_same_items(tiny, tmp_path):
    config = make_config(*tiny, tmp_path / "run", train__steps=1, run__eval_items=4)
    first = train(config)["evaluations"]
    both = train(changed(config, train__steps=2), resume=True)["evaluations"]
    assert list(both) == ["0", "1", "2"]
    assert both["1"] == first["1"]
    assert len({entry["held_out"] for entry in both.values()}) == 1
    assert both["2"]["num_items"] == 4
    assert both["2"]["temperature"] == 0.0


def test_evaluations_that_cannot_be_compared_are_refused(tiny, tmp_path):
    held_out = shutil.copy(tiny[1], tmp_path / "held_out.jsonl")
    config = make_config(
        *tiny, tmp_path / "run", train__steps=1, run__eval_items=4, task__eval_path=str(held_out)
    )
    train(config)
    with pytest.raises(ConfigError, match=r"evaluation at step 0 .* cannot be compared"):
        train(changed(config, train__steps=2, run__eval_temperature=1.0), resume=True)
    lines = Path(held_out).read_text(encoding="utf-8").splitlines()
    Path(held_out).write_text("\n".join(reversed(lines)), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"evaluation at step 0 .* cannot be compared"):
        train(changed(config, train__steps=2), resume=True)


def test_nothing_to_resume_is_refused(tiny, tmp_path):
    config = make_config(*tiny, tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="holds no run .* Start it without --resume"):
        train(config, resume=True)
    (tmp_path / "nowhere").mkdir()
    (tmp_path / "nowhere" / "letters.txt").write_text("not a run")
    with pytest.raises(ConfigError, match="holds no run .* but letters.txt"):
        train(config, resume=True)


def test_changed_prompts_are_refused(tiny, tmp_path):
    prompts = shutil.copy(tiny[1], tmp_path / "prompts.jsonl")
    config = make_config(tiny[0], prompts, tmp_path / "run", train__steps=1)
    train(config)
    with open(prompts, "a", encoding="utf-8") as file:
        file.write('{"prompt": "one more", "answer": "9"}\n')
    with pytest.raises(ConfigError, match="Data state belongs to source"):
        train(changed(config, train__steps=2), resume=True)


def test_restored_state_is_the_saved_one(tiny, tmp_path):
    config = stopped(tiny, tmp_path / "run", after=2)
    run = open_run(config, RunDirectory(config.run.dir, resume=True), resume=True)
    found = checkpoint.latest(run.directory.checkpoints)
    saved = checkpoint.load_optimizer(found)
    restored = run.trainer.optimizer.state_tensors()
    assert saved.keys() == restored.keys()
    assert {name.partition(".")[0] for name in saved} == {"master", "exp_avg", "exp_avg_sq", "step"}
    assert all(saved[name].equal(restored[name]) for name in saved)
    assert (run.step, run.engine.weight_version, len(run.pending)) == (2, 1, 1)
    assert run.stream.next_index == 6

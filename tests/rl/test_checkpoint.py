"""Checkpoints are whole or absent, load in plain transformers, and keep what was there when the disk is full."""

import json
import os
import random
import shutil
import subprocess

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from tests.rl.tiny_runs import make_config

from tracefp4.errors import ConfigError, RecordError
from tracefp4.rl import checkpoint
from tracefp4.rl.opening import open_run
from tracefp4.rl.rundir import RunDirectory

TMPFS_BYTES = 4_000_000


@pytest.fixture
def run(tiny, tmp_path):
    config = make_config(*tiny, tmp_path / "run", run__keep_last=2)
    return open_run(config, RunDirectory(config.run.dir, resume=False), resume=False)


def save_at(run, step):
    run.step = step
    run.save()
    return run.directory.checkpoints / f"step_{step:06d}"


def test_holds_everything_under_checksums(run):
    path = save_at(run, 3)
    content = json.loads((path / "state.json").read_text())
    assert set(content["checksums"]) | {"state.json"} == {file.name for file in path.iterdir()}
    assert {"model.safetensors", "optimizer.safetensors", "rng.json", "pending.bin", "tokenizer.json"} <= set(
        content["checksums"]
    )
    assert checkpoint.latest(path.parent) == path
    state = checkpoint.load_state(path)
    assert (state.step, state.weight_version, state.data["next_index"]) == (3, 0, 0)
    assert state.plan["static_exponents"] == run.applied.plan.summary()["static_exponents"]


def test_loads_in_plain_transformers_with_equal_logits(run):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = save_at(run, 1)
    text = (path / "config.json").read_text()
    assert "tracefp4" not in text
    loaded = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(path)
    run.applied.undo()
    ids = torch.tensor([tokenizer.encode("one 2 three")])
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, run.applied.model(ids).logits)
    assert loaded.generation_config.eos_token_id == run.policy.tokenizer.eos_token_id


def test_saving_leaves_the_patched_model_as_it_was(run):
    before = (run.applied.model.config._attn_implementation, run.applied.model.config.dtype)
    save_at(run, 1)
    assert (run.applied.model.config._attn_implementation, run.applied.model.config.dtype) == before


@pytest.mark.parametrize("damage", ["state.json", "optimizer.safetensors", "rng.json"])
@pytest.mark.parametrize("how", ["missing", "cut", "flipped"])
def test_a_torn_checkpoint_is_passed_over(run, damage, how):
    older, newer = save_at(run, 1), save_at(run, 2)
    file = newer / damage
    data = bytearray(file.read_bytes())
    if how == "missing":
        file.unlink()
    elif how == "cut":
        file.write_bytes(data[: len(data) // 2])
    else:
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    if (damage, how) == ("state.json", "flipped"):
        assert not checkpoint.is_whole(newer) or checkpoint.latest(newer.parent) == newer
    else:
        assert checkpoint.latest(newer.parent) == older


def test_keeps_the_last_ones_and_clears_leftovers(run):
    for step in (1, 2, 3):
        (run.directory.checkpoints / f".step_{step:06d}.tmp").mkdir(parents=True)
        save_at(run, step)
    assert sorted(path.name for path in run.directory.checkpoints.iterdir()) == ["step_000002", "step_000003"]


def test_what_lies_behind_the_resumed_step_is_discarded(run):
    first, second = save_at(run, 1), save_at(run, 2)
    (second / "state.json").unlink()
    checkpoint.discard_after(first.parent, checkpoint.latest(first.parent))
    assert [path.name for path in first.parent.iterdir()] == ["step_000001"]


def test_another_schema_is_refused(run):
    path = save_at(run, 1)
    content = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps({**content, "schema_version": 99}))
    with pytest.raises(RecordError, match="schema"):
        checkpoint.load_state(path)


def test_random_state_comes_back(run):
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    np.random.normal()
    path = save_at(run, 1)
    drawn = random.random(), np.random.normal(), torch.rand(3)
    random.seed(7), np.random.seed(7), torch.manual_seed(7)
    checkpoint.restore_rng(path)
    assert random.random() == drawn[0]
    assert np.random.normal() == drawn[1]
    assert torch.equal(torch.rand(3), drawn[2])


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("os.replace", OSError(28, "No space left on device")),
        (
            "tracefp4.rl.checkpoint.save_file",
            SafetensorError("I/O error: No space left on device (os error 28)"),
        ),
        ("tracefp4.rl.checkpoint.save_model", Exception("No space left on device (os error 28)")),
    ],
    ids=["rename", "safetensors", "tokenizers"],
)
def test_a_full_disk_loses_nothing(run, monkeypatch, name, error):
    path = save_at(run, 1)

    def full(*args, **kwargs):
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(name, full)
        with pytest.raises(
            ConfigError, match=r"step_000002 could not be written \(\d+ bytes\): the disk is full"
        ):
            save_at(run, 2)
    assert [entry.name for entry in path.parent.iterdir()] == ["step_000001"]
    assert checkpoint.latest(path.parent) == path


def test_any_other_failure_is_shown_and_cleaned_up(run, monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("a bug")

    monkeypatch.setattr("tracefp4.rl.checkpoint.save_file", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        save_at(run, 1)
    assert list(run.directory.checkpoints.iterdir()) == []


@pytest.fixture
def small_disk(tmp_path):
    """A real file system of 4 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={TMPFS_BYTES}", "tmpfs", str(folder)]
    if (
        os.geteuid() != 0
        or shutil.which("mount") is None
        or subprocess.run(command, capture_output=True).returncode
    ):
        pytest.skip("mounting a tmpfs is not allowed here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("share", [0.02, 0.3, 0.6, 0.98])
def test_a_disk_that_is_really_full(tiny, small_disk, share):
    config = make_config(*tiny, small_disk / "run")
    run = open_run(config, RunDirectory(config.run.dir, resume=False), resume=False)
    first = save_at(run, 1)
    size = sum(file.stat().st_size for file in first.iterdir())
    filler = small_disk / "filler"
    filler.write_bytes(b"x" * (shutil.disk_usage(small_disk).free - int(share * size)))
    with pytest.raises(ConfigError, match=r"the disk is full.*What was written before is intact.*--resume"):
        save_at(run, 2)
    assert [entry.name for entry in first.parent.iterdir()] == ["step_000001"]
    assert checkpoint.latest(first.parent) == first
    filler.unlink()
    again = open_run(config, RunDirectory(config.run.dir, resume=True), resume=True)
    assert again.step == 1
    assert save_at(again, 2).is_dir()

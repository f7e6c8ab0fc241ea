"""An output appears whole or not at all: kills at every step, full disks, and what may be replaced."""

import errno
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.checkpoints.tiny_families import save_tiny
from transformers import AutoModelForCausalLM

from tracefp4.checkpoints import Checkpoint, CheckpointWriter, ContainerWriter, TensorSpec
from tracefp4.checkpoints import target as target_module
from tracefp4.checkpoints.target import plan_shards, remove_leftovers
from tracefp4.errors import BackendError, ConfigError, FormatError

ROOT = Path(__file__).parents[2]
TENSORS = {f"t{i}": torch.full((4, 8), i, dtype=torch.bfloat16) for i in range(5)}
SPECS = [TensorSpec(name, value.dtype, tuple(value.shape)) for name, value in TENSORS.items()]
TENSOR_BYTES = 64
CONFIG = {"model_type": "qwen3_moe", "name": "\u00e9"}


def _fill(writer, *, offset=0):
    for name, value in TENSORS.items():
        writer.write(name, value + offset)
    return writer.finish(CONFIG)


def _write(out, *, offset=0, **options):
    with CheckpointWriter(out, SPECS, **options) as writer:
        return _fill(writer, offset=offset)


def _holds(out, *, offset=0):
    with Checkpoint(out) as checkpoint:
        assert checkpoint.config == CONFIG
        assert list(checkpoint.specs) == list(TENSORS)
        return all(torch.equal(checkpoint.read(name), value + offset) for name, value in TENSORS.items())


def _names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_one_shard_needs_no_index(tmp_path):
    out = _write(tmp_path / "out")
    assert _names(out) == ["config.json", "model.safetensors"]
    assert _names(tmp_path) == ["out"]
    assert _holds(out)


def test_shards_and_index(tmp_path):
    out = _write(tmp_path / "out", max_shard_bytes=2 * TENSOR_BYTES)
    shards = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert _names(out) == ["config.json", *shards, "model.safetensors.index.json"]
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 5 * TENSOR_BYTES}
    assert index["weight_map"] == dict(
        zip(TENSORS, [shards[0]] * 2 + [shards[1]] * 2 + [shards[2]], strict=True)
    )
    assert _holds(out)
    assert set(load_file(out / shards[2])) == {"t4"}


@pytest.mark.parametrize(
    "limit, held", [(1, [1] * 5), (64, [1] * 5), (127, [1] * 5), (128, [2, 2, 1]), (320, [5]), (10**10, [5])]
)
def test_a_shard_takes_what_its_limit_allows(limit, held):
    assert [len(specs) for specs in plan_shards(SPECS, max_shard_bytes=limit).values()] == held


def test_tensors_may_come_in_any_order_and_in_rows(tmp_path):
    with CheckpointWriter(tmp_path / "out", SPECS, max_shard_bytes=2 * TENSOR_BYTES) as writer:
        for name in reversed(TENSORS):
            for row in range(4):
                writer.write_rows(name, row, TENSORS[name][row : row + 1])
        writer.finish(CONFIG)
    assert _holds(tmp_path / "out")


@pytest.mark.parametrize("limit", [1, 5 * TENSOR_BYTES], ids=["own_shard", "behind_others"])
def test_a_tensor_without_elements_is_written_like_any_other(limit, tmp_path):
    none = torch.zeros(0, 3)
    specs = [*SPECS, TensorSpec("none", none.dtype, (0, 3))]
    with CheckpointWriter(tmp_path / "out", specs, max_shard_bytes=limit) as writer:
        for name, value in (TENSORS | {"none": none}).items():
            writer.write(name, value)
        with pytest.raises(FormatError, match="already written|once"):
            writer.write("none", none)
        writer.finish(CONFIG)
    with Checkpoint(tmp_path / "out") as checkpoint:
        assert checkpoint.read("none").shape == (0, 3)


def test_extra_files(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with CheckpointWriter(tmp_path / "out", SPECS) as writer:
        writer.copy_file(tmp_path / "tokenizer.json", "tokenizer.json")
        writer.copy_file(tmp_path / "tokenizer.json", "additional_chat_templates/x.jinja")
        writer.write_file("hf_quant_config.json", b"{}")
        out = _fill(writer)
    assert (out / "additional_chat_templates" / "x.jinja").read_text() == "{}"
    assert (out / "hf_quant_config.json").read_text() == "{}"


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_a_copy_loads_in_transformers(family, tmp_path):
    model = save_tiny(family, tmp_path / "m")
    with (
        Checkpoint(tmp_path / "m") as source,
        CheckpointWriter(tmp_path / "out", list(source.specs.values()), max_shard_bytes=20_000) as writer,
    ):
        for name in source.specs:
            writer.write(name, source.read(name))
        for name in source.extra_files:
            writer.copy_file(source.path / name, name)
        writer.finish(source.config)
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 2
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    for (name, value), other in zip(model.named_parameters(), loaded.parameters(), strict=True):
        assert torch.equal(value, other), name


@pytest.mark.parametrize(
    "write, message",
    [
        (lambda w: w.write("t9", TENSORS["t0"]), "not planned"),
        (lambda w: w.write("t0", TENSORS["t0"].float()), "float32"),
        (lambda w: [w.write("t0", TENSORS["t0"]) for _ in range(2)], "already written"),
        (lambda w: w.finish(CONFIG), "1 planned tensors are missing, t0"),
    ],
    ids=["unknown", "dtype", "twice", "missing"],
)
def test_what_was_not_planned_leaves_nothing(write, message, tmp_path):
    with (
        pytest.raises(FormatError, match=message),
        CheckpointWriter(tmp_path / "out", SPECS, max_shard_bytes=1) as writer,
    ):
        write(writer)
    assert _names(tmp_path) == []


def test_leaving_without_finish_leaves_nothing(tmp_path):
    with CheckpointWriter(tmp_path / "out", SPECS) as writer:
        writer.write("t0", TENSORS["t0"])
    assert _names(tmp_path) == []


@pytest.mark.parametrize("specs, limit", [([], 1), (SPECS, 0)], ids=["no_tensors", "no_bytes"])
def test_nothing_is_no_checkpoint(specs, limit, tmp_path):
    with pytest.raises(ConfigError, match="at least one"):
        CheckpointWriter(tmp_path / "out", specs, max_shard_bytes=limit)


def test_a_name_twice_is_refused_across_shards(tmp_path):
    with pytest.raises(FormatError, match="t0 is planned twice"):
        CheckpointWriter(tmp_path / "out", [*SPECS, SPECS[0]], max_shard_bytes=1)


def test_what_exists_is_refused(tmp_path):
    out = _write(tmp_path / "out")
    with pytest.raises(ConfigError, match="is not empty"):
        _write(out, offset=8)
    assert _holds(out)
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="is a file"):
        _write(tmp_path / "file", overwrite=True)
    (tmp_path / "empty").mkdir()
    assert _holds(_write(tmp_path / "empty"))
    with pytest.raises(ConfigError, match="mount point"):
        _write("/", overwrite=True)


def test_only_a_checkpoint_is_ever_overwritten(tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("x")
    with pytest.raises(ConfigError, match="is not empty"):
        _write(tmp_path / "home", overwrite=True)
    assert _names(tmp_path / "home") == ["thesis.tex"]


def test_a_run_directory_is_not_overwritten(tmp_path):
    """A run has a config.json of its own, and its checkpoints lie deeper."""
    run = tmp_path / "run"
    _write(run / "checkpoints" / "step_000001")
    (run / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="holds no checkpoint"):
        _write(run, overwrite=True)
    assert _holds(run / "checkpoints" / "step_000001")


def test_overwriting_replaces_the_whole(tmp_path):
    out = _write(tmp_path / "out", max_shard_bytes=1)
    with CheckpointWriter(out, SPECS, overwrite=True) as writer:
        assert _holds(out)
        for name, value in TENSORS.items():
            writer.write(name, value + 8)
        assert _holds(out)
        writer.finish(CONFIG)
    assert _names(out) == ["config.json", "model.safetensors"]
    assert _holds(out, offset=8)
    assert _names(tmp_path) == ["out"]


def test_a_link_to_a_directory_stays_a_link(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "disk" / "real")
    _write(tmp_path / "out")
    assert (tmp_path / "out").is_symlink()
    assert _holds(tmp_path / "disk" / "real")


def test_parents_are_made(tmp_path):
    assert _holds(_write(tmp_path / "a" / "b" / "out"))


def test_a_parent_that_is_a_file_is_reported(tmp_path):
    (tmp_path / "a").write_text("x")
    with pytest.raises(BackendError, match=r"out could not be written"):
        _write(tmp_path / "a" / "out")


# -- kills ------------------------------------------------------------------------------------------------

CHANGES = ("pwrite", "fsync", "rename", "mkdir", "rmdir", "unlink")
# A run syncs three shards twice, index, config and directories; fewer kills would miss some of them.
LEAST_CHANGES = 22


def _die_after(count):
    """Let the process kill itself instead of making the change of the file system number `count`."""
    left = [count]

    def counted(call):
        def wrapped(*args, **kwargs):
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return wrapped

    for name in CHANGES:
        setattr(os, name, counted(getattr(os, name)))


def _is_killed_run(out, after):
    """Write in a child process that dies at a change; False once the run is over before that."""
    child = os.fork()
    if child == 0:
        _die_after(after)
        with CheckpointWriter(out, SPECS, max_shard_bytes=2 * TENSOR_BYTES, overwrite=True) as writer:
            writer.write_file("tokenizer.json", b"{}")
            _fill(writer, offset=8)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


def kill_at_every_change(folder, *, has_old):
    """Kill a writer at its first change, its second, and so on; after each kill look at what is there."""
    for after in itertools.count():
        out = folder / str(after) / "out"
        out.parent.mkdir()
        if has_old:
            _write(out)
        is_killed = _is_killed_run(out, after)
        if not out.exists():
            # before the first rename of a new one, or between the two renames that replace an old one
            assert is_killed
            suffixes = sorted(path.suffix for path in out.parent.iterdir())
            assert suffixes == [".old", ".partial"] if has_old else suffixes in ([], [".partial"])
            remove_leftovers(out)
            assert out.exists() == has_old
        if out.exists():
            # whole, old or new: never a mixture, never a part
            assert _holds(out, offset=8) or (has_old and _holds(out))
        assert is_killed or _holds(out, offset=8)
        _write(out, offset=16, overwrite=True)
        assert _holds(out, offset=16)
        assert _names(out.parent) == ["out"]
        if not is_killed:
            return after


@pytest.mark.parametrize("has_old", [False, True], ids=["new", "overwrite"])
def test_ckp_1_killed_at_every_change_of_the_file_system(has_old, tmp_path):
    """In a process of its own, which forks: a fork of the test process would inherit its threads."""
    code = (
        "import pathlib, sys, tests.checkpoints.test_target as t; "
        f"sys.stdout.write(str(t.kill_at_every_change(pathlib.Path(sys.argv[1]), has_old={has_old})))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) >= LEAST_CHANGES


def _owned(out, pid, suffix="partial", host=None):
    path = out.with_name(f".{out.name}.{host or target_module._host()}-{pid}-0123abcd.{suffix}")
    path.mkdir()
    (path / "config.json").write_text("{}")
    return path


def test_only_what_dead_writers_to_this_output_left_is_removed(tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    out = tmp_path / "out"
    gone = [_owned(out, dead.pid), _owned(out, os.getpid())]
    kept = [
        _owned(out, os.getppid()),
        _owned(out, dead.pid, host="elsewhere"),
        _owned(tmp_path / "out2", dead.pid),
        _owned(tmp_path / "xout", dead.pid),
    ]
    _write(out)
    assert not any(path.exists() for path in gone)
    assert all(path.exists() for path in kept)


def test_two_writers_of_one_process_leave_each_other_alone(tmp_path):
    with CheckpointWriter(tmp_path / "out", SPECS) as first:
        with CheckpointWriter(tmp_path / "out", SPECS) as second:
            second.write("t0", TENSORS["t0"])
        assert _holds(_fill(first))


def test_an_old_checkpoint_that_lost_its_name_gets_it_back(tmp_path):
    out = _write(tmp_path / "out")
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    out.rename(out.with_name(f".out.{target_module._host()}-{dead.pid}-0123abcd.old"))
    with pytest.raises(BackendError):
        CheckpointWriter(out, SPECS, extra_bytes=10**18)
    assert _holds(out)


# -- full disks -------------------------------------------------------------------------------------------


def test_too_little_space_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    needed = CheckpointWriter(tmp_path / "probe", SPECS).num_bytes
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**6, 10**6, needed - 1))
    with pytest.raises(
        BackendError, match=rf"disk is full, only {needed - 1} bytes are free.*needs {needed} bytes"
    ):
        CheckpointWriter(tmp_path / "out", SPECS)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT], ids=["disk", "quota"])
@pytest.mark.parametrize("had_one", [False, True], ids=["new", "overwrite"])
def test_a_disk_that_fills_up_later(code, had_one, tmp_path, monkeypatch):
    out = tmp_path / "out"
    if had_one:
        _write(out)

    def full(*args):
        raise OSError(code, os.strerror(code))

    with (
        pytest.raises(BackendError, match=r"the disk is full.*needs \d+ bytes.*nothing under its name"),
        CheckpointWriter(out, SPECS, overwrite=True) as writer,
    ):
        writer.write("t0", TENSORS["t0"])
        monkeypatch.setattr(os, "pwrite", full)
        writer.write("t1", TENSORS["t1"])
    assert _names(tmp_path) == (["out"] if had_one else [])
    assert not had_one or _holds(out)


TMPFS_BYTES = 4_000_000


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


@pytest.mark.parametrize("share", [0.1, 0.5, 0.95])
def test_a_disk_that_is_really_full(share, small_disk):
    specs = [TensorSpec(f"t{i}", torch.uint8, (200_000,)) for i in range(10)]
    (small_disk / "filler").write_bytes(b"x" * 500_000)
    with (
        pytest.raises(BackendError, match="the disk is full"),
        CheckpointWriter(small_disk / "out", specs, max_shard_bytes=400_000) as writer,
    ):
        # another process takes the space that was free at the start
        free = shutil.disk_usage(small_disk).free
        with open(small_disk / "filler", "ab") as file:
            file.write(b"x" * (free - int(share * writer.num_bytes)))
        for spec in specs:
            writer.write(spec.name, torch.zeros(spec.shape, dtype=spec.dtype))
        writer.finish(CONFIG)
    assert _names(small_disk) == ["filler"]


def test_containers_of_a_shard_are_synced_when_full(tmp_path, monkeypatch):
    closed = []
    close = ContainerWriter.close
    monkeypatch.setattr(ContainerWriter, "close", lambda self: (closed.append(self.path.name), close(self)))
    with CheckpointWriter(tmp_path / "out", SPECS, max_shard_bytes=2 * TENSOR_BYTES) as writer:
        writer.write("t0", TENSORS["t0"])
        assert closed == []
        writer.write("t1", TENSORS["t1"])
        assert closed == ["model-00001-of-00003.safetensors"]


def test_an_interrupt_between_the_two_renames_brings_the_old_checkpoint_back(tmp_path, monkeypatch):
    out = _write(tmp_path / "out")
    rename = os.rename

    def interrupted(source, target):
        rename(source, target)
        if str(target).endswith(".old"):
            raise KeyboardInterrupt

    monkeypatch.setattr(target_module.os, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        _write(out, offset=8, overwrite=True)
    assert _holds(out) and _names(tmp_path) == ["out"]

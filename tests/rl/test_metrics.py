"""Where a step's numbers go."""

import builtins
import json
import sys
import types

import pytest
from tests.rl.tiny_runs import make_config

from tracefp4.errors import ConfigError
from tracefp4.rl.metrics import MetricWriter
from tracefp4.rl.rundir import RunDirectory


def open_writer(tmp_path, tiny, seen=None, *, first_step=0, **changes):
    config = make_config(*tiny, tmp_path / "run", **changes)
    directory = RunDirectory(config.run.dir, resume=False)
    on_step = None if seen is None else seen.append
    return MetricWriter(config, directory, on_step=on_step, first_step=first_step), directory


def test_rows_are_json_lines_and_reach_the_caller(tmp_path, tiny):
    seen = []
    writer, directory = open_writer(tmp_path, tiny, seen)
    writer.write({"step": 0, "loss": 0.1})
    writer.write({"step": 1, "loss": 1e-300})
    lines = (directory.path / "metrics.jsonl").read_text().splitlines()
    assert (
        [json.loads(line) for line in lines]
        == seen
        == [{"step": 0, "loss": 0.1}, {"step": 1, "loss": 1e-300}]
    )


def test_tensorboard_gets_the_numbers(tmp_path, tiny):
    pytest.importorskip("tensorboard", reason="the tensorboard extra is not installed")
    writer, directory = open_writer(tmp_path, tiny, run__tensorboard=True)
    writer.write({"step": 0, "loss": 0.5, "name": "text"})
    writer.close()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory.path / "tensorboard"))
    events.Reload()
    assert events.Tags()["scalars"] == ["loss"]
    assert [event.value for event in events.Scalars("loss")] == [0.5]


def test_a_resumed_run_hides_the_killed_steps_in_tensorboard(tmp_path, tiny):
    pytest.importorskip("tensorboard", reason="the tensorboard extra is not installed")
    for first_step, values in ((0, [1.0, 2.0, 3.0]), (1, [20.0])):
        writer, directory = open_writer(tmp_path, tiny, run__tensorboard=True, first_step=first_step)
        for step, value in enumerate(values, start=first_step):
            writer.write({"step": step, "loss": value})
        writer.close()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory.path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(0, 1.0), (1, 20.0)]


@pytest.mark.parametrize("first_step", [0, 4])
def test_tensorboard_is_told_where_a_run_continues(tmp_path, tiny, monkeypatch, first_step):
    opened = []
    fake = types.ModuleType("torch.utils.tensorboard")
    fake.SummaryWriter = lambda **settings: opened.append(settings)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", fake)
    _, directory = open_writer(tmp_path, tiny, run__tensorboard=True, first_step=first_step)
    assert opened == [{"log_dir": str(directory.path / "tensorboard"), "purge_step": first_step}]


def test_wandb_continues_the_run_of_this_directory(tmp_path, tiny, monkeypatch):
    opened, logged = [], []

    class Session:
        def log(self, numbers, step):
            logged.append((step, numbers))

        def finish(self):
            logged.append("finished")

    fake = types.ModuleType("wandb")
    fake.init = lambda **settings: opened.append(settings) or Session()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for path, first_step in ((tmp_path, 0), (tmp_path, 1), (tmp_path / "other", 0)):
        writer, _ = open_writer(path, tiny, run__wandb=True, first_step=first_step)
        writer.write({"step": first_step, "loss": 0.5, "grad_norm": None, "name": "text"})
        writer.close()
    first, again, other = opened
    assert first == again
    assert (first["resume"], first["dir"]) == ("allow", str(tmp_path / "run"))
    assert first["id"] != other["id"]
    assert logged[:4] == [(0, {"loss": 0.5}), "finished", (1, {"loss": 0.5}), "finished"]


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_writer_that_is_not_installed_is_refused(tmp_path, tiny, monkeypatch, name):
    real = builtins.__import__

    def missing(module, *args, **kwargs):
        if module.startswith(("wandb", "torch.utils.tensorboard")):
            raise ImportError(module)
        return real(module, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ConfigError, match=f"run.{name} needs .* pip install {name}"):
        open_writer(tmp_path, tiny, **{f"run__{name}": True})


def test_a_full_disk_is_an_error_with_the_path(tmp_path, tiny, monkeypatch):
    writer, _ = open_writer(tmp_path, tiny)

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(builtins, "open", full)
    with pytest.raises(ConfigError, match=r"metrics.jsonl could not be written .* the disk is full"):
        writer.write({"step": 0})

"""Where a step's numbers go."""

import builtins
import json

import pytest
from tests.rl.tiny_runs import make_config

from tracefp4.errors import ConfigError
from tracefp4.rl.metrics import MetricWriter
from tracefp4.rl.rundir import RunDirectory


def open_writer(tmp_path, tiny, seen=None, **changes):
    config = make_config(*tiny, tmp_path / "run", **changes)
    directory = RunDirectory(config.run.dir, resume=False)
    return MetricWriter(config, directory, on_step=None if seen is None else seen.append), directory


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

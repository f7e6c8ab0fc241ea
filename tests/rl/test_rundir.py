"""Files of a run: written whole, torn lines cut, and a full disk said plainly."""

import json

import pytest
import torch

from tracefp4.errors import ConfigError
from tracefp4.rl.rundir import RunDirectory, disk_error, hardware, is_disk_full, versions, weights_hash


def test_metrics_are_cut_where_a_run_continues(tmp_path):
    directory = RunDirectory(tmp_path / "run", resume=False)
    for step in range(4):
        directory.append_metrics({"step": step})
    with open(directory.path / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write('{"step": 4, "lo')
    directory.cut_metrics(first_step=2)
    lines = (directory.path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1]


def test_json_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    directory = RunDirectory(tmp_path / "run", resume=False)
    directory.write_json("manifest.json", {"value": 1})

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(ConfigError, match=r"manifest.json could not be written .* the disk is full"):
        directory.write_json("manifest.json", {"value": 2})
    assert directory.read_json("manifest.json") == {"value": 1}
    assert [path.name for path in directory.path.iterdir()] == ["manifest.json"]


def test_a_directory_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="could not be written"):
        RunDirectory(tmp_path / "file" / "run", resume=False)


def test_a_refused_start_leaves_no_directory_of_its_own(tmp_path):
    # Mutations: the directory stays; one that was there before is removed, or one that holds a file.
    (tmp_path / "before").mkdir()
    for name, is_written in [("before", False), ("a/new", False), ("written", True)]:
        directory = RunDirectory(tmp_path / name, resume=False)
        with pytest.raises(KeyError), directory.removed_if_refused():
            if is_written:
                directory.write_json("manifest.json", {})
            raise KeyError
    assert sorted(path.name for path in tmp_path.iterdir()) == ["before", "written"]


def test_checkpoints_of_something_else_are_not_adopted(tmp_path):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    with pytest.raises(ConfigError, match="holds no run .* but checkpoints"):
        RunDirectory(tmp_path / "run", resume=False)


def test_a_full_disk_is_known_by_number_and_by_text():
    assert is_disk_full(OSError(28, "x"))
    assert is_disk_full(Exception("I/O error: No space left on device (os error 28)"))
    assert not is_disk_full(OSError(13, "Permission denied"))
    assert "Permission denied" in str(disk_error("p", 3, OSError(13, "Permission denied")))


def test_the_hash_sees_names_dtypes_shapes_and_bytes():
    base = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor(3.0)}
    found = weights_hash(base)
    assert found == weights_hash(dict(reversed(base.items())))
    for other in (
        {"a": torch.tensor([1.0, 2.5]), "b": base["b"]},
        {"a": base["a"].view(1, 2), "b": base["b"]},
        {"c": base["a"], "b": base["b"]},
        {"a": base["a"].view(torch.int32), "b": base["b"]},
    ):
        assert weights_hash(other) != found


def test_versions_and_hardware_are_named():
    assert {"python", "tracefp4", "torch", "transformers"} <= set(versions())
    assert hardware()["cores"] >= 1

"""The suite `engine` on a GPU: two layers of a real shape, captured passes, right results."""

import json

import pytest
import torch
from typer.testing import CliRunner

from tracefp4.cli.main import app

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU visible to torch"),
]


def test_two_layers_decode_in_captured_passes(tmp_path):
    out = tmp_path / "engine.json"
    options = ["--layers", "2", "--context", "1k", "--steps", "8", "--only", "full,batch,zipf,recording"]
    result = CliRunner().invoke(app, ["bench", "engine", *options, "--profile", "--out", str(out)])
    stored = json.loads(out.read_text())
    assert not stored["failed"] and not stored["unfit"], result.output
    rows = {row["id"].removeprefix("engine.qwen3-30b-a3b.2_layers."): row for row in stored["rows"]}
    for name in ("1k", "1k.bf16", "1k.batch64", "1k.batch8.bf16", "1k.batch1", "1k.zipf"):
        row = rows[name]
        assert row["check"]["error"] == 0, (name, row["check"])
        assert row["facts"]["captured_steps"] == row["facts"]["timed_steps"] == 8
        assert 0 < row["share"] < 1.1, (name, row["share"])
    assert rows["1k.dequantizing_passes"]["value"] == 0
    assert rows["1k.zipf"]["facts"]["distinct_experts"] < rows["1k"]["facts"]["distinct_experts"] + 1
    names = [kernel["name"] for kernel in stored["profiles"]["engine.qwen3-30b-a3b.2_layers.1k"]]
    assert any(name.startswith("attend") for name in names), names


def test_four_layers_of_a_hybrid_decode_in_captured_passes(tmp_path):
    out = tmp_path / "engine.json"
    options = ["--random-weights", "qwen3.5-35b-a3b", "--layers", "4", "--context", "1k", "--steps", "8"]
    options += ["--only", "full,batch", "--state-dtype", "bfloat16", "--memory", "0.3", "--out", str(out)]
    result = CliRunner().invoke(app, ["bench", "engine", *options])
    stored = json.loads(out.read_text())
    assert not stored["failed"], result.output
    assert len(stored["rows"]) >= 6
    for row in stored["rows"]:
        assert row["check"]["error"] == 0, (row["id"], row["check"])
        assert row["facts"]["captured_steps"] == row["facts"]["timed_steps"] == 8
        assert 0 < row["share"] < 1.1, (row["id"], row["share"])

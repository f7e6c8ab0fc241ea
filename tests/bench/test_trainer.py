"""`tracefp4 bench trainer` as a whole on the tiny shape, and what it refuses."""

import json
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from tracefp4.bench import trainer
from tracefp4.bench.row import describe_machine
from tracefp4.cli.main import app
from tracefp4.patching import PlanRules
from tracefp4.rl.config import ModelConfig
from tracefp4.rl.placement import placement_of

ARMS = ("bf16", "nearest", "guided")


def run(out, *options):
    return CliRunner().invoke(app, ["bench", "trainer", *options, "--out", str(out)])


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_the_command_measures_a_step_of_every_arm(tmp_path):
    # Mutation: the guided arm gets no records (nothing is compared, the check is NaN and does not hold).
    out = tmp_path / "trainer.json"
    result = run(out, "--model", "tiny", "--layers", "2", "--device", "cpu", "--json")
    assert result.exit_code == 0, result.output
    stored = json.loads(out.read_text())
    assert stored == json.loads(result.stdout) and stored["suite"] == "trainer"
    (row,) = stored["rows"]
    assert row["id"] == "trainer.tiny.2_layers.0k" and row["unit"] == "%" and row["better"] == "less"
    facts = row["facts"]
    assert facts["tokens"] == 128 and facts["micro_batch_tokens"] == 64
    assert all(facts[f"{arm} ms"] > 0 and facts[f"{arm} spread"] >= 0 for arm in ARMS)
    assert row["value"] == pytest.approx(100 * (facts["guided ms"] / facts["bf16 ms"] - 1))
    # memory is a GPU's
    assert facts["guided peak GiB"] == 0 and "peak memory beyond BF16 %" not in facts
    # some codes differ before guidance
    assert 0 <= row["check"]["error"] < row["check"]["allowed"]


def test_a_guided_arm_that_follows_nothing_misses_its_check(tmp_path, monkeypatch):
    monkeypatch.setitem(trainer.ARMS, "guided", PlanRules(guidance="none"))
    out = tmp_path / "trainer.json"
    result = run(out, "--model", "tiny", "--layers", "2", "--device", "cpu")
    (row,) = json.loads(out.read_text())["rows"]
    assert row["check"]["error"] == 2 * row["check"]["allowed"] > 0
    assert "Training step" in result.output and "NO" in result.output and result.exit_code == 1


def test_steps_leave_the_weights_that_the_records_are_of():
    # Mutation: a learning rate, under which codes differ more with every turn.
    sizes = trainer.default_sizes("tiny", layers=2)
    sizes = replace(sizes, tokens=(64,), micro_batch_tokens=32, length=32, turns=1)
    bed = trainer._Bed(sizes, placement_of(ModelConfig(path="", device="cpu")), seed=0, on_event=print)
    before = [master.detach().clone() for master in bed.optimizer.masters]
    bed.measure(bed.samples, machine=describe_machine())
    assert len(bed.optimizer.adamw.state) > 0  # steps were taken
    for master, earlier in zip(bed.optimizer.masters, before, strict=True):
        assert torch.equal(master, earlier)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--model", "nonsense"), "nonsense"),
        (("--model", "tiny", "--layers", "99"), "99"),
        (("--model", "tiny", "--layers", "2", "--device", "cuda"), "model.device"),
    ],
    ids=["model", "layers", "device"],
)
def test_what_is_not_there_is_refused_before_anything_is_built(tmp_path, monkeypatch, options, text):
    monkeypatch.setattr(trainer, "_build_model", None)
    result = run(tmp_path / "trainer.json", *options)
    assert result.exit_code not in (0, 1) and text in result.output, result.output
    assert not (tmp_path / "trainer.json").exists()

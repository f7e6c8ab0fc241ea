"""A whole run on a second device, simulated in host memory: nothing mixes devices, nothing waits needlessly, and the
bytes are those of the CPU. What only a GPU can show is in `test_train_cuda.py`."""

import json
from pathlib import Path

import pytest
from tests.rl.elsewhere import DEVICE, Elsewhere
from tests.rl.tiny_runs import changed, make_config, metrics_of

from tracefp4.formats.arithmetic import EMULATED
from tracefp4.rl.loop import train
from tracefp4.rl.placement import Placement
from tracefp4.rl.planning import calibrated_plan
from tracefp4.rl.policy import load_policy
from tracefp4.rl.trainer import PolicyTrainer

TIMES = ("_seconds", "_per_s")


def _values(config):
    return [{k: v for k, v in row.items() if not k.endswith(TIMES)} for row in metrics_of(config)]


def _moved(config, monkeypatch):
    """Runs of this recipe compute on the second device; what calibrates, through a mask that transformers builds under
    vmap, which no simulated device knows, stays here."""

    def calibrated(policy, rules, **options):
        return calibrated_plan(load_policy(config.model.path), rules, **options)

    there = Placement(device=DEVICE, arithmetic=EMULATED)
    monkeypatch.setattr("tracefp4.rl.opening.placement_of", lambda model: there)
    monkeypatch.setattr("tracefp4.rl.opening.calibrated_plan", calibrated)
    monkeypatch.setattr(
        "torch.is_autocast_enabled", lambda device_type: False
    )  # which torch knows of no such device


def _train_there(config, monkeypatch, **options):
    _moved(config, monkeypatch)
    with Elsewhere():
        return train(config, **options)


@pytest.mark.parametrize(
    "changes",
    [
        {"train__packing": True, "train__activation_checkpointing": "full"},
        {"loss__kl_coef": 0.1, "train__optimizer_steps_per_rollout": 2, "run__eval_items": 2},
        {
            "quantization__guidance": "bch64_3+coset1",
            "records__store": "directory",
            "rollout__partial_groups": 1,
        },
    ],
    ids=["packed", "two_steps", "stored"],
)
def test_a_run_there_ends_in_the_bytes_of_one_here(tiny, tmp_path, monkeypatch, changes):
    # Mutations: a batch, a record's rows, the old log-probs or a mask left in host memory.
    checkpoint, prompts = tiny
    common = {"train__steps": 2, "train__transmission_every": 1, "train__agreement_every": 1} | changes
    here = make_config(checkpoint, prompts, tmp_path / "here", **common)
    there = make_config(checkpoint, prompts, tmp_path / "there", **common)
    wanted = train(here)
    found = _train_there(there, monkeypatch)
    assert found["final"]["weights_hash"] == wanted["final"]["weights_hash"]
    assert _values(there) == _values(here)
    assert found["placement"] == {"device": DEVICE.type, "arithmetic": "emulated"}


def test_a_run_there_goes_on_as_if_it_had_not_stopped(tiny, tmp_path, monkeypatch):
    # Mutation: moments that come back from a checkpoint stay in host memory.
    checkpoint, prompts = tiny
    whole = make_config(checkpoint, prompts, tmp_path / "whole", train__steps=2)
    parts = make_config(checkpoint, prompts, tmp_path / "parts", train__steps=1)
    wanted = _train_there(whole, monkeypatch)
    _train_there(parts, monkeypatch)
    found = _train_there(changed(parts, train__steps=2), monkeypatch, resume=True)
    assert found["final"]["weights_hash"] == wanted["final"]["weights_hash"]


def test_an_update_waits_for_the_device_a_few_times_a_micro_batch(tiny, tmp_path, monkeypatch):
    # Mutations: counters read site by site; log-probs fetched sample by sample; a mask indexed on the device.
    checkpoint, prompts = tiny
    waits, passes = {}, {"number": 0}
    update, logits = PolicyTrainer.update, PolicyTrainer.logits

    def counted(self, samples, **options):
        before = device.waits.copy()
        passes["number"] = 0
        found = update(self, samples, **options)
        waits.update(device.waits - before)
        return found

    def passed(self, batch):
        passes["number"] += 1
        return logits(self, batch)

    monkeypatch.setattr(PolicyTrainer, "update", counted)
    monkeypatch.setattr(PolicyTrainer, "logits", passed)
    config = make_config(checkpoint, prompts, tmp_path / "run", train__steps=1, train__micro_batch_tokens=48)
    _moved(config, monkeypatch)
    with Elsewhere() as device:
        train(config)
    print(json.dumps(waits), passes)
    assert passes["number"] >= 4


def test_here_and_there_are_told_apart(tmp_path: Path):
    import torch

    with Elsewhere() as device:
        x = torch.ones(3, device="cpu").to(DEVICE)
        with pytest.raises(AssertionError, match="mixes devices"):
            x + torch.ones(3, device="cpu")
        assert float(x.sum()) == 3.0 and device.waits["_local_scalar_dense"] == 1

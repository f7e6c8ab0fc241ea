"""A whole run on a second device, simulated in host memory: nothing mixes devices, nothing waits needlessly, and the
numbers are those of the CPU. What only a GPU can show is in `test_train_cuda.py`."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.rl.elsewhere import DEVICE, Elsewhere
from tests.rl.tiny_runs import changed, make_config, metrics_of

from tracefp4.formats.arithmetic import EMULATED
from tracefp4.rl.checkpoint import latest, load_optimizer
from tracefp4.rl.loop import train
from tracefp4.rl.placement import Placement
from tracefp4.rl.planning import calibrated_plan
from tracefp4.rl.policy import load_policy
from tracefp4.rl.trainer import PolicyTrainer

pytestmark = pytest.mark.slow  # whole runs on a simulated device, a minute and a half
TIMES = ("_seconds", "_per_s", "_wait_s")
LAST_BITS = 2.0**-19
VARIES = "tests.rl.tiny_runs:share_plain"


def _values(config):
    return [{k: v for k, v in row.items() if not k.endswith(TIMES)} for row in metrics_of(config)]


def _state(config):
    return load_optimizer(latest(Path(config.run.dir) / "checkpoints"))


def _noise(state, name, *, lr):
    """What sums in another order may change: last bits of float32 in a moment, relative to the largest of its tensor.
    AdamW divides such noise by the size of an entry's own gradients, at most lr per step, and an entry that never had
    any does not move."""
    kind, _, parameter = name.partition(".")
    if kind != "master":
        return LAST_BITS * state[name].abs().max()
    square = state[f"exp_avg_sq.{parameter}"].sqrt()
    share = LAST_BITS * state[f"exp_avg.{parameter}"].abs().max() / square
    moved = float(state[f"step.{parameter}"]) * lr * share.nan_to_num(0.0).clamp(max=1.0)
    return torch.where(square > 0, moved, 0.0) + LAST_BITS / 4 * state[name].abs()


def _moved(config, monkeypatch):
    """Runs of this recipe compute on the second device; what calibrates, through a mask that transformers builds under
    vmap, which no simulated device knows, stays here."""

    def calibrated(policy, rules, **options):
        return calibrated_plan(load_policy(config.model.path), rules, **options)

    there = Placement(device=DEVICE, arithmetic=EMULATED)
    monkeypatch.setattr("tracefp4.rl.opening.placement_of", lambda model: there)
    monkeypatch.setattr("tracefp4.rl.opening.calibrated_plan", calibrated)
    # what torch has of a device beside its tensors
    monkeypatch.setattr("torch.is_autocast_enabled", lambda device_type: False)
    monkeypatch.setattr("torch.lazy", SimpleNamespace(), raising=False)


def _train_there(config, monkeypatch, **options):
    _moved(config, monkeypatch)
    with Elsewhere():
        return train(config, **options)


def _assert_ended_alike(one, other):
    """Masters and moments of two runs differ by last bits."""
    state, wanted = _state(one), _state(other)
    assert state.keys() == wanted.keys()
    for name, values in wanted.items():
        beyond = (state[name] - values).abs() > _noise(wanted, name, lr=other.train.lr)
        # the final moments do not tell whose gradient was about zero at an earlier step
        rare = values.numel() // 1000 if name.startswith("master.") else 0
        assert beyond.sum() <= rare, name
        torch.testing.assert_close(state[name], values, rtol=1e-4, atol=1e-2 * other.train.lr)


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
def test_a_run_there_ends_as_one_here(tiny, tmp_path, monkeypatch, changes):
    # Mutations: a batch, a record's rows, the old log-probs or a mask left in host memory.
    checkpoint, prompts = tiny
    common = {"task__reward": VARIES, "train__steps": 2, "train__agreement_every": 1} | changes
    common |= {"train__transmission_every": 1}
    here = make_config(checkpoint, prompts, tmp_path / "here", **common)
    there = make_config(checkpoint, prompts, tmp_path / "there", **common)
    train(here)
    found = _train_there(there, monkeypatch)
    for row, wanted in zip(_values(there), _values(here), strict=True):
        assert row == pytest.approx(wanted, rel=1e-4, abs=1e-7)
    _assert_ended_alike(there, here)
    assert all(row["trained_samples"] for row in metrics_of(there))
    assert found["placement"] == {"device": DEVICE.type, "arithmetic": "emulated"}


def test_a_run_there_goes_on_as_if_it_had_not_stopped(tiny, tmp_path, monkeypatch):
    # Mutation: moments that come back from a checkpoint stay in host memory.
    checkpoint, prompts = tiny
    whole = make_config(checkpoint, prompts, tmp_path / "whole", task__reward=VARIES, train__steps=2)
    parts = make_config(checkpoint, prompts, tmp_path / "parts", task__reward=VARIES, train__steps=1)
    _train_there(whole, monkeypatch)
    _train_there(parts, monkeypatch)
    both = changed(parts, train__steps=2)
    _train_there(both, monkeypatch, resume=True)
    _assert_ended_alike(both, whole)  # sums on the simulated device have an order of their own in every run


def test_an_update_waits_for_the_device_a_few_times_a_micro_batch(tiny, tmp_path, monkeypatch):
    # Mutations: log-probs fetched sample by sample; a mask indexed on the device; saturation in every micro-batch. The
    # reference of guided rounding looks at values, which the kernels of a GPU do not; nearest rounding looks at none.
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
    config = make_config(
        checkpoint,
        prompts,
        tmp_path / "run",
        task__reward=VARIES,
        train__steps=1,
        train__micro_batch_tokens=48,
        train__agreement_every=0,
        train__transmission_every=0,
        quantization__mode="bf16",
        quantization__guidance="none",
    )
    _moved(config, monkeypatch)
    with Elsewhere() as device:
        train(config)
    number = passes["number"]
    assert number >= 4
    # a pass: are the experts possible, is the loss finite, its metrics; afterwards its log-probs. A step: norm, loss
    assert waits["_local_scalar_dense"] <= 2 * number + 2 and waits["_to_copy"] <= 2 * number + 2
    assert set(waits) <= {"_local_scalar_dense", "_to_copy"}


def test_here_and_there_are_told_apart(tmp_path: Path):
    with Elsewhere() as device:
        x = torch.ones(3, device="cpu").to(DEVICE)
        with pytest.raises(AssertionError, match="mixes devices"):
            x + torch.ones(3, device="cpu")
        assert float(x.sum()) == 3.0 and device.waits["_local_scalar_dense"] == 1

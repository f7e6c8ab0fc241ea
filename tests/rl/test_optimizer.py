"""Master weights: tiny updates add up, copies hold bf16 values, and state comes back whole."""

import math

import pytest
import torch
from torch import nn

from tracefp4.errors import ConfigError
from tracefp4.formats.arithmetic import round_bf16
from tracefp4.rl.optimizer import MasterWeightAdamW


def make(weight=1.0, **changes):
    layer = nn.Linear(16, 16)
    with torch.no_grad():
        layer.weight.fill_(weight)
        layer.bias.fill_(weight)
    return layer, MasterWeightAdamW(layer, **({"lr": 1e-4} | changes))


def take_steps(layer, optimizer, count, *, gradient=1.0):
    for _ in range(count):
        for parameter in layer.parameters():
            parameter.grad = torch.full_like(parameter, gradient)
        optimizer.step()


def test_updates_below_bf16_resolution_add_up():
    layer, optimizer = make()
    take_steps(layer, optimizer, 3)
    assert torch.all(layer.weight == 1.0), "a step of 1e-4 is below bf16's resolution at 1"
    take_steps(layer, optimizer, 60)
    assert torch.all(layer.weight < 1.0), "the masters kept what the copies could not show"
    assert torch.equal(layer.weight, round_bf16(layer.weight))


def test_without_emulation_the_copies_are_the_masters():
    layer, optimizer = make(emulates_bf16=False)
    take_steps(layer, optimizer, 1)
    assert torch.equal(layer.weight, optimizer.masters[0])


def test_equals_plain_adamw_on_the_masters():
    layer, optimizer = make(weight_decay=0.1, betas=(0.9, 0.95))
    plain = nn.Linear(16, 16)
    plain.load_state_dict({name: tensor.clone() for name, tensor in layer.state_dict().items()})
    groups = [{"params": [plain.weight], "weight_decay": 0.1}, {"params": [plain.bias], "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, lr=1e-4, betas=(0.9, 0.95))
    for _ in range(4):
        for ours, theirs in zip(layer.parameters(), plain.parameters(), strict=True):
            ours.grad = torch.randn_like(ours)
            theirs.grad = ours.grad.clone()
        optimizer.step(lr_scale=0.5)
        for group in reference.param_groups:
            group["lr"] = 0.5e-4
        reference.step()
    assert torch.equal(optimizer.masters[0], plain.weight)
    assert torch.equal(optimizer.masters[1], plain.bias)


def test_clipping_bounds_the_norm_and_returns_the_one_before():
    layer, optimizer = make(lr=1.0)
    for parameter in layer.parameters():
        parameter.grad = torch.full_like(parameter, 3.0)
    step = optimizer.step(grad_clip=1.0)
    assert step.is_taken
    assert step.norm == pytest.approx(3.0 * (16 * 17) ** 0.5)
    moments = torch.cat([optimizer.adamw.state[m]["exp_avg"].flatten() for m in optimizer.masters]) / 0.1
    assert moments.norm().item() == pytest.approx(1.0, rel=1e-4)


@pytest.mark.parametrize("gradient", [math.nan, math.inf])
def test_a_step_that_is_not_finite_changes_nothing(gradient):
    layer, optimizer = make()
    take_steps(layer, optimizer, 2)
    before = {name: tensor.clone() for name, tensor in optimizer.state_tensors().items()}
    for parameter in layer.parameters():
        parameter.grad = torch.full_like(parameter, gradient)
    step = optimizer.step(grad_clip=1.0)
    assert not step.is_taken
    assert not math.isfinite(step.norm)
    after = optimizer.state_tensors()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(parameter.grad is None for parameter in layer.parameters())


def test_norms_and_biases_have_no_weight_decay():
    layer, optimizer = make(weight_decay=1.0, lr=0.1)
    take_steps(layer, optimizer, 1, gradient=0.0)
    assert torch.all(layer.bias == 1.0)
    assert torch.all(layer.weight < 1.0)


def test_restored_state_continues_bit_for_bit():
    layer, optimizer = make(lr=1e-2)
    take_steps(layer, optimizer, 3)
    saved = {name: tensor.clone() for name, tensor in optimizer.state_tensors().items()}
    take_steps(layer, optimizer, 3, gradient=-0.5)
    other, restored = make(weight=7.0, lr=1e-2)
    restored.load_state_tensors(saved)
    take_steps(other, restored, 3, gradient=-0.5)
    assert all(
        torch.equal(tensor, restored.state_tensors()[name])
        for name, tensor in optimizer.state_tensors().items()
    )
    assert torch.equal(layer.weight, other.weight)


def test_state_of_another_model_is_refused():
    _, optimizer = make()
    with pytest.raises(ConfigError, match=r"missing \['master.bias'\]"):
        optimizer.load_state_tensors({"master.weight": torch.zeros(16, 16)})


def test_a_frozen_model_is_refused():
    layer = nn.Linear(4, 4).requires_grad_(False)
    with pytest.raises(ConfigError, match="no trainable parameter"):
        MasterWeightAdamW(layer, lr=1.0)

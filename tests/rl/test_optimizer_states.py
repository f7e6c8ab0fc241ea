"""Kinds of optimizer states: host memory changes nothing, 8 bits little, and both come back from a checkpoint."""

import pytest
import torch
from torch import nn

from tracefp4.errors import ConfigError
from tracefp4.rl.optimizer import MasterWeightAdamW
from tracefp4.rl.optimizer_states import build_optimizer, check_states

WIDTH = 64  # 64 x 64 values are enough for 8-bit moments


def make(states, seed=0):
    torch.manual_seed(seed)
    layer = nn.Linear(WIDTH, WIDTH)
    optimizer = build_optimizer(
        layer, states=states, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, emulates_bf16=True
    )
    return layer, optimizer


def train(layer, optimizer, steps, *, first=0, grad_clip=1.0):
    norms = []
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        for parameter in layer.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        norms.append(optimizer.step(lr_scale=0.5, grad_clip=grad_clip).norm)
    return norms


@pytest.mark.parametrize("grad_clip", [0.0, 1.0])
def test_states_in_host_memory_give_the_weights_of_states_on_the_device(grad_clip):
    # Mutations: no clipping; decayed biases; a step count that stands still; a copy that is not written.
    (layer, plain), (other, host) = make("float32"), make("host")
    wanted, found = (train(*pair, 4, grad_clip=grad_clip) for pair in ((layer, plain), (other, host)))
    assert found == pytest.approx(wanted)
    for name, tensor in plain.state_tensors().items():
        torch.testing.assert_close(host.state_tensors()[name], tensor, rtol=1e-6, atol=1e-7)
    assert all(parameter.grad is None for parameter in other.parameters())


@pytest.mark.slow
def test_states_of_8_bits_stay_near_those_of_32():
    (layer, plain), (other, small) = make("float32"), make("8bit")
    train(layer, plain, 8)
    train(other, small, 8)
    moved = (plain.masters[0] - make("float32")[0].weight).norm()
    assert (small.masters[0] - plain.masters[0]).norm() < 0.1 * moved
    held = small.adamw.state[small.masters[0]]["exp_avg"]
    assert held.codes.dtype == torch.uint8


@pytest.mark.slow
@pytest.mark.parametrize("states", ["host", "8bit"])
def test_a_checkpoint_of_any_kind_goes_on_as_it_was(states):
    # Mutation: moments that are rounded to 8 bits once more at every resumption.
    layer, optimizer = make(states)
    train(layer, optimizer, 2)
    kept = {name: tensor.clone() for name, tensor in optimizer.state_tensors().items()}
    again, restored = make(states, seed=1)
    restored.load_state_tensors(kept)
    assert {n: t.tolist() for n, t in restored.state_tensors().items()} == {
        n: t.tolist() for n, t in kept.items()
    }
    for pair in ((layer, optimizer), (again, restored)):
        train(*pair, 2, first=2)
    assert all(torch.equal(a, b) for a, b in zip(layer.parameters(), again.parameters(), strict=True))


def test_a_gradient_that_is_not_finite_takes_no_step_on_the_host_either():
    layer, optimizer = make("host")
    before = [parameter.clone() for parameter in layer.parameters()]
    layer.weight.grad = torch.full_like(layer.weight, torch.inf)
    assert not optimizer.step(grad_clip=1.0).is_taken
    assert all(torch.equal(a, b) for a, b in zip(before, layer.parameters(), strict=True))


def test_every_kind_has_its_class_and_what_cannot_be_had_is_refused(monkeypatch):
    assert type(make("float32")[1]) is MasterWeightAdamW
    with pytest.raises(
        ConfigError, match=r"got 'host' with a model on the CPU.*allowed there: 'float32', '8bit'"
    ):
        check_states("host", torch.device("cpu"))
    monkeypatch.setattr("tracefp4.rl.optimizer_states.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"got '8bit', and torchao is not installed.*pip install"):
        check_states("8bit", torch.device("cuda"))
    check_states("float32", torch.device("cpu"))

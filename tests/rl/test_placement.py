"""Device and arithmetic of a run: what `auto` means, what is refused, and that a run stays where it began."""

import pytest
import torch
from tests.rl.tiny_runs import changed, make_config

from tracefp4.errors import ConfigError
from tracefp4.formats.arithmetic import EMULATED, NATIVE
from tracefp4.rl.config import ModelConfig
from tracefp4.rl.loop import train
from tracefp4.rl.placement import ON_CPU, Placement, check_resumed, placement_of


def _placed(**settings):
    return placement_of(ModelConfig(path="p", **settings))


@pytest.fixture
def gpu(monkeypatch):
    """A machine with one GPU of compute capability 7.5, as far as torch tells."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (7, 5))


def test_without_a_gpu_auto_is_the_cpu_and_emulated(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert _placed() == ON_CPU == Placement(device=torch.device("cpu"), arithmetic=EMULATED)
    with pytest.raises(
        ConfigError, match=r"model.device: got 'cuda'.*finds 0 CUDA devices.*'auto', 'cpu'.*--set"
    ):
        _placed(device="cuda")


def test_with_a_gpu_auto_is_the_gpu_and_native(gpu, monkeypatch):
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    assert _placed() == _placed(device="cuda") == Placement(device=torch.device("cuda", 0), arithmetic=NATIVE)
    assert _placed(arithmetic="emulated").arithmetic is EMULATED
    assert _placed(device="cpu") == ON_CPU
    assert _placed(device="cpu", arithmetic="native").arithmetic is NATIVE
    with pytest.raises(ConfigError, match=r"got 'cuda:1'.*finds 1 CUDA devices.*'cuda:0' to 'cuda:0'"):
        _placed(device="cuda:1")


def test_native_needs_bf16_units(gpu):
    with pytest.raises(ConfigError, match=r"capability 7.5 of cuda:0. Allowed there is 'emulated'"):
        _placed()
    assert _placed(arithmetic="emulated").device.type == "cuda"


@pytest.mark.parametrize("name", ["tpu", "cuda:", "cuda:x", ""])
def test_other_devices_are_refused(name):
    with pytest.raises(ConfigError, match=r"model.device: got .*'auto', 'cpu', 'cuda' or 'cuda:N'"):
        ModelConfig(path="p", device=name)


def test_a_run_stays_where_it_began():
    native = Placement(device=torch.device("cuda", 0), arithmetic=NATIVE)
    check_resumed(native.summary(), native)
    check_resumed(None, ON_CPU)
    with pytest.raises(ConfigError, match=r"started on cuda in native arithmetic; got cpu and emulated here"):
        check_resumed(native.summary(), ON_CPU)


def test_a_native_run_on_the_cpu_is_native_on_both_sides(tiny, tmp_path):
    # Mutation: a trainer that stays emulated beside a native engine.
    config = make_config(
        *tiny,
        tmp_path / "run",
        model__arithmetic="native",
        train__steps=1,
        task__reward="tests.rl.tiny_runs:share_plain",
    )
    manifest = train(config)
    assert manifest["placement"] == {"device": "cpu", "arithmetic": "native"}
    with pytest.raises(ConfigError, match="started on cpu in native arithmetic; got cpu and emulated here"):
        train(changed(config, model__arithmetic="emulated", train__steps=2), resume=True)

"""Checkpoints that cannot be trained are refused with what to do; defaults come from the generation config."""

import json
import shutil

import pytest
import torch
from tests.rl.tiny_runs import SHAPE, make_checkpoint

from tracefp4.errors import ConfigError
from tracefp4.patching import PlanRules, plan
from tracefp4.rl.policy import generation_defaults, load_policy


@pytest.fixture
def copy(tiny, tmp_path):
    """A checkpoint that a test may damage."""
    return shutil.copytree(tiny[0], tmp_path / "copy")


def edit(path, **values):
    content = json.loads(path.read_text(encoding="utf-8"))
    content.update(values)
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def test_loads_model_tokenizer_and_defaults(tiny):
    policy = load_policy(tiny[0])
    assert next(policy.model.parameters()).dtype == torch.float32
    assert not policy.model.training
    assert policy.defaults.stop_token_ids == (policy.tokenizer.eos_token_id,)
    assert (policy.defaults.temperature, policy.defaults.top_p, policy.defaults.top_k) == (1.0, 1.0, 0)
    assert policy.pad_id == policy.tokenizer.pad_token_id


def test_sampling_defaults_are_the_checkpoints(copy):
    edit(copy / "generation_config.json", temperature=0.6, top_p=0.9, top_k=20, eos_token_id=[1, 2])
    defaults = load_policy(copy).defaults
    assert defaults.stop_token_ids == (1, 2)
    assert (defaults.temperature, defaults.top_p, defaults.top_k) == (0.6, 0.9, 20)


def test_no_checkpoint(tmp_path):
    with pytest.raises(ConfigError, match=r"not a checkpoint \(no config.json of a model\)"):
        load_policy(tmp_path)


def test_damaged_config(copy):
    (copy / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not valid JSON"):
        load_policy(copy)


@pytest.mark.parametrize("architectures", [["LlamaForCausalLM"], [], None])
def test_not_a_supported_mixture_of_experts(copy, architectures):
    edit(copy / "config.json", architectures=architectures)
    with pytest.raises(ConfigError, match="supported: Qwen3MoeForCausalLM"):
        load_policy(copy)


def test_missing_tokenizer(copy):
    for path in copy.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(ConfigError, match=r"no tokenizer .* Copy the tokenizer files"):
        load_policy(copy)


def test_missing_weights(copy):
    (copy / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="could not be loaded"):
        load_policy(copy)


def test_damaged_weights(copy):
    (copy / "model.safetensors").write_bytes(b"nothing of the kind")
    with pytest.raises(ConfigError, match="could not be loaded"):
        load_policy(copy)


def test_a_missing_tensor_is_refused_and_not_drawn_at_random(copy):
    from safetensors.torch import load_file, save_file

    tensors = load_file(copy / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match="lacks 1 weights of its model, e.g. model.norm.weight"):
        load_policy(copy)


def test_no_end_of_sequence(tiny):
    policy = load_policy(tiny[0])
    policy.model.generation_config.eos_token_id = None
    policy.tokenizer.eos_token = None
    with pytest.raises(ConfigError, match='Add "eos_token_id" to generation_config.json'):
        generation_defaults(policy.model, policy.tokenizer)


def test_dimension_that_is_no_multiple_of_the_block(tmp_path):
    from dataclasses import replace

    path = make_checkpoint(tmp_path / "odd", shape=replace(SHAPE, expert_size=24))
    with pytest.raises(ConfigError, match="moe_intermediate_size divisible by 16; got 24"):
        plan(load_policy(path).model, PlanRules())

"""Whole runs on a model with gated delta layers: rollout, records, training, checkpoints and the next run."""

import pytest
import torch
from tests.models.tiny_hybrids import tiny_config
from tests.rl.tiny_runs import PROMPTS, build_tokenizer, changed, make_config, metrics_of
from transformers import Qwen3_5MoeConfig, Qwen3_5MoeForCausalLM, Qwen3_5MoeForConditionalGeneration

from tracefp4.rl.checkpoint import save_model
from tracefp4.rl.loop import train
from tracefp4.rl.policy import load_policy

VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
TRAINED = {"task__reward": "tests.rl.tiny_runs:share_plain", "train__steps": 2}


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    """A random checkpoint with its tokenizer."""
    tokenizer, path = build_tokenizer(PROMPTS, vocab_size=262), tmp_path_factory.mktemp("hybrid")
    torch.manual_seed(0)
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    model = Qwen3_5MoeForCausalLM(tiny_config(vocab_size=262, max_position_embeddings=128, **ids))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4 if parameter.dim() > 1 else 1)
    save_model(model, tokenizer, path / "start")
    return path / "start"


PARTIAL = {"rollout__partial_groups": 1, "train__max_version_diff": 2}


@pytest.mark.parametrize("changes", [{}, pytest.param(PARTIAL, marks=pytest.mark.slow)])
def test_a_run_follows_its_rollout_and_saves_what_loads(hybrid, tiny, tmp_path, changes):
    config = make_config(hybrid, tiny[1], tmp_path / "run", **TRAINED, **changes)
    train(config)
    rows = metrics_of(config)
    assert all(row["trained_samples"] > 0 for row in rows)
    plain = changed(config, run__dir=tmp_path / "plain", quantization__guidance="none")
    train(plain)
    # of the first step, whose weights are the rollout's
    assert rows[0]["mismatch/abs_mean"] < 0.5 * metrics_of(plain)[0]["mismatch/abs_mean"]
    found = load_policy(tmp_path / "run" / "checkpoints" / "step_000002").model
    assert isinstance(found, Qwen3_5MoeForCausalLM)
    before = load_policy(hybrid).model.state_dict()
    assert any(not torch.equal(tensor, before[name]) for name, tensor in found.state_dict().items())


@pytest.mark.slow
def test_a_run_that_was_cut_goes_on_to_the_same_weights(hybrid, tiny, tmp_path):
    whole = train(make_config(hybrid, tiny[1], tmp_path / "whole", **TRAINED))
    cut = make_config(hybrid, tiny[1], tmp_path / "cut", **TRAINED)
    train(changed(cut, train__steps=1))
    found = train(cut, resume=True)
    assert found["final"]["weights_hash"] == whole["final"]["weights_hash"]


def test_of_a_checkpoint_that_sees_images_the_text_part_is_loaded(hybrid, tmp_path):
    text = load_policy(hybrid)
    composite = Qwen3_5MoeConfig(text_config=text.model.config.to_dict(), vision_config=VISION)
    model = Qwen3_5MoeForConditionalGeneration(composite)
    model.model.language_model.load_state_dict(text.model.model.state_dict())
    save_model(model, text.tokenizer, tmp_path / "both")
    found = load_policy(tmp_path / "both").model
    assert isinstance(found, Qwen3_5MoeForCausalLM)
    for name, tensor in text.model.model.state_dict().items():
        assert torch.equal(found.model.state_dict()[name], tensor), name

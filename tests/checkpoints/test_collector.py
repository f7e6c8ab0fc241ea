"""The collector: its experts compute what transformers' do, and its sums are those of the tokens that were routed.

Mutations that must die: the wrong axis of a transposed matrix, gate and up read as halves where they alternate, a token
counted once per slot in the mean over all (`_sums_are_those_of_the_routed_tokens`), combination weights left out
(`_the_model_computes_what_it_did`), padding or a short last batch dropped (`_batches_do_not_matter`).
"""

import json
import math

import pytest
import torch
from tests.checkpoints.tiny_families import FAMILIES, NUM_EXPERTS, save_tiny, tiny_model

from tracefp4.checkpoints import read_statistics
from tracefp4.checkpoints.collector import collect_statistics, observe
from tracefp4.errors import ConfigError

# float32 products of one expert at a time against grouped ones: 2e-7 of values near 1 in the same order of layers
LOGITS_ATOL = 1e-5
# two float32 forwards of the same layers, squared: twice the relative error of the values
SUMS_RTOL = 1e-4


def middle_of(family, experts, expert, x):
    """The down-projection's input, written out per family."""
    weight = experts.gate_up_proj[expert]
    if family == "gpt_oss":
        both = x @ weight + experts.gate_up_proj_bias[expert]
        gate, up = both[:, ::2].clamp(max=7.0), both[:, 1::2].clamp(-7.0, 7.0)
        return (up + 1) * gate * torch.sigmoid(1.702 * gate)
    gate, up = (x @ weight.T).chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def watch(model):
    """Return the inputs that every experts module gets in transformers' own forward: layer -> [(x, index)]."""
    seen = {}
    for name, module in model.named_modules():
        if type(module).__name__.endswith("Experts"):
            layer = int(name.split("layers.")[1].split(".")[0])
            seen[layer] = (module, [])
            module.register_forward_pre_hook(
                lambda _, args, found=seen[layer][1]: found.append((args[0].clone(), args[1].clone()))
            )
    return seen


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_sums_are_those_of_the_routed_tokens(family):
    model = tiny_model(family).float().eval()
    sequences = [torch.randint(3, 64, (24,)) for _ in range(3)]
    found = observe(model, sequences)
    seen = watch(model)
    for sequence in sequences:
        model(input_ids=sequence[None], use_cache=False)
    assert sorted(found) == sorted(seen)
    for layer, (experts, calls) in seen.items():
        x, index = (torch.cat(parts) for parts in zip(*calls, strict=True))
        got = found[layer]
        assert got.tokens.tolist() == torch.bincount(index.flatten(), minlength=NUM_EXPERTS).tolist()
        assert int(got.tokens.sum()) == 2 * 72
        close = {"rtol": SUMS_RTOL, "atol": 1e-12}
        torch.testing.assert_close(got.x_square_all, x.square().mean(0), **close)
        middles = []
        for expert in range(NUM_EXPERTS):
            rows = x[(index == expert).any(-1)]
            if len(rows):
                middles.append(middle_of(family, experts, expert, rows))
                torch.testing.assert_close(got.x_square[expert], rows.square().mean(0), **close)
                torch.testing.assert_close(got.w2_square[expert], middles[-1].square().mean(0), **close)
            else:
                assert not got.x_square[expert].any() and not got.w2_square[expert].any()
        amax = torch.stack([x.abs().amax(), torch.cat(middles).abs().amax()])
        torch.testing.assert_close(got.amax, amax, **close)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_the_model_computes_what_it_did(family, monkeypatch):
    model = tiny_model(family).float().eval()
    ids = torch.randint(3, 64, (2, 16))
    before, implementation = (
        model(input_ids=ids, use_cache=False).logits,
        model.config._experts_implementation,
    )
    names = list(model.state_dict())
    logits = []
    forward = model.forward
    monkeypatch.setattr(
        model, "forward", lambda **k: logits.append(forward(**{**k, "logits_to_keep": 0})) or logits[-1]
    )
    observe(model, list(ids))
    torch.testing.assert_close(logits[0].logits, before, rtol=0, atol=LOGITS_ATOL)
    assert model.config._experts_implementation == implementation
    assert list(model.state_dict()) == names
    assert not any(hasattr(module, "tracefp4_sums") for module in model.modules())


def test_batches_do_not_matter():
    model = tiny_model("qwen3_moe").float().eval()
    sequences = [torch.randint(3, 64, (length,)) for length in (16, 16, 16, 8, 5)]
    progress = []
    together = observe(model, sequences, on_tokens=lambda done, total: progress.append((done, total)))
    assert progress == [(48, 61), (56, 61), (61, 61)]
    alone = observe(model, sequences[:3]), observe(model, sequences[3:])
    for layer, found in together.items():
        parts = [one[layer] for one in alone]
        assert found.tokens.tolist() == (parts[0].tokens + parts[1].tokens).tolist()
        mean = (parts[0].x_square_all * 48 + parts[1].x_square_all * 13) / 61
        torch.testing.assert_close(found.x_square_all, mean, rtol=SUMS_RTOL, atol=0)


def test_an_error_inside_leaves_the_model_as_it_was():
    model = tiny_model("qwen3_moe").float()
    implementation = model.config._experts_implementation
    with pytest.raises(IndexError):
        observe(model, [torch.tensor([1, 10**6])])
    assert model.config._experts_implementation == implementation
    assert not any(hasattr(module, "tracefp4_sums") for module in model.modules())


def test_values_that_are_not_finite_are_refused():
    model = tiny_model("qwen3_moe").float()
    with torch.no_grad():
        model.model.layers[1].mlp.experts.gate_up_proj.fill_(float("nan"))
    with pytest.raises(ConfigError, match="layer 1 saw values that are not finite"):
        observe(model, [torch.arange(3, 40)])


def test_a_model_without_experts_is_refused():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    with pytest.raises(ConfigError, match="no routed experts"):
        observe(LlamaForCausalLM(config), [torch.arange(3)])


@pytest.fixture
def checkpoint(tmp_path):
    from tracefp4.rl.tiny import build_tokenizer

    directory = tmp_path / "model"
    save_tiny("qwen3_moe", directory, vocab_size=320)
    build_tokenizer(["one and two and three"]).save_pretrained(directory)
    (tmp_path / "texts.txt").write_text("one and two and three, " * 100, encoding="utf-8")
    return directory


def test_a_checkpoint_and_texts_become_a_file(checkpoint, tmp_path):
    options = {"max_tokens": 200, "sequence_length": 64}
    found = collect_statistics(checkpoint, tmp_path / "texts.txt", **options)
    assert found.num_tokens == 200 and sorted(found.layers) == [0, 1]
    found.check_model(json.loads((checkpoint / "config.json").read_text()))
    found.write(tmp_path / "statistics.safetensors")
    assert read_statistics(tmp_path / "statistics.safetensors").digest == found.digest
    assert collect_statistics(checkpoint, tmp_path / "texts.txt", **options).digest == found.digest
    importance = found.importance(0, "gate", expert=0, width=32)
    assert len(importance) == 32 and math.isfinite(float(importance.sum()))


def test_exp_5_a_quantized_checkpoint_is_refused(checkpoint, tmp_path):
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(
        json.dumps({**config, "quantization_config": {"quant_method": "mxfp4"}})
    )
    with pytest.raises(ConfigError, match="quantized already"):
        collect_statistics(checkpoint, tmp_path / "texts.txt", max_tokens=8, sequence_length=8)


def test_a_checkpoint_without_a_tokenizer_or_a_weight_is_refused(checkpoint, tmp_path):
    from safetensors.torch import load_file, save_file

    weights = load_file(checkpoint / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, checkpoint / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match="lacks 1 weights of its model, e.g. model.norm.weight"):
        collect_statistics(checkpoint, tmp_path / "texts.txt", max_tokens=8, sequence_length=8)
    for file in checkpoint.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ConfigError, match="has no tokenizer"):
        collect_statistics(checkpoint, tmp_path / "texts.txt", max_tokens=8, sequence_length=8)


def test_a_device_that_is_not_there_is_refused(checkpoint, tmp_path):
    with pytest.raises(ConfigError, match="could not be loaded on nowhere"):
        collect_statistics(
            checkpoint, tmp_path / "texts.txt", max_tokens=8, sequence_length=8, device="nowhere"
        )

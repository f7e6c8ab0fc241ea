"""Matrices as engines know them, against the parameters of the models that were saved."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.checkpoints.tiny_families import FAMILIES, NUM_EXPERTS, save_tiny

from tracefp4.checkpoints import Checkpoint, Cut, inventory
from tracefp4.errors import ConfigError, FormatError

MIDDLE = {"mixtral": 48, "olmoe": 48, "gpt_oss": 48}
HIDDEN = 32


def _experts(model, family):
    """The experts modules of a model by layer."""
    return {
        layer: module.mlp.experts
        for layer, module in enumerate(model.model.layers)
        if hasattr(getattr(module, "mlp", None), "experts")
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_every_expert_is_found_with_its_bytes(family, tmp_path):
    model = save_tiny(family, tmp_path)
    middle = MIDDLE.get(family, 16)
    with Checkpoint(tmp_path) as checkpoint:
        linears = {
            (linear.layer, linear.expert, linear.role): linear
            for linear in inventory(checkpoint).linears
            if linear.kind == "expert"
        }
        experts = _experts(model, family)
        assert len(linears) == len(experts) * NUM_EXPERTS * 3
        for layer, module in experts.items():
            for expert in range(NUM_EXPERTS):
                gate, up, down = (linears[layer, expert, role] for role in ("gate", "up", "down"))
                assert gate.shape == up.shape == (middle, HIDDEN)
                assert down.shape == (HIDDEN, middle)
                both = module.gate_up_proj[expert].detach()
                if family == "gpt_oss":
                    assert torch.equal(gate.read(checkpoint), both[:, 0::2].t())
                    assert torch.equal(up.read(checkpoint), both[:, 1::2].t())
                    assert torch.equal(down.read(checkpoint), module.down_proj[expert].t())
                    assert torch.equal(gate.read_bias(checkpoint), module.gate_up_proj_bias[expert, 0::2])
                    assert torch.equal(up.read_bias(checkpoint), module.gate_up_proj_bias[expert, 1::2])
                    assert torch.equal(down.read_bias(checkpoint), module.down_proj_bias[expert])
                else:
                    assert torch.equal(gate.read(checkpoint), both[:middle])
                    assert torch.equal(up.read(checkpoint), both[middle:])
                    assert torch.equal(down.read(checkpoint), module.down_proj[expert])
                    assert gate.read_bias(checkpoint) is None


@pytest.mark.parametrize("family", FAMILIES)
def test_modules_have_the_names_of_the_model(family, tmp_path):
    """Every linear that is no expert is a module of the transformers model, with its weight and bias."""
    model = save_tiny(family, tmp_path)
    modules = dict(model.named_modules())
    with Checkpoint(tmp_path) as checkpoint:
        for linear in inventory(checkpoint).linears:
            if linear.kind == "expert":
                continue
            module = modules[linear.module.replace("block_sparse_moe", "mlp")]
            assert torch.equal(linear.read(checkpoint), module.weight), linear.module
            bias = getattr(module, "bias", None)
            assert (linear.bias is None) == (bias is None)
            assert bias is None or torch.equal(linear.read_bias(checkpoint), bias)


def test_gate_and_up_alternate_only_where_the_model_says_so(tmp_path):
    """gpt_oss itself: which columns its experts use as gate."""
    model = save_tiny("gpt_oss", tmp_path)
    experts = model.model.layers[0].mlp.experts
    seen = torch.zeros(1, 96, dtype=torch.bfloat16)
    seen[:, 0::2] = -1e4  # a gate far below zero closes; an up far below zero would be clamped and pass
    assert experts._apply_gate(seen).abs().max() < 1e-3


def _fused(path, gate_up, down, *, model_type, hidden, bias=None):
    path.mkdir()
    config = {"model_type": model_type, "hidden_size": hidden, "num_hidden_layers": 1}
    config |= {"num_experts": len(gate_up), "num_local_experts": len(gate_up)}
    (path / "config.json").write_text(json.dumps(config))
    prefix = "model.layers.0.mlp.experts"
    tensors = {f"{prefix}.gate_up_proj": gate_up, f"{prefix}.down_proj": down}
    save_file(tensors, path / "model.safetensors")
    return path


def _rows(checkpoint):
    return {linear.role: linear.read(checkpoint) for linear in inventory(checkpoint).linears}


def test_lay_5_interleaved_and_concatenated_files_give_the_same_halves(tmp_path):
    gate, up = torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0])
    interleaved = torch.tensor([1.0, 10.0, 2.0, 20.0]).reshape(1, 1, 4)  # [E, H, 2I]
    concatenated = torch.tensor([1.0, 2.0, 10.0, 20.0]).reshape(1, 4, 1)  # [E, 2I, H]
    down = torch.tensor([5.0, 6.0])
    paths = [
        _fused(tmp_path / "i", interleaved, down.reshape(1, 2, 1), model_type="gpt_oss", hidden=1),
        _fused(tmp_path / "c", concatenated, down.reshape(1, 1, 2), model_type="qwen3_moe", hidden=1),
    ]
    for path in paths:
        with Checkpoint(path) as checkpoint:
            found = _rows(checkpoint)
        assert torch.equal(found["gate"], gate[:, None])
        assert torch.equal(found["up"], up[:, None])
        assert torch.equal(found["down"], down[None])
        # the largest magnitude of the pair, from which their shared outer scale comes
        assert max(found["gate"].abs().max(), found["up"].abs().max()) == 20.0


@pytest.mark.parametrize("model_type", ["gpt_oss", "qwen3_moe"])
def test_a_square_fused_tensor_is_read_by_the_family_not_by_its_shape(model_type, tmp_path):
    """2I == H: both layouts fit the shape, so only the model type can tell."""
    gate_up, down = torch.arange(32.0).reshape(2, 4, 4), torch.arange(16.0)
    shape = (2, 2, 4) if model_type == "gpt_oss" else (2, 4, 2)
    path = _fused(tmp_path / "m", gate_up, down.reshape(shape), model_type=model_type, hidden=4)
    with Checkpoint(path) as checkpoint:
        linears = inventory(checkpoint).linears
        linear = next(linear for linear in linears if (linear.expert, linear.role) == (1, "gate"))
        expected = gate_up[1].t()[0::2] if model_type == "gpt_oss" else gate_up[1][:2]
        assert torch.equal(linear.read(checkpoint), expected)


@pytest.mark.parametrize(
    "model_type, shape",
    [("gpt_oss", (2, 8, 4)), ("qwen3_moe", (2, 4, 8)), ("qwen3_moe", (2, 7, 4)), ("qwen3_moe", (8, 4))],
    ids=["not_transposed", "transposed", "odd", "flat"],
)
def test_a_fused_tensor_of_another_layout_is_refused(model_type, shape, tmp_path):
    path = _fused(tmp_path / "m", torch.zeros(shape), torch.zeros(2, 4, 4), model_type=model_type, hidden=4)
    with Checkpoint(path) as checkpoint, pytest.raises(FormatError, match=r"is no fused experts of"):
        inventory(checkpoint)


def test_mixtral_is_never_fused(tmp_path):
    path = _fused(tmp_path / "m", torch.zeros(2, 8, 4), torch.zeros(2, 4, 4), model_type="mixtral", hidden=4)
    tensors = load_file(path / "model.safetensors")
    save_file(
        {name.replace("mlp", "block_sparse_moe"): value for name, value in tensors.items()},
        path / "model.safetensors",
    )
    with Checkpoint(path) as checkpoint, pytest.raises(FormatError, match="layout is none"):
        inventory(checkpoint)


def test_a_view_writes_back_into_the_stored_matrix():
    stored = torch.zeros(3, 8)
    values = torch.arange(12.0).reshape(4, 3)
    Cut(0, True, 1, None, 2).view(stored).copy_(values)
    assert torch.equal(stored[:, 1::2], values.t())
    assert stored[:, 0::2].abs().sum() == 0


def test_a_lost_expert_is_refused(tmp_path):
    save_tiny("qwen3_moe", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.3.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with (
        Checkpoint(tmp_path) as checkpoint,
        pytest.raises(FormatError, match=r"holds 11 matrices.*needs 12.*up"),
    ):
        inventory(checkpoint)


@pytest.mark.parametrize("leaf", ["gate_proj", "down_proj"])
def test_an_expert_of_another_size_is_refused(leaf, tmp_path):
    save_tiny("qwen3_moe", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = f"model.layers.1.mlp.experts.1.{leaf}.weight"
    tensors[name] = tensors[name][:8].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    with (
        Checkpoint(tmp_path) as checkpoint,
        pytest.raises(FormatError, match=rf"experts.1.{leaf} has the shape"),
    ):
        inventory(checkpoint)


def test_an_expert_too_many_is_refused(tmp_path):
    save_tiny("qwen3_moe", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_experts": 3}))
    with Checkpoint(tmp_path) as checkpoint, pytest.raises(FormatError, match=r"holds 12 matrices.*needs 9"):
        inventory(checkpoint)


@pytest.mark.parametrize("value", [None, 0, "2", True])
def test_a_config_without_layers_is_refused(value, tmp_path):
    save_tiny("qwen3_moe", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": value}))
    with Checkpoint(tmp_path) as checkpoint, pytest.raises(ConfigError, match="num_hidden_layers"):
        inventory(checkpoint)


def test_a_model_without_routed_experts_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", "num_hidden_layers": 1}))
    save_file({"model.norm.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    with Checkpoint(tmp_path) as checkpoint, pytest.raises(ConfigError, match="holds no routed experts"):
        inventory(checkpoint)


def test_an_aliased_module_is_a_linear_of_its_own(tmp_path):
    save_tiny("qwen3_moe", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    attention = "model.layers.0.self_attn"
    del tensors[f"{attention}.v_proj.weight"]
    save_file(
        tensors,
        tmp_path / "model.safetensors",
        metadata={f"{attention}.v_proj.weight": f"{attention}.k_proj.weight"},
    )
    with Checkpoint(tmp_path) as checkpoint:
        linears = {linear.module: linear for linear in inventory(checkpoint).linears}
        value, key = linears[f"{attention}.v_proj"], linears[f"{attention}.k_proj"]
        assert value.stored == key.stored
        assert torch.equal(value.read(checkpoint), key.read(checkpoint))


def test_a_tied_head_is_known_though_it_is_not_stored(tmp_path):
    save_tiny("qwen3_moe", tmp_path, tie_word_embeddings=True)
    with Checkpoint(tmp_path) as checkpoint:
        stock = inventory(checkpoint)
        assert "lm_head.weight" not in checkpoint.specs
        head = next(linear for linear in stock.linears if linear.module == "lm_head")
        assert (head.kind, head.stored, stock.ties_embeddings) == ("head", "model.embed_tokens.weight", True)

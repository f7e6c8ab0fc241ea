"""What transformers stores for every family, tensor by tensor, and what we say each is."""

from collections import Counter

import pytest
from safetensors import safe_open
from tests.checkpoints.tiny_families import FAMILIES, save_tiny

from tracefp4.checkpoints import names
from tracefp4.checkpoints.names import classify, family_of
from tracefp4.errors import ConfigError

# Routed experts, 2 layers x 4 experts x 3 matrices; deepseek_v3 and glm4_moe have a dense first layer.
ALL = {"expert": 24, "norm": 5, "router": 2, "embedding": 1, "head": 1}
DENSE_FIRST = {**ALL, "expert": 12, "mlp": 3, "shared_expert": 3}
EXPECTED = {
    "qwen2_moe": {**ALL, "attention": 14, "shared_expert": 6, "router": 4},
    "qwen3_moe": {**ALL, "attention": 8, "norm": 9},
    "qwen3_5_moe_text": {**ALL, "attention": 12, "norm": 8, "shared_expert": 6, "router": 4},
    "qwen3_next": {**ALL, "attention": 10, "norm": 8, "shared_expert": 6, "router": 4},
    "olmoe": {**ALL, "attention": 8, "norm": 9},
    "mixtral": {**ALL, "attention": 8},
    "deepseek_v3": {**DENSE_FIRST, "attention": 10, "norm": 9},
    "glm4_moe": {**DENSE_FIRST, "attention": 8},
    # fused: gate_up and down of a layer, and a bias for each
    "gpt_oss": {**ALL, "expert": 4, "expert_bias": 4, "attention": 18, "router": 4},
}


def test_every_family_is_built_here():
    assert set(FAMILIES) == set(names.FAMILIES) == set(EXPECTED)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_stored_tensor_has_its_kind(family, tmp_path):
    save_tiny(family, tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        stored = [classify(name, family=names.FAMILIES[family], num_layers=2) for name in file.keys()]  # noqa: SIM118
    assert Counter(item.kind for item in stored) == EXPECTED[family]
    assert all(item.kind in names.KINDS for item in stored)
    assert all(
        item.layer == (int(item.name.split(".")[2]) if "layers" in item.name else None) for item in stored
    )
    assert all(item.is_fused == (family == "gpt_oss") for item in stored if item.kind == "expert")


QWEN, MIXTRAL, GPT = (names.FAMILIES[name] for name in ("qwen3_moe", "mixtral", "gpt_oss"))


@pytest.mark.parametrize(
    "name, family, kind, layer, expert, role",
    [
        ("model.layers.1.mlp.experts.17.gate_proj.weight", QWEN, "expert", 1, 17, "gate"),
        ("model.layers.1.mlp.experts.17.down_proj.weight", QWEN, "expert", 1, 17, "down"),
        ("model.layers.1.mlp.experts.gate_up_proj", QWEN, "expert", 1, None, "gate_up"),
        ("model.language_model.layers.1.mlp.experts.down_proj", QWEN, "expert", 1, None, "down"),
        ("model.layers.0.block_sparse_moe.experts.3.w1.weight", MIXTRAL, "expert", 0, 3, "gate"),
        ("model.layers.0.block_sparse_moe.experts.3.w3.weight", MIXTRAL, "expert", 0, 3, "up"),
        ("model.layers.0.block_sparse_moe.experts.3.w2.weight", MIXTRAL, "expert", 0, 3, "down"),
        ("model.layers.0.block_sparse_moe.gate.weight", MIXTRAL, "router", 0, None, ""),
        ("model.layers.1.mlp.experts.gate_up_proj_bias", GPT, "expert_bias", 1, None, "gate_up"),
        ("model.layers.1.mlp.router.bias", GPT, "router", 1, None, ""),
        ("model.layers.1.self_attn.sinks", GPT, "attention", 1, None, ""),
        ("model.layers.1.mlp.gate.weight", QWEN, "router", 1, None, ""),
        ("model.layers.1.mlp.gate.e_score_correction_bias", QWEN, "router", 1, None, ""),
        ("model.layers.1.mlp.gate_proj.weight", QWEN, "mlp", 1, None, ""),
        ("model.layers.1.mlp.shared_expert_gate.weight", QWEN, "router", 1, None, ""),
        ("model.layers.1.mlp.shared_experts.up_proj.weight", QWEN, "shared_expert", 1, None, ""),
        ("model.layers.1.self_attn.kv_a_layernorm.weight", QWEN, "norm", 1, None, ""),
        ("model.layers.1.linear_attn.A_log", QWEN, "attention", 1, None, ""),
        ("model.visual.pos_embed.weight", QWEN, "embedding", None, None, ""),
        ("model.visual.patch_embed.proj.weight", QWEN, "embedding", None, None, ""),
        ("model.visual.blocks.0.attn.qkv.weight", QWEN, "attention", None, None, ""),
        ("model.norm.weight", QWEN, "norm", None, None, ""),
        ("lm_head.weight", QWEN, "head", None, None, ""),
        ("model.rotary.inv_freq", QWEN, "other", None, None, ""),
        # multi-token prediction: a layer behind the last, or a module of its own
        ("model.layers.2.mlp.experts.0.up_proj.weight", QWEN, "draft", 2, 0, "up"),
        ("model.layers.2.eh_proj.weight", QWEN, "draft", 2, None, ""),
        ("model.layers.2.enorm.weight", QWEN, "norm", 2, None, ""),
        ("model.layers.2.shared_head.head.weight", QWEN, "head", 2, None, ""),
        ("mtp.layers.0.mlp.experts.0.up_proj.weight", QWEN, "draft", 0, 0, "up"),
        ("mtp.fc.weight", QWEN, "draft", None, None, ""),
        ("mtp.pre_fc_norm_embedding.weight", QWEN, "norm", None, None, ""),
    ],
    ids=lambda value: value if isinstance(value, str) and "." in value else "",
)
def test_names_of_releases(name, family, kind, layer, expert, role):
    found = classify(name, family=family, num_layers=2)
    assert (found.kind, found.layer, found.expert, found.role) == (kind, layer, expert, role)


def test_the_language_model_names_the_family():
    nested = {"model_type": "qwen3_5_moe", "text_config": {"model_type": "qwen3_5_moe_text"}}
    assert family_of(nested).model_type == "qwen3_5_moe_text"


@pytest.mark.parametrize("config", [{}, {"model_type": "llama"}], ids=["none", "dense"])
def test_an_unknown_architecture_is_refused_with_the_list(config):
    with pytest.raises(ConfigError, match=r"deepseek_v3, glm4_moe, gpt_oss, mixtral, olmoe, qwen2_moe"):
        family_of(config)

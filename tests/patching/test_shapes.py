"""Shapes against published sizes and transformers itself; guidance bytes against the method's table."""

import json
from dataclasses import replace

import pytest

from tracefp4.coding import CODECS
from tracefp4.errors import ConfigError
from tracefp4.formats import SCHEMES
from tracefp4.patching.budget import (
    FP4_BYTES,
    GIB,
    block_of,
    bytes_by_codec,
    card_bytes,
    codec_bytes,
    decisions_for,
    guided_sites,
    memory,
    record_bytes,
)
from tracefp4.patching.catalogue import ALIASES, KNOWN_SHAPES, shape_by_name, shape_from_config
from tracefp4.patching.rules import PlanRules
from tracefp4.patching.shapes import modules, num_parameters

# activations full, KV full, activations mantissa last half, w2-input values per token and layer
BYTES_PER_TOKEN = {
    "qwen3.5-35b-a3b": (46_080, 5_760, 7_680, 4_096),
    "qwen3.5-122b-a10b": (82_944, 6_912, 13_824, 8_192),
    "qwen3.8-flash-next": (69_120, 6_912, 11_520, 6_400),
    "qwen3.8-2.4t-a95b": (423_936, 26_496, 70_656, 20_480),
    "qwen3-30b-a3b": (55_296, 27_648, 9_216, 6_144),
    "gpt-oss-20b": (38_880, 13_824, 6_480, 11_520),
    "olmoe-1b-7b": (18_432, 36_864, 3_072, 8_192),
}

# Published totals in billions, and how far a shape may be from them.
PARAMETERS = {
    "qwen3-30b-a3b": (30.532, 0.001),
    "qwen3-235b-a22b": (235.09, 0.01),
    "gpt-oss-20b": (20.91, 0.01),
    "gpt-oss-120b": (116.83, 0.01),
    "olmoe-1b-7b": (6.92, 0.01),
    "qwen3.5-35b-a3b": (34.7, 0.5),
    "qwen3.5-122b-a10b": (122.1, 0.5),
}


def _record(name: str, **options):
    shape = KNOWN_SHAPES[name]
    rules = PlanRules(**options)
    return record_bytes(shape, decisions_for(shape, rules), rules)


@pytest.mark.parametrize("name", BYTES_PER_TOKEN)
def test_bytes_per_token_are_the_methods_table(name):
    full_x, full_kv, compact_x, w2_values = BYTES_PER_TOKEN[name]
    full = _record(name, guidance="full", layers="all")
    assert (full.activations, full.kv) == (full_x, full_kv)
    assert _record(name, guidance="mantissa", layers="last_half").activations == compact_x
    assert KNOWN_SHAPES[name].top_k * KNOWN_SHAPES[name].moe_inter == w2_values


def test_35b_lines_are_separate_and_add_up():
    compact = _record("qwen3.5-35b-a3b", guidance="mantissa", layers="last_half")
    assert (compact.activations, compact.kv, compact.row_exponents, compact.routed_ids) == (
        7_680,
        960,
        20,
        320,
    )
    assert compact.total == 7_680 + 960 + 20 + 320
    everything = _record("qwen3.5-35b-a3b", guidance="mantissa", layers="all")
    assert (everything.activations, everything.kv, everything.row_exponents) == (15_360, 1_920, 40)
    none = _record("qwen3.5-35b-a3b", guidance="none")
    assert (none.total, none.routed_ids) == (320, 320)  # routing is recorded whatever else is
    assert _record("qwen3.5-35b-a3b", guidance="none", replay_routing=False).total == 0
    assert _record("qwen3.5-35b-a3b", guidance="full", replay_routing=False).routed_ids == 0


# Codec and layer rule -> codec bytes per token of activations and of KV; the first four are the method's own figures.
BYTES_OF_35B = {
    ("full", "all"): (46_080, 5_760),
    ("mantissa", "last:20"): (7_680, 960),
    ("mantissa_lean", "last:20"): (5_760, 720),
    ("secded", "all"): (4_480, 560),
    ("low2", "all"): (25_600, 3_200),
    ("mantissa", "all"): (15_360, 1_920),
    ("mantissa_lean", "all"): (11_520, 1_440),
    ("parity2", "all"): (6_400, 800),
    ("parity4", "all"): (3_840, 480),
    ("parity8", "all"): (2_560, 320),
    ("parity16", "all"): (1_920, 240),
    ("bch64_3", "all"): (4_320, 540),
    ("bch128_3", "all"): (3_040, 380),
    ("bch128_3+coset1", "all"): (2_400, 300),
    ("bch256_3+bch128_2", "all"): (1_080, 180),
    ("secded+raw", "all"): (8_320, 1_040),
}


@pytest.mark.parametrize(("codec", "layers"), BYTES_OF_35B, ids="-".join)
def test_35b_weighs_under_every_codec_what_its_rates_say(codec, layers):
    # Mutation: rows that are not rounded up to whole bytes (bch256_3 keeps 50 bits of a KV row: 7 bytes).
    found = _record("qwen3.5-35b-a3b", guidance=codec, layers=layers)
    assert (found.activations, found.kv) == BYTES_OF_35B[codec, layers]
    lines = (found.activations, found.kv, found.row_exponents, found.routed_ids)
    assert lines[2:] == ((40, 320) if layers == "all" else (20, 320)) and found.total == sum(lines)


def test_codecs_are_compared_over_the_same_sites_and_auto_has_no_size_of_its_own():
    shape = KNOWN_SHAPES["qwen3.5-35b-a3b"]
    auto = PlanRules(guidance="auto", layers="last_half")
    decisions = decisions_for(shape, auto)
    compared = bytes_by_codec(shape, decisions, auto)
    assert tuple(compared) == CODECS
    assert compared["mantissa"] == _record("qwen3.5-35b-a3b", guidance="mantissa", layers="last_half")
    own = bytes_by_codec(shape, decisions, PlanRules(guidance="parity3", layers="last_half"))
    assert tuple(own) == (*CODECS, "parity3")
    assert bytes_by_codec(shape, decisions, PlanRules(guidance="none")) == {}
    with pytest.raises(ConfigError, match="no size yet; got guidance 'auto'.*mantissa_lean"):
        record_bytes(shape, decisions, auto)


def test_rows_of_the_down_projection_are_padded_one_by_one():
    # A row of 768 is 6 blocks of 128: 132 bits of syndromes, 17 bytes; 48 scales keep 12. Mutation: one row of 6,144.
    only_w2 = _record("qwen3-30b-a3b", guidance="bch128_3", sites=("w2",))
    assert only_w2.activations == 48 * 8 * (17 + 12)


def test_more_than_256_experts_need_two_bytes_an_id():
    assert _record("qwen3.8-2.4t-a95b", guidance="mantissa").routed_ids == 92 * 10 * 2


def test_w2_site_has_one_row_per_chosen_expert():
    only_w2 = _record("qwen3-30b-a3b", guidance="full", sites=("w2",))
    assert only_w2.activations == 48 * 6_144 * 9 // 16
    assert (only_w2.kv, only_w2.row_exponents) == (0, 48 * 8)


def test_mxfp4_has_half_as_many_block_scales_and_no_exponents():
    # Mutation: sizes of NVFP4 whatever the scheme.
    found = _record("qwen3-30b-a3b", guidance="full", sites=("x", "w2"), activation="MXFP4_RCEIL")
    assert found.activations == 48 * (2048 + 6_144) * 17 // 32
    assert found.row_exponents == 0
    static = _record("qwen3-30b-a3b", guidance="full", sites=("x",), activation="NVFP4_STATIC_POW2")
    assert (static.activations, static.row_exponents) == (48 * 2048 * 9 // 16, 0)
    assert _record("qwen3-30b-a3b", sites=("x", "k"), activation="none").activations == 0
    shape = KNOWN_SHAPES["qwen3-30b-a3b"]
    experts, options = 48 * 128 * 3 * 2048 * 768, {"context": 1, "batch": 1}
    for weight, expected in (("MXFP4_EVEN", 0.53125), ("NVFP4_TENSOR_FP32", 0.5625), ("none", 2)):
        found = memory(shape, decisions_for(shape, PlanRules(weight=weight)), weight=weight, **options)
        assert found.weights_plan == int((found.parameters - experts) * 2 + experts * expected)
    with pytest.raises(ConfigError, match="moe_intermediate_size divisible by 32; got 48"):
        decisions_for(replace(shape, moe_inter=48), PlanRules(weight="MXFP4_EVEN"))


@pytest.mark.parametrize("name", SCHEMES)
def test_a_schemes_name_says_what_budgets_read_from_it(name):
    # The budget imports no torch, so it cannot ask the scheme itself.
    scheme = SCHEMES[name]
    assert block_of(name) == scheme.block_size
    assert ("_ROW_" in name) == (scheme.outer == "row")


def test_last_n_and_bf16_layers_reduce_the_record():
    assert _record("qwen3-30b-a3b", guidance="mantissa", layers="last:2").activations == 2 * 2048 * 3 // 16
    kept = _record("qwen3-30b-a3b", guidance="mantissa", layers="last:2", last_layers_bf16=1)
    assert kept.activations == 2048 * 3 // 16
    assert kept.kv == 2 * 512 * 3 // 16


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameter_counts_are_the_published_ones(name):
    billions, tolerance = PARAMETERS[name]
    assert abs(num_parameters(KNOWN_SHAPES[name]) / 1e9 - billions) < tolerance


def test_qwen3_30b_counts_every_parameter():
    assert num_parameters(KNOWN_SHAPES["qwen3-30b-a3b"]) == 30_532_122_624


def test_memory_of_30b_against_published_sizes():
    shape = KNOWN_SHAPES["qwen3-30b-a3b"]
    found = memory(shape, decisions_for(shape, PlanRules()), context=4096, batch=1)
    assert abs(found.weights_bf16 / GIB - 56.87) < 0.02
    assert found.kv_bf16 == 4096 * 98_304 == 384 * 1024**2
    assert found.kv_plan == found.kv_bf16 * FP4_BYTES / 2
    experts = 48 * 128 * 3 * 2048 * 768
    assert found.weights_plan == int((found.parameters - experts) * 2 + experts * FP4_BYTES)
    assert found.state == 0
    assert found.trainer == 16 * found.parameters


def test_delta_layers_have_state_and_no_cache():
    shape = KNOWN_SHAPES["qwen3.5-35b-a3b"]
    found = memory(shape, decisions_for(shape, PlanRules()), context=1000, batch=2)
    assert found.kv_bf16 == 2 * 1000 * 20_480
    assert found.state == 2 * 30 * (32 * 128 * 128 * 4 + (2 * 16 + 32) * 128 * 3 * 2)


def test_sliding_window_layers_stop_growing():
    shape = KNOWN_SHAPES["gpt-oss-20b"]
    decisions = decisions_for(shape, PlanRules())
    short, long = (memory(shape, decisions, context=c, batch=1).kv_bf16 for c in (128, 1128))
    assert long - short == 12 * 1000 * 2 * 512 * 2


def test_cards():
    assert card_bytes("H200") == 139 * GIB
    assert card_bytes("48GB") == 48 * GIB
    for wrong in ("h300", "GB", "-1GB", "0GB"):
        with pytest.raises(ConfigError, match="known: h200"):
            card_bytes(wrong)


def test_decisions_name_module_layer_and_reason():
    decisions = decisions_for(KNOWN_SHAPES["qwen3.5-35b-a3b"], PlanRules(last_layers_bf16=1))
    by_name = {d.name: d for d in decisions}
    assert by_name["model.layers.0.mlp.experts"].is_quantized
    assert not by_name["model.layers.39.mlp.experts"].is_quantized
    assert "last_layers_bf16" in by_name["model.layers.39.mlp.experts"].reason
    assert not by_name["model.layers.0.mlp.gate"].is_quantized
    assert sum(d.kind == "kv" and d.is_quantized for d in decisions) == 9
    assert all(d.reason for d in decisions)


def test_selecting_nothing_is_refused():
    shape = KNOWN_SHAPES["olmoe-1b-7b"]
    with pytest.raises(ConfigError, match="no module of OLMoE"):
        decisions_for(shape, PlanRules(exclude=("model.layers.*",)))
    rules = PlanRules(sites=("k",), exclude=("*.kv_cache",))
    with pytest.raises(ConfigError, match="selects no site"):
        guided_sites(shape, decisions_for(shape, rules), rules)


def test_codec_bytes_refuses_a_width_off_the_block():
    assert codec_bytes(16, "mantissa") == 3
    assert codec_bytes(0, "full") == 0
    with pytest.raises(ConfigError, match="divisible by 16; got 100"):
        codec_bytes(100, "full")
    with pytest.raises(ConfigError, match="Unknown guidance codec; got 'half'"):
        codec_bytes(16, "half")


def test_a_model_off_the_block_is_refused():
    shape = shape_from_config(_tiny("qwen3_moe", head_dim=24), name="tiny")
    with pytest.raises(ConfigError, match="head_dim divisible by 16; got 24"):
        decisions_for(shape, PlanRules())
    assert decisions_for(shape, PlanRules(exclude=("*.kv_cache",)))


@pytest.mark.parametrize(
    ("short", "name"),
    [
        ("olmoe", "OLMoE-1B-7B"),
        ("qwen3-30b", "Qwen3-30B-A3B"),
        ("Qwen3-235B", "Qwen3-235B-A22B"),
        ("qwen3.5-35b", "Qwen3.5-35B-A3B"),
        ("Qwen/qwen3.5-122b", "Qwen3.5-122B-A10B"),
    ],
)
def test_shape_by_name_knows_short_names(short, name):
    assert shape_by_name(short).name == name
    assert set(ALIASES.values()) <= set(KNOWN_SHAPES) and not set(ALIASES) & set(KNOWN_SHAPES)


def test_shape_by_name_reads_files_and_explains_itself(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(_tiny("qwen3_moe")))
    assert shape_by_name(str(tmp_path)) == shape_by_name(str(tmp_path / "config.json"))
    assert shape_by_name("Qwen/Qwen3-30B-A3B").name == "Qwen3-30B-A3B"
    with pytest.raises(ConfigError, match=r"Did you mean 'qwen3.5-35b-a3b'"):
        shape_by_name("qwen35-35b")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not readable JSON"):
        shape_by_name(str(tmp_path))
    with pytest.raises(ConfigError, match="model_type 'llama'"):
        shape_from_config({"model_type": "llama"}, name="x")
    with pytest.raises(ConfigError, match="lacks 'hidden_size'"):
        shape_from_config({"model_type": "olmoe"}, name="x")


def _tiny(kind: str, **extra):
    sizes = {
        "model_type": kind,
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "head_dim": 16,
        "num_key_value_heads": 2,
        "vocab_size": 96,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "num_experts": 8,
        "intermediate_size": 80,
    }
    return sizes | extra


def _configs():
    from transformers import GptOssConfig, OlmoeConfig, Qwen3_5MoeTextConfig, Qwen3MoeConfig

    small = {
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 96,
        "num_experts_per_tok": 2,
    }
    delta = {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    }
    return {
        "qwen3_moe": Qwen3MoeConfig(
            **small,
            head_dim=16,
            num_experts=8,
            moe_intermediate_size=32,
            mlp_only_layers=[3],
            intermediate_size=80,
        ),
        "qwen3_moe_tied": Qwen3MoeConfig(
            **small, head_dim=16, num_experts=8, moe_intermediate_size=32, tie_word_embeddings=True
        ),
        "qwen3_5_moe": Qwen3_5MoeTextConfig(
            **small,
            **delta,
            head_dim=16,
            num_experts=8,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=48,
        ),
        "gpt_oss": GptOssConfig(**small, head_dim=16, num_local_experts=8, intermediate_size=32),
        "olmoe": OlmoeConfig(**small, num_experts=8, intermediate_size=32, eos_token_id=1),
    }


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_moe_tied", "qwen3_5_moe", "gpt_oss", "olmoe"])
def test_names_and_counts_are_those_of_transformers(family):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    config = _configs()[family]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shape = shape_from_config(json.loads(json.dumps(config.to_dict(), default=str)), name=family)
    assert num_parameters(shape) == sum(p.numel() for p in model.parameters())
    counted: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        owner = name if name.endswith(("sinks", "A_log", "dt_bias")) else name.rpartition(".")[0]
        counted[owner] = counted.get(owner, 0) + parameter.numel()
    assert {m.name: m.num_parameters for m in modules(shape) if m.num_parameters} == counted

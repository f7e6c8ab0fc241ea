"""Plans of real models: which modules, why, what is refused, and when two plans are the same."""

from dataclasses import replace

import pytest
import torch
from tests.assertions import assert_names_equal
from tests.models.tiny_models import tiny_config, tiny_model
from torch import nn
from transformers import Qwen3MoeForCausalLM

from tracefp4.errors import ConfigError
from tracefp4.formats import BF16_LAYER, NVFP4_KV, NVFP4_ROW_POW2, NVFP4_TENSOR_POW2
from tracefp4.guidance import Site
from tracefp4.patching import PlanRules, plan
from tracefp4.rollout.recorder import default_sites, scheme_digest

LAYER_NAMES = [
    *(f"self_attn.{n}" for n in ("q_proj", "k_proj", "kv_cache", "v_proj", "o_proj", "q_norm", "k_norm")),
    "mlp.experts",
    "mlp.gate",
    "input_layernorm",
    "post_attention_layernorm",
]


def shell(**changes):
    """A model without memory for its weights."""
    with torch.device("meta"):
        return Qwen3MoeForCausalLM(tiny_config(**changes))


def made(model=None, **options):
    return plan(shell() if model is None else model, PlanRules(**options))


def test_every_leaf_module_is_listed_once_in_model_order():
    names = ["model.embed_tokens"]
    names += [f"model.layers.{n}.{name}" for n in (0, 1) for name in LAYER_NAMES]
    names += ["model.norm", "model.rotary_emb", "lm_head"]
    found = made()
    assert_names_equal((d.name for d in found.decisions), names)
    assert_names_equal(
        (d.name for d in found.decisions if d.is_quantized),
        [f"model.layers.{n}.{name}" for n in (0, 1) for name in ("self_attn.kv_cache", "mlp.experts")],
    )
    assert found.num_quantized == 4 and all(d.reason for d in found.decisions)


def test_layers_have_the_default_schemes_and_every_quantized_site_is_guided():
    found = made()
    assert [(p.activation, p.weight, p.kv) for p in found.layers] == [
        (NVFP4_ROW_POW2, NVFP4_TENSOR_POW2, NVFP4_KV)
    ] * 2
    assert sorted(found.guided_sites) == sorted(default_sites(found.layers))


def test_plans_of_dense_layers_leave_them_bf16():
    found = made(shell(mlp_only_layers=[0]))
    assert found.layers[0].activation is None and found.layers[0].kv == NVFP4_KV
    kinds = {d.name: d.kind for d in found.decisions}
    assert kinds["model.layers.0.mlp.gate_proj"] == "mlp" and kinds["model.layers.1.mlp.gate"] == "router"
    assert Site("x", 0) not in found.guided_sites and Site("x", 1) in found.guided_sites


def test_last_layers_bf16():
    found = made(shell(num_hidden_layers=4), last_layers_bf16=3)
    assert [layer == BF16_LAYER for layer in found.layers] == [False, True, True, True]
    assert {site.layer for site in found.guided_sites} == {0}
    reasons = {d.name: d.reason for d in found.decisions}
    assert reasons["model.layers.1.mlp.experts"] == "among the last 3 layers (last_layers_bf16)"


@pytest.mark.parametrize(
    ("rule", "expected"),
    [("all", [0, 1, 2, 3, 4]), ("last_half", [2, 3, 4]), ("last:1", [4]), ("last:5", [0, 1, 2, 3, 4])],
)
def test_layer_rules_choose_the_guided_layers(rule, expected):
    found = made(shell(num_hidden_layers=5), layers=rule)
    assert sorted({site.layer for site in found.guided_sites}) == expected
    assert found.num_quantized == 10


def test_sites_without_their_scheme_are_not_guided():
    found = made(kv="none", sites=("x", "k", "w2"))
    assert {site.kind for site in found.guided_sites} == {"x", "w2"}
    assert [d.reason for d in found.decisions if d.kind == "kv"] == ['kv = "none"'] * 2


def test_an_excluded_glob_keeps_its_modules_bf16():
    found = made(exclude=("model.layers.1.*",))
    assert found.layers[1] == BF16_LAYER and found.layers[0] != BF16_LAYER
    reason = next(d.reason for d in found.decisions if d.name == "model.layers.1.mlp.experts")
    assert reason == "excluded by 'model.layers.1.*'"


def test_bf16_mode_quantizes_nothing_on_purpose():
    found = made(mode="bf16")
    assert found.layers == (BF16_LAYER,) * 2 and found.guided_sites == () and found.num_quantized == 0
    assert found.scheme_digest == "bf16-bf16-bf16"
    made(shell(head_dim=8), mode="bf16")  # nothing is quantized, so any dimension will do


def test_other_architectures_are_refused():
    with pytest.raises(ConfigError, match="Linear is not a supported.*supported: Qwen3MoeForCausalLM"):
        plan(nn.Linear(2, 2), PlanRules())


@pytest.mark.parametrize("options", [{"last_layers_bf16": 2}, {"exclude": ("*",)}], ids=["last", "exclude"])
def test_selecting_nothing_is_refused(options):
    with pytest.raises(ConfigError, match='no module of Qwen3MoeForCausalLM was selected.*mode = "bf16"'):
        made(**options)


def test_guiding_nothing_is_refused():
    with pytest.raises(ConfigError, match="guidance 'mantissa' selects no site"):
        made(last_layers_bf16=1, layers="last:1")


def test_an_exclude_pattern_without_a_match_is_refused_with_the_nearest_name():
    with pytest.raises(
        ConfigError, match=r"'layers\.1\.mlp\.experts' matches no module.*model\.layers\.1\.mlp"
    ):
        made(exclude=("layers.1.mlp.experts",))


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"hidden_size": 72}, {}, "hidden_size divisible by 16; got 72"),
        ({"moe_intermediate_size": 40}, {}, "moe_intermediate_size divisible by 16; got 40"),
        ({"head_dim": 8}, {}, "head_dim divisible by 16; got 8"),
    ],
    ids=["hidden", "inner", "head"],
)
def test_quantized_dimensions_must_divide(changes, options, message):
    with pytest.raises(ConfigError, match=message):
        made(shell(**changes), **options)


def test_unquantized_dimensions_need_not_divide():
    assert made(shell(head_dim=8), kv="none").num_quantized == 2
    assert made(shell(moe_intermediate_size=40), exclude=("*.experts",)).num_quantized == 2


@pytest.mark.parametrize(
    "options",
    [{"activation": "NVFP4_TENSOR_POW2"}, {"weight": "NVFP4_ROW_POW2"}, {"kv": "NVFP4_ROW_POW2"}],
    ids=lambda options: next(iter(options)),
)
def test_schemes_with_the_wrong_outer_scale_are_refused(options):
    # BAT-1: an activation scale over the whole batch couples rows, and cannot be guided.
    with pytest.raises(ConfigError, match=f"quantization.{next(iter(options))}: .* needs one per"):
        made(**options)


def test_equal_models_and_rules_have_equal_digests():
    assert made().digest == made(tiny_model()).digest and len(made().digest) == 16


def test_the_digest_covers_what_the_rollout_computes():
    base = made()
    others = [
        made(mode="bf16"),
        made(kv="none"),
        made(last_layers_bf16=1),
        made(exclude=("*.0.mlp.experts",)),
        made(shell(num_hidden_layers=3)),
        base.with_kv_exponents({0: (1, 0)}),
        base.with_kv_exponents({0: (0, 1)}),
        base.with_kv_exponents({1: (0, 1)}),
        replace(base, architecture="OtherForCausalLM", digest=""),
    ]
    digests = [found.digest for found in (base, *others)]
    assert len(set(digests)) == len(digests)


def test_the_digest_does_not_cover_how_the_trainer_follows():
    base = made()
    for options in (
        {"guidance": "full"},
        {"guidance": "none"},
        {"decoder": "bracket"},
        {"layers": "last_half"},
        {"sites": ("x",)},
        {"replay_routing": False},
        {"backward": "high_precision"},
        {"ste": "clip"},
    ):
        assert made(**options).digest == base.digest, options
    assert base.without_guidance().digest == base.digest and base.without_guidance().guided_sites == ()


@pytest.mark.parametrize(
    "options",
    [{}, {"kv": "none"}, {"mode": "bf16"}, {"exclude": ("*.0.*",)}],
    ids=lambda o: next(iter(o), "default"),
)
def test_the_scheme_digest_is_the_recorders(options):
    found = made(**options)
    assert found.scheme_digest == scheme_digest(found.layers)


def test_exponents_are_set_where_the_cache_is_quantized():
    found = made(exclude=("*.1.self_attn.kv_cache",)).with_kv_exponents({0: (2, -4), 1: (5, 5)})
    assert [(p.k_exponent, p.v_exponent) for p in found.layers] == [(2, -4), (0, 0)]


def test_the_summary_is_plain_data():
    import json

    summary = made().summary()
    assert json.loads(json.dumps(summary))["num_quantized_modules"] == 4
    assert summary["kv_exponents"] == [[0, 0], [0, 0]] and summary["digest"] == made().digest

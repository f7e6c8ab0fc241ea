"""Plans of real models: which modules, why, what is refused, and when two plans are the same."""

from dataclasses import replace

import pytest
import torch
from tests.assertions import assert_names_equal
from tests.models.tiny_models import tiny_config, tiny_model
from torch import nn
from transformers import Qwen3MoeForCausalLM

from tracefp4.errors import ConfigError
from tracefp4.formats import BF16_LAYER, NVFP4_KV, NVFP4_ROW_POW2, NVFP4_TENSOR_POW2, SCHEMES
from tracefp4.formats.arithmetic import EMULATED, NATIVE
from tracefp4.guidance import Site
from tracefp4.models.qwen3_moe_config import read_sizes
from tracefp4.patching import PlanRules, apply, plan
from tracefp4.patching.schemes import ALLOWED_OUTER
from tracefp4.rollout.recorder import Recorder, default_sites
from tracefp4.rollout.ring import RecordRing

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
    with pytest.raises(ConfigError, match="guidance '.*' selects no site"):
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
        ({"head_dim": 8}, {}, r"layers\.0\.self_attn\.kv_cache \(NVFP4_KV\) needs head_dim divisible by 16; got 8"),
        ({"moe_intermediate_size": 48}, {"activation": "MXFP4_EVEN"},
         r"layers\.0\.mlp\.experts \(MXFP4_EVEN\) needs moe_intermediate_size divisible by 32; got 48"),
        ({"hidden_size": 80}, {"weight": "MXFP4_EVEN"}, r"\(MXFP4_EVEN\) needs hidden_size divisible by 32; got 80"),
    ],
    ids=["hidden", "inner", "head", "MXFP4 activations", "MXFP4 weights"],
)  # fmt: skip
def test_quantized_dimensions_must_divide(changes, options, message):
    with pytest.raises(ConfigError, match=message):
        made(shell(**changes), **options)


def test_unquantized_dimensions_need_not_divide():
    assert made(shell(head_dim=8), kv="none").num_quantized == 2
    assert made(shell(moe_intermediate_size=40), exclude=("*.experts",)).num_quantized == 2


@pytest.mark.parametrize(
    "options",
    [
        {"activation": "NVFP4_TENSOR_POW2"},
        {"activation": "NVFP4_TRANSFORMER_ENGINE"},
        {"weight": "NVFP4_ROW_POW2"},
        {"weight": "NVFP4_STATIC_POW2"},
        {"kv": "NVFP4_ROW_POW2"},
        {"kv": "NVFP4_TENSOR_POW2"},
        {"kv": "MXFP4_EVEN"},
    ],
    ids=lambda options: "-".join(*options.items()),
)
def test_schemes_with_the_wrong_outer_scale_are_refused(options):
    # BAT-1: an activation scale over the whole batch couples rows, and cannot be guided.
    with pytest.raises(ConfigError, match=f"quantization.{next(iter(options))}: .* needs one per"):
        made(**options)


def test_a_cache_needs_a_power_of_two():
    with pytest.raises(
        ConfigError, match="NVFP4_STATIC_VLLM stores its outer scale as a float32 divisor.*NVFP4_KV"
    ):
        made(kv="NVFP4_STATIC_VLLM")
    assert made(kv="NVFP4_STATIC_POW2").layers[0].kv.name == "NVFP4_STATIC_POW2"


@pytest.mark.parametrize("name", SCHEMES)
def test_every_scheme_serves_where_its_outer_scale_lives(name):
    scheme = SCHEMES[name]
    for option, allowed in ALLOWED_OUTER.items():
        rules = {"guidance": "none", option: name}
        if scheme.outer in allowed and (option != "kv" or scheme.is_exact_in_bf16):
            assert getattr(made(**rules).layers[0], option) == scheme
        else:
            with pytest.raises(ConfigError, match=f"quantization.{option}: {name}"):
                made(**rules)


@pytest.mark.parametrize("name", ["NVFP4_ROW_FP32", "NVFP4_STATIC_VLLM"])
def test_sites_with_a_float32_outer_scale_cannot_be_guided(name):
    with pytest.raises(ConfigError, match=rf"site 0\.x cannot be guided under {name}.*float32"):
        made(activation=name)
    assert {site.kind for site in made(activation=name, sites=("k", "v")).guided_sites} == {"k", "v"}
    assert made(activation=name, guidance="none").layers[1].activation == SCHEMES[name]


@pytest.mark.parametrize(
    ("activation", "guidance", "message"),
    [
        (
            "NVFP4_ROW_POW2_4OVER6_MSE",
            "mantissa_lean",
            r"site 0.x .* 'mantissa_lean': .*lets two scales compete",
        ),
        ("NVFP4_ROW_POW2_4OVER6_MSE", "secded", "coded as 'coset2'"),
        ("MXFP4_FLOOR", "secded+bch128_2", r"site 0.x .* 'secded\+bch128_2': .*whose scales are E8M0"),
    ],
)
def test_codecs_that_no_reader_could_decode_are_refused_before_a_token_is_sampled(
    activation, guidance, message
):
    # Mutation: check_codec is not called; the first pass of the trainer then fails, after a whole rollout.
    with pytest.raises(ConfigError, match=message):
        made(activation=activation, guidance=guidance)


def test_a_plan_says_which_codecs_it_can_follow():
    undecided = {"guidance": "auto"}
    found = {
        name: [
            codec
            for codec in ("full", "mantissa_lean", "secded+bch128_2")
            if made(activation=name, **undecided).can_follow(codec)
        ]
        for name in ("NVFP4_ROW_POW2", "NVFP4_ROW_POW2_4OVER6_MSE", "MXFP4_FLOOR")
    }
    assert [len(codecs) for codecs in found.values()] == [3, 1, 2]


@pytest.mark.parametrize("options", [{}, {"mode": "bf16"}], ids=["fp4", "bf16"])
def test_exp_7_models_with_adapters_are_refused(options):
    # Mutation: an adapter next to the weight, which engine and export do not see.
    model = tiny_model()
    fp4 = made(model, **options)
    attention = model.model.layers[1].self_attn
    attention.q_proj.base_layer = nn.Linear(64, 128)
    for refused in (lambda: made(model, **options), lambda: apply(model, fp4, arithmetic=EMULATED)):
        with pytest.raises(
            ConfigError, match=r"layers\.1\.self_attn\.q_proj carries an adapter.*merge_and_unload"
        ):
            refused()


def test_values_that_the_storage_cannot_hold_are_refused():
    model = tiny_model()
    for options in ({"weight": "NVFP4_TENSOR_FP32"}, {"activation": "NVFP4_ROW_FP32"}):
        with pytest.raises(
            ConfigError, match=r"native stores bf16.*_FP32: its outer scale is float32.*MXFP4"
        ):
            apply(model, made(model, guidance="none", **options), arithmetic=NATIVE)
    assert not hasattr(model, "tracefp4_applied") and model.dtype == torch.float32
    apply(model, made(model, weight="MXFP4_RCEIL"), arithmetic=NATIVE)


def test_equal_models_and_rules_have_equal_digests():
    assert made().digest == made(tiny_model()).digest and len(made().digest) == 16


def test_parts_may_stay_bf16():
    found = made(activation="none", sites=("x", "k"))
    assert found.layers[0].activation is None and found.layers[0].weight == NVFP4_TENSOR_POW2
    assert {site.kind for site in found.guided_sites} == {"k"}
    assert made(weight="none").layers[1].weight is None
    neither = made(activation="none", weight="none", sites=("k",))
    assert neither.num_quantized == 2
    reasons = {d.name: d.reason for d in (*found.decisions, *neither.decisions) if d.kind == "experts"}
    assert set(reasons.values()) == {'activation = weight = "none"'}
    with pytest.raises(ConfigError, match="no module of Qwen3MoeForCausalLM was selected"):
        made(activation="none", weight="none", kv="none")
    assert "routed experts: bf16 x NVFP4_TENSOR_POW2" in {d.reason for d in found.decisions}


def test_the_digest_covers_what_the_rollout_computes():
    base = made()
    others = [
        made(mode="bf16"),
        made(kv="none"),
        made(last_layers_bf16=1),
        made(exclude=("*.0.mlp.experts",)),
        made(shell(num_hidden_layers=3)),
        base.with_exponents({Site("k", 0): 1}),
        base.with_exponents({Site("v", 0): 1}),
        base.with_exponents({Site("v", 1): 1}),
        made(activation="NVFP4_STATIC_POW2"),
        made(activation="NVFP4_STATIC_POW2").with_exponents({Site("x", 0): 1}),
        made(activation="NVFP4_STATIC_POW2").with_exponents({Site("w2", 0): 1}),
        made(activation="MXFP4_RCEIL"),
        made(activation="MXFP4_RCEIL", weight="MXFP4_RCEIL"),
        replace(base, architecture="OtherForCausalLM", digest=""),
    ]
    digests = [found.digest for found in (base, *others)]
    assert len(set(digests)) == len(digests)


def test_the_digest_does_not_cover_how_the_trainer_follows():
    base = made()
    for options in (
        {"guidance": "full"},
        {"guidance": "none"},
        {"guidance": "bch128_3"},
        {"guidance": "auto"},
        {"gate": "noise"},
        {"decoder": "bracket"},
        {"layers": "last_half"},
        {"sites": ("x",)},
        {"replay_routing": False},
        {"backward": "high_precision"},
        {"ste": "clip"},
    ):
        assert made(**options).digest == base.digest, options
    assert base.without_guidance().digest == base.digest and base.without_guidance().guided_sites == ()


def test_a_fixed_codec_is_that_of_every_guided_site():
    found = made(guidance="secded", layers="last:1")
    assert found.codecs == {Site(kind, 1): "secded" for kind in ("x", "k", "v")}
    assert not found.needs_calibration
    assert found.without_guidance().codecs == made(guidance="none").codecs == {}
    with pytest.raises(ConfigError, match="guidance 'secded'. Only guidance = \"auto\" takes them"):
        found.with_codecs(found.codecs)


def test_codecs_chosen_by_a_calibration_are_part_of_the_plan_and_its_digest():
    # Mutation: a digest that leaves them out lets records of one choice pass for another's.
    unset = made(guidance="auto")
    assert unset.codecs == {} and unset.needs_calibration and unset.digest == made().digest
    cheap = dict.fromkeys(unset.guided_sites, "parity16")
    found, other = unset.with_codecs(cheap), unset.with_codecs(cheap | {Site("k", 1): "mantissa"})
    assert found.codecs == cheap and not found.needs_calibration
    assert len({unset.digest, found.digest, other.digest}) == 3
    assert found.with_codecs(cheap) == found
    assert other.with_exponents({Site("k", 0): 1}).codecs == other.codecs
    assert found.without_guidance().digest == unset.digest and found.without_guidance().codecs == {}
    assert found.summary()["codecs"]["1.v"] == "parity16" and unset.summary()["needs_calibration"]
    reordered = unset.with_codecs(dict(reversed(cheap.items())))
    assert reordered == found and reordered.digest == found.digest
    with pytest.raises(ConfigError, match=r"got 5 codecs, missing or not guided are \['layers.0.k'\]"):
        unset.with_codecs({site: name for site, name in cheap.items() if site != Site("k", 0)})
    with pytest.raises(ConfigError, match="Unknown guidance codec; got 'quarter'"):
        unset.with_codecs(cheap | {Site("k", 0): "quarter"})


@pytest.mark.parametrize(
    "options",
    [{}, {"kv": "none"}, {"mode": "bf16"}, {"exclude": ("*.0.*",)}, {"exclude": ("*.0.mlp.experts",)}],
    ids=["default", "kv", "mode", "layer 0", "experts of layer 0"],
)
def test_the_scheme_digest_is_the_recorders(options):
    found = made(**options)
    ring = RecordRing(torch.device("cpu"), num_slots=1, slot_tokens=1)
    recorder = Recorder(
        (), sizes=read_sizes(tiny_config()), precision=found.layers, plan_digest="p", ring=ring
    )
    assert recorder._scheme_digest == found.scheme_digest


def test_plans_that_differ_in_the_schemes_of_any_layer_differ_in_their_scheme_digest():
    # Mutation: only the first layer that is not bf16 counts.
    kept = {"exclude": ("model.layers.0.mlp.experts",), "sites": ("k",)}
    first = made(**kept)
    for options in ({"weight": "MXFP4_RCEIL"}, {"activation": "NVFP4_ROW_FP32"}):
        assert made(**kept, **options).scheme_digest != first.scheme_digest, options


def test_exponents_are_set_where_the_scheme_is_static():
    given = {Site(kind, layer): 2 + layer for kind in ("x", "w2", "k", "v") for layer in (0, 1)}
    found = made(exclude=("*.1.self_attn.kv_cache",)).with_exponents(given)
    assert found.static_exponents == {Site("k", 0): 2, Site("v", 0): 2}
    assert [p.k_exponent for p in found.layers] == [2, 0] and found.layers[0].x_exponent == 0
    found = made(activation="NVFP4_STATIC_POW2", kv="none", sites=("x",)).with_exponents(given)
    assert found.static_exponents == {Site(kind, n): 2 + n for kind in ("x", "w2") for n in (0, 1)}
    assert [(p.x_exponent, p.w2_exponent, p.k_exponent) for p in found.layers] == [(2, 2, 0), (3, 3, 0)]


def test_the_summary_is_plain_data():
    import json

    summary = made().summary()
    assert json.loads(json.dumps(summary))["num_quantized_modules"] == 4
    assert summary["static_exponents"] == {"0.k": 0, "0.v": 0, "1.k": 0, "1.v": 0}
    assert summary["num_layers"] == 2 and summary["digest"] == made().digest

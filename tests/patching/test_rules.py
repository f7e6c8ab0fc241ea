"""The decision rule: kinds from names, options refused by name, and a package that does not need torch."""

import subprocess
import sys
from pathlib import Path

import pytest

from tracefp4.coding import CODECS
from tracefp4.errors import ConfigError
from tracefp4.patching.rules import PlanRules, decide, guided_layers, module_kind

KINDS = {
    "model.layers.0.mlp.experts": "experts",
    "model.layers.0.mlp.experts.3.up_proj": "experts",
    "model.layers.0.mlp.gate": "router",
    "model.layers.0.mlp.router": "router",
    "model.layers.0.mlp.gate_proj": "mlp",
    "model.layers.0.mlp.shared_expert.up_proj": "shared_expert",
    "model.layers.0.mlp.shared_expert_gate": "shared_expert",
    "model.layers.0.self_attn.kv_cache": "kv",
    "model.layers.0.self_attn.q_norm": "norm",
    "model.layers.0.self_attn.o_proj": "attention",
    "model.layers.0.linear_attn.in_proj_qkv": "attention",
    "model.layers.0.input_layernorm": "norm",
    "model.norm": "norm",
    "model.embed_tokens": "embedding",
    "lm_head": "head",
    "model.rotary_emb": "other",
}


@pytest.mark.parametrize("name", KINDS)
def test_kinds_come_from_whole_names(name):
    assert module_kind(name) == KINDS[name]


def test_only_experts_and_caches_become_fp4():
    names = [name for name in KINDS if "kv_cache" not in name] + ["model.layers.0.self_attn.k_proj"]
    decisions = decide(names, num_layers=1, rules=PlanRules())
    assert {d.kind for d in decisions if d.is_quantized} == {"experts", "kv"}
    assert [d.name for d in decisions if d.kind == "kv"] == ["model.layers.0.self_attn.kv_cache"]


def test_layer_rules():
    assert guided_layers("last_half", num_layers=40) == tuple(range(20, 40))
    assert guided_layers("last_half", num_layers=5) == (2, 3, 4)
    assert guided_layers("last:2", num_layers=5) == (3, 4)
    for rule in ("last", "last:0", "last:-1", "last:x", "first:2", "half", ""):
        with pytest.raises(ConfigError, match="allowed: all, last_half, last:N"):
            guided_layers(rule, num_layers=5)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"mode": "fp8"}, r"quantization\.mode: unknown value 'fp8'.*Did you mean 'fp4'"),
        (
            {"guidance": "mantisa"},
            r"'mantisa'; allowed: none, auto, or a codec, which is <payload>[^']*"
            r"bch64_3\+coset1[^']*Did you mean 'mantissa'\?$",
        ),
        (
            {"guidance": "bch128_3+coset3"},
            r"unknown value 'bch128_3\+coset3'.*Did you mean 'bch128_3\+coset1'",
        ),
        (
            {"gate": "nois"},
            r"quantization\.gate: unknown value 'nois'; allowed: auto, none, noise.*Did you mean 'noise'",
        ),
        ({"decoder": "nearest"}, "allowed: bracket, nearest_cell"),
        ({"sites": ("x", "q")}, r"quantization\.sites: unknown value 'q'"),
        ({"backward": "exact"}, "allowed: dequantized, high_precision"),
        ({"ste": "clamp"}, "allowed: identity, clip"),
        ({"layers": "first"}, "last:N with N >= 1"),
        ({"last_layers_bf16": -1}, "must be 0 or more; got -1"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_unknown_options_are_refused(option, message):
    with pytest.raises(ConfigError, match=message):
        PlanRules(**option)


@pytest.mark.parametrize("name", ["none", "auto", *CODECS, "parity3", "bch64_2+raw", "full+coset2"])
def test_every_codec_is_a_guidance(name):
    assert PlanRules(guidance=name).guidance == name


def test_what_is_guided_is_gated_unless_the_gate_is_off():
    assert PlanRules().guidance != "none" and PlanRules().is_gated
    assert not PlanRules(guidance="none").is_gated and not PlanRules(gate="none").is_gated
    assert PlanRules(guidance="mantissa", gate="noise").is_gated


def test_a_pattern_is_a_whole_name_and_never_a_substring():
    names = ["model.layers.1.mlp.experts", "model.layers.11.mlp.experts"]
    decisions = decide(names, num_layers=12, rules=PlanRules(exclude=("model.layers.1.*",)))
    assert [d.is_quantized for d in decisions] == [False, True]
    with pytest.raises(ConfigError, match=r"Nearest name: model\.layers\.1\.mlp\.experts"):
        decide(names, num_layers=12, rules=PlanRules(exclude=("layers.1.mlp",)))


def _python(code):
    source = Path(__file__).parents[2] / "src"
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=False,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(source)},
    )  # fmt: skip


def test_plans_by_name_import_no_torch():
    code = (
        "import sys, tracefp4.patching.budget, tracefp4.patching.catalogue, tracefp4.patching.rules\n"
        "from tracefp4.patching import PlanRules\n"
        "print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    )
    result = _python(code)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[]"


def test_plan_and_apply_are_functions_whatever_was_imported_first():
    # Mutation: an import on first use alone gives the module `plan` to whoever comes after its first import.
    code = (
        "import tracefp4.patching.plan, tracefp4.patching.apply\n"
        "import tracefp4.patching as room\n"
        "for _ in range(2):\n"
        "    from tracefp4.patching import apply, plan\n"
        "    assert callable(plan) and callable(apply) and room.plan is plan\n"
        "assert 'nothing' in str(getattr(room, 'nothing', 'nothing'))\n"
        "print(plan.__module__)"
    )
    result = _python(code)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "tracefp4.patching.plan"

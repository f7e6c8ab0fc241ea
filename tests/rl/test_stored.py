"""FP4 checkpoints as policies: evaluated as they are stored, bit for bit, before and after the round trip."""

import json
from dataclasses import replace

import pytest
import torch
from tests.assertions import assert_bitwise
from tests.rl.tiny_runs import SHAPE, changed, make_checkpoint, make_config, tables, write_recipe
from typer.testing import CliRunner

from tracefp4.checkpoints import (
    Output,
    Settings,
    change_layout,
    collect_statistics,
    from_plain,
    load_fp4,
    quantize_checkpoint,
    to_plain,
)
from tracefp4.cli.main import app
from tracefp4.errors import ConfigError
from tracefp4.formats import (
    MXFP4_RCEIL,
    NVFP4_STATIC_POW2,
    NVFP4_TENSOR_FP32,
    NVFP4_TENSOR_POW2,
    SCHEMES,
    BlockTensor,
)
from tracefp4.formats.arithmetic import EMULATED
from tracefp4.formats.schemes import NVFP4_COMPRESSED_TENSORS
from tracefp4.ops.dequantize import dequantize
from tracefp4.ops.quantize import quantize
from tracefp4.patching import PlanRules, apply, plan
from tracefp4.rl.checkpoint import save_model
from tracefp4.rl.deployment import evaluate_checkpoint, generate_text, load_deployed
from tracefp4.rl.exporting import export_run
from tracefp4.rl.loop import train
from tracefp4.rl.policy import load_policy
from tracefp4.rl.stored import is_fp4_checkpoint, load_stored, stored_plan
from tracefp4.rl.sync import build_engine
from tracefp4.rollout import SamplingParams

PLAIN = "tests.rl.tiny_runs:first_letter"
PROMPTS = [[5, 9, 33], [7, 7, 12, 40]]
COMPLETIONS = [[[3, 60, 61, 9], [8, 2]], [[1, 1, 1]]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A tiny checkpoint whose widths are multiples of 32."""
    return make_checkpoint(tmp_path_factory.mktemp("plain") / "start", shape=replace(SHAPE, expert_size=32))


def quantized(checkpoint, path, *, scheme=NVFP4_TENSOR_POW2, statistics=None, **options):
    quantize_checkpoint(
        checkpoint, Output(path=path), Settings(scheme=scheme, **options), statistics=statistics
    )
    return path


def test_rft_6_the_largest_scale_is_the_files_and_the_trainer_rounds_to_its_bytes(checkpoint, tmp_path):
    # The case: amax 2688, exported under a largest block scale of 256, g = 2688 / (6 * 256) = 1.75; a side that takes
    # 448 has g = 1 and other bytes. Mutations: a plan that takes its own default scheme; a digest without scale_max.
    policy = load_policy(checkpoint)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.copy_(parameter.bfloat16())
        policy.model.model.layers[0].mlp.experts.down_proj[0, 0, 0] = 2688.0
    save_model(policy.model, policy.tokenizer, tmp_path / "master")
    scheme = SCHEMES["NVFP4_TENSOR_FP32_4OVER6_MSE"]
    loaded = load_stored(quantized(tmp_path / "master", tmp_path / "fp4", scheme=scheme, layout="modelopt"))
    stored = loaded.state["model.layers.0.mlp.experts.down_proj"]
    assert stored.scheme.digest == scheme.digest and stored.scheme.scale_max == 256.0
    assert stored.outer.reshape(-1)[0] == 1.75
    made = stored_plan(loaded, PlanRules(guidance="none"), prompts=PROMPTS)
    assert made.rules.weight == scheme.name
    experts = apply(policy.model, made, arithmetic=EMULATED).model.model.layers[0].mlp.experts
    assert_bitwise(
        experts.tracefp4.quantized("down_proj", experts.down_proj), dequantize(stored, dtype=torch.float32)
    )
    under_448 = quantize(experts.down_proj.detach(), scheme=NVFP4_TENSOR_FP32)
    assert under_448.outer.reshape(-1)[0] == 1.0
    assert not torch.equal(under_448.block_scales, stored.block_scales)
    default = plan(load_policy(tmp_path / "master").model, PlanRules(guidance="none"))
    assert default.layers[0].weight.scale_max == 448.0 and default.digest != made.digest
    assert default.scheme_digest != made.scheme_digest


def logprobs(weights, made, config):
    """Log-probs of fixed completions in the engine."""
    engine = build_engine(weights, made, arithmetic=EMULATED, rollout=config.rollout, records=False)
    return torch.tensor(
        [p for group in engine.force(PROMPTS, COMPLETIONS) for c in group for p in c.logprobs]
    )


@pytest.fixture
def config(checkpoint, tiny, tmp_path):
    return make_config(checkpoint, tiny[1], tmp_path / "unused", task__reward=PLAIN)


@pytest.mark.parametrize(
    ("scheme", "layout"),
    [
        (NVFP4_TENSOR_POW2, "compressed-tensors"),
        (NVFP4_COMPRESSED_TENSORS, "compressed-tensors"),
        (MXFP4_RCEIL, "compressed-tensors"),
        (NVFP4_TENSOR_POW2, "modelopt"),
        (NVFP4_TENSOR_FP32, "modelopt"),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_an_fp4_checkpoint_computes_what_its_scheme_makes_of_the_weights(
    checkpoint, config, tmp_path, scheme, layout
):
    # Mutations: weights quantized a second time; the default activation scheme in place of the checkpoint's.
    path = quantized(checkpoint, tmp_path / "fp4", scheme=scheme, layout=layout)
    found = load_stored(path)
    made = stored_plan(found, config.quantization, prompts=PROMPTS)
    assert made.layers[0].weight == scheme and made.layers[0].activation is None
    assert made.layers[0].kv is not None and any(made.static_exponents.values())
    policy = load_policy(checkpoint)
    assert_bitwise(logprobs(found, made, config), logprobs(policy.model, made, config))
    bf16 = plan(policy.model, PlanRules(mode="bf16", guidance="none"))
    assert not torch.equal(logprobs(found, made, config), logprobs(policy.model, bf16, config))


@pytest.mark.parametrize("cut", ["experts of layer 0", "attention too"])
def test_exp_8_what_the_engine_decodes_is_what_the_checkpoint_packs(checkpoint, config, tmp_path, cut):
    # Mutation: plain experts of a mixed checkpoint are quantized by the plan.
    options = {"exclude": ("model.layers.0.*",)}
    if cut == "attention too":
        options = {"include": ("*.experts.*", "*.self_attn.*_proj")}
    found = load_stored(quantized(checkpoint, tmp_path / "fp4", **options))
    made = stored_plan(found, config.quantization, prompts=PROMPTS)
    packed = {name.split(".experts.")[0] for name in found.stored.quantized if ".experts." in name}
    assert {f"model.layers.{n}.mlp" for n, layer in enumerate(made.layers) if layer.weight} == packed
    assert len(packed) == (2 if cut == "attention too" else 1)
    engine = build_engine(found, made, arithmetic=EMULATED, rollout=config.rollout, records=False)
    decoded = {n.removesuffix(".weight") for n, t in found.state.items() if isinstance(t, BlockTensor)}
    assert ("model.layers.1.self_attn.q_proj" in decoded) == (cut == "attention too")
    plain = load_policy(checkpoint).model.state_dict()
    changed_there = {
        name.removesuffix(".weight")
        for name, t in plain.items()
        if not torch.equal(engine._model.weights[name], t)
    }
    assert changed_there == decoded


def test_static_inputs_run_under_the_exponents_of_the_checkpoint(checkpoint, config, tmp_path):
    # Mutations: exponents of x and w2 swapped; calibrated again; ignored.
    policy = load_policy(checkpoint)
    texts = tmp_path / "texts.txt"
    texts.write_text("one two 2 three 33 four 4444 five 6\n" * 40)
    statistics = collect_statistics(checkpoint, texts, max_tokens=512, sequence_length=64)
    path = quantized(checkpoint, tmp_path / "fp4", activations="static", statistics=statistics)
    found = load_stored(path)
    made = stored_plan(found, config.quantization, prompts=PROMPTS)
    pairs = {n: (layer.x_exponent, layer.w2_exponent) for n, layer in enumerate(made.layers)}
    assert pairs == found.stored.exponents and all(x != w2 for x, w2 in pairs.values())
    assert made.layers[1].activation == NVFP4_STATIC_POW2
    found_logprobs = logprobs(found, made, config)
    assert_bitwise(found_logprobs, logprobs(policy.model, made, config))
    swapped = made.with_exponents({s: k - 9 for s, k in made.static_exponents.items() if s.kind == "x"})
    assert not torch.equal(found_logprobs, logprobs(found, swapped, config))


@pytest.fixture(scope="module")
def trained(checkpoint, tiny, tmp_path_factory):
    """A run of one step under an activation scheme, made once, its static exponents lowered until values saturate.

    Exponents as calibrated could come out alike when they are calibrated again, or larger ones round alike.
    """
    made = {}

    def run(activation):
        if activation not in made:
            options = {"quantization__activation": activation, "quantization__sites": ("k", "v")}
            where = tmp_path_factory.mktemp("trained") / "run"
            config = make_config(checkpoint, tiny[1], where, task__reward=PLAIN, train__steps=1, **options)
            train(config)
            path = where / "checkpoints" / "step_000001"
            state = json.loads((path / "state.json").read_text())
            exponents = state["plan"]["static_exponents"]
            state["plan"]["static_exponents"] = {site: k - 5 for site, k in exponents.items()}
            (path / "state.json").write_text(json.dumps(state))
            made[activation] = (config, path)
        return made[activation]

    return run


def files(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.parametrize("activation", ["none", "NVFP4_STATIC_POW2", "NVFP4_STATIC_VLLM"])
def test_a_trained_policy_gives_the_same_log_probs_before_and_after_the_round_trip(
    activation, trained, checkpoint, tmp_path
):
    # Mutations: exponents of K and V swapped, or lost by an import; those of x and w2 swapped; inputs stay in bf16.
    config, path = trained(activation)
    before = load_deployed(path)
    out = export_run(path, Output(path=tmp_path / "out"), layout="compressed-tensors").path
    expected = logprobs(before.weights, before.plan, config)
    plain = to_plain(out, Output(path=tmp_path / "plain"))
    again = from_plain(plain, Output(path=tmp_path / "again"))
    assert files(again) == files(out)
    other = change_layout(out, Output(path=tmp_path / "other"), "modelopt")
    back = change_layout(other, Output(path=tmp_path / "back"), "compressed-tensors")
    assert files(back) == files(out)
    for found in (out, again, other):
        after = load_deployed(found)
        assert after.plan.digest == before.plan.digest
        assert after.cache == before.cache == "K and V: NVFP4_KV, exponents of the run"
        assert_bitwise(expected, logprobs(after.weights, after.plan, config))
    start = load_deployed(checkpoint)
    assert not torch.equal(expected, logprobs(start.weights, before.plan, config))
    moved = {site: k + 5 for site, k in before.plan.static_exponents.items()}
    for kinds in ("kv", ("x", "w2")):
        only = {site: k for site, k in moved.items() if site.kind in kinds}
        if only:
            elsewhere = logprobs(before.weights, before.plan.with_exponents(only), config)
            assert not torch.equal(expected, elsewhere), kinds


def test_a_recipe_rounds_the_cache_of_an_export_as_the_run_did_or_not_at_all(trained, tmp_path):
    # Mutations: the recipe's cache is taken without a look; kv = "none" is overruled; K and V are calibrated as well.
    config, path = trained("none")
    found = load_stored(export_run(path, Output(path=tmp_path / "out"), layout="modelopt").path)
    rules = replace(config.quantization, guidance="none")
    made = stored_plan(found, rules, prompts=[])  # nothing is calibrated
    assert made.digest == load_deployed(path).plan.digest
    assert all(layer.kv is None for layer in stored_plan(found, replace(rules, kv="none"), prompts=[]).layers)
    with pytest.raises(ConfigError, match=r"'NVFP4_KV' in layers \[0, 1\]; .*'NVFP4_KV' in layers \[0\]"):
        stored_plan(found, replace(rules, last_layers_bf16=1), prompts=PROMPTS)
    with pytest.raises(ConfigError, match=r"'NVFP4_KV' in layers \[0, 1\]; .*'NVFP4_STATIC_POW2' in layers"):
        stored_plan(found, replace(rules, kv="NVFP4_STATIC_POW2"), prompts=PROMPTS)


def test_evaluation_and_generation_take_fp4_checkpoints(checkpoint, config, tiny, tmp_path):
    path = quantized(checkpoint, tmp_path / "fp4")
    assert is_fp4_checkpoint(path) and not is_fp4_checkpoint(checkpoint) and not is_fp4_checkpoint(tmp_path)
    found = evaluate_checkpoint(changed(config, model__path=str(path)), num_items=6)
    weights_only = changed(config, quantization__activation="none", quantization__sites=("k", "v"))
    assert found == evaluate_checkpoint(weights_only, num_items=6)
    deployed = load_deployed(path)
    params = SamplingParams(max_tokens=5, seed=1)
    assert generate_text(deployed, ["one"], params=params) == generate_text(deployed, ["one"], params=params)
    recipe = write_recipe(
        tmp_path / "recipe.toml", tables(path, tiny[1], tmp_path / "unused", task__reward=PLAIN)
    )
    result = CliRunner().invoke(app, ["eval", str(path), "--recipe", str(recipe), "--items", "6", "--json"])
    assert result.exit_code == 0 and json.loads(result.stdout)["accuracy"] == found.accuracy, result.output
    assert "K and V: NVFP4_KV, exponents calibrated on" in result.stderr
    result = CliRunner().invoke(
        app, ["generate", str(path), "one", "--max-tokens", "4", "--temperature", "0"]
    )
    assert result.exit_code == 0, result.output


def test_the_cache_follows_the_recipe(checkpoint, config, tmp_path, monkeypatch):
    found = load_stored(quantized(checkpoint, tmp_path / "fp4"))
    # the model of decoded values is not quantized again while the cache is calibrated
    monkeypatch.delattr("tracefp4.qat.experts.quantize")
    rules = replace(config.quantization, guidance="none")
    for options, expected in (
        ({"kv": "none"}, [False, False]),
        ({"last_layers_bf16": 1}, [True, False]),
        ({"exclude": ("model.layers.0.self_attn.kv_cache",)}, [False, True]),
    ):
        made = stored_plan(found, replace(rules, **options), prompts=PROMPTS)
        assert [layer.kv is not None for layer in made.layers] == expected
        assert all(layer.weight == NVFP4_TENSOR_POW2 for layer in made.layers)


def test_what_cannot_be_run_as_stored_is_refused(checkpoint, config, tmp_path, monkeypatch):
    path = quantized(checkpoint, tmp_path / "fp4")
    with pytest.raises(ConfigError, match="has no bf16 weights; got mode bf16"):
        load_deployed(path, mode="bf16")
    with pytest.raises(ConfigError, match="quantized checkpoint.*not trained.*import --dequantize"):
        load_policy(path)
    whole = load_fp4(path)
    parts = dict(whole.state)
    parts["model.layers.0.mlp.experts.0.down_proj.weight"] = torch.zeros(32, 32)
    static = replace(
        whole, activation=NVFP4_STATIC_POW2, quantized=(*whole.quantized, "model.layers.0.self_attn.q_proj")
    )
    for made, message in (
        (replace(whole, state=parts), r"layers\.0 are FP4 in part"),
        (static, r"inputs of model\.layers\.0\.self_attn\.q_proj.*routed experts only.*w4a16"),
        (replace(whole, state={k: v for k, v in whole.state.items() if "norm" not in k}), "missing .*norm"),
    ):
        monkeypatch.setattr("tracefp4.rl.stored.load_fp4", lambda _, made=made: made)
        with pytest.raises(ConfigError, match=message):
            load_stored(path)


def test_bytes_of_another_scheme_are_refused(checkpoint, config):
    # Mutation: bytes are decoded whatever the plan says of the layer.
    policy = load_policy(checkpoint)
    state = dict(policy.model.state_dict())
    name = "model.layers.1.mlp.experts.down_proj"
    state[name] = quantize(state[name], scheme=MXFP4_RCEIL)
    made = plan(policy.model, replace(config.quantization, guidance="none"))

    class Weights:
        config = policy.model.config
        state_dict = staticmethod(lambda: state)

    with pytest.raises(
        ConfigError, match=rf"{name} comes as bytes of MXFP4_RCEIL, the plan has NVFP4_TENSOR_POW2"
    ):
        logprobs(Weights, made, config)

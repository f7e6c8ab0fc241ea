"""Checkpoints as deployed: BF16 or FP4 rounded to nearest, their own defaults, and the two commands."""

import json
import shutil

import pytest
from tests.rl.tiny_runs import changed, make_config, tables, write_recipe
from typer.testing import CliRunner

from tracefp4.cli.main import app
from tracefp4.errors import ConfigError
from tracefp4.rl.deployment import evaluate_checkpoint, generate_text, load_deployed
from tracefp4.rl.loop import train

PLAIN = "tests.rl.tiny_runs:first_letter"


@pytest.fixture
def config(tiny, tmp_path):
    return make_config(*tiny, tmp_path / "unused", task__reward=PLAIN, task__reward_timeout_s=5.0)


@pytest.mark.parametrize("mode", ["fp4", "bf16"])
def test_greedy_accuracy(config, mode):
    config = changed(config, quantization__guidance="none", quantization__mode=mode)
    found = evaluate_checkpoint(config, num_items=6)
    assert found.num_items == 6
    assert 0.0 <= found.accuracy <= 1.0
    assert found.pass_at_k == {1: found.accuracy}
    assert found == evaluate_checkpoint(config, num_items=6)


def test_pass_at_k_rises_with_k(config):
    found = evaluate_checkpoint(config, num_items=6, samples=8)
    assert list(found.pass_at_k) == [1, 2, 4, 8]
    assert list(found.pass_at_k.values()) == sorted(found.pass_at_k.values())
    assert 0 < found.pass_at_k[1] < found.pass_at_k[8]
    assert found.standard_error > 0
    assert found.outcomes["scored"] == 48


def test_a_runs_checkpoint_is_rounded_with_the_runs_exponents(tiny, tmp_path):
    config = make_config(*tiny, tmp_path / "run", train__steps=1, run__eval_items=6, task__reward=PLAIN)
    manifest = train(config)
    path = tmp_path / "run" / "checkpoints" / "step_000001"
    state = json.loads((path / "state.json").read_text())
    assert load_deployed(path).plan.summary()["static_exponents"] == state["plan"]["static_exponents"]
    found = evaluate_checkpoint(changed(config, model__path=str(path)), num_items=6)
    assert found.accuracy == manifest["evaluations"]["1"]["accuracy"]
    assert found.mean_tokens == manifest["evaluations"]["1"]["mean_tokens"]
    state["plan"]["static_exponents"] |= {"0.k": 3, "1.k": 3}
    (path / "state.json").write_text(json.dumps(state))
    assert [s.k_exponent for s in load_deployed(path).plan.layers] == [3, 3]
    assert load_deployed(path, mode="bf16").plan.num_quantized == 0


@pytest.mark.parametrize(
    ("rules", "experts", "kv"),
    [
        ({"last_layers_bf16": 1}, [True, False], [True, False]),
        ({"exclude": ("model.layers.0.mlp.experts",)}, [False, True], [True, True]),
        ({"kv": "none"}, [True, True], [False, False]),
    ],
    ids=["last_layers_bf16", "exclude", "kv"],
)
def test_a_runs_checkpoint_is_quantized_where_the_run_was(tiny, tmp_path, rules, experts, kv):
    changes = {f"quantization__{name}": value for name, value in rules.items()}
    if "kv" in rules:
        changes["quantization__sites"] = ("x",)
    config = make_config(*tiny, tmp_path / "run", train__steps=1, task__reward=PLAIN, **changes)
    manifest = train(config)
    path = tmp_path / "run" / "checkpoints" / "step_000001"
    made = load_deployed(path).plan
    assert [layer.activation is not None for layer in made.layers] == experts
    assert [layer.kv is not None for layer in made.layers] == kv
    assert made.digest == manifest["plan"]["digest"], "deployed as the rollout computed"
    assert made.rules.guidance == "none"
    assert not made.guided_sites
    assert load_deployed(path, mode="bf16").plan.num_quantized == 0
    with pytest.raises(ConfigError, match="written down has .*these rules have .*rules of the run"):
        evaluate_checkpoint(make_config(path, tiny[1], tmp_path / "unused", task__reward=PLAIN), num_items=2)
    assert evaluate_checkpoint(changed(config, model__path=str(path)), num_items=2).num_items == 2


def test_a_plan_with_other_schemes_or_unknown_rules_is_refused(tiny, tmp_path):
    config = make_config(*tiny, tmp_path / "run", train__steps=1, task__reward=PLAIN)
    train(config)
    path = tmp_path / "run" / "checkpoints" / "step_000001"
    state = json.loads((path / "state.json").read_text())
    found = state["plan"]["scheme_digest"]
    state["plan"]["scheme_digest"] = "a-b-c"
    (path / "state.json").write_text(json.dumps(state))
    with pytest.raises(ConfigError, match=f"has schemes a-b-c, these rules have {found}"):
        load_deployed(path)
    state["plan"]["rules"]["rotation"] = "hadamard"
    (path / "state.json").write_text(json.dumps(state))
    with pytest.raises(ConfigError, match=r"unknown rules \['rotation'\]; known are .* the version"):
        load_deployed(path)


def test_generation_is_reproducible_and_differs_by_mode(tiny):
    texts = {}
    for mode in ("fp4", "bf16"):
        deployed = load_deployed(tiny[0], mode=mode)
        assert deployed.params.stop_token_ids
        from dataclasses import replace

        params = replace(deployed.params, max_tokens=24, n=3, seed=2)
        texts[mode] = generate_text(deployed, ["one", "two 2"], params=params)
        assert texts[mode] == generate_text(deployed, ["one", "two 2"], params=params)
        assert [len(group) for group in texts[mode]] == [3, 3]
    assert texts["fp4"] != texts["bf16"]


def test_the_pool_holds_what_is_asked_for():
    from tracefp4.rl.deployment import _sizes
    from tracefp4.rollout import SamplingParams

    small = _sizes([[1, 2]], SamplingParams(max_tokens=5))
    assert small.num_pages == 512
    large = _sizes([[1] * 50, [1]], SamplingParams(max_tokens=1000, n=80))
    assert large.num_pages * large.page_size >= 64 * 1050


def test_sampling_defaults_are_the_checkpoints(tiny, tmp_path):
    path = shutil.copytree(tiny[0], tmp_path / "copy")
    file = path / "generation_config.json"
    file.write_text(
        json.dumps({**json.loads(file.read_text()), "temperature": 0.5, "top_p": 0.8, "top_k": 7})
    )
    params = load_deployed(path).params
    assert (params.temperature, params.top_p, params.top_k) == (0.5, 0.8, 7)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda tiny, tmp: load_deployed(tiny[0], mode="fp8"), "unknown value 'fp8'"),
        (lambda tiny, tmp: load_deployed(tmp), "not a checkpoint"),
        (lambda tiny, tmp: generate_text(load_deployed(tiny[0]), [""], params=load_deployed(tiny[0]).params),
         "empty prompt"),
        (lambda tiny, tmp: evaluate_checkpoint(make_config(*tiny, tmp, task__eval_path=""), num_items=2),
         "task.eval_path"),
        (lambda tiny, tmp: evaluate_checkpoint(make_config(*tiny, tmp), num_items=2, samples=0),
         "at least 1 sample"),
    ],
    ids=["mode", "no checkpoint", "empty prompt", "no held-out file", "no samples"],
)  # fmt: skip
def test_mistakes_are_refused(tiny, tmp_path, make, message):
    with pytest.raises(ConfigError, match=message):
        make(tiny, tmp_path)


def test_the_eval_command(tiny, tmp_path):
    recipe = write_recipe(tmp_path / "recipe.toml", tables(*tiny, tmp_path / "unused", task__reward=PLAIN))
    arguments = ["eval", str(tiny[0]), "--recipe", str(recipe), "--items", "6"]
    result = CliRunner().invoke(app, [*arguments, "--pass-at", "4"])
    assert result.exit_code == 0, result.output
    assert "(6 items, fp4, rounded to nearest)" in result.output
    assert "pass@4 " in result.output
    result = CliRunner().invoke(app, [*arguments, "--mode", "bf16", "--json"])
    assert json.loads(result.stdout)["num_items"] == 6
    result = CliRunner().invoke(app, [*arguments, "--set", "task.longth=3"])
    assert result.exit_code == 2
    assert "task.longth: unknown key" in result.output


def test_the_generate_command(tiny):
    arguments = ["generate", str(tiny[0]), "one", "two", "--max-tokens", "5", "--temperature", "0"]
    result = CliRunner().invoke(app, [*arguments, "--samples", "2", "--chat"])
    assert result.exit_code == 0, result.output
    assert "one" in result.output
    assert result.output == CliRunner().invoke(app, [*arguments, "--samples", "2", "--chat"]).output

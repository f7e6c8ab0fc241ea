"""Recipes are read strictly: every mistake names the key, what it got, and what is valid."""

import json

import pytest

from tracefp4.cli.config import config_from_table, load_config
from tracefp4.coding import CODECS
from tracefp4.errors import ConfigError
from tracefp4.patching.rules import PlanRules
from tracefp4.rl.config import RunConfig

MINIMAL = {"model": {"path": "m"}, "task": {"name": "basic_arithmetic"}}


def _config(*overrides: str, **tables) -> RunConfig:
    return config_from_table(json.loads(json.dumps(MINIMAL)) | tables, overrides=overrides)


def test_minimal_recipe_has_every_default():
    config = _config()
    assert config.quantization.mode == "fp4"
    assert config.loss.tis_cap == 5.0
    assert config.train.max_version_diff == 3
    assert config.train.betas == (0.9, 0.99)
    assert config.quantization.sites == ("x", "k", "v")


def test_a_recipe_file_with_overrides(tmp_path):
    path = tmp_path / "r.toml"
    path.write_text('[model]\npath = "m"\n[task]\nname = "a"\noptions = {min_terms = 2}\n[train]\nlr = 1\n')
    config = load_config(
        path,
        overrides=["train.steps=7", "quantization.mode=bf16", "quantization.guidance=none",
                   "task.options.max_terms=3", "run.dir='a b'", 'quantization.sites=["x"]',
                   "train.packing=true"],
    )  # fmt: skip
    assert config.train.lr == 1.0 and isinstance(config.train.lr, float)
    assert config.train.steps == 7
    assert config.quantization.mode == "bf16"
    assert config.task.options == {"min_terms": 2, "max_terms": 3}
    assert config.run.dir == "a b"
    assert config.quantization.sites == ("x",)
    assert config.train.packing is True


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.lr=abc", "train.lr: expected float, got 'abc'"),
        ("train.lr=true", "train.lr: expected float, got True"),
        ("train.steps=1.5", "train.steps: expected integer, got 1.5"),
        ("train.steps=true", "train.steps: expected integer, got True"),
        ("run.wandb=1", "run.wandb: expected true or false, got 1"),
        ("model.path=3", "model.path: expected string, got 3"),
        ("train.betas=0.9", "train.betas: expected list, got 0.9"),
        ("train.betas=[0.9]", "train.betas: expected 2 values, got 1"),
        ('train.betas=[0.9, "b"]', r"train.betas\[1\]: expected float, got 'b'"),
        ("train=3", "train: expected a table, got 3"),
        ("task.options=3", "task.options: expected table, got 3"),
        ("train.step=3", "train.step: unknown key. Did you mean train.steps"),
        ("trian.steps=3", "trian: unknown key. Did you mean train"),
        ("train.truncated=maks", "allowed: mask, penalize, train. Did you mean 'mask'"),
        ("loss.aggregation=mean", "loss.aggregation: unknown value 'mean'"),
        ("train.lr=0", "train.lr: got 0.0; allowed: above 0"),
        ("train.lr=-1e-5", "allowed: above 0"),
        ("rollout.max_tokens=0", "rollout.max_tokens: got 0; allowed: 1 or more"),
        ("quantization.guidance=ful", "Did you mean 'full'"),
        ("quantization.layers=last:0", "quantization.layers: unknown rule"),
        ("train.lr", "expected key=value"),
        ("=3", "expected key=value"),
        ("train.lr=[1", "is not a TOML value"),
        ("model.path.x=3", "'path' holds a value, not a table"),
        ("train.optimizer_steps_per_rollout=1000000", "at most the 128 samples"),
    ],
)
def test_mistakes_are_named(override, message):
    with pytest.raises(ConfigError, match=message):
        _config(override)


def test_the_default_codec_is_a_bare_word():
    # Mutation: a pattern of bare words without the plus sign.
    default = PlanRules().guidance
    assert _config(f"quantization.guidance={default}").quantization.guidance == default
    assert default in CODECS


def test_required_keys():
    with pytest.raises(ConfigError, match="model.path: required and not given"):
        config_from_table({"task": {"name": "a"}})
    with pytest.raises(ConfigError, match="task.name"):
        config_from_table({"model": {"path": "m"}})
    with pytest.raises(ConfigError, match="task.path"):
        config_from_table({"model": {"path": "m"}, "task": {"kind": "jsonl"}})


def test_an_unknown_key_lists_the_valid_ones():
    with pytest.raises(
        ConfigError, match="Valid here: model, task, rollout, quantization, train, loss, records, run"
    ):
        _config(extra={})


def test_optional_values_take_their_type():
    assert _config("rollout.temperature=1").rollout.temperature == 1.0
    assert _config().rollout.temperature is None
    with pytest.raises(ConfigError, match="rollout.top_k: expected integer, got 'all'"):
        _config("rollout.top_k=all")


def test_unreadable_recipes(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path / "absent.toml")
    (tmp_path / "bad.toml").write_text("[model\n")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_config(tmp_path / "bad.toml")

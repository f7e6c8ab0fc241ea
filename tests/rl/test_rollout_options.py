"""Options of the engine in a recipe: stop texts, the prefix cache and a bound on swapped pages, through whole runs."""

import json

import pytest
from tests.rl.tiny_runs import make_config

from tracefp4.errors import ConfigError
from tracefp4.rl.config import RolloutConfig
from tracefp4.rl.loop import train
from tracefp4.rl.opening import open_run
from tracefp4.rl.rundir import RunDirectory
from tracefp4.rl.sync import reader
from tracefp4.rl.update import evaluation_params, sampling_params


def open_tiny(tiny, path, **changes):
    config = make_config(*tiny, path, **changes)
    return open_run(config, RunDirectory(config.run.dir, resume=False), resume=False)


def test_a_stop_text_ends_completions_and_its_tokens_are_trained(tiny, tmp_path):
    run = open_tiny(tiny, tmp_path / "run")
    params = sampling_params(run.config, run.policy.defaults)(0)
    prompts = [[5 + i, 9, 60 + i] for i in range(6)]
    read = reader(run.policy.tokenizer)
    free = [row[0] for row in run.engine.generate(prompts, params)]
    # a text that some completion holds before its end: one token of it, decoded alone
    text = next(
        read([c.token_ids[2]]) for c in free if len(c.token_ids) > 4 and read([c.token_ids[2]]).strip()
    )
    stopping = open_tiny(tiny, tmp_path / "stop", rollout__stop=(text,))
    asked = sampling_params(stopping.config, stopping.policy.defaults)(0)
    assert asked.stop == (text,) and asked.keeps_stop
    assert evaluation_params(stopping.config, stopping.policy.defaults).stop == (text,)
    ended = [row[0] for row in stopping.engine.generate(prompts, asked)]
    assert any(len(one.token_ids) < len(other.token_ids) for one, other in zip(ended, free, strict=True))
    for one, other in zip(ended, free, strict=True):
        assert one.token_ids == other.token_ids[: len(one.token_ids)]
        assert text not in read(one.token_ids[:-1])
        if len(one.token_ids) < len(other.token_ids):
            assert text in read(one.token_ids) and one.finish_reason == "stop"
        assert one.record.length == len(one.prompt_ids) + len(one.token_ids) - 1


def test_runs_with_a_prefix_cache_and_few_swapped_pages_end_in_the_same_weights(tiny, tmp_path):
    small = {"rollout__num_pages": 24, "rollout__max_batch": 8}
    hashes = {}
    for name, options in {
        "plain": {},
        "bounded": {"rollout__max_swapped_pages": 0},
        "cached": {"rollout__prefix_cache": True},
    }.items():
        manifest = train(make_config(*tiny, tmp_path / name, **small, **options))
        hashes[name] = manifest["final"]["weights_hash"]
    assert hashes["plain"] == hashes["bounded"] == hashes["cached"]


def test_options_reach_the_engine(tiny, tmp_path):
    run = open_tiny(tiny, tmp_path / "run", rollout__prefix_cache=True, rollout__max_swapped_pages=3)
    assert run.engine.prefix_cache is True
    assert run.engine.max_swapped_pages == 3


@pytest.mark.parametrize("wrong", [{"stop": ("",)}, {"max_swapped_pages": -1}])
def test_options_out_of_range_are_refused(wrong):
    (name,) = wrong
    with pytest.raises(ConfigError, match=f"rollout.{name}"):
        RolloutConfig(**wrong)


def test_the_resolved_config_holds_them(tiny, tmp_path):
    train(make_config(*tiny, tmp_path / "run", rollout__stop=("#",), train__steps=1))
    written = json.loads((tmp_path / "run" / "config.json").read_text())["rollout"]
    assert (written["stop"], written["prefix_cache"], written["max_swapped_pages"]) == (["#"], False, None)

"""Options of the engine in a recipe: stop texts, the prefix cache, a bound on swapped pages and the memory of the pool,
through whole runs."""

import json

import pytest
from tests.rl.tiny_runs import make_config, metrics_of

from tracefp4.errors import ConfigError
from tracefp4.rl import loop
from tracefp4.rl.config import RolloutConfig
from tracefp4.rl.loop import train
from tracefp4.rl.opening import open_run
from tracefp4.rl.rollouts import RolloutMaker
from tracefp4.rl.rundir import RunDirectory
from tracefp4.rl.sync import reader
from tracefp4.rl.update import Updater, evaluation_params, sampling_params

TIMES = ("rollout_seconds", "rollout_tokens_per_s", "train_seconds")
TRAINED = {"task__reward": "tests.rl.tiny_runs:share_plain"}


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


@pytest.mark.parametrize(
    "changes",
    [{}, {"rollout__prefix_cache": True}, {"rollout__partial_groups": 1, "train__max_version_diff": 2}],
    ids=str,
)
def test_a_pool_that_is_given_back_changes_no_weight_and_no_metric(tiny, tmp_path, monkeypatch, changes):
    held, updates = [], []
    update, make = Updater.update, RolloutMaker.make
    engines = []

    def made(self, *args, **options):
        engines[:] = [self.engine]
        return make(self, *args, **options)

    def updated(self, *args, **options):
        held.append(engines[0].pool.num_bytes)
        return update(self, *args, **options)

    monkeypatch.setattr(RolloutMaker, "make", made)
    monkeypatch.setattr(Updater, "update", updated)
    found = {}
    for keeps in (True, False):
        path = tmp_path / str(keeps)
        config = make_config(*tiny, path, **changes, **TRAINED, rollout__keep_pool=keeps)
        manifest = train(config)
        kept = [{k: v for k, v in row.items() if k not in TIMES} for row in metrics_of(config)]
        found[keeps] = (manifest["final"]["weights_hash"], kept)
        assert kept[-1]["optimizer_steps"] > 1
        updates.append((len(held), sum(size > 0 for size in held)))
        held.clear()
    assert found[True] == found[False]
    assert updates == [(updates[0][0], updates[0][0]), (updates[0][0], 0)] and updates[0][0] > 0


def test_a_run_goes_on_with_the_pool_kept_or_not(tiny, tmp_path):
    whole = train(make_config(*tiny, tmp_path / "whole", **TRAINED))
    train(make_config(*tiny, tmp_path / "cut", **TRAINED, train__steps=1))
    manifest = train(make_config(*tiny, tmp_path / "cut", **TRAINED, rollout__keep_pool=False), resume=True)
    assert manifest["final"]["weights_hash"] == whole["final"]["weights_hash"]


def test_the_memory_of_an_evaluation_and_of_an_engine_that_waits_is_free(tiny, tmp_path, monkeypatch):
    seen = []
    build = loop.build_engine
    monkeypatch.setattr(loop, "build_engine", lambda *a, **o: seen.append(build(*a, **o)) or seen[-1])
    run = open_tiny(tiny, tmp_path / "run", rollout__keep_pool=False, run__eval_items=2)
    assert run.engine.pool.num_bytes > 0
    run.rest_engine()
    assert run.engine.pool.num_bytes == 0
    loop.evaluate_run(run)
    (engine,) = seen
    assert engine.pool.num_bytes == 0
    kept = open_tiny(tiny, tmp_path / "kept")
    kept.rest_engine()
    assert kept.engine.pool.num_bytes > 0

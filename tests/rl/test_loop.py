"""Whole runs: RL learns, every row and manifest is complete, options do what they say, mistakes are refused early."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from tests.rl.tiny_runs import changed, make_config, metrics_of

from tracefp4.diagnostics.report import render
from tracefp4.errors import ConfigError
from tracefp4.rl.loop import train

PLAIN = "tests.rl.tiny_runs:share_plain"
LEARNING = {
    "task__reward": PLAIN,
    "rollout__num_prompts": 4,
    "rollout__samples_per_prompt": 8,
    "rollout__max_tokens": 4,
    "rollout__max_batch": 32,
    "rollout__max_tokens_per_step": 256,
    "rollout__num_pages": 128,
    "train__steps": 22,
    "train__lr": 0.01,
    "train__micro_batch_tokens": 2048,
    "run__checkpoint_every": 0,
}


def learn(tiny, path, **changes):
    config = make_config(*tiny, path, **(LEARNING | changes))
    train(config)
    rewards = [row["reward_mean"] for row in metrics_of(config)]
    return sum(rewards[:3]) / 3, sum(rewards[-3:]) / 3, config


def test_rl_learns_with_fp4_rollouts_and_guided_rounding(tiny, tmp_path):
    # measured 0.34 -> 0.98; shuffled advantages stay below 0.5
    first, last, config = learn(tiny, tmp_path / "run")
    assert first < 0.45
    assert last > 0.85
    assert metrics_of(config)[0]["guidance/followed_fraction"] > 0.7


def test_rl_learns_in_bf16(tiny, tmp_path):
    changes = {"quantization__mode": "bf16", "quantization__guidance": "none", "train__steps": 14}
    first, last, _ = learn(tiny, tmp_path / "run", **changes)
    assert last > first + 0.2


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {
            "train__optimizer_steps_per_rollout": 2,
            "loss__aggregation": "dr_grpo",
            "loss__advantage_std": False,
            "train__lr": 0.02,
        },
        {"train__rollout_ahead": 2},
        {"quantization__guidance": "none"},
    ],
    ids=["several steps, Dr. GRPO", "two rollouts ahead", "nearest rounding"],
)
def test_rl_learns_in_other_settings(tiny, tmp_path, changes):
    first, last, _ = learn(tiny, tmp_path / "run", **changes)
    assert last > first + 0.2


def test_a_run_leaves_everything_that_explains_it(tiny, tmp_path):
    config = make_config(
        *tiny, tmp_path / "run", run__eval_items=4, run__eval_every=2, train__steps=3, task__reward=PLAIN
    )
    rows = []
    manifest = train(config, on_step=rows.append)
    path = Path(config.run.dir)
    assert json.loads((path / "manifest.json").read_text()) == manifest
    assert json.loads((path / "config.json").read_text())["rollout"]["page_size"] == 16
    assert list(manifest["evaluations"]) == ["0", "2", "3"]
    assert manifest["final"]["counters"] == {"optimizer_steps": 3, "samples_dropped": 0}
    assert len(manifest["final"]["weights_hash"]) == 32
    assert len(manifest["plan"]["digest"]) == len(manifest["config_digest"]) == 16
    assert {"versions", "hardware", "patched_modules", "seeds"} <= set(manifest)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert [json.loads(json.dumps(row)) for row in rows] == metrics_of(config)
    for name in (
        "reward_mean", "loss", "grad_norm", "ratio_mean", "mismatch/abs_mean", "mismatch/k3", "gen_kl_error",
        "rollout_corr/kl", "guidance_bytes_per_token", "rollout_tokens_per_s", "weight_version", "reward/scored",
    ):  # fmt: skip
        assert name in rows[-1], name


def test_the_same_recipe_gives_the_same_bytes(tiny, tmp_path):
    hashes = [
        train(make_config(*tiny, tmp_path / name, train__steps=1, task__reward=PLAIN))["final"][
            "weights_hash"
        ]
        for name in ("first", "second")
    ]
    assert hashes[0] == hashes[1]
    other = train(make_config(*tiny, tmp_path / "third", train__steps=1, task__reward=PLAIN, train__seed=1))
    assert other["final"]["weights_hash"] != hashes[0]


def test_samples_made_ahead_lag_and_are_counted(tiny, tmp_path):
    config = make_config(*tiny, tmp_path / "run", train__rollout_ahead=2, train__steps=6, task__reward=PLAIN)
    manifest = train(config)
    rows = metrics_of(config)
    assert [row.get("version_lag_max") for row in rows] == [None, None, 0, 1, 2, 2]
    assert [row["weight_version"] for row in rows] == [0, 0, 1, 2, 3, 4]
    assert rows[-1]["lag2/mismatch/num_tokens"] == rows[-1]["mismatch/num_tokens"]
    assert not [name for name in rows[2] if name.startswith("lag")]
    assert manifest["final"]["counters"] == {"optimizer_steps": 4, "samples_dropped": 0}


def test_samples_that_are_too_old_are_dropped_counted_and_train_nothing(tiny, tmp_path):
    config = make_config(
        *tiny,
        tmp_path / "run",
        train__rollout_ahead=1,
        train__max_version_diff=0,
        train__steps=6,
        task__reward=PLAIN,
    )
    manifest = train(config)
    rows = metrics_of(config)
    # after each update the rollout that was made before it is one version old
    trained = [row["trained_samples"] + row["samples_skipped"] for row in rows[1:]]
    assert trained == [12, 0, 12, 0, 12]
    assert [row["weight_version"] for row in rows] == [0, 1, 1, 2, 2, 3]
    assert manifest["final"]["counters"] == {"optimizer_steps": 3, "samples_dropped": 24}


@pytest.mark.parametrize("truncated", ["mask", "penalize", "train"])
def test_truncated_completions(tiny, tmp_path, truncated):
    config = make_config(
        *tiny,
        tmp_path / "run",
        train__truncated=truncated,
        train__steps=1,
        task__reward=PLAIN,
        rollout__num_prompts=12,
    )
    train(config)
    (row,) = metrics_of(config)
    assert row["truncated_fraction"] > 0.8
    everything = row["mismatch/num_tokens"]
    if truncated == "mask":
        assert row["num_tokens"] < 0.2 * everything, "tokens of truncated completions are not trained"
    else:
        assert row["num_tokens"] == everything
    assert (row["reward_mean"] < 0.1) == (truncated == "penalize")


def test_transmission_is_measured_when_asked(tiny, tmp_path):
    config = make_config(
        *tiny,
        tmp_path / "run",
        train__transmission_every=2,
        train__steps=3,
        task__reward=PLAIN,
        train__lr=0.01,
    )
    manifest = train(config)
    rows = metrics_of(config)
    assert ["transmission/slope" in row for row in rows] == [True, False, True]
    assert rows[0]["transmission/num_tokens"] > 20
    assert 0.0 < rows[0]["transmission/slope"] < 1.5
    plain = train(changed(config, run__dir=str(tmp_path / "plain"), train__transmission_every=0))
    assert plain["final"] == manifest["final"], "measuring may not change the run"


def test_agreement_is_measured_by_site_and_layer_and_plotted(tiny, tmp_path):
    config = make_config(
        *tiny,
        tmp_path / "run",
        train__agreement_every=2,
        train__steps=3,
        task__reward=PLAIN,
        quantization__gate="none",
    )
    manifest = train(config)
    rows = metrics_of(config)
    for kind in "xkv":
        for layer in range(2):
            name = f"agreement/{kind}/layer_{layer}/mismatch"
            assert [f"{name}_before" in row for row in rows] == [True, False, True]
            assert 0 <= rows[2][f"{name}_after"] <= rows[2][f"{name}_before"] < 0.5
    assert rows[2]["agreement/mismatch_before"] > 0
    assert rows[2]["agreement/mismatch_after"] < rows[2]["agreement/mismatch_before"]
    assert {f"agreement/routing/{where}changed" for where in ("", "layer_0/", "layer_1/")} <= set(rows[0])
    page = render(config.run.dir).read_text(encoding="utf-8")
    assert "Codes that differ, by layer" in page
    assert "was not measured" not in page
    plain = train(changed(config, run__dir=str(tmp_path / "plain"), train__agreement_every=0))
    assert plain["final"] == manifest["final"], "measuring may not change the run"


@pytest.mark.parametrize("mode", ["fp4", "bf16"])
def test_without_guidance_only_the_routing_is_compared(tiny, tmp_path, mode):
    config = make_config(
        *tiny, tmp_path / "run", train__steps=1, quantization__guidance="none", quantization__mode=mode
    )
    train(config)
    (row,) = metrics_of(config)
    assert {name.split("/")[1] for name in row if name.startswith("agreement/")} == {"routing"}


def test_groups_of_equal_reward_train_and_publish_nothing(tiny, tmp_path):
    config = make_config(*tiny, tmp_path / "run", task__reward="tests.rl.tiny_runs:share_of_nines")
    manifest = train(config)
    rows = metrics_of(config)
    assert [row["groups_skipped"] for row in rows] == [3.0] * 3, "no completion of a random model has a 9"
    assert [(row["trained_samples"], row["samples_skipped"]) for row in rows] == [(0, 12)] * 3
    assert [row["weight_version"] for row in rows] == [0, 0, 0]
    assert manifest["final"]["counters"]["optimizer_steps"] == 0


def test_the_kl_term_is_in_the_loss(tiny, tmp_path):
    config = make_config(*tiny, tmp_path / "run", loss__kl_coef=0.5, train__steps=2, task__reward=PLAIN)
    train(config)
    assert all(row["reference_kl"] > 0 for row in metrics_of(config))


def test_ctrl_c_saves_and_resume_ends_like_an_uninterrupted_run(tiny, tmp_path):
    settings = {"run__checkpoint_every": 0, "task__reward": PLAIN}
    whole = train(make_config(*tiny, tmp_path / "whole", **settings))
    assert whole["final"]["counters"]["optimizer_steps"] == 3
    config = make_config(*tiny, tmp_path / "run", **settings)

    def interrupt(row):
        if row["step"] == 1:
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        train(config, on_step=interrupt)
    assert signal.getsignal(signal.SIGINT) is before
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_000002"]
    assert train(config, resume=True)["final"] == whole["final"]


def test_a_full_disk_ends_the_run_with_the_earlier_checkpoint_intact(tiny, tmp_path, monkeypatch):
    config = make_config(*tiny, tmp_path / "run", task__reward=PLAIN)
    from tracefp4.rl import checkpoint

    real, calls = checkpoint.save_file, []

    def full(*args, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        return real(*args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "save_file", full)
        with pytest.raises(ConfigError, match="step_000002 could not be written .* the disk is full"):
            train(config)
    found = train(config, resume=True)
    assert found["final"] == train(changed(config, run__dir=str(tmp_path / "whole")))["final"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rollout__top_p": 0.9}, "full distribution"),
        ({"task__eval_path": "", "run__eval_items": 4}, "task.eval_path: evaluation of a JSONL task"),
        ({"model__path": "nowhere"}, "not a checkpoint"),
        ({"task__path": "nowhere.jsonl"}, "cannot be read"),
        ({"task__reward": "no.such:thing"}, "cannot be imported"),
        ({"quantization__exclude": ("no.such.module",)}, "no.such.module"),
        ({"quantization__last_layers_bf16": 2}, "no module of Qwen3MoeForCausalLM was selected"),
        ({"rollout__num_pages": 1}, "page"),
        ({"train__micro_batch_tokens": 16}, r"micro_batch_tokens: a sample can have 17 .* Set it to 17"),
        (
            {"records__store": "tcp://127.0.0.1:9", "records__key": "/nope.key"},
            r"^records\.key: Key .* refused: got /nope\.key: No such file or directory\. A key file has .* Make",
        ),
    ],
    ids=["top-p", "no held-out file", "no model", "no prompts", "no reward", "bad exclude", "nothing FP4", "pool",
         "micro-batch", "no key"],
)  # fmt: skip
def test_mistakes_are_refused_and_the_directory_stays_usable(tiny, tmp_path, changes, message):
    config = make_config(*tiny, tmp_path / "run")
    with pytest.raises(ConfigError, match=message):
        train(changed(config, **changes))
    # The pool is refused by the first prompt that does not fit, when the run has begun.
    assert (tmp_path / "run").exists() == ("rollout__num_pages" in changes)
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_directory_in_use_is_refused_before_anything_is_loaded(tiny, tmp_path):
    config = make_config(*tiny, tmp_path / "run", train__steps=1)
    train(config)
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    with pytest.raises(ConfigError, match="already holds a run. Use --resume"):
        train(changed(config, model__path="nowhere"))
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == before


def test_the_old_weights_sample_and_the_new_ones_are_published(tiny, tmp_path, monkeypatch):
    from tracefp4.rl import loop

    published = []
    real = loop.publish

    def publish(model, engine, *, version):
        real(model, engine, version=version)
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        published.append((version, state))

    monkeypatch.setattr(loop, "publish", publish)
    train(make_config(*tiny, tmp_path / "run", train__steps=2, task__reward=PLAIN, train__lr=0.1))
    assert [version for version, _ in published] == [1, 2]
    name = "model.layers.0.mlp.experts.down_proj"
    assert not torch.equal(published[0][1][name], published[1][1][name])


def test_a_run_whose_time_is_up_ends_whole_and_goes_on(tiny, tmp_path):
    # Mutations: a limit that is not looked at; one that leaves no checkpoint, or no last evaluation.
    config = make_config(
        *tiny, tmp_path / "run", run__time_limit_s=1e-9, run__eval_items=2, run__checkpoint_every=0
    )
    manifest = train(config)
    assert manifest["final"]["steps"] == 1 and set(manifest["evaluations"]) == {"0", "1"}
    whole = train(make_config(*tiny, tmp_path / "whole", run__eval_items=2))
    resumed = train(changed(config, run__time_limit_s=0.0), resume=True)
    assert resumed["final"]["weights_hash"] == whole["final"]["weights_hash"]

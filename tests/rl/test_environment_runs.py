"""Whole runs with the calculator: FP4, guidance, several turns; stopped, resumed, evaluated and exported as any run."""

import json
from dataclasses import replace

import pytest
import torch
from tests.rl.tiny_runs import changed, metrics_of

from tracefp4.errors import ConfigError
from tracefp4.patching import PlanRules
from tracefp4.rl.config import (
    ModelConfig,
    RecordsConfig,
    RolloutConfig,
    RunConfig,
    RunSettings,
    TaskConfig,
    TrainConfig,
)
from tracefp4.rl.deployment import evaluate_checkpoint
from tracefp4.rl.loop import _maker, train
from tracefp4.rl.opening import open_run
from tracefp4.rl.rundir import RunDirectory
from tracefp4.rl.solutions import Part, call_calculator, solve_chain_sum
from tracefp4.rl.tasks import Task
from tracefp4.rl.tiny import TinyShape, build_tokenizer
from tracefp4.rl.update import sampling_params
from tracefp4.rl.warmstart import WarmStart, _example, warm_start

TASK = TaskConfig(
    name="chain_sum",
    options={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    environment="calculator",
    environment_options={"instruction": ""},
    max_turns=4,
)
SHAPE = TinyShape(
    num_layers=2,
    hidden_size=64,
    num_heads=2,
    num_kv_heads=1,
    num_experts=8,
    expert_size=32,
    max_positions=128,
)
FRESH = TrainConfig(steps=1)
LENGTH = "tests.rl.worlds:text_length"
TIMES = ("rollout_seconds", "rollout_tokens_per_s", "train_seconds")
QUESTION = "State the final answer to the following arithmetic problem: 4 - 7 + 12 ="


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """A checkpoint that has seen calls of the calculator."""
    path = tmp_path_factory.mktemp("calculator") / "start"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    warm_start(WarmStart(task=TASK, shape=SHAPE, steps=80, batch_size=32, uses_calculator=True), path=path)
    torch.set_num_threads(threads)
    return path


def make_config(start, path, *, steps, **changes):
    config = RunConfig(
        model=ModelConfig(path=str(start)),
        task=TASK,
        rollout=RolloutConfig(
            num_prompts=3, samples_per_prompt=4, max_tokens=40, temperature=1.0, num_pages=128
        ),
        quantization=PlanRules(guidance="mantissa"),
        train=TrainConfig(steps=steps, lr=1e-3, rollout_ahead=1, optimizer_steps_per_rollout=2),
        run=RunSettings(dir=str(path), eval_items=0, checkpoint_every=1),
    )
    return changed(config, **changes)


def timeless(config):
    return [{name: value for name, value in row.items() if name not in TIMES} for row in metrics_of(config)]


@pytest.fixture(scope="module")
def whole(start, tmp_path_factory):
    config = make_config(start, tmp_path_factory.mktemp("whole") / "run", steps=4)
    return config, train(config)


def test_a_run_with_the_calculator_trains_and_says_what_happened(whole):
    rows = metrics_of(whole[0])
    assert len(rows) == 4 and whole[1]["final"]["counters"]["optimizer_steps"] > 0
    for row in rows:
        assert row["env/turns"] > 1 and row["env/tool_calls"] > 0 and row["env/tokens"] > 0
        assert row["env/error"] == row["env/timeout"] == 0
        # one answer per turn
        assert row["env/answered"] == 12 * row["env/turns"]
    assert any(0 < row.get("guidance/followed_fraction", 0) <= 1 for row in rows)
    assert all(row["mismatch/abs_mean"] < 0.05 for row in rows if "mismatch/abs_mean" in row)


@pytest.mark.parametrize("after", [1, 3])
def test_a_stopped_run_ends_in_the_same_bytes(start, tmp_path, whole, after):
    config = make_config(start, tmp_path / "run", steps=after)
    train(config)
    manifest = train(changed(config, train__steps=4), resume=True)
    assert manifest["final"] == whole[1]["final"]
    assert timeless(config) == timeless(whole[0])


def test_another_environment_is_another_run(start, tmp_path):
    config = make_config(start, tmp_path / "run", steps=1)
    train(config)
    for changes in ({"task__max_turns": 2}, {"task__environment": ""}):
        with pytest.raises(ConfigError, match="other settings"):
            train(changed(config, train__steps=2, **changes), resume=True)


def test_samples_hold_the_results_untrained_between_trained_turns(start, tmp_path):
    config = make_config(start, tmp_path / "run", steps=1)
    run = open_run(config, RunDirectory(config.run.dir, resume=False), resume=False)
    params = sampling_params(config, run.policy.defaults)(0)
    rollout, tokenizer = _maker(run).make(run.stream.take(3), params, num_references=12), run.policy.tokenizer
    called = 0
    for sample in rollout.samples:
        flags = sample.trained_flags
        text = "".join(
            tokenizer.decode([token]) for token, own in zip(sample.token_ids, flags, strict=True) if not own
        )
        results = text.replace("><", "> <").split()
        assert all(part.startswith("<result>") and part.endswith("</result>") for part in results)
        called += len(results)
        assert sample.record.length == sample.num_tokens - 1 and bool(sample.record.valid.all())
        assert {v for v, own in zip(sample.weight_versions, flags, strict=True) if own} == {0}
    assert called == rollout.metrics["env/tool_calls"] * 12 > 0
    # the trainer computes what the engine computed, the environment's positions included
    scored = run.trainer.score(rollout.samples)
    for sample, own in zip(rollout.samples, scored.logprobs, strict=True):
        flags = torch.tensor(sample.trained_flags)
        difference = (own.double() - torch.tensor(sample.rollout_logprobs, dtype=torch.float64)).abs()
        assert difference[flags].mean() < 0.05


def test_evaluations_play_with_the_environment(start, tmp_path):
    config = make_config(start, tmp_path / "run", steps=1, run__eval_items=4, run__eval_temperature=1.0)
    found = train(config)["evaluations"]
    assert list(found) == ["0", "1"] and found["0"]["num_items"] == 4
    newest = sorted((tmp_path / "run" / "checkpoints").iterdir())[-1]
    again = evaluate_checkpoint(changed(config, model__path=str(newest)), num_items=4)
    assert json.loads(json.dumps(again.outcomes)) == found["1"]["outcomes"]
    assert (again.accuracy, again.mean_tokens) == (found["1"]["accuracy"], found["1"]["mean_tokens"])
    # an environment that gives the rewards itself leaves nothing to the verifier
    talks = changed(config, task__environment="tests.rl.worlds:talkative", task__environment_options={})
    assert sum(evaluate_checkpoint(talks, num_items=4).outcomes.values()) == 0 < sum(again.outcomes.values())


def test_a_store_keeps_the_records_of_trajectories(start, tmp_path, whole):
    config = changed(
        make_config(start, tmp_path / "run", steps=4), records__store="directory", records__keep_versions=4
    )
    assert isinstance(config.records, RecordsConfig)
    assert train(config)["final"] == whole[1]["final"]


def test_demonstrations_call_and_read_in_parts():
    assert call_calculator(QUESTION) == [
        Part(text="<tool>4-7</tool>", is_sampled=True),
        Part(text="<result>-3</result>", is_sampled=False),
        Part(text="<tool>-3+12</tool>", is_sampled=True),
        Part(text="<result>9</result>", is_sampled=False),
        Part(text="<answer>9</answer>", is_sampled=True),
    ]
    assert call_calculator(QUESTION, is_tagged=False)[-1].text == "9"
    assert solve_chain_sum(QUESTION) == "4-7=-3;-3+12=9;<answer>9</answer>"
    with pytest.raises(ConfigError, match="not a chain_sum question"):
        call_calculator("What is 4 - 7?")


@pytest.mark.parametrize(
    "changes",
    [
        {"quantization": PlanRules(guidance="none"), "train": FRESH},
        {"quantization": PlanRules(mode="bf16", guidance="none"), "train": FRESH},
        {"train": TrainConfig(steps=1, packing=True)},
        {"train": TrainConfig(steps=1, activation_checkpointing="full")},
    ],
    ids=["nearest rounding", "bf16", "packed rows", "recomputed activations"],
)
def test_other_recipes_play_too(start, tmp_path, changes):
    rows = []
    train(
        replace(make_config(start, tmp_path / "run", steps=1, task__reward=LENGTH), **changes),
        on_step=rows.append,
    )
    assert rows[0]["env/tool_calls"] > 0 and rows[0]["mismatch/abs_mean"] < 0.1
    assert rows[0]["mismatch/num_tokens"] <= 12 * rows[0]["completion_tokens_mean"]


def test_the_warm_start_trains_calls_and_not_their_results():
    tokenizer = build_tokenizer(["<tool>4-7</tool>", "<result>-3</result>"], vocab_size=300)
    task = Task(source="chain_sum", index=9, prompt=QUESTION)
    example = _example(task, tokenizer, WarmStart(task=TASK, uses_calculator=True))
    trained = [token for token, own in zip(example.input_ids, example.is_trained, strict=True) if own]
    assert tokenizer.decode(trained) == "<tool>4-7</tool><tool>-3+12</tool><answer>9</answer><|end|>"

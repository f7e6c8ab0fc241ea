"""From a recipe's [task] table to items and verifiers."""

import pytest
from tests.rl.tiny_runs import REWARD

from tracefp4.errors import ConfigError
from tracefp4.rl.config import TaskConfig
from tracefp4.rl.policy import load_policy
from tracefp4.rl.prompts import build_held_out, build_scorer, build_source, encode
from tracefp4.rl.tasks import Task


def test_reasoning_gym_trains_and_evaluates_on_different_items():
    task = TaskConfig(name="chain_sum", options={"min_terms": 2, "max_terms": 2}, seed=3)
    train, held_out = build_source(task), build_held_out(task)
    assert train.digest != held_out.digest
    assert [train.item(i).prompt for i in range(8)] != [held_out.item(i).prompt for i in range(8)]


def test_jsonl_evaluates_on_its_second_file_only(tiny):
    with pytest.raises(ConfigError, match=r"task.eval_path: .* run.eval_items = 0"):
        build_held_out(TaskConfig(kind="jsonl", path=str(tiny[1])))
    task = TaskConfig(kind="jsonl", path=str(tiny[1]), eval_path=str(tiny[1]))
    assert build_held_out(task).item(0).prompt == "one", "held-out items keep the file's order"


@pytest.mark.parametrize(
    ("task", "verifier", "function"),
    [
        (TaskConfig(name="chain_sum"), "reasoning_gym", ""),
        (TaskConfig(kind="jsonl", path="x"), "math_verify", ""),
        (TaskConfig(name="chain_sum", reward="math_verify"), "math_verify", ""),
        (TaskConfig(kind="jsonl", path="x", reward=REWARD), "function", REWARD),
    ],
    ids=["task's own", "jsonl", "math", "dotted"],
)
def test_verifier(task, verifier, function):
    config = build_scorer(task).config
    assert (config.verifier, config.function) == (verifier, function)


def test_the_recipes_reward_options_reach_the_scorer():
    task = TaskConfig(
        kind="jsonl", path="x", reward=REWARD, reward_timeout_s=0.5, reward_on_error="raise",
        reward_isolation="process", answer_tag="",
    )  # fmt: skip
    config = build_scorer(task).config
    assert (config.timeout_s, config.on_error, config.isolation, config.answer_tag) == (
        0.5, "raise", "process", "",
    )  # fmt: skip


def test_prompts_go_through_the_chat_template_once(tiny):
    tokenizer = load_policy(tiny[0]).tokenizer
    ids = encode(Task(source="s", index=0, prompt="one"), tokenizer=tokenizer)
    assert tokenizer.decode(ids) == "<|user|>one<|assistant|>"
    tokenizer.chat_template = None
    assert tokenizer.decode(encode(Task(source="s", index=0, prompt="one"), tokenizer=tokenizer)) == "one"

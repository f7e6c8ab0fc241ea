"""A tiny checkpoint, recipes on it, and rewards: everything that tests of whole runs share."""

import json
from dataclasses import replace
from pathlib import Path

from tracefp4.patching import PlanRules
from tracefp4.rl.checkpoint import save_model
from tracefp4.rl.config import (
    LossConfig,
    ModelConfig,
    RecordsConfig,
    RolloutConfig,
    RunConfig,
    RunSettings,
    TaskConfig,
    TrainConfig,
)
from tracefp4.rl.tiny import TinyShape, build_model, build_tokenizer

SHAPE = TinyShape(
    num_layers=2,
    hidden_size=32,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    num_experts=4,
    top_k=2,
    expert_size=16,
    max_positions=128,
    init_std=0.3,
)
PROMPTS = ["one", "two 2", "three 33", "four 4444", "five", "6"]
REWARD = "tests.rl.tiny_runs:share_of_nines"
TABLES = {
    "model": ModelConfig,
    "task": TaskConfig,
    "rollout": RolloutConfig,
    "quantization": PlanRules,
    "train": TrainConfig,
    "loss": LossConfig,
    "records": RecordsConfig,
    "run": RunSettings,
}


def share_of_nines(prompt, completion, answer):
    """Reward: share of the completion's characters that are the digit 9."""
    return completion.count("9") / max(1, len(completion))


def share_plain(prompt, completion, answer):
    """Reward: share of the completion's characters from "0" to "z", about a quarter of what bytes can be."""
    return sum("0" <= letter <= "z" for letter in completion) / max(1, len(completion))


def first_letter(prompt, completion, answer):
    """Reward: 1 when the completion's first character is odd."""
    return float(bool(completion) and ord(completion[0]) % 2 == 1)


def make_checkpoint(path, *, seed=0, shape=SHAPE):
    """Save a random model with its tokenizer; returns the path."""
    tokenizer = build_tokenizer(PROMPTS, vocab_size=262)
    save_model(build_model(shape, tokenizer=tokenizer, seed=seed), tokenizer, Path(path))
    return Path(path)


def make_prompts(path):
    """Write the prompts as a JSONL file; returns the path."""
    lines = [json.dumps({"prompt": text, "answer": "9"}) for text in PROMPTS]
    Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return Path(path)


def tables(checkpoint, prompts, run_dir, **changes):
    """Recipe as nested tables; changes are dotted keys with '__' for the dot, e.g. train__steps=3."""
    found = {
        "model": {"path": str(checkpoint), "device": "cpu"},
        "task": {"kind": "jsonl", "path": str(prompts), "reward": REWARD, "eval_path": str(prompts)},
        "rollout": {
            "num_prompts": 3,
            "samples_per_prompt": 4,
            "max_tokens": 6,
            "num_pages": 64,
            "max_batch": 16,
            "max_tokens_per_step": 64,
        },
        "quantization": {"mode": "fp4", "guidance": "mantissa"},
        "train": {"steps": 3, "lr": 3e-3, "truncated": "train", "micro_batch_tokens": 128},
        "loss": {},
        "records": {},
        "run": {"dir": str(run_dir), "checkpoint_every": 1, "eval_items": 0},
    }
    for name, value in changes.items():
        table, _, key = name.partition("__")
        found[table][key] = value
    return found


def make_config(checkpoint, prompts, run_dir, **changes):
    """The same as a RunConfig."""
    found = tables(checkpoint, prompts, run_dir, **changes)
    return RunConfig(**{name: TABLES[name](**table) for name, table in found.items()})


def changed(config, **changes):
    """A RunConfig with some dotted keys changed."""
    for name, value in changes.items():
        table, _, key = name.partition("__")
        config = replace(config, **{table: replace(getattr(config, table), **{key: value})})
    return config


def write_recipe(path, found):
    """Write nested tables as TOML (JSON scalars are TOML scalars)."""
    lines = []
    for table, keys in found.items():
        lines += [f"[{table}]", *[f"{key} = {json.dumps(value)}" for key, value in keys.items()]]
    Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return Path(path)


def metrics_of(config):
    """Every row of a run's metrics."""
    lines = (Path(config.run.dir) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]

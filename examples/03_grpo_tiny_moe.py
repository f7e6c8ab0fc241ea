"""GRPO on a tiny mixture of experts: FP4 rollouts, guided rounding in the trainer, a run directory and a resume.

A few supervised steps teach a random model the task's format; a recipe in Python does the rest. `tracefp4 train`
runs the same recipe from a TOML file. A handful of steps shows the loop, not a trained model.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from tracefp4 import PlanRules
from tracefp4.rl.config import ModelConfig, RolloutConfig, RunConfig, RunSettings, TaskConfig, TrainConfig
from tracefp4.rl.loop import train
from tracefp4.rl.tiny import TinyShape
from tracefp4.rl.warmstart import WarmStart, warm_start

TASK = TaskConfig(
    name="chain_sum",
    options={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
)
SHAPE = TinyShape(num_layers=2, hidden_size=64, num_heads=2, num_kv_heads=1, num_experts=8, expert_size=32)


def recipe(start: Path, directory: Path, *, steps: int) -> RunConfig:
    """One run: what a TOML file in recipes/ says, as Python."""
    return RunConfig(
        model=ModelConfig(path=str(start)),
        task=TASK,
        rollout=RolloutConfig(num_prompts=8, samples_per_prompt=8, max_tokens=24, temperature=1.0),
        quantization=PlanRules(),
        train=TrainConfig(steps=steps, lr=3e-4),
        run=RunSettings(dir=str(directory), eval_items=0),
    )


def show(row: Mapping[str, Any]) -> None:
    """Print what one step measured."""
    print(
        f"step {row['step']}: reward {row['reward_mean']:.3f}   "
        f"mean |d log p| {row.get('mismatch/abs_mean', float('nan')):.5f}   "
        f"guidance {row['guidance_bytes_per_token']:.0f} bytes per token"
    )


def main(directory: Path) -> None:
    torch.set_num_threads(1)
    start, run = directory / "start", directory / "run"
    loss = warm_start(WarmStart(task=TASK, shape=SHAPE, steps=120, batch_size=32), path=start)
    print(f"warm start: loss {loss:.3f} nats per token")

    train(recipe(start, run, steps=3), on_step=show)
    # A longer run continues where the shorter one stopped; a killed one continues from its last checkpoint.
    final = train(recipe(start, run, steps=6), resume=True, on_step=show)
    print(f"weights hash {final['final']['weights_hash']}")
    print(f"files: {', '.join(sorted(path.name for path in run.iterdir()))}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with TemporaryDirectory() as temporary:
            main(Path(temporary))

"""GRPO over several turns: the policy calls a calculator, reads its result and goes on; one record per trajectory.

A recipe names the environment: "calculator", or a factory of yours, "package.module:factory". What it writes is
recorded like the prompt and kept out of the loss. This one gives the calculator a price for every call.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from tracefp4 import PlanRules
from tracefp4.rl import Task
from tracefp4.rl.calculator import Calculator, CalculatorEpisode
from tracefp4.rl.config import ModelConfig, RolloutConfig, RunConfig, RunSettings, TaskConfig, TrainConfig
from tracefp4.rl.environments import End, Reply, Turn
from tracefp4.rl.loop import train
from tracefp4.rl.tiny import TinyShape
from tracefp4.rl.warmstart import WarmStart, warm_start

SHAPE = TinyShape(num_layers=2, hidden_size=64, num_heads=2, num_kv_heads=1, num_experts=8, expert_size=32)
TASK = TaskConfig(
    name="chain_sum",
    options={"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1},
    environment=f"{__name__}:PricedCalculator",
    environment_options={"price": 0.1},
    max_turns=4,
)


class PricedCalculator(Calculator):
    """`stop` and `prompt` are the calculator's, `open` begins a trajectory."""

    def __init__(self, *, price: float) -> None:
        super().__init__(instruction="")
        self.price = price

    def open(self, task: Task, *, seed: int) -> "PricedEpisode":
        return PricedEpisode(task, self.price)


@dataclass
class PricedEpisode(CalculatorEpisode):
    """`answer` is asked after every turn, with the text and the ids that the policy sampled."""

    task: Task
    price: float

    def answer(self, turn: Turn) -> Reply | End:
        is_right = f"<answer>{self.task.answer}</answer>" in turn.text
        return End(reward=1.0 - self.price * turn.index) if is_right else super().answer(turn)


def show(row: Mapping[str, Any]) -> None:
    mismatch = row.get("mismatch/abs_mean", float("nan"))
    numbers = f"reward {row['reward_mean']:.3f}   calls {row['env/tool_calls']:.2f}"
    print(f"step {row['step']}: {numbers}   mean |d log p| {mismatch:.5f}")


def main(directory: Path) -> None:
    torch.set_num_threads(1)
    first = WarmStart(task=TASK, shape=SHAPE, steps=150, batch_size=32, uses_calculator=True)
    warm_start(first, path=directory / "start")
    train(
        RunConfig(
            model=ModelConfig(path=str(directory / "start")), task=TASK, quantization=PlanRules(),
            rollout=RolloutConfig(num_prompts=8, samples_per_prompt=8, max_tokens=64, temperature=1.0),
            train=TrainConfig(steps=6, lr=3e-4), run=RunSettings(dir=str(directory / "run"), eval_items=0),
        ),
        on_step=show,
    )  # fmt: skip


if __name__ == "__main__":
    with TemporaryDirectory() as temporary:
        main(Path(sys.argv[1] if len(sys.argv) > 1 else temporary))

"""The demo: one small model, three arms that differ in rounding only, and what each of them costs and learns.

Warm start on mixed demonstrations (most of them without the answer tags that the verifier wants), then GRPO from
that checkpoint with a BF16 rollout, an FP4 rollout followed by nearest rounding (QAT), and an FP4 rollout
followed by guided rounding: same seeds, same prompts, FP4 experts and KV cache on both sides. Everything goes
to `demo.json`; the report draws it.
"""

import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tracefp4.errors import ConfigError
from tracefp4.patching import PlanRules
from tracefp4.rl.config import (
    LossConfig,
    ModelConfig,
    RolloutConfig,
    RunConfig,
    RunSettings,
    TaskConfig,
    TrainConfig,
)
from tracefp4.rl.loop import train
from tracefp4.rl.planning import remembered_plan
from tracefp4.rl.policy import load_policy
from tracefp4.rl.rundir import hardware, versions, write_atomically
from tracefp4.rl.tiny import TinyShape
from tracefp4.rl.warmstart import WarmStart, warm_start
from tracefp4.study.rescore import rescore

OnEvent = Callable[[str], None]
ARMS: dict[str, PlanRules] = {
    "bf16": PlanRules(mode="bf16", guidance="none"),
    "qat": PlanRules(guidance="none"),
    "guided": PlanRules(),
}
TASK_OPTIONS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}
# steps between two measurements of how much of an update the quantized forward shows
TRANSMISSION_EVERY = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoSettings:
    """Sizes of the demo; the defaults take about four minutes on two CPU cores."""

    seed: int = 0
    """Seed of weights, prompts and draws."""
    shape: TinyShape = field(default_factory=TinyShape)
    """Shape of the model."""
    warm_steps: int = 240
    """Optimizer steps of the warm start."""
    steps: int = 22
    """GRPO steps per arm."""
    lr: float = 1e-4
    """Learning rate of GRPO."""
    num_prompts: int = 16
    """Prompts per step."""
    samples_per_prompt: int = 8
    """Completions per prompt."""
    eval_items: int = 512
    """Held-out items, before and after."""
    rescore_prompts: int = 32
    """Held-out prompts whose completions every trainer scores."""


def arm_config(settings: DemoSettings, *, arm: str, out: Path) -> RunConfig:
    """Return the run of one arm; the recipes `tiny_arithmetic*.toml` are these, and a test holds them equal."""
    return RunConfig(
        model=ModelConfig(path=str(out / "start")),
        task=TaskConfig(name="chain_sum", options=dict(TASK_OPTIONS), seed=3 + 1_000_000 * settings.seed),
        rollout=RolloutConfig(
            num_prompts=settings.num_prompts,
            samples_per_prompt=settings.samples_per_prompt,
            max_tokens=32,
            temperature=1.0,
            num_pages=1024,
            max_batch=256,
            max_tokens_per_step=4096,
        ),
        quantization=ARMS[arm],
        train=TrainConfig(
            steps=settings.steps,
            lr=settings.lr,
            warmup_steps=3,
            betas=(0.9, 0.95),
            micro_batch_tokens=8192,
            seed=settings.seed,
            transmission_every=TRANSMISSION_EVERY,
        ),
        loss=LossConfig(clip_high=0.28),
        run=RunSettings(
            dir=str(out / arm),
            checkpoint_every=0,
            keep_last=1,
            eval_items=settings.eval_items,
            eval_temperature=1.0,
        ),
    )


def run_demo(
    out: Path, *, settings: DemoSettings | None = None, on_event: OnEvent = lambda text: None
) -> dict[str, Any]:
    """Run the demo into an empty directory.

    Args:
        out: gets `start/` (the warm-started checkpoint), one run directory per arm, and `demo.json`.
        settings: sizes; None for the defaults.
        on_event: called with one line of text for every stage and step.

    Returns:
        The content of `demo.json`.

    Raises:
        ConfigError: `out` holds a demo already.
    """
    if (out / "demo.json").exists() or any((out / arm).exists() for arm in ARMS):
        raise ConfigError(
            f"demo: {out} holds a demo already. Name another directory with --out, or delete it."
        )
    settings = settings or DemoSettings()
    started = time.monotonic()
    configs = {arm: arm_config(settings, arm=arm, out=out) for arm in ARMS}
    warm = _warm_start(settings, configs["bf16"].task, out / "start", on_event)
    arms = {}
    for arm, config in configs.items():
        on_event(
            f"arm {arm}: {settings.steps} GRPO steps, evaluation on {settings.eval_items} held-out items"
        )
        manifest = train(config, on_step=lambda row, arm=arm: on_event(_step_line(arm, row)))  # type: ignore[misc]
        arms[arm] = _arm_result(Path(config.run.dir), manifest)
    summary = json.loads((out / "guided" / "manifest.json").read_text(encoding="utf-8"))["plan"]
    guided = remembered_plan(load_policy(out / "start").model, ARMS["guided"], summary=summary)
    last = sorted((out / "guided" / "checkpoints").glob("step_*"))[-1]
    scored = {}
    for when, path in (("first", out / "start"), ("last", last)):
        on_event(f"rescoring the same tokens with every trainer: {when} checkpoint")
        scored[when] = rescore(path, guided, configs["guided"], num_prompts=settings.rescore_prompts)
    result = {
        "settings": asdict(settings),
        "hardware": hardware(),
        "versions": versions(),
        "seconds": round(time.monotonic() - started, 1),
        "warm_start": warm,
        "plan": guided.summary(),
        "arms": arms,
        "rescore": {when: found.rows for when, found in scored.items()},
        "rescored_tokens": {when: found.num_tokens for when, found in scored.items()},
        "agreement": {"site": scored["last"].agreement},
        "learning_claim": True,
    }
    result["claims"] = check_claims(result)
    write_atomically(out / "demo.json", (json.dumps(result, indent=2, default=str) + "\n").encode())
    return result


def check_claims(result: Mapping[str, Any]) -> dict[str, bool]:
    """Say which of the demo's claims hold in this result; a test asserts that all do.

    closer_than_qat: guided mean |d log p| at least 4 times below nearest rounding's, on both checkpoints.
    below_bf16: guided mean |d log p| no higher than the BF16 pair's, on both checkpoints.
    floor_is_real: the BF16 pair lies where real engines lie, .0005 to .004, on both checkpoints.
    bf16_learns, guided_learns: held-out accuracy rises by more than two standard errors of the difference.
    """
    scored = [result["rescore"][when] for when in ("first", "last")]
    claims = {
        "closer_than_qat": all(rows["qat"]["mean"] >= 4 * rows["guided"]["mean"] for rows in scored),
        "below_bf16": all(rows["guided"]["mean"] <= rows["bf16"]["mean"] for rows in scored),
        "floor_is_real": all(0.0005 <= rows["bf16"]["mean"] <= 0.004 for rows in scored),
    }
    for arm in ("bf16", "guided"):
        found = result["arms"][arm]
        error = math.hypot(found["accuracy_before_se"], found["accuracy_after_se"])
        claims[f"{arm}_learns"] = found["accuracy_after"] - found["accuracy_before"] > 2 * error
    return claims


def _warm_start(settings: DemoSettings, task: TaskConfig, path: Path, on_event: OnEvent) -> dict[str, float]:
    on_event(f"warm start: {settings.warm_steps} supervised steps from random weights")
    started = time.monotonic()

    def report(step: int, steps: int, loss: float) -> None:
        if step % 25 == 0 or step == steps - 1:
            on_event(f"warm start {step + 1:4d}/{steps}   loss {loss:.3f}")

    config = WarmStart(task=task, shape=settings.shape, steps=settings.warm_steps, seed=settings.seed)
    loss = warm_start(config, path=path, on_progress=report)
    return {"loss": loss, "seconds": round(time.monotonic() - started, 1)}


def _arm_result(directory: Path, manifest: Mapping[str, Any]) -> dict[str, Any]:
    lines = (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    evaluations = manifest["evaluations"]
    before, after = evaluations["0"], evaluations[max(evaluations, key=int)]
    tokens = sum(row["rollout_tokens_per_s"] * row["rollout_seconds"] for row in rows)
    return {
        "reward": [row["reward_mean"] for row in rows],
        "mismatch_mean": [row.get("mismatch/abs_mean") for row in rows],
        "mismatch_max": [row.get("mismatch/abs_max") for row in rows],
        "accuracy_before": before["accuracy"],
        "accuracy_before_se": before["standard_error"],
        "accuracy_after": after["accuracy"],
        "accuracy_after_se": after["standard_error"],
        "tokens_per_s": tokens / sum(row["rollout_seconds"] for row in rows),
        "train_seconds_per_step": sum(row.get("train_seconds", 0.0) for row in rows) / len(rows),
        "bytes_per_token": rows[-1]["guidance_bytes_per_token"],
        "transmission": [
            {"step": row["step"], **{key: row[f"transmission/{key}"] for key in ("slope", "low", "high")}}
            for row in rows
            if "transmission/slope" in row
        ],
        "weights_hash": manifest["final"]["weights_hash"],
    }


def _step_line(arm: str, row: Mapping[str, Any]) -> str:
    return (
        f"{arm:>6} step {int(row['step']) + 1:3d}   reward {row['reward_mean']:.3f}   "
        f"mean |d log p| {row.get('mismatch/abs_mean', float('nan')):.5f}"
    )

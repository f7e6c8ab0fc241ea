"""The demo: one small model, three arms that differ in rounding only, and what each of them costs and learns.

Warm start on mixed demonstrations (most of them without the answer tags that the verifier wants), then GRPO from
that checkpoint with a BF16 rollout, an FP4 rollout followed by nearest rounding (QAT), and an FP4 rollout
followed by guided rounding: same seeds, same prompts, FP4 experts and KV cache on both sides. Everything goes
to `demo.json`; the report draws it. Two sizes: `tiny` for two CPU cores, and `large` (200 million parameters) for one
GPU, whose three arms share a limit of time, so that there is a report whatever the machine does.
"""

import gc
import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from tracefp4.errors import ConfigError
from tracefp4.formats.arithmetic import EMULATED
from tracefp4.ops.backend import explain
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
from tracefp4.rl.placement import Placement, placement_of
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
# shares of the limit of time: for the warm start, and for the last measurements; the arms get the rest
WARM_SHARE, LAST_SHARE = 0.27, 0.12


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoSettings:
    """Sizes of the demo; the defaults, size `tiny`, take about four minutes on two CPU cores."""

    seed: int = 0
    """Seed of weights, prompts and draws."""
    device: str = "cpu"
    """As `model.device` of a recipe."""
    time_limit_s: float = 0.0
    """Wall-clock seconds of the whole demo, kept by ending warm start and arms early; 0: no limit."""
    shape: TinyShape = field(default_factory=TinyShape)
    """Shape of the model."""
    warm_steps: int = 240
    """Optimizer steps of the warm start."""
    warm_batch: int = 64
    """Examples per step of the warm start."""
    warm_lr: float = 2e-3
    """Peak learning rate of the warm start."""
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
    max_batch: int = 256
    """Sequences that run at once."""
    micro_batch_tokens: int = 8192
    """Most tokens in one forward pass of the trainer."""


SIZES: dict[str, DemoSettings] = {
    "tiny": DemoSettings(),
    "large": DemoSettings(
        device="cuda",
        time_limit_s=500.0,
        shape=TinyShape(
            num_layers=8,
            hidden_size=512,
            num_heads=8,
            num_kv_heads=2,
            head_dim=64,
            num_experts=64,
            top_k=8,
            expert_size=256,
            init_std=0.02,
        ),
        warm_steps=500,
        warm_batch=256,
        warm_lr=1e-3,
        steps=30,
        lr=3e-5,
        num_prompts=64,
        rescore_prompts=64,
        max_batch=512,
        micro_batch_tokens=16384,
    ),
}
"""Settings by the name of a size."""


def arm_config(
    settings: DemoSettings, *, arm: str, out: Path, steps: int | None = None, time_limit_s: float = 0.0
) -> RunConfig:
    """Return the run of one arm; the recipes `tiny_arithmetic*.toml` are these, and a test holds them equal.

    Args:
        settings: sizes.
        arm: one of ARMS.
        out: directory of the demo.
        steps: GRPO steps; None: the settings'.
        time_limit_s: as `run.time_limit_s`.
    """
    return RunConfig(
        model=ModelConfig(path=str(out / "start"), device=settings.device),
        task=TaskConfig(name="chain_sum", options=dict(TASK_OPTIONS), seed=3 + 1_000_000 * settings.seed),
        rollout=RolloutConfig(
            num_prompts=settings.num_prompts,
            samples_per_prompt=settings.samples_per_prompt,
            max_tokens=32,
            temperature=1.0,
            num_pages=4 * settings.max_batch,
            max_batch=settings.max_batch,
            max_tokens_per_step=16 * settings.max_batch,
        ),
        quantization=ARMS[arm],
        train=TrainConfig(
            steps=settings.steps if steps is None else steps,
            lr=settings.lr,
            warmup_steps=3,
            betas=(0.9, 0.95),
            micro_batch_tokens=settings.micro_batch_tokens,
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
            time_limit_s=time_limit_s,
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
        ConfigError: `out` holds a demo already, or the device is not there.
    """
    if (out / "demo.json").exists() or any((out / arm).exists() for arm in ARMS):
        raise ConfigError(
            f"demo: {out} holds a demo already. Name another directory with --out, or delete it."
        )
    settings = settings or DemoSettings()
    placement = placement_of(arm_config(settings, arm="bf16", out=out).model)
    clock = _Clock(limit_s=settings.time_limit_s)
    plain = [
        row["op"] for row in explain(placement.device) if row["backend"] == "reference"
    ]  # compiles the others
    on_event(f"ops on {placement.device} that run in plain torch: {', '.join(plain)}")
    warm = _warm_start(settings, out / "start", placement, on_event)
    arms = _run_arms(settings, out, clock, on_event)
    summary = json.loads((out / "guided" / "manifest.json").read_text(encoding="utf-8"))["plan"]
    model = load_policy(out / "start").model
    guided = remembered_plan(model, ARMS["guided"], summary=summary)
    last = sorted((out / "guided" / "checkpoints").glob("step_*"))[-1]
    scored = {}
    for when, path in (("first", out / "start"), ("last", last)):
        on_event(f"rescoring the same tokens with every trainer: {when} checkpoint")
        config = arm_config(settings, arm="guided", out=out)
        scored[when] = rescore(path, guided, config, num_prompts=settings.rescore_prompts)
    result = {
        "settings": asdict(settings),
        "hardware": hardware(),
        "versions": versions(),
        "placement": placement.summary(),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "seconds": round(clock.spent_s, 1),
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
    floor_is_real: the BF16 pair lies where real engines lie, .0005 to .004, on both checkpoints; claimed of emulated
        arithmetic alone, as a native pair is two real implementations.
    bf16_learns, guided_learns: held-out accuracy rises by more than two standard errors of the difference.
    """
    scored = [result["rescore"][when] for when in ("first", "last")]
    claims = {
        "closer_than_qat": all(rows["qat"]["mean"] >= 4 * rows["guided"]["mean"] for rows in scored),
        "below_bf16": all(rows["guided"]["mean"] <= rows["bf16"]["mean"] for rows in scored),
    }
    if result["placement"]["arithmetic"] == EMULATED.name:
        claims["floor_is_real"] = all(0.0005 <= rows["bf16"]["mean"] <= 0.004 for rows in scored)
    for arm in ("bf16", "guided"):
        found = result["arms"][arm]
        error = math.hypot(found["accuracy_before_se"], found["accuracy_after_se"])
        claims[f"{arm}_learns"] = found["accuracy_after"] - found["accuracy_before"] > 2 * error
    return claims


@dataclass(kw_only=True, slots=True)
class _Clock:
    """Seconds of the demo, and what a limit leaves of them."""

    limit_s: float
    """0: none."""
    started_s: float = field(default_factory=time.monotonic)
    """On the monotonic clock."""

    @property
    def spent_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.started_s

    def left_s(self, kept_share: float) -> float:
        """Seconds left when a share of the limit is kept back: at least 1, or 0, for no limit, without one."""
        return max(1.0, self.limit_s * (1 - kept_share) - self.spent_s) if self.limit_s else 0.0


def _warm_start(
    settings: DemoSettings, path: Path, placement: Placement, on_event: OnEvent
) -> dict[str, float]:
    on_event(f"warm start: {settings.warm_steps} supervised steps from random weights")
    started = time.monotonic()
    config = WarmStart(
        task=arm_config(settings, arm="bf16", out=path.parent).task,
        shape=settings.shape,
        steps=settings.warm_steps,
        batch_size=settings.warm_batch,
        lr=settings.warm_lr,
        seed=settings.seed,
        placement=placement,
        time_limit_s=settings.time_limit_s * WARM_SHARE,
    )

    def report(step: int, steps: int, loss: float) -> None:
        on_event(f"warm start {step + 1:4d}/{steps}   loss {loss:.3f}")

    loss = warm_start(config, path=path, on_progress=report)
    return {"loss": loss, "seconds": round(time.monotonic() - started, 1)}


def _run_arms(settings: DemoSettings, out: Path, clock: _Clock, on_event: OnEvent) -> dict[str, Any]:
    """Train every arm for as many steps as the slowest, which goes first, has time for."""
    arms: dict[str, Any] = {}
    steps = settings.steps
    for place, arm in enumerate(reversed(ARMS)):
        share_s = clock.left_s(LAST_SHARE) / (len(ARMS) - place)
        config = arm_config(settings, arm=arm, out=out, steps=steps, time_limit_s=share_s)
        limit = f" within {share_s:.0f} s" if share_s else ""
        on_event(f"arm {arm}: {steps} GRPO steps{limit}, evaluation on {settings.eval_items} held-out items")
        manifest = train(
            config,
            on_step=lambda row, arm=arm: on_event(_step_line(arm, row)),  # type: ignore[misc]
            on_event=lambda text, arm=arm: on_event(f"{arm:>6} {text}"),  # type: ignore[misc]
        )
        arms[arm] = _arm_result(Path(config.run.dir), manifest)
        steps = len(arms[arm]["reward"])
        gc.collect()  # engine and trainer refer to themselves; the next arm needs their memory
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return {arm: arms[arm] for arm in ARMS}


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
        f"mean |d log p| {row.get('mismatch/abs_mean', float('nan')):.5f}   "
        f"rollout {row['rollout_seconds']:.2f} s, training {row.get('train_seconds', 0.0):.2f} s"
    )

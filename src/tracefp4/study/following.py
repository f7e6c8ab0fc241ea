"""Which rule should a trainer follow its rollout by? Arms that differ in the rule alone, over lags, steps and seeds.

    bf16       BF16 rollout and trainer: what the task can teach
    qat        FP4 rollout, nearest rounding in the trainer, routing replayed
    ungated    FP4 rollout, every recorded decision followed (the published rule)
    gated      FP4 rollout, followed only inside the noise gate
    coded      the same, from the syndromes of 64 values instead of a bit for each

A cell of the grid is (weight versions between sampling and training, optimizer steps per rollout). Every seed has its
own warm-started checkpoint, prompts and draws, shared by all arms of the cell, so arms are compared in pairs. The
quantity is the area under the reward curve, the mean over a run's steps of the mean reward of the sampled
completions. Runs go to worker processes of one thread each; what has finished is not run again, so a study that was
killed goes on where it stood. This file lists and runs; `verdict.py` compares.
"""

import json
import multiprocessing
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tracefp4.patching import PlanRules
from tracefp4.rl.config import RunConfig
from tracefp4.rl.loop import train
from tracefp4.rl.rundir import hardware, versions, write_atomically
from tracefp4.rl.warmstart import WarmStart, warm_start
from tracefp4.study.demo import DemoSettings, arm_config
from tracefp4.study.verdict import Comparison, compare_cells, gains

OnEvent = Callable[[str], None]
ARMS: dict[str, PlanRules] = {
    "bf16": PlanRules(mode="bf16", guidance="none"),
    "qat": PlanRules(guidance="none"),
    "ungated": PlanRules(guidance="mantissa", gate="none"),
    "gated": PlanRules(guidance="mantissa", gate="noise"),
    "coded": PlanRules(guidance="bch64_3+coset1", gate="noise"),
}
# metrics of a step that are averaged over a run: name in the result -> name in metrics.jsonl
AVERAGED = {
    "mismatch_mean": "mismatch/abs_mean",
    "transmission": "transmission/slope",
    "followed": "guidance/followed_values_fraction",
    "ratio_max": "ratio_max",
    "policy_kl": "policy_kl",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class FollowingSettings:
    """Sizes of the study."""

    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    """One pair of runs per seed."""
    lags: tuple[int, ...] = (0, 3)
    """Weight versions between sampling and training (`rollout_ahead`, and `max_version_diff`)."""
    optimizer_steps: tuple[int, ...] = (1, 4)
    """Optimizer steps per rollout."""
    arms: tuple[str, ...] = tuple(ARMS)
    """Names of ARMS."""
    warm_steps: int = 400
    """Optimizer steps of each warm start."""
    steps: int = 40
    """Rollouts of each run."""
    lr: float = 1e-4
    """Learning rate of GRPO."""
    demo: DemoSettings = field(default_factory=DemoSettings)
    """Task, model and batch sizes, as in the demo."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One run of the study."""

    arm: str
    """Name of the arm."""
    seed: int
    """Seed of checkpoint, prompts and draws."""
    lag: int
    """Weight versions between sampling and training."""
    optimizer_steps: int
    """Optimizer steps per rollout."""

    @property
    def cell(self) -> str:
        """Name of the cell of the grid."""
        return f"lag{self.lag}_steps{self.optimizer_steps}"


def jobs(settings: FollowingSettings) -> list[Job]:
    """List the runs, long ones (four optimizer steps) first, so that no worker is left alone at the end."""
    found = [
        Job(arm=arm, seed=seed, lag=lag, optimizer_steps=steps)
        for steps in settings.optimizer_steps
        for lag in settings.lags
        for seed in settings.seeds
        for arm in settings.arms
    ]
    return sorted(found, key=lambda job: -job.optimizer_steps)


def job_config(job: Job, settings: FollowingSettings, *, out: Path) -> RunConfig:
    """Return the recipe of one run: the demo's, with this job's rule, lag and steps."""
    demo = replace(settings.demo, seed=job.seed, steps=settings.steps, lr=settings.lr)
    config = arm_config(demo, arm="bf16", out=out)
    return replace(
        config,
        model=replace(config.model, path=str(start_of(job.seed, out=out))),
        quantization=ARMS[job.arm],
        train=replace(
            config.train,
            optimizer_steps_per_rollout=job.optimizer_steps,
            rollout_ahead=job.lag,
            max_version_diff=job.lag,
        ),
        run=replace(config.run, dir=str(out / job.cell / f"seed{job.seed}" / job.arm)),
    )


def start_of(seed: int, *, out: Path) -> Path:
    """Return the directory of a seed's warm-started checkpoint."""
    return out / "start" / f"seed{seed}"


def run_following(
    out: Path,
    *,
    settings: FollowingSettings | None = None,
    workers: int = 1,
    on_event: OnEvent = lambda text: None,
) -> dict[str, Any]:
    """Run what is missing of the study, compare, and write `following.json`.

    Args:
        out: directory of the study; a study of the same settings that stopped there goes on.
        settings: sizes; None for the defaults.
        workers: processes, one thread each; at least 1.
        on_event: called with one line of text for every run that ends.

    Returns:
        The content of `following.json`.

    Raises:
        ConfigError: a run cannot be made or continued (a directory of other settings, a full disk).
    """
    settings = settings or FollowingSettings()
    out.mkdir(parents=True, exist_ok=True)
    starts = [(_start, (seed, settings, out)) for seed in settings.seeds]
    runs = [(_run, (job, settings, out)) for job in jobs(settings)]
    with ProcessPoolExecutor(
        workers, mp_context=multiprocessing.get_context("spawn"), initializer=_one_thread
    ) as pool:
        for tasks in (starts, runs):
            _finish(pool, tasks, on_event)
    rows = [_row(job, settings, out) for job in jobs(settings)]
    compared = compare_cells(rows)
    result = {
        "settings": asdict(settings),
        "hardware": hardware(),
        "versions": versions(),
        "workers": workers,
        "runs": rows,
        "comparisons": [asdict(comparison) for comparison in compared],
        "bf16_gains": gains(rows, arm="bf16"),
        "claims": check_claims(compared, gains(rows, arm="bf16")),
    }
    text = json.dumps(result, indent=2, default=str) + "\n"
    write_atomically(out / "following.json", text.encode())
    return result


def check_claims(compared: Sequence[Comparison], bf16_gains: Mapping[str, float]) -> dict[str, bool]:
    """Say which claims hold.

    task_teaches: there is a BF16 arm, and it gains at least .15 held-out accuracy in every cell.
    gated_not_worse, coded_not_worse: in every cell the one-sided 95% lower bound of that arm minus ungated, area under
    the reward curve, lies above -.02.
    """

    def is_not_worse(arm: str) -> bool:
        pairs = [found for found in compared if (found.arm, found.base) == (arm, "ungated")]
        return bool(pairs) and all(found.low > -0.02 for found in pairs)

    return {
        "task_teaches": bool(bf16_gains) and all(gain >= 0.15 for gain in bf16_gains.values()),
        "gated_not_worse": is_not_worse("gated"),
        "coded_not_worse": is_not_worse("coded"),
    }


def _finish(
    pool: ProcessPoolExecutor, tasks: Iterable[tuple[Callable[..., str], tuple[Any, ...]]], on_event: OnEvent
) -> None:
    """Wait for all tasks; the first error ends the study, after the runs that are under way."""
    left: set[Future[str]] = {pool.submit(function, *arguments) for function, arguments in tasks}
    total = len(left)
    while left:
        done, left = wait(left, return_when=FIRST_COMPLETED)
        for future in done:
            try:
                on_event(f"{total - len(left):3d}/{total}   {future.result()}")
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise


def _one_thread() -> None:
    """Keep a worker to one core; runs in the worker before any task."""
    import torch

    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)


def _start(seed: int, settings: FollowingSettings, out: Path) -> str:
    path = start_of(seed, out=out)
    if not (path / "config.json").exists():
        config = job_config(Job(arm="bf16", seed=seed, lag=0, optimizer_steps=1), settings, out=out)
        loss = warm_start(
            WarmStart(task=config.task, shape=settings.demo.shape, steps=settings.warm_steps, seed=seed),
            path=path,
        )
        return f"warm start seed {seed}: loss {loss:.3f}"
    return f"warm start seed {seed}: found"


def _run(job: Job, settings: FollowingSettings, out: Path) -> str:
    config = job_config(job, settings, out=out)
    path = Path(config.run.dir)
    if not _is_finished(path):
        train(config, resume=(path / "config.json").exists())
    row = _row(job, settings, out)
    return (
        f"{job.cell} seed {job.seed} {job.arm:>8}: area {row['area']:.3f}, accuracy "
        f"{row['accuracy_before']:.3f} -> {row['accuracy_after']:.3f}"
    )


def _is_finished(path: Path) -> bool:
    manifest = path / "manifest.json"
    return manifest.exists() and "final" in json.loads(manifest.read_text(encoding="utf-8"))


def _row(job: Job, settings: FollowingSettings, out: Path) -> dict[str, Any]:
    """One finished run as numbers."""
    path = Path(job_config(job, settings, out=out).run.dir)
    manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
    lines = (path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [json.loads(line) for line in lines]
    evaluations = manifest["evaluations"]
    reward = [step["reward_mean"] for step in steps]
    averaged = {
        name: sum(found) / len(found) if found else None
        for name, key in AVERAGED.items()
        for found in [[step[key] for step in steps if step.get(key) is not None]]
    }
    return {
        **asdict(job),
        "cell": job.cell,
        "reward": reward,
        "area": sum(reward) / len(reward),
        "accuracy_before": evaluations["0"]["accuracy"],
        "accuracy_after": evaluations[max(evaluations, key=int)]["accuracy"],
        **averaged,
    }

"""GRPO on one page: sample, score, update, publish; a killed run continues where its last checkpoint stands.

Everything random is a function of (seed, step): prompts by index, draws by (seed, prompt, sample, position). So
the state of a run is the optimizer, the prompt cursor, the weight version, the rollouts made ahead of training and
the groups under way; with those restored, a resumed run ends in the same bytes as an uninterrupted one (on a CPU).
"""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from types import FrameType
from typing import Any

from tracefp4.diagnostics.agreement import agreement_metrics
from tracefp4.rl.advantages import AdvantageConfig
from tracefp4.rl.config import RunConfig
from tracefp4.rl.episodes import build_episodes
from tracefp4.rl.evaluation import Evaluation, evaluate, evaluate_task
from tracefp4.rl.metrics import MetricWriter, OnStep
from tracefp4.rl.opening import open_run
from tracefp4.rl.pace import Pace
from tracefp4.rl.prompts import build_scorer
from tracefp4.rl.rollouts import RolloutMaker
from tracefp4.rl.run import Run, evaluated_on
from tracefp4.rl.rundir import RunDirectory
from tracefp4.rl.samples import TrainingSample
from tracefp4.rl.sync import EngineOptions, build_engine, publish, reader
from tracefp4.rl.transmission import TransmissionProbe
from tracefp4.rl.update import Updater, evaluation_params, sampling_params
from tracefp4.rollout import SamplingParams

__all__ = ["build_engine", "evaluate", "evaluate_run", "train"]


def train(
    config: RunConfig,
    *,
    resume: bool = False,
    on_step: OnStep | None = None,
    on_event: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Run a recipe to its end, or continue one.

    Args:
        config: the resolved recipe.
        resume: continue the run in `run.dir` from its last whole checkpoint (from the start if it has none).
        on_step: called with each step's metrics.
        on_event: called with one line of text for what takes seconds beside the steps.

    Returns:
        The final manifest: weights hash, accuracies before and after, counters.

    Raises:
        ConfigError: anything in the recipe, the checkpoint or the directory that cannot be used; a full disk.
        RecordError: a record that does not belong to the run.
        KeyboardInterrupt: after Ctrl-C, once the finished step's checkpoint is written; a second Ctrl-C does
            not wait.
    """
    pace = Pace(limit_s=config.run.time_limit_s)
    directory = RunDirectory(config.run.dir, resume=resume)
    with directory.removed_if_refused():
        run = open_run(config, directory, resume=resume, on_event=on_event)
    writer = MetricWriter(config, directory, on_step=on_step, first_step=run.step)
    maker = _maker(run)
    run.rest_engine()
    try:
        with _interrupts() as interrupted:
            for _ in _steps(run, maker, writer, interrupted, pace):
                _evaluate_once(run, pace, on_event)
            dropped = {} if run.records is None else run.records.dropped()
            run.note({"final": run.result()} | ({"records_dropped": dropped} if dropped else {}))
    finally:
        maker.scorer.close()
        writer.close()
        if run.records is not None:
            run.records.close()
    return run.manifest()


def _steps(
    run: Run, maker: RolloutMaker, writer: MetricWriter, interrupted: list[int], pace: Pace
) -> Iterator[None]:
    """Take the remaining steps; checkpoint as the recipe says, at the end, and at an interruption. Yields where the run
    is to be evaluated."""
    config = run.config
    updater = Updater(run.trainer, config, reference=run.reference)
    params = sampling_params(config, run.policy.defaults)
    saved_step = run.step
    is_over = run.step >= config.train.steps
    while not is_over:
        if _is_evaluation_step(config, run.step):
            yield
        if not interrupted:
            with pace.step():
                writer.write(_step(run, maker, updater, params))
            run.step += 1
        every = config.run.checkpoint_every
        is_over = run.step >= config.train.steps or not pace.has_time
        is_due = is_over or bool(every and run.step % every == 0)
        if (is_due or interrupted) and run.step > saved_step:
            with pace.part("checkpoint"):
                run.save()
            saved_step = run.step
        if interrupted:
            raise KeyboardInterrupt
    if config.run.eval_items:
        yield


def _step(
    run: Run, maker: RolloutMaker, updater: Updater, params: Callable[[int], SamplingParams]
) -> dict[str, Any]:
    """Sample with the engine's weights, then train on the oldest pending rollout."""
    partial = run.partial
    tasks = run.stream.take(run.config.rollout.num_prompts if partial is None else partial.num_missing)
    settings = run.config.train
    is_due = settings.agreement_every > 0 and run.step % settings.agreement_every == 0
    is_measured = is_due or run.gating.needs_measurement
    rollout = maker.make(
        tasks,
        params(run.step),
        step=run.step,
        num_references=settings.agreement_samples if is_measured else 0,
    )
    run.rest_engine()
    metrics: dict[str, Any] = {"step": run.step, **rollout.metrics}
    if rollout.references:
        metrics |= _agreement(run, rollout.references)
    samples = rollout.samples
    if run.records is not None:
        samples, found = run.records.put(samples, weight_version=run.engine.weight_version)
        metrics |= found
    run.pending.append(samples)
    if len(run.pending) > settings.rollout_ahead:
        metrics |= _train_on(run, updater, run.pending.popleft())
    return metrics | {"weight_version": run.engine.weight_version, **run.counters}


def _agreement(run: Run, samples: list[TrainingSample]) -> dict[str, float]:
    """Compare the trainer's codes and experts with those of the engine, which holds the same weights here, and
    refresh the noise gate."""
    scored = run.trainer.score(samples, measure=True)
    return agreement_metrics(scored.agreement, routing=scored.routing) | run.gating.observe(scored)


def _train_on(run: Run, updater: Updater, samples: list[TrainingSample]) -> dict[str, Any]:
    """Drop what is too old, update, and publish the new weights under the next version."""
    settings, version = run.config.train, run.engine.weight_version
    if run.records is not None:
        samples = run.records.settled(samples)
    fresh = [sample for sample in samples if sample.version_lag(version) <= settings.max_version_diff]
    run.counters["samples_dropped"] += len(samples) - len(fresh)
    probe = None
    if fresh and settings.transmission_every and run.step % settings.transmission_every == 0:
        probe = TransmissionProbe(
            run.trainer, fresh, num_samples=settings.transmission_samples, version=version
        )
    metrics = updater.update(fresh, optimizer_step=run.counters["optimizer_steps"], version=version)
    run.counters["optimizer_steps"] += updater.steps_taken
    if updater.steps_taken:
        publish(run.applied.model, run.engine, version=version + 1)
    metrics |= probe.finish() if probe is not None and updater.steps_taken else {}
    return metrics | (run.trainer.fetcher.take_metrics() if run.trainer.fetcher is not None else {})


def evaluate_run(run: Run) -> Evaluation:
    """Score the current policy on held-out items, rounded to nearest as deployed."""
    config = run.config
    assert run.held_out is not None, "run.eval_items is 0"
    engine = build_engine(
        run.applied.model,
        run.applied.plan,
        arithmetic=run.trainer.arithmetic,
        rollout=config.rollout,
        records=False,
        options=EngineOptions(decode=reader(run.policy.tokenizer)),
    )
    found = evaluate_task(
        config.task,
        engine,
        tokenizer=run.policy.tokenizer,
        source=run.held_out,
        params=evaluation_params(config, run.policy.defaults),
        num_items=config.run.eval_items,
    )
    engine.release_pool()  # now, not when Python collects its cycles
    return found


def _evaluate_once(run: Run, pace: Pace, on_event: Callable[[str], None]) -> None:
    """Evaluate at this step unless the manifest already holds the result (the run was resumed here)."""
    evaluations = dict(run.manifest().get("evaluations", {}))
    if str(run.step) not in evaluations:
        assert run.held_out is not None, "run.eval_items is 0"
        with pace.part("evaluation"):
            found = evaluate_run(run)
        evaluations[str(run.step)] = asdict(found) | evaluated_on(run.config, run.held_out)
        run.note({"evaluations": evaluations})
        on_event(
            f"held-out accuracy after step {run.step}: {found.accuracy:.1%} +- {found.standard_error:.1%}"
        )


def _is_evaluation_step(config: RunConfig, step: int) -> bool:
    every = config.run.eval_every
    return bool(config.run.eval_items) and (step == 0 or (every > 0 and step % every == 0))


def _maker(run: Run) -> RolloutMaker:
    config, scorer, tokenizer = run.config, build_scorer(run.config.task), run.policy.tokenizer
    return RolloutMaker(
        engine=run.engine,
        tokenizer=tokenizer,
        scorer=scorer,
        advantage=AdvantageConfig(normalize="std" if config.loss.advantage_std else "none"),
        truncated=config.train.truncated,
        codec=run.applied.plan.codecs or "none",
        keeps_routing=run.applied.plan.rules.replay_routing,
        episodes=build_episodes(config.task, engine=run.engine, tokenizer=tokenizer, scorer=scorer),
        partial=run.partial,
    )


@contextmanager
def _interrupts() -> Iterator[list[int]]:
    """Collect Ctrl-C: the list is empty until it arrives; a second one interrupts at once."""
    received: list[int] = []

    def note(signum: int, frame: FrameType | None) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(signum)

    try:
        previous = signal.signal(signal.SIGINT, note)
    except ValueError:  # not the main thread: signals stay as they are
        yield received
        return
    try:
        yield received
    finally:
        signal.signal(signal.SIGINT, previous)

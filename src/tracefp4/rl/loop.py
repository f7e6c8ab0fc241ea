"""GRPO on one page: sample, score, update, publish; a killed run continues where its last checkpoint stands.

Everything random is a function of (seed, step): prompts by index, draws by (seed, prompt, sample, position). So
the state of a run is the optimizer, the prompt cursor, the weight version and the rollouts made ahead of
training; with those restored, a resumed run ends in the same bytes as an uninterrupted one (on a CPU).
"""

import hashlib
import io
import json
import signal
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from types import FrameType
from typing import Any

import torch

from tracefp4.formats.arithmetic import EMULATED, Arithmetic
from tracefp4.patching import Applied, Plan, apply, calibrate_kv, plan
from tracefp4.rl import checkpoint
from tracefp4.rl.advantages import AdvantageConfig
from tracefp4.rl.config import RunConfig
from tracefp4.rl.evaluation import Evaluation, evaluate
from tracefp4.rl.metrics import MetricWriter, OnStep
from tracefp4.rl.optimizer import MasterWeightAdamW
from tracefp4.rl.policy import Policy, load_policy
from tracefp4.rl.prompts import build_held_out, build_scorer, build_source, encode
from tracefp4.rl.rollouts import RolloutMaker
from tracefp4.rl.rundir import RunDirectory, hardware, versions, weights_hash
from tracefp4.rl.samples import TrainingSample
from tracefp4.rl.sync import build_engine, publish
from tracefp4.rl.tasks import TaskStream
from tracefp4.rl.trainer import PolicyTrainer
from tracefp4.rl.update import Updater, evaluation_params, sampling_params
from tracefp4.rollout import LocalEngine

CALIBRATION_PROMPTS = 32


@dataclass(kw_only=True)
class Run:
    """A run in progress: the objects of one training process and their counters."""

    config: RunConfig
    """The resolved recipe."""
    directory: RunDirectory
    """Its files."""
    policy: Policy
    """Model, tokenizer and generation defaults."""
    applied: Applied
    """The patched model and its plan."""
    trainer: PolicyTrainer
    """Scores and updates."""
    engine: LocalEngine
    """Samples."""
    stream: TaskStream
    """Prompts, with the cursor that a checkpoint keeps."""
    step: int = 0
    """Next step."""
    pending: deque[list[TrainingSample]] = field(default_factory=deque)
    """Rollouts made ahead of training, oldest first."""
    counters: dict[str, int] = field(default_factory=lambda: {"optimizer_steps": 0, "samples_dropped": 0})
    """Totals since the start of the run."""


def train(config: RunConfig, *, resume: bool = False, on_step: OnStep | None = None) -> dict[str, Any]:
    """Run a recipe to its end, or continue one.

    Args:
        config: the resolved recipe.
        resume: continue the run in `run.dir` from its last whole checkpoint (from the start if it has none).
        on_step: called with each step's metrics.

    Returns:
        The final manifest: weights hash, accuracies before and after, counters.

    Raises:
        ConfigError: anything in the recipe, the checkpoint or the directory that cannot be used.
        KeyboardInterrupt: after Ctrl-C, once the finished step's checkpoint is written.
    """
    directory = RunDirectory(config.run.dir, resume=resume)
    run = _open(config, directory, resume=resume)
    writer = MetricWriter(config, directory, on_step=on_step)
    maker = _maker(run)
    updater = Updater(run.trainer, config)
    params = sampling_params(config, run.policy.defaults)
    evaluations = dict(_manifest(run).get("evaluations", {}))  # type: ignore[call-overload]
    with _interrupts() as interrupted:
        while run.step < config.train.steps:
            if _is_evaluation_step(config, run.step) and str(run.step) not in evaluations:
                evaluations[str(run.step)] = asdict(evaluate_run(run))
                _update_manifest(run, evaluations=evaluations)
            row = _step(run, maker, updater, params)
            writer.write(row)
            run.step += 1
            every = config.run.checkpoint_every
            if interrupted or run.step == config.train.steps or (every and run.step % every == 0):
                _save(run)
            if interrupted:
                writer.close()
                raise KeyboardInterrupt
    if config.run.eval_items and str(run.step) not in evaluations:
        evaluations[str(run.step)] = asdict(evaluate_run(run))
    assert run.trainer.optimizer is not None
    final = {"weights_hash": weights_hash(run.trainer.optimizer.state_tensors()), "counters": run.counters}
    _update_manifest(run, evaluations=evaluations, final=final)
    writer.close()
    return _manifest(run)


def _step(run: Run, maker: RolloutMaker, updater: Updater, params: Any) -> dict[str, Any]:
    """Sample with the engine's weights, train on the oldest pending rollout, publish."""
    config = run.config
    tasks = run.stream.take(config.rollout.num_prompts)
    rollout = maker.make(tasks, params(run.step))
    run.pending.append(rollout.samples)
    metrics: dict[str, Any] = {"step": run.step, **rollout.metrics}
    if len(run.pending) > config.train.rollout_ahead:
        samples = run.pending.popleft()
        version = run.engine.weight_version
        fresh = [sample for sample in samples if sample.version_lag(version) <= config.train.max_version_diff]
        run.counters["samples_dropped"] += len(samples) - len(fresh)
        metrics |= updater.update(fresh, optimizer_step=run.counters["optimizer_steps"], version=version)
        run.counters["optimizer_steps"] += updater.steps_taken
        publish(run.applied.model, run.engine, version=version + 1)
    return metrics | {"weight_version": run.engine.weight_version, **run.counters}


def evaluate_run(run: Run) -> Evaluation:
    """Score the current policy on held-out items, rounded to nearest as deployed."""
    config = run.config
    engine = build_engine(
        run.applied.model,
        run.applied.plan,
        arithmetic=run.trainer.arithmetic,
        rollout=config.rollout,
        records=False,
    )
    return evaluate(
        engine,
        tokenizer=run.policy.tokenizer,
        source=build_held_out(config.task),
        scorer=build_scorer(config.task),
        params=evaluation_params(config, run.policy.defaults),
        num_items=config.run.eval_items,
    )


def _open(config: RunConfig, directory: RunDirectory, *, resume: bool) -> Run:
    """Load the policy (or the last checkpoint), make or restore the plan, build trainer and engine."""
    found = checkpoint.latest(directory.checkpoints) if resume else None
    policy = load_policy(config.model.path if found is None else found)
    stream = TaskStream(build_source(config.task))
    arithmetic = EMULATED
    run_plan = _plan(config, policy, stream, arithmetic)
    applied = apply(policy.model, run_plan, arithmetic=arithmetic)
    if config.train.activation_checkpointing:
        policy.model.gradient_checkpointing_enable()
        policy.model.train()
    optimizer = MasterWeightAdamW(
        policy.model, lr=config.train.lr, betas=config.train.betas, weight_decay=config.train.weight_decay
    )
    defaults = sampling_params(config, policy.defaults)(0)
    trainer = PolicyTrainer(
        applied=applied,
        arithmetic=arithmetic,
        pad_id=policy.pad_id,
        temperature=defaults.temperature,
        micro_batch_tokens=config.train.micro_batch_tokens,
        optimizer=optimizer,
    )
    state = None if found is None else checkpoint.load_state(found)
    if found is not None and state is not None:
        checkpoint.check_digest(state, config_digest=config_digest(config))
        optimizer.load_state_tensors(checkpoint.load_optimizer(found))
        checkpoint.restore_rng(found)
        stream.restore(state.data)
    engine = build_engine(
        policy.model,
        run_plan,
        arithmetic=arithmetic,
        rollout=config.rollout,
        records=run_plan.guided_sites,
        weight_version=0 if state is None else state.weight_version,
    )
    run = Run(
        config=config,
        directory=directory,
        policy=policy,
        applied=applied,
        trainer=trainer,
        engine=engine,
        stream=stream,
    )
    if found is not None and state is not None:
        run.step, run.counters = state.step, dict(state.counters)
        run.pending = _unpack(checkpoint.load_pending(found))
    directory.cut_metrics(first_step=run.step)
    if not resume:
        directory.write_json("manifest.json", _first_manifest(run))
        directory.write_json("config.json", asdict(config))
    elif found is None:
        directory.write_json("manifest.json", _first_manifest(run))
    return run


def _plan(config: RunConfig, policy: Policy, stream: TaskStream, arithmetic: Arithmetic) -> Plan:
    """Make the plan, with KV exponents calibrated on the first prompts of the *starting* checkpoint."""
    start = policy if policy.path == type(policy.path)(config.model.path) else load_policy(config.model.path)
    made = plan(start.model, config.quantization)
    if all(layer.kv is None for layer in made.layers):
        return made
    prompts = [encode(stream.source.item(i), tokenizer=start.tokenizer) for i in range(CALIBRATION_PROMPTS)]
    longest = max(map(len, prompts))
    input_ids = torch.tensor([ids + [start.pad_id] * (longest - len(ids)) for ids in prompts])
    mask = torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids in prompts])
    applied = apply(start.model, made, arithmetic=arithmetic)
    try:
        return calibrate_kv(start.model, made, input_ids=input_ids, attention_mask=mask)
    finally:
        applied.undo()


def _maker(run: Run) -> RolloutMaker:
    config = run.config
    return RolloutMaker(
        engine=run.engine,
        tokenizer=run.policy.tokenizer,
        scorer=build_scorer(config.task),
        advantage=AdvantageConfig(normalize="std" if config.loss.advantage_std else "none"),
        truncated=config.train.truncated,
        codec=config.quantization.guidance if run.applied.plan.guided_sites else "none",
    )


def _is_evaluation_step(config: RunConfig, step: int) -> bool:
    every = config.run.eval_every
    return bool(config.run.eval_items) and (step == 0 or (every > 0 and step % every == 0))


def _save(run: Run) -> None:
    assert run.trainer.optimizer is not None
    state = checkpoint.TrainState(
        step=run.step,
        weight_version=run.engine.weight_version,
        data=run.stream.state(),
        config_digest=config_digest(run.config),
        counters=run.counters,
    )
    checkpoint.save(
        run.directory.checkpoints,
        state=state,
        model=run.applied.model,
        tokenizer=run.policy.tokenizer,
        optimizer=run.trainer.optimizer.state_tensors(),
        pending=_pack(run.pending),
    )
    checkpoint.keep_last(run.directory.checkpoints, count=run.config.run.keep_last)


def config_digest(config: RunConfig) -> str:
    """Digest of what must be equal when a run is resumed: everything but [run] and the number of steps."""
    content = asdict(config)
    content.pop("run")
    content["train"].pop("steps")
    return hashlib.blake2b(
        json.dumps(content, sort_keys=True, default=str).encode(), digest_size=8
    ).hexdigest()


def _pack(pending: deque[list[TrainingSample]]) -> bytes:
    buffer = io.BytesIO()
    torch.save(list(pending), buffer)
    return buffer.getvalue()


def _unpack(data: bytes) -> deque[list[TrainingSample]]:
    return deque(torch.load(io.BytesIO(data), weights_only=False))


def _first_manifest(run: Run) -> dict[str, Any]:
    return {
        "versions": versions(),
        "hardware": hardware(),
        "plan": run.applied.plan.summary(),
        "patched_modules": list(run.applied.patched),
        "seeds": {"train": run.config.train.seed, "task": run.config.task.seed},
        "config_digest": config_digest(run.config),
    }


def _manifest(run: Run) -> dict[str, Any]:
    return run.directory.read_json("manifest.json")


def _update_manifest(run: Run, **content: Any) -> None:
    run.directory.write_json("manifest.json", {**_manifest(run), **content})


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

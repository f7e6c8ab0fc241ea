"""Open a run: from a recipe and a directory to the objects that a training process works with.

A new run loads the starting checkpoint and calibrates its plan; a resumed one loads the last whole checkpoint
and takes the plan's exponents from the manifest. Everything that can be refused is refused here, the cheap
checks first, before a token is sampled.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tracefp4.errors import ConfigError
from tracefp4.formats.arithmetic import EMULATED
from tracefp4.patching import Plan, PlanRules, apply, plan
from tracefp4.rl import checkpoint
from tracefp4.rl.config import RunConfig
from tracefp4.rl.optimizer import MasterWeightAdamW
from tracefp4.rl.pending import samples_from_bytes
from tracefp4.rl.planning import calibrated_plan, remembered_plan
from tracefp4.rl.policy import Policy, load_policy
from tracefp4.rl.prompts import build_held_out, build_stream, encode
from tracefp4.rl.records import RecordKeeper
from tracefp4.rl.run import Run, config_digest, evaluated_on
from tracefp4.rl.rundir import RunDirectory
from tracefp4.rl.sync import build_engine
from tracefp4.rl.tasks import TaskSource, TaskStream
from tracefp4.rl.trainer import PolicyTrainer
from tracefp4.rl.update import sampling_params

CALIBRATION_PROMPTS = 32


def open_run(config: RunConfig, directory: RunDirectory, *, resume: bool) -> Run:
    """Build a new run, or restore one from its last whole checkpoint (from its start if it has none).

    Raises:
        ConfigError: anything in recipe, checkpoint or task that cannot be used; resuming under settings that
            change the result.
    """
    manifest = directory.read_json("manifest.json") if directory.is_begun else None
    if manifest is not None:
        _check_digest(str(manifest["config_digest"]), config)
    held_out = build_held_out(config.task) if config.run.eval_items else None
    if manifest is not None and held_out is not None:
        _check_evaluations(manifest, evaluated_on(config, held_out))
    found = None if manifest is None else checkpoint.latest(directory.checkpoints)
    state = None if found is None else checkpoint.load_state(found)
    policy = load_policy(config.model.path if found is None else found)
    stream = build_stream(config.task, reserved=config.run.eval_items)
    trainer = _trainer(config, policy, _plan(config, policy, stream.source, manifest))
    version = 0
    if found is not None and state is not None:
        _restore(trainer, stream, found, state)
        version = state.weight_version
    run = Run(
        config=config,
        directory=directory,
        policy=policy,
        applied=trainer.applied,
        trainer=trainer,
        engine=build_engine(
            policy.model,
            trainer.plan,
            arithmetic=trainer.arithmetic,
            rollout=config.rollout,
            records=trainer.plan.guided_sites,
            weight_version=version,
        ),
        stream=stream,
        held_out=held_out,
        reference=_reference(config, trainer),
    )
    if found is not None and state is not None:
        run.step, run.counters = state.step, dict(state.counters)
        run.pending = deque(samples_from_bytes(checkpoint.load_pending(found)))
    if manifest is None:
        run.begin()
    if resume:
        checkpoint.discard_after(directory.checkpoints, found)
    directory.cut_metrics(first_step=run.step)
    if config.run.save_records:
        run.records = RecordKeeper(directory.records, keep_steps=config.run.keep_records, first_step=run.step)
    return run


def _trainer(config: RunConfig, policy: Policy, run_plan: Plan) -> PolicyTrainer:
    """Patch the policy's model and put optimizer and scorer on it."""
    applied = apply(policy.model, run_plan, arithmetic=EMULATED)
    if config.train.activation_checkpointing:
        policy.model.gradient_checkpointing_enable()
        policy.model.train()
    settings = config.train
    return PolicyTrainer(
        applied=applied,
        arithmetic=EMULATED,
        pad_id=policy.pad_id,
        temperature=sampling_params(config, policy.defaults)(0).temperature,
        micro_batch_tokens=settings.micro_batch_tokens,
        optimizer=MasterWeightAdamW(
            policy.model, lr=settings.lr, betas=settings.betas, weight_decay=settings.weight_decay
        ),
    )


def _plan(config: RunConfig, policy: Policy, source: TaskSource, manifest: dict[str, Any] | None) -> Plan:
    """The plan of a new run, or that of the run which the manifest describes."""
    if manifest is not None:
        return remembered_plan(policy, config.quantization, summary=manifest["plan"])
    prompts = [encode(source.item(i), tokenizer=policy.tokenizer) for i in range(CALIBRATION_PROMPTS)]
    _check_length(config, longest_prompt=max(map(len, prompts)))
    return calibrated_plan(policy, config.quantization, prompts=prompts, arithmetic=EMULATED)


def _restore(trainer: PolicyTrainer, stream: TaskStream, found: Path, state: checkpoint.TrainState) -> None:
    assert trainer.optimizer is not None
    trainer.optimizer.load_state_tensors(checkpoint.load_optimizer(found))
    checkpoint.restore_rng(found)
    stream.restore(state.data)


def _reference(config: RunConfig, trainer: PolicyTrainer) -> PolicyTrainer | None:
    """The starting checkpoint as a second model in bf16, which follows no record; None without a KL term."""
    if config.loss.kl_coef == 0:
        return None
    policy = load_policy(config.model.path)
    policy.model.requires_grad_(False)
    made = plan(policy.model, PlanRules(mode="bf16", guidance="none", replay_routing=False))
    applied = apply(policy.model, made, arithmetic=trainer.arithmetic)
    return replace(trainer, applied=applied, optimizer=None)


def _check_length(config: RunConfig, *, longest_prompt: int) -> None:
    """Refuse samples that no micro-batch of the trainer can hold."""
    budget, longest = config.train.micro_batch_tokens, longest_prompt + config.rollout.max_tokens
    if longest > budget:
        raise ConfigError(
            f"train.micro_batch_tokens: a sample can have {longest} tokens ({longest_prompt} of the longest of the "
            f"first {CALIBRATION_PROMPTS} prompts, and rollout.max_tokens {config.rollout.max_tokens}); got {budget}. "
            f"Set it to {longest} or more, or lower rollout.max_tokens."
        )


def _check_digest(started_with: str, config: RunConfig) -> None:
    if started_with != config_digest(config):
        raise ConfigError(
            f"--resume: the run was started with other settings (config digest {started_with}, now "
            f"{config_digest(config)}). Only train.steps, train.transmission_*, train.agreement_* "
            "and [run] without run.eval_items may change; start a new run for the rest."
        )


def _check_evaluations(manifest: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse to put evaluations that cannot be compared next to each other."""
    for step, entry in manifest.get("evaluations", {}).items():
        before = {name: entry.get(name) for name in now}
        if before != now:
            raise ConfigError(
                f"--resume: the evaluation at step {step} was made on {before}, the next would be on {dict(now)}; "
                "the two cannot be compared. Restore run.eval_temperature and the items of task.eval_path, or "
                "start a new run."
            )

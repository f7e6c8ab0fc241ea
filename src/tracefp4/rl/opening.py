"""Open a run: from a recipe and a directory to the objects that a training process works with.

A new run loads the starting checkpoint and calibrates its plan; a resumed one loads the last whole checkpoint
and takes the plan's exponents from the manifest. Everything that can be refused is refused here, the cheap
checks first, before a token is sampled.
"""

import hashlib
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from tracefp4.errors import ConfigError
from tracefp4.patching import Plan, PlanRules, apply, plan
from tracefp4.rl import checkpoint
from tracefp4.rl.alarms import SaturationAlarm
from tracefp4.rl.config import RecordsConfig, RunConfig
from tracefp4.rl.environments import build_environment
from tracefp4.rl.optimizer_states import build_optimizer, check_states
from tracefp4.rl.partial import Group, PartialRollouts, check_restorable
from tracefp4.rl.pending import groups_from_bytes, samples_from_bytes
from tracefp4.rl.placement import Placement, check_resumed, placement_of
from tracefp4.rl.planning import calibrated_plan, remembered_plan
from tracefp4.rl.policy import Policy, load_policy
from tracefp4.rl.prompts import build_held_out, build_scorer, build_stream, encode
from tracefp4.rl.rates import RateChoice, calibrate_rates
from tracefp4.rl.records import Retention, RunRecords
from tracefp4.rl.replies import first_prompt
from tracefp4.rl.run import Run, changed_settings, config_digest, evaluated_on
from tracefp4.rl.rundir import RunDirectory
from tracefp4.rl.same_tokens import SameTokens
from tracefp4.rl.sync import EngineOptions, build_engine, reader
from tracefp4.rl.tasks import TaskSource, TaskStream
from tracefp4.rl.trainer import PolicyTrainer
from tracefp4.rl.update import sampling_params
from tracefp4.store.backends import open_directory, open_remote, open_shared
from tracefp4.store.pending import WriterOptions

CALIBRATION_PROMPTS = 32
MIB = 1 << 20


def open_run(
    config: RunConfig,
    directory: RunDirectory,
    *,
    resume: bool,
    on_event: Callable[[str], None] = lambda text: None,
) -> Run:
    """Build a new run, or restore one from its last whole checkpoint (from its start if it has none).

    Args:
        config: the recipe.
        directory: of the run.
        resume: whether it goes on.
        on_event: called with one line of text for what takes seconds.

    Raises:
        ConfigError: anything in recipe, checkpoint or task that cannot be used; resuming under settings that
            change the result.
    """
    _check_key(config.records)
    placement = placement_of(config.model)
    check_states(config.train.optimizer_states, placement.device)
    build_scorer(config.task).close()
    held_out = build_held_out(config.task) if config.run.eval_items else None
    left = _left(config, directory, placement, held_out)
    policy = load_policy(left.checkpoint or config.model.path, placement=placement)
    stream = build_stream(config.task, reserved=config.run.eval_items)
    run_plan, choice = _plan(config, policy, placement, stream.source, left.manifest, on_event)
    trainer = _trainer(config, policy, run_plan, placement)
    version = _restore(trainer, stream, left)
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
            options=EngineOptions(weight_version=version, decode=reader(policy.tokenizer)),
        ),
        stream=stream,
        held_out=held_out,
        reference=_reference(config, trainer, placement),
    )
    why_eager = run.engine.stats.why_eager
    if why_eager and placement.device.type == "cuda":
        on_event(f"decode passes are not captured: {why_eager}")
    run.partial = _partial(run, _go_on(run, left))
    if left.manifest is None:
        run.begin(
            {"placement": placement.summary()} | ({} if choice is None else {"rates": choice.summary()})
        )
    if resume:
        checkpoint.discard_after(directory.checkpoints, left.checkpoint)
    directory.cut_metrics(first_step=run.step)
    run.records = _records(config, directory, first_step=run.step)
    if run.records is not None:
        trainer.fetcher = run.records.fetcher(trainer.plan)
    return run


class _Left(NamedTuple):
    """What an earlier process left of the run; of a new run, nothing."""

    manifest: dict[str, Any] | None
    """None: the run is new."""
    checkpoint: Path | None
    """The last whole one; None: there is none."""
    state: checkpoint.TrainState | None
    """Of that checkpoint."""


def _left(
    config: RunConfig, directory: RunDirectory, placement: Placement, held_out: TaskSource | None
) -> _Left:
    """Find what there is of the run, and refuse to go on where the recipe would change its results."""
    if not directory.is_begun:
        return _Left(None, None, None)
    manifest = directory.read_json("manifest.json")
    check_resumed(manifest.get("placement"), placement)
    _check_settings(str(manifest["config_digest"]), directory.read_json("config.json"), config)
    if held_out is not None:
        _check_evaluations(manifest, evaluated_on(config, held_out))
    found = checkpoint.latest(directory.checkpoints)
    return _Left(manifest, found, None if found is None else checkpoint.load_state(found))


def _restore(trainer: PolicyTrainer, stream: TaskStream, left: _Left) -> int:
    """Put optimizer, generators and stream where the checkpoint has them; returns the version of its weights."""
    if left.checkpoint is None or left.state is None:
        return 0
    assert trainer.optimizer is not None
    trainer.optimizer.load_state_tensors(checkpoint.load_optimizer(left.checkpoint))
    checkpoint.restore_rng(left.checkpoint)
    stream.restore(left.state.data)
    return left.state.weight_version


def _go_on(run: Run, left: _Left) -> list[Group]:
    """Give the run its step, counters, gate and pending rollouts; returns the groups that were under way."""
    if left.checkpoint is None or left.state is None:
        return []
    run.step, run.counters = left.state.step, dict(left.state.counters)
    run.gating.restore(left.state.gate)
    rollouts = checkpoint.load_rollouts(left.checkpoint)
    run.pending = deque(samples_from_bytes(rollouts[checkpoint.PENDING]))
    return groups_from_bytes(rollouts[checkpoint.UNDER_WAY], task_of=run.stream.source.item)


def _partial(run: Run, groups: list[Group]) -> PartialRollouts | None:
    """What goes on over several steps; None where the recipe does not ask for it."""
    if not run.config.rollout.partial_groups:
        return None
    tokenizer = run.policy.tokenizer
    return PartialRollouts(
        run.engine, config=run.config, encode=lambda task: encode(task, tokenizer=tokenizer), groups=groups
    )


def store_name(path: Path) -> str:
    """Return the name that a run has in stores that it shares with other runs: 12 digits of its directory."""
    return hashlib.blake2b(str(path.resolve()).encode(), digest_size=6).hexdigest()


def _records(config: RunConfig, directory: RunDirectory, *, first_step: int) -> RunRecords | None:
    """Open the store of the run's records; None where they stay with the samples."""
    settings = config.records
    if settings.store == "memory":
        return None
    options = WriterOptions(policy=settings.when_full, max_queue_bytes=int(settings.max_queue_mb * MIB))
    # Runs share a server, and may share a host: their names begin with the run's own.
    own, prefix = store_name(directory.path), ""
    if settings.store == "directory":
        store = open_directory(directory.records, options=options)
    elif settings.store == "shared":
        store = open_shared(own, capacity_bytes=int(settings.capacity_mb * MIB), options=options)
    else:
        prefix = f"{own}/"
        store = open_remote(settings.store, options=options, key=Path(settings.key) if settings.key else None)
    retention = Retention(keep_versions=settings.keep_versions, prefix=prefix)
    return RunRecords(store, retention=retention, first_step=first_step)


def _trainer(config: RunConfig, policy: Policy, run_plan: Plan, placement: Placement) -> PolicyTrainer:
    """Patch the policy's model and put optimizer and scorer on it."""
    applied = apply(policy.model, run_plan, arithmetic=placement.arithmetic)
    if config.train.activation_checkpointing == "full":
        policy.model.gradient_checkpointing_enable({"use_reentrant": False})
        policy.model.train()
    settings = config.train
    return PolicyTrainer(
        applied=applied,
        arithmetic=placement.arithmetic,
        pad_id=policy.pad_id,
        temperature=sampling_params(config, policy.defaults)(0).temperature,
        micro_batch_tokens=settings.micro_batch_tokens,
        packing=settings.packing,
        optimizer=build_optimizer(
            policy.model,
            lr=settings.lr,
            betas=settings.betas,
            weight_decay=settings.weight_decay,
            states=settings.optimizer_states,
            emulates_bf16=placement.arithmetic.emulates_bf16,
        ),
        alarm=SaturationAlarm(limit=settings.saturation_alarm),
    )


def _plan(
    config: RunConfig,
    policy: Policy,
    placement: Placement,
    source: TaskSource,
    manifest: dict[str, Any] | None,
    on_event: Callable[[str], None],
) -> tuple[Plan, RateChoice | None]:
    """The plan of a new run and how its codecs were chosen, or the plan of the run which the manifest describes."""
    if manifest is not None:
        return remembered_plan(policy.model, config.quantization, summary=manifest["plan"]), None
    environment = build_environment(config.task)
    prompts = [
        first_prompt(source.item(i), tokenizer=policy.tokenizer, environment=environment)
        for i in range(CALIBRATION_PROMPTS)
    ]
    _check_length(config, longest_prompt=max(map(len, prompts)))
    made = calibrated_plan(policy, config.quantization, prompts=prompts, arithmetic=placement.arithmetic)
    if config.rollout.partial_groups:
        check_restorable(made)
    if not made.needs_calibration:
        return made, None
    bed = SameTokens(
        policy=policy,
        arithmetic=placement.arithmetic,
        rollout=config.rollout,
        micro_batch_tokens=config.train.micro_batch_tokens,
    )
    choice = calibrate_rates(
        bed, made, prompts, max_tokens=config.rollout.max_tokens, seed=config.train.seed, on_event=on_event
    )
    return made.with_codecs(choice.codecs), choice


def _reference(config: RunConfig, trainer: PolicyTrainer, placement: Placement) -> PolicyTrainer | None:
    """The starting checkpoint as a second model in bf16, which follows no record; None without a KL term."""
    if config.loss.kl_coef == 0:
        return None
    policy = load_policy(config.model.path, placement=placement)
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


def _check_key(settings: RecordsConfig) -> None:
    """Refuse a key that cannot be read before anything is loaded; without pyzmq the store itself is refused later."""
    if not settings.key or find_spec("zmq") is None:
        return
    from tracefp4.store.keys import read_key

    try:
        read_key(Path(settings.key))
    except ConfigError as error:
        raise ConfigError(f"records.key: {error}") from error


def _check_settings(started_with: str, before: Mapping[str, Any], config: RunConfig) -> None:
    """Refuse to resume under settings that change the result, and name those that differ."""
    if started_with != config_digest(config):
        changes = changed_settings(before, config)
        # Settings of the same values under another digest: a version that counts others.
        found = "; ".join(changes) or f"config digest {started_with}, now {config_digest(config)}"
        raise ConfigError(
            f"--resume: the run was started with other settings: {found}. Only rollout.keep_pool, train.steps, "
            "train.transmission_*, train.agreement_*, train.saturation_alarm, [records] and [run] without "
            "run.eval_items may change; start a new run for the rest."
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

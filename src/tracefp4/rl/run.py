"""A run in progress: its objects, its counters, and what it writes about itself (checkpoints and the manifest)."""

import hashlib
import json
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from tracefp4.patching import Applied
from tracefp4.rl import checkpoint
from tracefp4.rl.config import RunConfig
from tracefp4.rl.gating import Gating
from tracefp4.rl.held_out import items_digest
from tracefp4.rl.partial import PartialRollouts
from tracefp4.rl.pending import groups_to_bytes, samples_to_bytes
from tracefp4.rl.policy import Policy
from tracefp4.rl.records import RunRecords
from tracefp4.rl.rundir import RunDirectory, hardware, versions, weights_hash
from tracefp4.rl.samples import TrainingSample
from tracefp4.rl.tasks import TaskSource, TaskStream
from tracefp4.rl.trainer import PolicyTrainer
from tracefp4.rollout import LocalEngine

# of [train]: how often and on how much something is measured, and when a person is told
MEASUREMENTS = (
    "transmission_every", "transmission_samples", "agreement_every", "agreement_samples", "saturation_alarm",
)  # fmt: skip


@dataclass(kw_only=True)
class Run:
    """The objects of one training process and their counters."""

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
    held_out: TaskSource | None = None
    """Items of the evaluations; None when the recipe asks for none."""
    reference: PolicyTrainer | None = None
    """Scores the KL term's reference policy; None without a KL term."""
    records: RunRecords | None = None
    """Gives records to a store; None where they stay with the samples."""
    step: int = 0
    """Next step."""
    pending: deque[list[TrainingSample]] = field(default_factory=deque)
    """Rollouts made ahead of training, oldest first."""
    partial: PartialRollouts | None = None
    """Groups that go on over several steps; None: every step completes its own."""
    counters: dict[str, int] = field(default_factory=lambda: {"optimizer_steps": 0, "samples_dropped": 0})
    """Totals since the start of the run."""
    gating: Gating = field(init=False)
    """The noise gate of the trainer."""

    def __post_init__(self) -> None:
        self.gating = Gating(trainer=self.trainer)

    def rest_engine(self) -> None:
        """Leave the memory of the engine's pages to the trainer until the next rollout, where the recipe says so."""
        if not self.config.rollout.keep_pool:
            self.engine.release_pool()

    def save(self) -> None:
        """Write a checkpoint and delete the oldest beyond `run.keep_last`.

        Raises:
            ConfigError: the disk is full; earlier checkpoints are intact.
        """
        assert self.trainer.optimizer is not None
        state = checkpoint.TrainState(
            step=self.step,
            weight_version=self.engine.weight_version,
            data=self.stream.state(),
            config_digest=config_digest(self.config),
            counters=self.counters,
            plan=self.applied.plan.summary(),
            gate=self.gating.state(),
        )
        checkpoint.save(
            self.directory.checkpoints,
            state=state,
            model=self.applied.model,
            tokenizer=self.policy.tokenizer,
            optimizer=self.trainer.optimizer.state_tensors(),
            rollouts={
                checkpoint.PENDING: samples_to_bytes(self._whole_pending()),
                checkpoint.UNDER_WAY: groups_to_bytes([] if self.partial is None else self.partial.groups),
            },
        )
        checkpoint.keep_last(self.directory.checkpoints, count=self.config.run.keep_last)

    def _whole_pending(self) -> list[list[TrainingSample]]:
        """The pending rollouts with their records in memory, so that a checkpoint needs no store."""
        if self.records is None:
            return list(self.pending)
        return [self.records.loaded(samples) for samples in self.pending]

    def begin(self, content: Mapping[str, Any]) -> None:
        """Write the manifest, with further entries, and the resolved config of a new run, in this order."""
        self.directory.write_json("manifest.json", {**self._first_manifest(), **content})
        self.directory.write_json("config.json", asdict(self.config))

    def manifest(self) -> dict[str, Any]:
        """Read the manifest."""
        return self.directory.read_json("manifest.json")

    def note(self, content: Mapping[str, Any]) -> None:
        """Add entries to the manifest, or replace them."""
        self.directory.write_json("manifest.json", {**self.manifest(), **content})

    def result(self) -> dict[str, Any]:
        """Return what identifies the outcome: a hash over masters and moments, and the counters."""
        assert self.trainer.optimizer is not None
        return {
            "weights_hash": weights_hash(self.trainer.optimizer.state_tensors()),
            "steps": self.step,
            "counters": self.counters,
            **({} if self.gating.gate is None else {"gate": self.gating.gate.describe()}),
        }

    def _first_manifest(self) -> dict[str, Any]:
        return {
            "versions": versions(),
            "hardware": hardware(),
            "plan": self.applied.plan.summary(),
            "patched_modules": list(self.applied.patched),
            "seeds": {"train": self.config.train.seed, "task": self.config.task.seed},
            "config_digest": config_digest(self.config),
        }


def config_digest(config: RunConfig) -> str:
    """Return 16 hex digits of what must be equal when a run is resumed.

    All but [run], [records], rollout.keep_pool, the number of steps and what is only measured: those change no weight
    (records that a store loses are counted). Of [run], `eval_items` counts: what is held out is not trained on. With a
    noise gate the measurements of agreement count: the bands come from them.
    """
    counted = _counted(asdict(config), is_gated=config.quantization.is_gated)
    text = json.dumps(counted, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def changed_settings(before: Mapping[str, Any], config: RunConfig) -> list[str]:
    """Return the keys that count in `config_digest` and differ, each with both values.

    Args:
        before: the resolved config of the run, as its directory keeps it.
        config: the recipe now.
    """
    is_gated = config.quantization.is_gated
    old, new = (_counted(content, is_gated=is_gated) for content in (before, asdict(config)))
    keys = {f"{table}.{key}": (table, key) for found in (new, old) for table in found for key in found[table]}
    pairs = {
        name: tuple(json.dumps(found.get(table, {}).get(key), default=str) for found in (old, new))
        for name, (table, key) in keys.items()
    }
    return [f"{name} was {was}, now {is_now}" for name, (was, is_now) in pairs.items() if was != is_now]


def _counted(content: Mapping[str, Any], *, is_gated: bool) -> dict[str, dict[str, Any]]:
    """Return the tables of a resolved config without the keys that do not count."""
    counted = {table: dict(values) for table, values in content.items() if table != "records"}
    counted["rollout"].pop("keep_pool", None)
    counted["run"] = {"eval_items": content["run"]["eval_items"]}
    for name in ("steps", *MEASUREMENTS):
        if not (is_gated and name.startswith("agreement_")):
            counted["train"].pop(name, None)
    return counted


def evaluated_on(config: RunConfig, held_out: TaskSource) -> dict[str, Any]:
    """Return what two evaluations of a run must share: the digest of the prompts, their number, temperature."""
    return {
        "held_out": items_digest(held_out, num_items=config.run.eval_items),
        "num_items": config.run.eval_items,
        "temperature": config.run.eval_temperature,
    }

"""Checkpoints of a run: an ordinary Hugging Face checkpoint plus everything needed to continue bit for bit.

step_000010/ holds model.safetensors (bf16: the copies that forward uses), config, tokenizer and generation
config, `optimizer.safetensors` (fp32 masters and moments), `rng.json`, `pending.bin` (samples generated ahead of
training), `under_way.bin` (groups that go on over several steps, with their records), and `state.json`, written last,
with a checksum of every other file. The directory is filled under a temporary name and renamed: a reader finds a whole
checkpoint or none. Anything without a valid state.json is ignored. Nothing is pickled: reading a checkpoint runs no
code of its writer.
"""

import hashlib
import json
import os
import random
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from tracefp4.errors import RecordError
from tracefp4.rl.policy import no_progress_bars
from tracefp4.rl.rundir import disk_error, is_disk_full

SCHEMA_VERSION = 5
PENDING, UNDER_WAY = "pending.bin", "under_way.bin"


@dataclass(kw_only=True)
class TrainState:
    """What a checkpoint restores besides the weights."""

    step: int
    """Steps finished."""
    weight_version: int
    """Version of the weights last published to the engine."""
    data: dict[str, int | str]
    """State of the prompt stream."""
    config_digest: str
    """Digest of everything in the config that changes the result."""
    counters: dict[str, int] = field(default_factory=dict)
    """Totals of the run (optimizer steps, dropped samples)."""
    plan: dict[str, Any] = field(default_factory=dict)
    """Summary of the run's plan, its static exponents among them; a deployment rounds with the same ones."""
    gate: dict[str, Any] = field(default_factory=dict)
    """State of the noise gate (`guidance.gate`); empty without one, or before its first measurement."""


def save(
    parent: Path,
    *,
    state: TrainState,
    model: Any,
    tokenizer: Any,
    optimizer: dict[str, Tensor],
    rollouts: Mapping[str, bytes],
) -> Path:
    """Write one checkpoint; on failure nothing of it remains and earlier ones are untouched.

    Args:
        parent: directory of the run's checkpoints.
        state: goes into state.json.
        model, tokenizer: saved as they are.
        optimizer: its tensors by name.
        rollouts: what `load_rollouts` gives back: content of PENDING and UNDER_WAY.

    Raises:
        ConfigError: the disk is full or the path not writable, with path and bytes needed.
    """
    target = parent / f"step_{state.step:06d}"
    temporary = parent / f".{target.name}.tmp"
    num_bytes = sum(t.numel() * t.element_size() for t in optimizer.values())
    num_bytes += sum(map(len, rollouts.values()))
    num_bytes += sum(2 * p.numel() for p in model.parameters())
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        save_model(model, tokenizer, temporary)
        save_file(
            {key: value.cpu().contiguous() for key, value in optimizer.items()},
            temporary / "optimizer.safetensors",
        )
        for name, content in rollouts.items():
            (temporary / name).write_bytes(content)
        (temporary / "rng.json").write_text(json.dumps(_rng_state()), encoding="ascii")
        _seal(temporary, state)
        shutil.rmtree(target, ignore_errors=True)
        os.replace(temporary, target)
        _fsync(parent)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        # tokenizers and safetensors are Rust: a full disk is no OSError there, only its text tells
        if isinstance(error, OSError | SafetensorError) or is_disk_full(error):
            raise disk_error(target, num_bytes, error) from error
        raise
    return target


def _seal(directory: Path, state: TrainState) -> None:
    """Write state.json with the checksum of every file, and make all of it durable."""
    checksums = {path.name: _checksum(path) for path in sorted(directory.iterdir())}
    content = {"schema_version": SCHEMA_VERSION, "checksums": checksums, **asdict(state)}
    (directory / "state.json").write_text(json.dumps(content, indent=2), encoding="utf-8")
    for path in directory.iterdir():
        _fsync(path)
    _fsync(directory)


def latest(parent: Path) -> Path | None:
    """Return the newest whole checkpoint; torn ones (bad or missing state, wrong checksums) are skipped."""
    for path in sorted(parent.glob("step_*"), reverse=True):
        if is_whole(path):
            return path
    return None


def is_whole(path: Path) -> bool:
    """Say whether every file of a checkpoint is there with its checksum."""
    try:
        content = json.loads((path / "state.json").read_text(encoding="utf-8"))
        return all(_checksum(path / name) == value for name, value in content["checksums"].items())
    except (OSError, ValueError, KeyError):
        return False


def load_state(path: Path) -> TrainState:
    """Read the state of one checkpoint.

    Raises:
        RecordError: another schema version.
    """
    content = json.loads((path / "state.json").read_text(encoding="utf-8"))
    if content.pop("schema_version") != SCHEMA_VERSION:
        raise RecordError(
            f"{path}: checkpoint schema is not {SCHEMA_VERSION}. Resume with the version that wrote it."
        )
    content.pop("checksums")
    return TrainState(**content)


def load_optimizer(path: Path) -> dict[str, Tensor]:
    """Read masters and moments of one checkpoint."""
    return load_file(path / "optimizer.safetensors")


def load_rollouts(path: Path) -> dict[str, bytes]:
    """Read the samples generated ahead of training and the groups under way, as `save` was given them."""
    return {name: (path / name).read_bytes() for name in (PENDING, UNDER_WAY)}


def restore_rng(path: Path) -> None:
    """Set Python's, numpy's and torch's random state to the checkpoint's."""
    content = json.loads((path / "rng.json").read_text(encoding="ascii"))
    version, words, gauss = content["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, *rest = content["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(torch.frombuffer(bytearray.fromhex(content["torch"]), dtype=torch.uint8))


def _rng_state() -> dict[str, Any]:
    name, keys, *rest = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": [name, [int(key) for key in keys], *rest],
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
    }


def discard_after(parent: Path, kept: Path | None) -> None:
    """Delete the checkpoints behind the one that a run continues from (all of them when `kept` is None).

    They are torn, or they would count as newer than what the run is going to write.
    """
    for path in parent.glob("step_*"):
        if kept is None or path.name > kept.name:
            shutil.rmtree(path, ignore_errors=True)


def keep_last(parent: Path, *, count: int) -> None:
    """Delete all but the newest `count` checkpoints, and what a killed save left behind."""
    for path in sorted(parent.glob("step_*"))[:-count]:
        shutil.rmtree(path, ignore_errors=True)
    for path in parent.glob(".step_*.tmp"):
        shutil.rmtree(path, ignore_errors=True)


def save_model(model: Any, tokenizer: Any, directory: Path) -> None:
    """Save in bf16, which is lossless: the model's parameters hold bf16 values."""
    state = {name: tensor.to(torch.bfloat16).cpu() for name, tensor in model.state_dict().items()}
    names = (model.config._attn_implementation, model.config._experts_implementation, model.config.dtype)
    try:
        # a checkpoint names no implementation of ours: it must load in plain transformers
        model.config._attn_implementation = "eager"
        model.config._experts_implementation = "eager"
        model.config.dtype = torch.bfloat16
        with no_progress_bars():
            model.save_pretrained(directory, state_dict=state)
    finally:
        model.config._attn_implementation, model.config._experts_implementation, model.config.dtype = names
    if tokenizer is not None:
        tokenizer.save_pretrained(directory)


def _checksum(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

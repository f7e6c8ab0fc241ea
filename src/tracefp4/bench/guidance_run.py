"""The whole of `tracefp4 bench guidance`: find or train the model, measure, and return what is stored.

This module puts the parts together and describes where they ran; every number is measured elsewhere in the room.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tracefp4.bench.guidance import Comparison, best_row, measure_everything, new_comparison
from tracefp4.bench.guidance_model import SIZES, Size, default_device, default_size, save_policy, train_model
from tracefp4.bench.guidance_rows import AIM_BYTES, AMBITION_BYTES, GuidanceRow, Tried, tried
from tracefp4.bench.guidance_update import STEPS, UpdateProbe, UpdateRow, masters_of
from tracefp4.bench.row import describe_machine
from tracefp4.coding import CODECS, codec_by_name
from tracefp4.errors import ConfigError
from tracefp4.patching.rules import AUTO
from tracefp4.rl.policy import Policy, load_policy

SCHEMA_VERSION = 1
OnEvent = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class GuidanceOptions:
    """What to measure; the options of the command."""

    size: str | None = None
    """A key of SIZES; None takes the one of the hardware."""
    model: Path | None = None
    """Checkpoint to measure; None trains a model of this size."""
    save_model: Path | None = None
    """Where to keep a trained model; None keeps it nowhere."""
    train_seconds: float | None = None
    """Wall time of the training, above 0; None takes the size's own."""
    codecs: tuple[str, ...] = ()
    """Codecs to measure on all layers, `auto` for the automatic rate; empty measures all."""
    is_swept: bool = True
    """Whether all codecs include the combinations of SWEEP."""
    is_update: bool = False
    """Measure the transmission of updates instead of mismatch."""
    seed: int = 0
    """Of weights, texts, prompts and draws."""


def run_guidance(options: GuidanceOptions, *, on_event: OnEvent = lambda text: None) -> dict[str, Any]:
    """Run the suite.

    Args:
        options: what to measure.
        on_event: called with one line of text before anything that takes seconds, and for every row.

    Returns:
        The result as plain data: rows, what they mean, hardware and versions.

    Raises:
        ConfigError: an unknown size or codec, or a checkpoint that cannot be used.
    """
    begun = time.monotonic()
    size = _size(options, default_device())
    for name in options.codecs:
        if name != AUTO or options.is_update:
            codec_by_name(name)
    policy = _policy(size, options, on_event)
    masters = masters_of(policy.model) if options.is_update else {}
    comparison = new_comparison(
        policy, size, seed=options.seed, on_row=lambda row: on_event(_line(row)), on_event=on_event
    )
    if options.is_update:
        probe = UpdateProbe(comparison=comparison, masters=masters, codecs=options.codecs or CODECS)
        found = _updates(probe, on_event)
    else:
        found = _mismatch(comparison, options)
    return found | _described(comparison) | {"seconds": round(time.monotonic() - begun, 1)}


def _mismatch(comparison: Comparison, options: GuidanceOptions) -> dict[str, Any]:
    asked = [Tried(codec=name, layers="all") for name in options.codecs if name != AUTO]
    choice = measure_everything(
        comparison,
        ways=asked if options.codecs else tried(sweep=options.is_swept),
        is_auto=not options.codecs or AUTO in options.codecs,
    )
    best = best_row(comparison.rows)
    return {
        "suite": "guidance",
        "floor": comparison.floor,
        "aim_bytes": AIM_BYTES,
        "ambition_bytes": AMBITION_BYTES,
        "best": None if best is None else best.id,
        "auto": None if choice is None else choice.summary(),
        "rows": [row.to_json() for row in comparison.rows],
    }


def _updates(probe: UpdateProbe, on_event: OnEvent) -> dict[str, Any]:
    probe.comparison.sample()
    rows = probe.run(lambda row: on_event(_update_line(row)))
    return {
        "suite": "guidance_update",
        "steps": list(STEPS),
        "gate": probe.gate.describe(),
        "rows": [row.to_json() for row in rows],
    }


def _size(options: GuidanceOptions, device: torch.device) -> Size:
    name = options.size
    if name is not None and name not in SIZES:
        raise ConfigError(
            f"bench guidance: unknown size {name!r}; allowed: {', '.join(SIZES)}. Leave --size out to let the "
            "hardware decide."
        )
    size = default_size(device) if name is None else SIZES[name]
    return size if options.train_seconds is None else replace(size, seconds=options.train_seconds)


def _policy(size: Size, options: GuidanceOptions, on_event: OnEvent) -> Policy:
    device = default_device()
    if options.model is not None:
        on_event(f"loading {options.model}")
        loaded = load_policy(options.model)
        return replace(loaded, model=loaded.model.to(device))
    on_event(f"training a model of size {size.name} on {device.type}")
    policy = train_model(size, device=device, seed=options.seed, on_event=on_event)
    if options.save_model is not None:
        save_policy(policy, options.save_model)
        on_event(f"model kept in {options.save_model}")
    return policy


def _described(comparison: Comparison) -> dict[str, Any]:
    """What the rows depend on."""
    policy = comparison.bed.policy
    device = next(policy.model.parameters()).device
    return {
        "schema_version": SCHEMA_VERSION,
        "size": comparison.size.name,
        "seed": comparison.seed,
        "train_seconds": comparison.size.seconds,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "arithmetic": comparison.bed.arithmetic.name,
        "parameters": sum(p.numel() for p in policy.model.parameters()),
        "model": str(policy.path),
        "config": policy.model.config.to_dict(),
        "plan": comparison.base.summary(),
        "num_tokens": sum(len(sample.token_ids) for sample in comparison.samples),
        **asdict(describe_machine()),
    }


def _line(row: GuidanceRow) -> str:
    cost = f"   {row.activation_bytes:6,} B/token" if row.activation_bytes else ""
    return f"{row.id:28} mean |d log p| {row.mean:.5f}   p99 {row.p99:.4f}   max {row.largest:.3f}{cost}"


def _update_line(row: UpdateRow) -> str:
    slopes = "   ".join(
        f"{step}: {found.get('slope', float('nan')):.2f}" for step, found in row.transmission.items()
    )
    return (
        f"{row.id:24} gate {row.gate:5}   mean {row.mean:.5f}   followed {row.followed:.3f}   slope {slopes}"
    )

"""Export the policy of a run: its newest whole checkpoint, quantized as the run's plan says.

What is packed must be what the plan quantizes, no more and no less: a policy trained with rounded experts and served
with other modules rounded is another policy. Static exponents of inputs, K and V go with the weights; nothing is
calibrated here.
"""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tracefp4.checkpoints import (
    Output,
    Progress,
    Selection,
    Settings,
    StaticScales,
    Statistics,
    Summary,
    quantize_checkpoint,
)
from tracefp4.errors import ConfigError
from tracefp4.formats import Scheme
from tracefp4.patching import Plan
from tracefp4.rl import checkpoint
from tracefp4.rl.planning import remembered_plan, rules_of


def export_run(
    run: str | Path,
    output: Output,
    *,
    layout: str,
    activations: str | None = None,
    statistics: Statistics | None = None,
    progress: Progress | None = None,
) -> Summary:
    """Write the newest whole checkpoint of a run as an FP4 checkpoint.

    Args:
        run: the run directory, or one of its checkpoints.
        output: where to.
        layout: name of the layout.
        activations: None for the run's own: `static` where it trained with static exponents, which are stored, else
            `w4a16`. Either of them by name overrules the run, and a note of the summary says so.
        statistics: of a calibration of that checkpoint; only for `static` inputs of a run that had none.
        progress: told after every group and copied tensor.

    Raises:
        ConfigError: no whole checkpoint; a run that rounded no weights; schemes that the layout cannot hold;
            statistics for a run that has exponents; modules that are not the plan's.
        FormatError: damaged tensors.
        BackendError: the disk is full or refuses.
    """
    path = _newest(Path(run))
    made = _plan_of(path)
    planned = [each.name for each in made.decisions if each.kind == "experts" and each.is_quantized]
    weight = next((layer.weight for layer in made.layers if layer.weight is not None), None)
    if weight is None:
        rules = made.rules
        reason = f"mode = {rules.mode!r}" if rules.mode != "fp4" else f"weight = {rules.weight!r}"
        raise ConfigError(
            f"{run} trained its experts in bf16 (quantization: {reason}, exclude = {list(rules.exclude)}). An export "
            f"writes the weights that a run rounded. Use `tracefp4 quantize {path} OUT` to quantize after training."
        )
    trained = next((layer.activation for layer in made.layers if layer.activation is not None), None)
    is_static = trained is not None and trained.outer == "static"
    activations = activations or ("static" if is_static else "w4a16")
    if statistics is not None:
        _check_statistics(run, is_static=is_static, activations=activations)
    settings = Settings(
        scheme=weight,
        layout=layout,
        activations=activations,
        inputs=_inputs(made) if is_static and activations == "static" else None,
        cache=_cache(made),
        include=tuple(f"{name}.*" for name in planned),
    )
    summary = quantize_checkpoint(
        path,
        output,
        settings,
        statistics=statistics,
        check=lambda chosen: check_scope(planned, chosen),
        progress=progress,
    )
    return replace(summary, notes=(*summary.notes, *_differences(trained, activations)))


def check_scope(planned: Iterable[str], chosen: Selection) -> None:
    """Refuse a selection that is not the plan's.

    Args:
        planned: modules that the plan quantizes, e.g. `model.layers.0.mlp.experts`.
        chosen: what would be packed.

    Raises:
        ConfigError: the two differ, with what only one of them has.
    """
    packed = {linear.experts or linear.module for linear in chosen.linears}
    only_planned, only_packed = sorted(set(planned) - packed), sorted(packed - set(planned))
    if only_planned or only_packed:
        raise ConfigError(
            f"The modules to pack are not those that the run rounded; only in the plan: {only_planned}, only packed: "
            f"{only_packed}. Both must be the same set, or the exported policy is not the trained one. Export with the "
            "version and the checkpoint of the run."
        )


def _plan_of(path: Path) -> Plan:
    """The plan of the run that wrote a checkpoint, with its static exponents."""
    summary = checkpoint.load_state(path).plan
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
    return remembered_plan(model, rules_of(summary), summary=summary)


def _inputs(made: Plan) -> StaticScales:
    """The static scheme of the experts' inputs, and their exponents."""
    layers = {i: layer for i, layer in enumerate(made.layers) if layer.activation is not None}
    return StaticScales(
        scheme=next(layer.activation for layer in layers.values()),
        exponents={i: (layer.x_exponent, layer.w2_exponent) for i, layer in layers.items()},
    )


def _cache(made: Plan) -> StaticScales:
    """The scheme of K and V, and their exponents."""
    layers = {i: layer for i, layer in enumerate(made.layers) if layer.kv is not None}
    return StaticScales(
        scheme=next((layer.kv for layer in layers.values()), None),
        exponents={i: (layer.k_exponent, layer.v_exponent) for i, layer in layers.items()},
    )


def _check_statistics(run: str | Path, *, is_static: bool, activations: str) -> None:
    """Refuse statistics that the export would not use."""
    if activations == "static" and not is_static:
        return
    reason = "has exponents of its own for static inputs" if is_static else "trained without static inputs"
    advice = "" if is_static else ", or ask for static inputs with --activations static"
    raise ConfigError(
        f"{run} {reason}; got calibration statistics beside activations {activations}. The export rounds as the run "
        f"did, unless it is told otherwise, and would not use them. Leave --calibration out{advice}."
    )


def _differences(trained: Scheme | None, activations: str) -> tuple[str, ...]:
    """One line where the file rounds inputs otherwise than training did."""
    if activations == "static" and (trained is None or trained.outer != "static"):
        was = "in high precision" if trained is None else f"rounded under {trained.name}"
        return (f"inputs were {was} in training; this file rounds them under calibrated static scales",)
    if activations != "static" and trained is not None:
        return (
            f"inputs were rounded under {trained.name} in training; this file leaves them in high precision",
        )
    return ()


def _newest(run: Path) -> Path:
    """The newest whole checkpoint of a run directory; a checkpoint itself as it is."""
    if (run / "state.json").is_file():
        found = run if checkpoint.is_whole(run) else None
    else:
        found = checkpoint.latest(run / "checkpoints")
    if found is None:
        raise ConfigError(
            f"{run} holds no whole checkpoint of a run. Checkpoints lie in RUN/checkpoints/step_*, each with a "
            "state.json that matches its files. Name a run directory; quantize another checkpoint with `tracefp4 "
            "quantize`, and store one that already is FP4 otherwise with `tracefp4 import`."
        )
    return found

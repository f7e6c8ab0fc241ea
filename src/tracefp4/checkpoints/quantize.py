"""Quantize a checkpoint: read group by group, choose bytes, write them in a layout that engines load.

Linears that engines fuse (gate with up, q with k and v) are quantized as the one matrix that they become, so they
share an outer scale and need no rescaling when they are loaded. Weights that already are FP4 are refused: found
again, scales would differ and values would change. Never calibrates: statistics come from outside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from tracefp4.checkpoints.coded import is_on_grid
from tracefp4.checkpoints.grouping import Group
from tracefp4.checkpoints.layouts import HF_QUANT_CONFIG, Content, Precision, layout_by_name
from tracefp4.checkpoints.linears import Linear, inventory
from tracefp4.checkpoints.measure import ModuleError, measure, rows_of
from tracefp4.checkpoints.metadata import METADATA_FILE, Metadata, StaticScales
from tracefp4.checkpoints.packed import quantization_of
from tracefp4.checkpoints.selection import Selection, select
from tracefp4.checkpoints.source import Checkpoint
from tracefp4.checkpoints.statistics import Statistics
from tracefp4.checkpoints.writing import Job, Output, Progress, concatenated, content, write
from tracefp4.errors import ConfigError
from tracefp4.formats import NVFP4, NVFP4_STATIC_POW2, SCHEMES, BlockTensor, Scheme
from tracefp4.ops.quantize import quantize
from tracefp4.ops.search_scales import search_scales

METHODS = ("nearest", "4over6", "h-scale")
ACTIVATIONS = ("w4a16", "static")
# Names in a config that `tracefp4 import` can read; others (fp8, awq) hold no FP4.
_READ_METHODS = ("compressed-tensors", "modelopt", "mxfp4")


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What a checkpoint becomes."""

    scheme: Scheme
    """Of the weights; method `4over6` takes its sibling with the MSE rule."""
    layout: str = "compressed-tensors"
    """Name of the layout."""
    method: str = "nearest"
    """How block scales are chosen: one of `METHODS`."""
    activations: str = "w4a16"
    """`w4a16` leaves inputs in high precision; `static` stores an outer scale of every input."""
    inputs: StaticScales | None = None
    """Scheme and exponents of static inputs that a run rounded under; None takes them from statistics."""
    cache: StaticScales | None = None
    """How a run rounded K and V, which is written down; None where no run trained the weights."""
    include: tuple[str, ...] = ()
    """Globs of what becomes FP4; empty for all routed experts."""
    exclude: tuple[str, ...] = ()
    """Globs of what stays in high precision."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """What was done."""

    path: Path
    """The output."""
    errors: dict[str, ModuleError]
    """Error of every quantized module, in the order of writing."""
    kinds: dict[str, str]
    """Kind of every quantized module: `expert`, `attention` and so on."""
    kept: tuple[str, ...]
    """Linears in high precision."""
    notes: tuple[str, ...]
    """What to know of it: what a pattern matched and was not quantized, what training did and the file does not."""
    num_bytes: tuple[int, int]
    """Bytes of tensors before and after."""


def quantize_checkpoint(
    path: str | Path,
    output: Output,
    settings: Settings,
    *,
    statistics: Statistics | None = None,
    check: Callable[[Selection], None] | None = None,
    progress: Progress | None = None,
) -> Summary:
    """Quantize a Hugging Face checkpoint of a supported family.

    Args:
        path: the checkpoint.
        output: where to.
        settings: scheme, layout, method, what is selected.
        statistics: needed by the method `h-scale`, and by static activations without `settings.inputs`.
        check: told what was selected, before anything is written; may refuse it.
        progress: told after every group and copied tensor.

    Raises:
        ConfigError: settings that do not fit each other, the checkpoint or the layout; a checkpoint that already is
            quantized.
        FormatError: damaged tensors; weights with NaN or Inf.
        BackendError: the disk is full or refuses.
    """
    precision = _precision(settings, statistics)
    layout = layout_by_name(settings.layout)
    errors: dict[str, ModuleError] = {}
    with Checkpoint(path) as source:
        refuse_quantized(source)
        stock = inventory(source)
        chosen = select(stock, include=settings.include, exclude=settings.exclude)
        layout.check(precision, family=stock.family, linears=chosen.linears)
        _check_blocks(chosen.linears, precision.weight)
        if statistics is not None:
            statistics.check_model(source.config)
        _check_calibrated(chosen.linears, settings)
        exponents = _exponents(settings, statistics)
        if check is not None:
            check(chosen)

        def content_of(group: Group) -> Content:
            weights = [_weight(source, linear) for linear in group.members]
            blocks = _quantized(group, weights, settings.method, precision.weight, statistics)
            for linear, weight, block in zip(group.members, weights, blocks, strict=True):
                errors[linear.module] = measure(weight, block, name=linear.module)
            made = content(blocks, source=source, group=group)
            if precision.activation is None:
                return made
            exponent = torch.tensor(_exponent(group, exponents), dtype=torch.int8)
            return replace(made, inputs=(exponent,) * len(blocks))

        def finished() -> Metadata:
            return Metadata(
                layout=layout.name,
                precision=precision,
                method=settings.method,
                calibration=None if statistics is None else statistics.digest,
                cache=settings.cache,
                modules={module: error.to_dict() for module, error in errors.items()},
            )

        job = Job(source=source, stock=stock, groups=chosen.groups, layout=layout, precision=precision)
        out = write(job, output, content_of=content_of, finished=finished, progress=progress)
        before = source.total_bytes
    with Checkpoint(out) as written:
        after = written.total_bytes
    return Summary(
        path=out,
        errors=errors,
        kinds={linear.module: linear.kind for linear in chosen.linears},
        kept=job.kept,
        notes=chosen.notes,
        num_bytes=(before, after),
    )


def refuse_quantized(checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint that says of itself that it is quantized. Raises: ConfigError."""
    config = quantization_of(checkpoint)
    if config is not None:
        method = config.get("quant_method") or HF_QUANT_CONFIG
        is_read = method in (*_READ_METHODS, HF_QUANT_CONFIG)
        _refuse_again(
            str(checkpoint.path),
            f"its config says that it is ({method})",
            "change its layout with `tracefp4 import`" if is_read else "a bf16 release of the model",
        )
    if (checkpoint.path / METADATA_FILE).is_file():
        _refuse_again(
            str(checkpoint.path),
            f"its {METADATA_FILE} says that it holds values of an FP4 checkpoint",
            "write those bytes with `tracefp4 export`, which reuses the stored scales",
        )


def _refuse_again(what: str, reason: str, advice: str) -> None:
    raise ConfigError(
        f"{what} is already quantized: {reason}. Quantizing twice changes weights, because scales found again differ "
        f"from the stored ones. Quantize the original weights, or {advice}."
    )


def _precision(settings: Settings, statistics: Statistics | None) -> Precision:
    """Turn settings into schemes. Raises: ConfigError for settings that do not fit each other."""
    scheme, method = settings.scheme, settings.method
    for name, value, allowed in (
        ("method", method, METHODS),
        ("activations", settings.activations, ACTIVATIONS),
    ):
        if value not in allowed:
            raise ConfigError(f"Unknown {name} {value!r}. Allowed: {', '.join(allowed)}. Choose one of them.")
    if method != "nearest" and scheme.block_format is not NVFP4:
        raise ConfigError(
            f"The method {method} chooses among E4M3 block scales; got {scheme.name}, whose scales are powers of two. "
            "It needs an NVFP4 scheme. Use the method nearest, or NVFP4_TENSOR_POW2."
        )
    if method == "4over6" and "_4OVER6" not in scheme.name:
        sibling = SCHEMES.get(f"{scheme.name}_4OVER6_MSE")
        if sibling is None:
            raise ConfigError(
                f"The method 4over6 needs a scheme with a four-over-six sibling; got {scheme.name}. "
                "NVFP4_TENSOR_POW2 and NVFP4_TENSOR_FP32 have one. Use one of them, or the method nearest."
            )
        scheme = sibling
    is_static = settings.activations == "static"
    needs_inputs = is_static and settings.inputs is None
    if statistics is not None and not needs_inputs and method != "h-scale":
        raise ConfigError(
            f"Calibration statistics were given and nothing reads them; got method {method} and activations "
            f"{settings.activations}. They serve the method h-scale and calibrated static activations. Choose one of "
            "these, or leave them out."
        )
    if statistics is None and (needs_inputs or method == "h-scale"):
        raise ConfigError(
            f"{'Static activations need' if needs_inputs else 'The method h-scale needs'} calibration statistics; got "
            "none. They hold what inputs of every linear look like. Run `tracefp4 calibrate` and pass --calibration."
        )
    static = NVFP4_STATIC_POW2 if settings.inputs is None else settings.inputs.scheme
    return Precision(weight=scheme, activation=static if is_static else None)


def _check_blocks(linears: Sequence[Linear], scheme: Scheme) -> None:
    odd = [linear for linear in linears if linear.shape[1] % scheme.block_size]
    if odd:
        raise ConfigError(
            f"{odd[0].module} of shape {odd[0].shape} does not fit {scheme.name} ({len(odd)} such modules). The input "
            f"width must be a multiple of {scheme.block_size}. Exclude them, or use a scheme with smaller blocks."
        )


def _check_calibrated(linears: Sequence[Linear], settings: Settings) -> None:
    """Statistics, and static exponents of a run, describe the inputs of routed experts alone."""
    others = [linear.module for linear in linears if linear.kind != "expert"]
    if others and (settings.method == "h-scale" or settings.activations == "static"):
        raise ConfigError(
            f"{others[0]} has no calibration statistics ({len(others)} such modules). They are collected at routed "
            "experts only. Exclude it, or use the method nearest with w4a16."
        )


def _exponents(settings: Settings, statistics: Statistics | None) -> dict[int, tuple[int, int]]:
    """Static exponents of inputs by layer: of the run that trained them, else calibrated."""
    if settings.inputs is not None:
        return settings.inputs.exponents
    return {} if statistics is None else statistics.exponents()


def _exponent(group: Group, exponents: dict[int, tuple[int, int]]) -> int:
    """Static exponent of a group's input: one per layer for gate and up, one for down."""
    first = group.members[0]
    if first.layer not in exponents:
        raise ConfigError(
            f"The statistics hold no layer {first.layer}; they hold {sorted(exponents)}. Every quantized layer needs "
            "its own. Calibrate the checkpoint that is quantized."
        )
    return exponents[first.layer][1 if first.role == "down" else 0]


def _weight(source: Checkpoint, linear: Linear) -> Tensor:
    weight = linear.read(source)
    if not weight.dtype.is_floating_point or weight.dtype.itemsize < 2:
        _refuse_again(linear.module, f"it is stored as {weight.dtype}", "dequantize it first")
    if is_on_grid(weight):
        _refuse_again(
            linear.module,
            "every block of its weights is E2M1 codes times one number",
            "keep the FP4 checkpoint that it came from and change its layout with `tracefp4 import`",
        )
    return weight


def _quantized(
    group: Group, weights: Sequence[Tensor], method: str, scheme: Scheme, statistics: Statistics | None
) -> list[BlockTensor]:
    """Quantize a group as one matrix, and cut the bytes where its members end."""
    joined = concatenated(weights)
    if method == "h-scale":
        assert statistics is not None
        first = group.members[0]
        assert first.layer is not None and first.expert is not None
        # gate and up read the same input
        importance = statistics.importance(first.layer, first.role, expert=first.expert, width=first.shape[1])
        block = search_scales(joined, importance=importance, scheme=scheme)
    else:
        block = quantize(joined, scheme=scheme)
    found, start = [], 0
    for weight in weights:
        found.append(rows_of(block, start, start + len(weight)))
        start += len(weight)
    return found

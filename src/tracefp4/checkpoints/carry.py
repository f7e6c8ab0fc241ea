"""Carry the bytes of an FP4 checkpoint: into another layout, into a plain checkpoint, and back out of one.

Codes and block scales never change. An outer scale is stored in another way only where that is exact. A plain
checkpoint holds the values, a sidecar the scales, and tracefp4.json the rest, so that an export writes the bytes
that the import read. Nothing here quantizes.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tracefp4.checkpoints.coded import coded
from tracefp4.checkpoints.container import ContainerReader
from tracefp4.checkpoints.grouping import Group, group
from tracefp4.checkpoints.layouts import Content, Plain, Precision, layout_by_name, value_dtype
from tracefp4.checkpoints.layouts.plain import BLOCK_SCALES, OUTER
from tracefp4.checkpoints.linears import Linear, inventory
from tracefp4.checkpoints.metadata import METADATA_FILE, Metadata, read_metadata
from tracefp4.checkpoints.packed import PackedCheckpoint
from tracefp4.checkpoints.source import Checkpoint
from tracefp4.checkpoints.writing import Job, Output, Progress, content, write
from tracefp4.errors import ConfigError, FormatError
from tracefp4.formats import NVFP4, NVFP4_TENSOR_POW2, BlockTensor
from tracefp4.ops.dequantize import dequantize

_DTYPE_KEYS = ("dtype", "torch_dtype")


def change_layout(path: str | Path, output: Output, layout: str, *, progress: Progress | None = None) -> Path:
    """Write an FP4 checkpoint in another layout.

    Args:
        path: the FP4 checkpoint.
        output: where to.
        layout: name of the layout.
        progress: told after every group and copied tensor.

    Raises:
        ConfigError: not an FP4 checkpoint; a layout that cannot hold it.
        FormatError: outer or input scales that the layout cannot hold exactly; damaged parts.
    """
    target = layout_by_name(layout)
    with PackedCheckpoint(path) as packed:
        precision = packed.precision
        if packed.metadata is None and precision.weight.block_format is NVFP4 and target is not packed.layout:
            # decodes alike where every outer scale is a power of two, and reading refuses all others
            precision = Precision(weight=NVFP4_TENSOR_POW2, activation=precision.activation)
        job = Job(source=packed, stock=packed.stock, groups=packed.groups, layout=target, precision=precision)
        return write(
            job,
            output,
            content_of=lambda group: _content(packed, group, precision),
            finished=lambda: _metadata(packed, precision, layout=target.name),
            progress=progress,
        )


def to_plain(path: str | Path, output: Output, *, progress: Progress | None = None) -> Path:
    """Write the exact values of an FP4 checkpoint as a plain one, with its scales beside them.

    Args:
        path: the FP4 checkpoint.
        output: where to. Values are bf16 where every value is a bf16 number, else float32.
        progress: told after every group and copied tensor.

    Raises:
        ConfigError: not an FP4 checkpoint.
        FormatError: damaged parts; codes that values do not tell (a nonzero code in a block of scale 0).
    """
    with PackedCheckpoint(path) as packed:
        scheme = packed.precision.weight
        inputs: dict[str, float] = {}

        def content_of(found: Group) -> Content:
            made = _content(packed, found, packed.precision)
            for linear, block in zip(found.members, made.blocks, strict=True):
                _check_return(linear, block)
            for linear, outer in zip(found.members, made.inputs, strict=False):
                inputs[linear.module] = float(outer)
            return made

        config = dict(packed.config)
        stored = {key: config[key] for key in _DTYPE_KEYS if key in config}
        for key in stored:
            config[key] = str(value_dtype(scheme)).removeprefix("torch.")
        origin: dict[str, Any] = {
            "layout": packed.layout.name,
            "inputs": inputs,
            "input_kind": packed.layout.kind,
            "dtype": stored,
        }
        job = Job(
            source=packed,
            stock=packed.stock,
            groups=packed.groups,
            layout=Plain(is_fused=packed.stock.family.fused == "interleaved"),
            precision=packed.precision,
        )
        return write(
            job,
            output,
            content_of=content_of,
            finished=lambda: _metadata(packed, packed.precision, layout=Plain.name, origin=origin),
            config=config,
            progress=progress,
        )


def is_imported(path: str | Path) -> bool:
    """Say whether a directory is a plain checkpoint that `to_plain` wrote. Raises: as `read_metadata`."""
    found = read_metadata(Path(path))
    return found is not None and found.layout == Plain.name


def from_plain(
    path: str | Path, output: Output, *, layout: str | None = None, progress: Progress | None = None
) -> Path:
    """Write the bytes that a plain checkpoint's values stand for, under the scales beside it.

    Args:
        path: a directory that `to_plain` wrote, weights unchanged.
        output: where to.
        layout: name of the layout; None for the one that was imported.
        progress: told after every group and copied tensor.

    Raises:
        ConfigError: no such directory, or a layout that cannot hold it.
        FormatError: weights that were changed; scales that are missing or damaged.
    """
    metadata = read_metadata(Path(path))
    if metadata is None or metadata.layout != Plain.name:
        raise ConfigError(
            f"{path} was not imported from an FP4 checkpoint; it holds no {METADATA_FILE} of the layout {Plain.name}. "
            "Only then are there scales to reuse. Quantize it with `tracefp4 quantize`."
        )
    sidecar = Path(path) / str(Plain.sidecar)
    if not sidecar.is_file():
        raise FormatError(
            f"{path} lacks {Plain.sidecar}, which holds the scales of its weights. Without it the bytes cannot be "
            "written again. Import the FP4 checkpoint again."
        )
    origin = metadata.origin
    target = layout_by_name(layout or str(origin["layout"]))
    with Checkpoint(path) as source, ContainerReader(sidecar) as scales:
        stock = inventory(source)
        linears = tuple(linear for linear in stock.linears if linear.module in metadata.modules)
        missing = metadata.modules.keys() - {linear.module for linear in linears}
        if missing:
            raise FormatError(
                f"{path}: {METADATA_FILE} lists {min(missing)}, which the checkpoint lacks ({len(missing)} such "
                "modules). Every quantized module must be there. Import the FP4 checkpoint again."
            )

        def content_of(found: Group) -> Content:
            blocks = [_coded(source, scales, linear, metadata) for linear in found.members]
            given = [origin["inputs"].get(linear.module) for linear in found.members]
            inputs = tuple(torch.tensor(value) for value in given if value is not None)
            made = content(blocks, source=source, group=found)
            return replace(made, inputs=inputs, input_kind=origin["input_kind"])

        job = Job(
            source=source, stock=stock, groups=group(linears), layout=target, precision=metadata.precision
        )
        return write(
            job,
            output,
            content_of=content_of,
            finished=lambda: _like(metadata, layout=target.name),
            config=dict(source.config) | origin["dtype"],
            progress=progress,
        )


def _content(packed: PackedCheckpoint, found: Group, precision: Precision) -> Content:
    """Bytes of one group, as they are stored."""
    blocks = [packed.layout.read(packed.source, linear, precision.weight) for linear in found.members]
    outers = [packed.input_outer(linear) for linear in found.members]
    inputs = tuple(outer for outer in outers if outer is not None)
    made = content(blocks, source=packed, group=found)
    return replace(made, inputs=inputs, input_kind=packed.layout.kind)


def _metadata(
    packed: PackedCheckpoint, precision: Precision, *, layout: str, origin: dict[str, Any] | None = None
) -> Metadata:
    known = packed.metadata
    if known is None:
        modules: dict[str, dict[str, float | int | None]] = {linear.module: {} for linear in packed.linears}
        known = Metadata(layout=layout, precision=precision, method="carried", modules=modules)
    return _like(known, layout=layout, origin=origin)


def _like(known: Metadata, *, layout: str, origin: dict[str, Any] | None = None) -> Metadata:
    """The same facts of bytes that lie elsewhere."""
    return replace(known, layout=layout, origin=origin or {})


def _coded(source: Checkpoint, scales: ContainerReader, linear: Linear, metadata: Metadata) -> BlockTensor:
    return coded(
        linear.read(source),
        block_scales=scales.read(f"{linear.module}.{BLOCK_SCALES}"),
        outer=scales.read(f"{linear.module}.{OUTER}"),
        scheme=metadata.precision.weight,
        name=linear.module,
    )


def _check_return(linear: Linear, block: BlockTensor) -> None:
    """Refuse bytes that values and scales would not give back."""
    values = dequantize(block, dtype=value_dtype(block.scheme))
    again = coded(
        values, block_scales=block.block_scales, outer=block.outer, scheme=block.scheme, name=linear.module
    )
    if not torch.equal(again.packed, block.packed):
        differing = int((again.codes() != block.codes()).sum())
        raise FormatError(
            f"{linear.module}: {differing} codes are lost in their values (a code in a block whose scale is 0 or NaN). "
            "Values of a plain checkpoint must give every byte back. Change the layout with --layout instead."
        )

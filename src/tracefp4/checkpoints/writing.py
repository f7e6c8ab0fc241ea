"""Write a checkpoint in some layout: groups of quantized linears one after the other, all other tensors unchanged.

Tensors are planned and written in the order of their names, numbers by value, so the same content gives the same
files wherever it came from. At most one group and one chunk of a copied tensor are in memory. Never computes a
scale: the caller hands over the content of every group.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tracefp4.checkpoints.grouping import Group
from tracefp4.checkpoints.header import TensorSpec
from tracefp4.checkpoints.layouts import Content, Frame, Layout, Precision
from tracefp4.checkpoints.linears import Inventory, Linear
from tracefp4.checkpoints.metadata import METADATA_FILE, Metadata
from tracefp4.checkpoints.source import HEAD, Source
from tracefp4.checkpoints.target import MAX_SHARD_BYTES, CheckpointWriter
from tracefp4.errors import ConfigError
from tracefp4.formats import BlockTensor

COPY_BYTES = 64 << 20
"""Bytes of a copied tensor that are in memory at once (a row at least)."""
_DIGITS = re.compile(r"(\d+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What is read, what of it is quantized, and how it is stored."""

    source: Source
    """The checkpoint, plain or packed."""
    stock: Inventory
    """Its inventory."""
    groups: tuple[Group, ...]
    """The quantized linears."""
    layout: Layout
    """How they are stored."""
    precision: Precision
    """Under which schemes."""

    @property
    def kept(self) -> tuple[str, ...]:
        """Full names of all linears that stay in high precision, routers and embeddings included, by name."""
        chosen = {linear.module for group in self.groups for linear in group.members}
        return tuple(sorted({each.module for each in self.stock.linears} - chosen, key=natural))


@dataclass(frozen=True, kw_only=True, slots=True)
class Output:
    """Where a checkpoint goes."""

    path: Path
    """The directory to make."""
    max_shard_bytes: int = MAX_SHARD_BYTES
    """Limit on a file; a larger tensor gets its own."""
    overwrite: bool = False
    """Replace a checkpoint that is there."""


Progress = Callable[[int, int], None]
"""Called with bytes of the source that are done, and all of them."""


def write(
    job: Job,
    output: Output,
    *,
    content_of: Callable[[Group], Content],
    finished: Callable[[], Metadata],
    config: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> Path:
    """Write a whole checkpoint, or nothing.

    Args:
        job: what is written.
        output: where to.
        content_of: the bytes of a group; called once for each, in the order of writing.
        finished: what tracefp4.json says; called after the last group.
        config: config.json without a quantization config; None for the source's.
        progress: told after every group and copied tensor.

    Returns: the directory.

    Raises:
        ConfigError: a layout that cannot hold the job; an output that cannot be made, or that is or contains the
            source.
        FormatError: damaged tensors, or what `content_of` refuses.
        BackendError: the disk is full or refuses.
    """
    _check_apart(job.source.path, output.path)
    linears = [linear for group in job.groups for linear in group.members]
    job.layout.check(job.precision, family=job.stock.family, linears=linears)
    frames = _frames(job)
    copies = _copies(job)
    items: list[tuple[str, Group | None]] = [(name, None) for name in copies]
    items += [(job.layout.specs(group, frames[group])[0].name, group) for group in job.groups]
    items.sort(key=lambda item: (natural(item[0]), item[1].members[0].expert or 0 if item[1] else 0))
    sidecars = {}
    if job.layout.sidecar is not None:
        ordered = [group for _, group in items if group is not None]
        sidecars[job.layout.sidecar] = [s for g in ordered for s in job.layout.sidecar_specs(g, frames[g])]
    writer = CheckpointWriter(
        output.path,
        _planned(job, items, frames, copies),
        max_shard_bytes=output.max_shard_bytes,
        overwrite=output.overwrite,
        sidecars=sidecars,
    )
    done, total = 0, sum(spec.num_bytes for spec in job.source.specs.values())
    with writer:
        for name, group in items:
            if group is None:
                done += _copy(job.source, copies[name], name, writer)
            else:
                _write_group(job.layout, group, content_of(group), writer)
                done += sum(_num_bytes(job.source, linear) for linear in group.members)
            if progress is not None:
                # what is quantized together with a matrix (biases) is not counted
                progress(done if (name, group) != items[-1] else total, total)
        return _finish(job, writer, finished(), dict(job.source.config if config is None else config))


def natural(name: str) -> tuple[tuple[int, int | str], ...]:
    """A sort key under which layer 10 follows layer 9."""
    return tuple((0, int(part)) if part.isdigit() else (1, part) for part in _DIGITS.split(name))


def _check_apart(source: Path, out: Path) -> None:
    """Replacing what is read would cost the original weights."""
    read, made = source.resolve(), out.resolve()
    if made == read or made in read.parents:
        raise ConfigError(
            f"{out} {'is' if made == read else 'contains'} the checkpoint that is read, {source}. Its weights cannot "
            "be found again once they are replaced. Name another directory."
        )


def _frames(job: Job) -> dict[Group, Frame]:
    """What the specs of every group depend on."""
    experts = Counter((linear.experts, linear.role) for linear in job.stock.linears)
    frames = {}
    for group in job.groups:
        first = group.members[0]
        bias = first.bias if first.kind == "expert" else None
        frames[group] = Frame(
            precision=job.precision,
            num_experts=experts[first.experts, first.role] if first.experts is not None else 0,
            bias=None if bias is None else job.source.specs[bias].dtype,
        )
    return frames


def _copies(job: Job) -> dict[str, str]:
    """Tensors to copy: name in the output -> name in the source; names that share bytes get bytes of their own."""
    linears = [linear for group in job.groups for linear in group.members]
    taken = {linear.stored for linear in linears}
    taken |= {linear.bias for linear in linears if linear.bias is not None and linear.kind == "expert"}
    copies = {name: name for name in job.source.specs if name not in taken}
    packed = {f"{linear.module}.weight" for linear in linears}
    aliases = {alias: kept for alias, kept in job.source.aliases.items() if alias not in packed}
    return copies | {
        alias: kept for alias, kept in aliases.items() if not (alias == HEAD and job.stock.ties_embeddings)
    }


def _planned(
    job: Job,
    items: Sequence[tuple[str, Group | None]],
    frames: Mapping[Group, Frame],
    copies: Mapping[str, str],
) -> list[TensorSpec]:
    planned: dict[str, TensorSpec] = {}
    for name, group in items:
        if group is None:
            spec = job.source.specs[copies[name]]
            planned[name] = TensorSpec(name, spec.dtype, spec.shape)
        else:
            # experts of a fused tensor plan the same specs
            planned |= {spec.name: spec for spec in job.layout.specs(group, frames[group])}
    return list(planned.values())


def _write_group(layout: Layout, group: Group, content: Content, writer: CheckpointWriter) -> None:
    for part in layout.parts(group, content):
        if part.row is None:
            writer.write(part.name, part.tensor)
        else:
            writer.write_rows(part.name, part.row, part.tensor.unsqueeze(0))


def _num_bytes(source: Source, linear: Linear) -> int:
    return linear.shape[0] * linear.shape[1] * source.specs[linear.stored].dtype.itemsize


def _copy(source: Source, name: str, target: str, writer: CheckpointWriter) -> int:
    """Copy one tensor in chunks of rows; return its bytes."""
    spec = source.specs[name]
    rows = spec.shape[0] if spec.shape else 0
    if spec.num_bytes <= COPY_BYTES or rows < 2:
        writer.write(target, source.read(name))
        return spec.num_bytes
    step = max(1, COPY_BYTES * rows // spec.num_bytes)
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        writer.write_rows(target, start, source.read_rows(name, start, stop))
    return spec.num_bytes


def _finish(job: Job, writer: CheckpointWriter, metadata: Metadata, config: dict[str, Any]) -> Path:
    for name in job.source.extra_files:
        writer.copy_file(job.source.path / name, name)
    for name, data in job.layout.files(job.precision, job.kept).items():
        writer.write_file(name, data)
    writer.write_file(METADATA_FILE, metadata.to_bytes())
    quantization = job.layout.config(job.precision, job.kept)
    if quantization is not None:
        config["quantization_config"] = quantization
    return writer.finish(config)


def content(blocks: Sequence[BlockTensor], *, source: Source, group: Group) -> Content:
    """Put bytes together with the biases of routed experts, read from the source."""
    biases: list[Tensor] = []
    for linear in group.members:
        bias = linear.read_bias(source) if linear.kind == "expert" else None
        if bias is not None:
            biases.append(bias)
    return Content(blocks=tuple(blocks), biases=tuple(biases))


def concatenated(weights: Sequence[Tensor]) -> Tensor:
    """The matrix that an engine makes of a group: outputs one under the other."""
    return weights[0] if len(weights) == 1 else torch.cat(tuple(weights))

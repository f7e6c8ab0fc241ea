"""Load an FP4 checkpoint for an engine: bytes as they are stored, under the names that transformers has in memory.

Routed experts become two tensors per layer, `mlp.experts.gate_up_proj` [E, 2I, H] and `mlp.experts.down_proj`
[E, H, I], rows in the order of the family in memory. Gate and up share one outer scale; where a file gives them two,
block scales are rescaled to the larger one, and every byte that this changes inexactly is counted. Never decodes.

    s' * g' = s * g   exactly, or s' = E4M3(s * g / g')
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tracefp4.checkpoints.grouping import Group
from tracefp4.checkpoints.layouts.fused import stacked
from tracefp4.checkpoints.linears import Linear
from tracefp4.checkpoints.metadata import StaticScales
from tracefp4.checkpoints.names import Family
from tracefp4.checkpoints.outer_scales import converted
from tracefp4.checkpoints.packed import PackedCheckpoint
from tracefp4.errors import FormatError
from tracefp4.formats import BlockTensor, Scheme
from tracefp4.formats.grid import decode_e4m3, encode_e4m3
from tracefp4.formats.order import OuterKind


@dataclass(frozen=True, kw_only=True, slots=True)
class Rescaled:
    """What sharing one outer scale did to a group whose file has several."""

    blocks: int
    """Blocks whose scale byte was rescaled."""
    inexact: int
    """Blocks whose values changed."""
    max_relative: float
    """Largest relative change of a block scale."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fp4Model:
    """An FP4 checkpoint in memory."""

    config: dict[str, Any]
    """config.json without its quantization config."""
    state: dict[str, Tensor | BlockTensor]
    """Every parameter by its name in memory: bytes [E, out, in] or [out, in] where quantized, else as stored."""
    weight: Scheme
    """Scheme of the quantized weights."""
    activation: Scheme | None
    """Static scheme of their inputs; None when inputs stay in high precision."""
    exponents: dict[int, tuple[int, int]]
    """Static exponents of routed experts: layer -> (input of gate and up, input of down)."""
    cache: StaticScales | None
    """How the run that trained the weights rounded K and V; None where the checkpoint does not say."""
    quantized: tuple[str, ...]
    """Names of the quantized modules as on disk."""
    rescaled: dict[str, Rescaled]
    """Groups that did not share an outer scale, by the name of their first module; empty for our own exports."""


def load_fp4(path: str | Path) -> Fp4Model:
    """Load a checkpoint in any packed layout.

    Args:
        path: a directory that `tracefp4 quantize`, llm-compressor, ModelOpt or gpt-oss wrote.

    Warns: when sharing an outer scale changed values, and when input scales cannot be used.

    Raises:
        ConfigError: not such a checkpoint.
        FormatError: parts missing, unexpected, or of another size.
    """
    with PackedCheckpoint(path) as packed:
        family = packed.stock.family
        state: dict[str, Tensor | BlockTensor] = {}
        taken = {linear.stored for linear in packed.linears}
        biases = {linear.bias for linear in packed.linears if linear.kind == "expert"} - {None}
        for name in packed.specs:
            if name not in taken | biases:
                state[memory_name(name, family)] = packed.read(name)
        rescaled: dict[str, Rescaled] = {}
        experts: dict[str, dict[int, Group]] = defaultdict(dict)
        for group in packed.groups:
            first = group.members[0]
            if first.kind == "expert":
                assert first.expert is not None
                experts[_fused_name(first, family)][first.expert] = group
                continue
            for linear in group.members:
                state[memory_name(f"{linear.module}.weight", family)] = packed.read_block(linear)
        for name, by_expert in experts.items():
            members = [by_expert[expert] for expert in sorted(by_expert)]
            state[name] = _experts(packed, members, rescaled)
            if members[0].members[0].bias is not None:
                state[f"{name}_bias"] = _biases(packed, members)
        activation, exponents = _inputs(packed)
        model = Fp4Model(
            config=packed.config,
            state=state,
            weight=packed.precision.weight,
            activation=activation,
            exponents=exponents,
            cache=None if packed.metadata is None else packed.metadata.cache,
            quantized=tuple(linear.module for linear in packed.linears),
            rescaled=rescaled,
        )
    _warn(path, rescaled)
    return model


def memory_name(name: str, family: Family) -> str:
    """Return the name that transformers gives a stored tensor in memory."""
    # the only family whose files say another word for its MLP than its modules do
    return name.replace(".block_sparse_moe.", ".mlp.") if family.model_type == "mixtral" else name


def shared(blocks: Sequence[BlockTensor]) -> tuple[list[BlockTensor], Rescaled]:
    """Put matrices under one outer scale, the largest of theirs.

    Args:
        blocks: [out, in] each, one scheme.

    Returns: the matrices, codes untouched, and what happened to their block scales.
    """
    scheme = blocks[0].scheme
    multiplier = [_multiplier(block) for block in blocks]
    if len(set(multiplier)) == 1:
        return list(blocks), Rescaled(blocks=0, inexact=0, max_relative=0.0)
    keeper = blocks[max(range(len(blocks)), key=multiplier.__getitem__)]
    largest = max(multiplier)
    found, count, inexact, worst = [], 0, 0, 0.0
    for block, own in zip(blocks, multiplier, strict=True):
        if own == largest:
            found.append(block)
            continue
        unit = decode_e4m3(block.block_scales, torch.float64)
        is_number = ~unit.isnan()
        scales = torch.where(is_number, encode_e4m3(unit * (own / largest)), block.block_scales)
        wanted, got = unit * own, decode_e4m3(scales, torch.float64) * largest
        change = torch.where((unit > 0) & is_number, (got - wanted).abs() / wanted, 0.0)
        found.append(replace(block, block_scales=scales, outer=keeper.outer))
        count += scales.numel()
        inexact += int((change > 0).sum())
        worst = max(worst, float(change.max()))
    assert scheme is keeper.scheme
    return found, Rescaled(blocks=count, inexact=inexact, max_relative=worst)


def _multiplier(block: BlockTensor) -> float:
    """The outer scale as a number that multiplies, in double precision."""
    kind = block.scheme.outer_kind
    if kind == "divisor":
        return 1.0 / float(block.outer)
    return float(block.outer if kind == "multiplier" else converted(block.outer, kind=kind, to="multiplier"))


def _fused_name(linear: Linear, family: Family) -> str:
    leaf = "down_proj" if linear.role == "down" else "gate_up_proj"
    return memory_name(f"{linear.experts}.{leaf}", family)


def _experts(packed: PackedCheckpoint, groups: Sequence[Group], rescaled: dict[str, Rescaled]) -> BlockTensor:
    """Stack the experts of a layer: [E, 2I, H] or [E, H, I]."""
    found = []
    for group in groups:
        blocks, change = _shared(packed, group)
        if change.blocks:
            rescaled[group.members[0].module] = change
        found.append((_joined(packed, [b.packed for b in blocks]), blocks))
    scheme = packed.precision.weight
    outer = torch.stack([blocks[0].outer for _, blocks in found])
    return BlockTensor(
        packed=torch.stack([codes for codes, _ in found]),
        block_scales=torch.stack([_joined(packed, [b.block_scales for b in blocks]) for _, blocks in found]),
        outer=outer if scheme.outer == "tensor" else torch.zeros((), dtype=torch.int8),
        scheme=scheme,
    )


def _shared(packed: PackedCheckpoint, group: Group) -> tuple[list[BlockTensor], Rescaled]:
    blocks = [packed.read_block(linear) for linear in group.members]
    if blocks[0].scheme.outer_kind == "none":
        return blocks, Rescaled(blocks=0, inexact=0, max_relative=0.0)
    return shared(blocks)


def _joined(packed: PackedCheckpoint, parts: Sequence[Tensor]) -> Tensor:
    """Gate and up in the row order of the family in memory."""
    return stacked(parts) if packed.stock.family.fused == "interleaved" else torch.cat(tuple(parts))


def _biases(packed: PackedCheckpoint, groups: Sequence[Group]) -> Tensor:
    """Stack biases [E, out], rows as those of the matrices."""
    rows = []
    for group in groups:
        parts = [linear.read_bias(packed) for linear in group.members]
        rows.append(_joined(packed, [part for part in parts if part is not None]))
    return torch.stack(rows)


def _inputs(packed: PackedCheckpoint) -> tuple[Scheme | None, dict[int, tuple[int, int]]]:
    """Scheme and exponents of the experts' inputs; None where they are no powers of two shared by a layer."""
    activation = packed.precision.activation
    if activation is None:
        return None, {}
    stored: dict[tuple[int, str], set[float]] = defaultdict(set)
    for linear in packed.linears:
        found = packed.input_outer(linear)
        if linear.kind == "expert" and linear.layer is not None and found is not None:
            stored[linear.layer, "w2" if linear.role == "down" else "x"].add(float(found))
    exponents: dict[tuple[int, str], int] = {}
    for place, values in stored.items():
        try:
            exponents[place] = _exponent(values, packed.layout.kind)
        except FormatError:
            if packed.metadata is not None:
                raise
            warnings.warn(
                f"{packed.path}: input scales of layer {place[0]} are {len(values)} numbers such as {min(values)}. "
                "Only one power of two per layer can be followed exactly; inputs stay in high precision."
            )
            return None, {}
    layers = sorted({layer for layer, _ in exponents})
    return activation, {layer: (exponents[layer, "x"], exponents[layer, "w2"]) for layer in layers}


def _exponent(values: set[float], kind: OuterKind) -> int:
    if len(values) != 1:
        raise FormatError(
            f"The experts of a layer have {len(values)} input scales, {sorted(values)[:2]} among them. One token has "
            "one. Export the checkpoint again."
        )
    value = torch.tensor(min(values), dtype=torch.float32)
    return int(converted(value, kind=kind, to="exponent"))


def _warn(path: str | Path, rescaled: dict[str, Rescaled]) -> None:
    changed = {module: found for module, found in rescaled.items() if found.inexact}
    if changed:
        blocks = sum(found.inexact for found in changed.values())
        worst = max(found.max_relative for found in changed.values())
        warnings.warn(
            f"{path}: {len(changed)} pairs of gate and up have two outer scales; {blocks} block scales changed by up "
            f"to {worst:.2%} to share one. Engines that fuse them do the same. Quantize with a shared outer scale."
        )

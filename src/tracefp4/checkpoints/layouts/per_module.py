"""What compressed-tensors and ModelOpt have in common: every quantized module stores its own few tensors.

    packed codes     uint8 [out, in / 2], even column in the low nibble
    block scales     E4M3 [out, in / 16] in plain row order, or E8M0 bytes as uint8 [out, in / 32]
    outer scale      one float32
    input scale      one float32, where inputs are quantized

They differ in names, in whether the float32 multiplies or divides, and in their configs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tracefp4.checkpoints.grouping import Group
from tracefp4.checkpoints.header import TensorSpec
from tracefp4.checkpoints.layouts.layout import (
    Content,
    Frame,
    PackedLayout,
    Part,
    Precision,
    check_part,
    refuse,
)
from tracefp4.checkpoints.linears import Linear
from tracefp4.checkpoints.names import Family
from tracefp4.checkpoints.outer_scales import converted
from tracefp4.checkpoints.source import Checkpoint
from tracefp4.errors import FormatError
from tracefp4.formats import NVFP4, BlockFormat, BlockTensor, Scheme


@dataclass(frozen=True, slots=True)
class PartNames:
    """Last names of a module's tensors."""

    packed: str
    """Codes, two a byte."""
    block_scales: str
    """Scale bytes."""
    outer: str
    """Outer scale of the weight."""
    inputs: str
    """Outer scale of the input."""


class PerModule(PackedLayout):
    """Base of the two layouts."""

    names: ClassVar[PartNames]
    scalar_shape: ClassVar[tuple[int, ...]]
    formats: ClassVar[tuple[BlockFormat, ...]]

    def check(self, precision: Precision, *, family: Family, linears: Sequence[Linear]) -> None:
        """Refuse schemes without one outer scale per matrix that the layout's float32 can say exactly."""
        weight = precision.weight
        allowed = " and ".join(found.name for found in self.formats) + " with one outer scale per matrix"
        if weight.block_format not in self.formats:
            refuse(self.name, weight.name, allowed, f"Use {self._other_layouts(weight)}.")
        if weight.outer not in ("tensor", "none"):
            refuse(
                self.name,
                f"{weight.name} (outer scale: {weight.outer})",
                allowed,
                "Use NVFP4_TENSOR_POW2.",
            )
        if weight.outer_kind not in ("exponent", "none", self.kind):
            what = f"{weight.name}, whose outer scale is a {weight.outer_kind}"
            refuse(self.name, what, f"powers of two and {self.kind}s", "Use NVFP4_TENSOR_POW2.")
        activation = precision.activation
        if activation is not None and (weight.block_format is not NVFP4 or activation.outer != "static"):
            what = f"inputs under {activation.name} beside weights under {weight.name}"
            refuse(
                self.name, what, "static NVFP4 inputs beside NVFP4 weights", "Leave inputs in high precision."
            )

    def specs(self, group: Group, frame: Frame) -> tuple[TensorSpec, ...]:
        """The tensors of every member, module by module."""
        return tuple(spec for linear in group.members for spec in self._specs(linear, frame))

    def parts(self, group: Group, content: Content) -> Iterator[Part]:
        """The tensors of every member, module by module."""
        for i, (linear, block) in enumerate(zip(group.members, content.blocks, strict=True)):
            found = self._tensors(block)
            if content.inputs:
                outer = converted(content.inputs[i], kind=content.input_kind, to=self.kind)
                found[self.names.inputs] = outer.reshape(self.scalar_shape)
            if content.biases:
                found["bias"] = content.biases[i]
            for leaf, tensor in found.items():
                yield Part(name=f"{linear.module}.{leaf}", tensor=tensor)

    def plain(self, specs: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
        """One `weight` per module that has block scales."""
        found = {}
        suffix = f".{self.names.block_scales}"
        for name in specs:
            if name.endswith(suffix):
                module = name.removesuffix(suffix)
                packed = specs.get(f"{module}.{self.names.packed}")
                shape = (0, 0) if packed is None or len(packed.shape) != 2 else packed.shape
                weight = f"{module}.weight"
                found[weight] = TensorSpec(weight, torch.bfloat16, (shape[0], 2 * shape[1]))
        return found

    def consumed(self, name: str) -> tuple[str, ...]:
        """The module's four possible tensors."""
        module = name.rpartition(".")[0]
        names = self.names
        return tuple(
            f"{module}.{leaf}" for leaf in (names.packed, names.block_scales, names.outer, names.inputs)
        )

    def read(self, checkpoint: Checkpoint, linear: Linear, scheme: Scheme) -> BlockTensor:
        """Return one matrix, every part checked against the shape that its codes give."""
        names = self.names
        frame = Frame(precision=Precision(weight=scheme))
        for spec in self._specs(linear, frame):
            if not spec.name.endswith((f".{names.outer}", ".bias")):
                check_part(checkpoint, spec.name, spec)
        outer = torch.zeros((), dtype=torch.int8)
        if scheme.outer_kind != "none":
            found = self._scalar(checkpoint, f"{linear.module}.{names.outer}")
            outer = converted(found, kind=self.kind, to=scheme.outer_kind)
        return BlockTensor(
            packed=checkpoint.read(f"{linear.module}.{names.packed}"),
            block_scales=checkpoint.read(f"{linear.module}.{names.block_scales}").view(torch.uint8),
            outer=outer,
            scheme=scheme,
        )

    def has_input(self, checkpoint: Checkpoint, linear: Linear) -> bool:
        """By name."""
        return f"{linear.module}.{self.names.inputs}" in checkpoint.specs

    def input_outer(self, checkpoint: Checkpoint, linear: Linear) -> Tensor | None:
        """By name."""
        if not self.has_input(checkpoint, linear):
            return None
        return self._scalar(checkpoint, f"{linear.module}.{self.names.inputs}")

    def _specs(self, linear: Linear, frame: Frame) -> list[TensorSpec]:
        (rows, columns), weight, names = linear.shape, frame.precision.weight, self.names
        module, is_nvfp4 = linear.module, weight.block_format is NVFP4
        scale_dtype = torch.float8_e4m3fn if is_nvfp4 else torch.uint8
        scales = (rows, columns // weight.block_size)
        found = [
            TensorSpec(f"{module}.{names.packed}", torch.uint8, (rows, columns // 2)),
            TensorSpec(f"{module}.{names.block_scales}", scale_dtype, scales),
        ]
        if is_nvfp4:
            found.append(TensorSpec(f"{module}.{names.outer}", torch.float32, self.scalar_shape))
        if frame.precision.activation is not None:
            found.append(TensorSpec(f"{module}.{names.inputs}", torch.float32, self.scalar_shape))
        if frame.bias is not None:
            found.append(TensorSpec(f"{module}.bias", frame.bias, (rows,)))
        return found

    def _tensors(self, block: BlockTensor) -> dict[str, Tensor]:
        names, scheme = self.names, block.scheme
        found = {names.packed: block.packed, names.block_scales: block.block_scales}
        if scheme.outer_kind != "none":
            found[names.block_scales] = block.block_scales.view(torch.float8_e4m3fn)
            outer = converted(block.outer, kind=scheme.outer_kind, to=self.kind)
            found[names.outer] = outer.reshape(self.scalar_shape)
        return found

    def _scalar(self, checkpoint: Checkpoint, name: str) -> Tensor:
        """Return one float32 as a tensor of shape (); an already fused matrix has one as well, for all its rows."""
        spec = checkpoint.specs.get(name)
        if spec is None or spec.dtype != torch.float32 or spec.shape not in ((), (1,)):
            got = "nothing" if spec is None else f"{spec.dtype} {spec.shape}"
            raise FormatError(
                f"{checkpoint.path}: {name} must be one float32; got {got}. A matrix has one outer scale, also one "
                "that fuses several projections. Export the checkpoint again."
            )
        found = checkpoint.read(name).reshape(())
        if not bool(torch.isfinite(found)) or float(found) <= 0.0:
            raise FormatError(
                f"{checkpoint.path}: {name} is {float(found)}. An outer scale is a positive finite number. Export the "
                "checkpoint again."
            )
        return found

    def _other_layouts(self, weight: Scheme) -> str:
        return "compressed-tensors or gpt-oss" if weight.block_format is not NVFP4 else "compressed-tensors"

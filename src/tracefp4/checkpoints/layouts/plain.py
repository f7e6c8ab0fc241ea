"""Plain: the exact values of quantized matrices as an ordinary checkpoint, their scales in a file beside it.

Any program loads the values; bf16 holds them where the outer scale is a power of two, float32 otherwise. The sidecar
keeps what the values alone do not tell, so that an export reproduces every byte:

    <module>.block_scales uint8 [out, in / block], <module>.outer int8 or float32 ()

A value is a code times its decode scale, so the codes follow from value and scale (`coded.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from tracefp4.checkpoints.grouping import Group
from tracefp4.checkpoints.header import TensorSpec
from tracefp4.checkpoints.layouts.fused import fused_name, fused_rows, stacked
from tracefp4.checkpoints.layouts.layout import Content, Frame, Layout, Part, Precision
from tracefp4.checkpoints.linears import Linear
from tracefp4.checkpoints.names import Family
from tracefp4.formats import BlockTensor, Scheme
from tracefp4.ops.dequantize import dequantize

BLOCK_SCALES, OUTER = "block_scales", "outer"


class Plain(Layout):
    """The layout.

    Args:
        is_fused: True for families whose files hold all experts of a layer in one tensor, in and out swapped.
    """

    name = "plain"
    sidecar = "fp4_scales.safetensors"

    def __init__(self, *, is_fused: bool) -> None:
        self._is_fused = is_fused

    def check(self, precision: Precision, *, family: Family, linears: Sequence[Linear]) -> None:
        """Everything has values."""

    def specs(self, group: Group, frame: Frame) -> tuple[TensorSpec, ...]:
        """One weight per member, or the fused tensor of the layer; biases of experts with them."""
        dtype = value_dtype(frame.precision.weight)
        found = []
        if self._is_fused and group.members[0].kind == "expert":
            name, rows = fused_name(group), fused_rows(group)
            found.append(TensorSpec(name, dtype, (frame.num_experts, group.members[0].shape[1], rows)))
            if frame.bias is not None:
                found.append(TensorSpec(f"{name}_bias", frame.bias, (frame.num_experts, rows)))
            return tuple(found)
        for linear in group.members:
            found.append(TensorSpec(f"{linear.module}.weight", dtype, linear.shape))
            if frame.bias is not None:
                found.append(TensorSpec(f"{linear.module}.bias", frame.bias, linear.shape[:1]))
        return tuple(found)

    def sidecar_specs(self, group: Group, frame: Frame) -> tuple[TensorSpec, ...]:
        """Block scales and outer scale of every member."""
        scheme = frame.precision.weight
        outer_dtype = torch.int8 if scheme.is_exact_in_bf16 else torch.float32
        found = []
        for linear in group.members:
            scales = (linear.shape[0], linear.shape[1] // scheme.block_size)
            found.append(TensorSpec(f"{linear.module}.{BLOCK_SCALES}", torch.uint8, scales))
            found.append(TensorSpec(f"{linear.module}.{OUTER}", outer_dtype, ()))
        return tuple(found)

    def parts(self, group: Group, content: Content) -> Iterator[Part]:
        """Values, biases, scales."""
        values = [dequantize(block, dtype=value_dtype(block.scheme)) for block in content.blocks]
        if self._is_fused and group.members[0].kind == "expert":
            name, expert = fused_name(group), group.members[0].expert
            yield Part(name=name, tensor=stacked(values).t().contiguous(), row=expert)
            if content.biases:
                yield Part(name=f"{name}_bias", tensor=stacked(content.biases), row=expert)
        else:
            for linear, value in zip(group.members, values, strict=True):
                yield Part(name=f"{linear.module}.weight", tensor=value)
            for linear, bias in zip(group.members, content.biases, strict=False):
                yield Part(name=f"{linear.module}.bias", tensor=bias)
        for linear, block in zip(group.members, content.blocks, strict=True):
            yield from _scales(linear, block)

    def config(self, precision: Precision, kept: Sequence[str]) -> None:
        """A plain checkpoint has no quantization config."""


def value_dtype(scheme: Scheme) -> torch.dtype:
    """The smallest float type that holds every value of a scheme exactly."""
    return torch.bfloat16 if scheme.is_exact_in_bf16 else torch.float32


def _scales(linear: Linear, block: BlockTensor) -> Iterator[Part]:
    yield Part(name=f"{linear.module}.{BLOCK_SCALES}", tensor=block.block_scales)
    yield Part(name=f"{linear.module}.{OUTER}", tensor=block.outer)

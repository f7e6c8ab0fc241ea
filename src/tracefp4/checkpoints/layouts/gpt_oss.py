"""gpt-oss: the layout of that family's own releases, routed experts in MXFP4 and nothing else.

    gate_up_proj_blocks uint8 [E, 2I, H / 32, 16]   gate and up rows alternate; a block's 32 codes, two a byte
    gate_up_proj_scales uint8 [E, 2I, H / 32]       E8M0
    gate_up_proj_bias   bf16  [E, 2I]
    down_proj_*         likewise, [E, H, I / 32]

transformers, vLLM and SGLang read it. Source: transformers 5.17, integrations/mxfp4.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from tracefp4.checkpoints.grouping import Group
from tracefp4.checkpoints.header import TensorSpec
from tracefp4.checkpoints.layouts.fused import fused_name, fused_rows, stacked
from tracefp4.checkpoints.layouts.layout import (
    Content,
    Frame,
    PackedLayout,
    Part,
    Precision,
    Stated,
    check_part,
    kept_config,
    refuse,
)
from tracefp4.checkpoints.linears import Linear
from tracefp4.checkpoints.names import Family
from tracefp4.checkpoints.source import Checkpoint
from tracefp4.formats import MXFP4, BlockTensor, Scheme

_BLOCKS, _SCALES = "_blocks", "_scales"


class GptOss(PackedLayout):
    """The layout."""

    name = "gpt-oss"
    kind = "none"

    def check(self, precision: Precision, *, family: Family, linears: Sequence[Linear]) -> None:
        """Refuse other families, other formats, quantized inputs, and anything but routed experts."""
        allowed = "the routed experts of gpt_oss in MXFP4, inputs in high precision"
        others = [linear.module for linear in linears if linear.kind != "expert"]
        if precision.weight.block_format is not MXFP4:
            refuse(self.name, precision.weight.name, allowed, "Use an MXFP4 scheme, or compressed-tensors.")
        if family.model_type != "gpt_oss":
            refuse(self.name, f"the family {family.model_type}", allowed, "Use compressed-tensors.")
        if precision.activation is not None:
            refuse(self.name, f"inputs under {precision.activation.name}", allowed, "Use W4A16.")
        if others:
            refuse(self.name, others[0], allowed, "Exclude it.")

    def specs(self, group: Group, frame: Frame) -> tuple[TensorSpec, ...]:
        """Blocks, scales and biases of all experts of the layer."""
        name, rows, columns = fused_name(group), fused_rows(group), group.members[0].shape[1]
        lead = (frame.num_experts, rows, columns // MXFP4.block_size)
        found = [
            TensorSpec(name + _BLOCKS, torch.uint8, (*lead, MXFP4.block_size // 2)),
            TensorSpec(name + _SCALES, torch.uint8, lead),
        ]
        if frame.bias is not None:
            found.append(TensorSpec(f"{name}_bias", frame.bias, lead[:2]))
        return tuple(found)

    def parts(self, group: Group, content: Content) -> Iterator[Part]:
        """One expert's row of each."""
        name, expert = fused_name(group), group.members[0].expert
        packed = stacked([block.packed for block in content.blocks])
        scales = stacked([block.block_scales for block in content.blocks])
        blocks = packed.unflatten(-1, (-1, MXFP4.block_size // 2))
        yield Part(name=name + _BLOCKS, tensor=blocks, row=expert)
        yield Part(name=name + _SCALES, tensor=scales, row=expert)
        if content.biases:
            yield Part(name=f"{name}_bias", tensor=stacked(content.biases), row=expert)

    def config(self, precision: Precision, kept: Sequence[str]) -> dict[str, Any]:
        """The method, and the full names of what is not quantized."""
        return {"quant_method": "mxfp4", "modules_to_not_convert": list(kept)}

    def stated(self, config: Mapping[str, Any]) -> Stated | None:
        """Read `quantization_config`."""
        if config.get("quant_method") != "mxfp4":
            return None
        kept = kept_config(config, "modules_to_not_convert", "quantization_config")
        return Stated(block_format=MXFP4, has_static_inputs=False, kept=kept)

    def plain(self, specs: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
        """Fused experts, [E, in, out]."""
        found = {}
        for name, spec in specs.items():
            if name.endswith(("_proj" + _BLOCKS, "_proj" + _SCALES)):
                fused = name.removesuffix(_BLOCKS).removesuffix(_SCALES)
                experts, rows, blocks = (*spec.shape, 0, 0, 0)[:3]
                shape = (experts, blocks * MXFP4.block_size, rows)
                found[fused] = TensorSpec(fused, torch.bfloat16, shape)
        return found

    def consumed(self, name: str) -> tuple[str, ...]:
        """Blocks and scales."""
        return name + _BLOCKS, name + _SCALES

    def read(self, checkpoint: Checkpoint, linear: Linear, scheme: Scheme) -> BlockTensor:
        """Return one matrix of one expert."""
        expert, cut = linear.cut.row, linear.cut
        assert expert is not None
        blocks, scales = self.consumed(linear.stored)
        lead = checkpoint.specs[scales].shape if scales in checkpoint.specs else ()
        check_part(checkpoint, blocks, TensorSpec(blocks, torch.uint8, (*lead, MXFP4.block_size // 2)))
        check_part(checkpoint, scales, TensorSpec(scales, torch.uint8, lead))
        rows = slice(cut.start, cut.stop, cut.step)
        return BlockTensor(
            packed=checkpoint.read_rows(blocks, expert, expert + 1)[0].flatten(-2)[rows].contiguous(),
            block_scales=checkpoint.read_rows(scales, expert, expert + 1)[0][rows].contiguous(),
            outer=torch.zeros((), dtype=torch.int8),
            scheme=scheme,
        )

"""Gate and up of an expert in one matrix, rows alternating, as gpt-oss holds them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tracefp4.checkpoints.grouping import Group


def stacked(parts: Sequence[Tensor]) -> Tensor:
    """Interleave the rows of gate and up, [I, ...] each, to [2I, ...]; one part (down) stays as it is."""
    return torch.stack(tuple(parts), dim=1).flatten(0, 1) if len(parts) > 1 else parts[0]


def fused_name(group: Group) -> str:
    """Stored name of a group of fused experts, e.g. `model.layers.0.mlp.experts.gate_up_proj`."""
    first = group.members[0]
    return f"{first.experts}.{'down_proj' if first.role == 'down' else 'gate_up_proj'}"


def fused_rows(group: Group) -> int:
    """Output rows of a group's matrix."""
    return sum(linear.shape[0] for linear in group.members)

"""Routed experts whose weights are kept in bf16, as `ops.expert_layer` computes those in FP4.

    x^ = Q(x);   g, u = R(W13[e] x^);   m = R(R(silu(g)) u);   m^ = Q(m);   y = R(sum_j w_j R(W2[e] m^))

R rounds to bf16; Q is what the caller gives, the identity where activations stay bf16. The sum over the slots j is in
float32, in their order. Nothing here asks the host: groups are found on the device and their sizes are not looked at.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from tracefp4.formats.precision import Part
from tracefp4.ops.grouped_matmul import grouped_matmul
from tracefp4.ops.route import Routed
from tracefp4.ops.swiglu import swiglu


class Bf16Experts(NamedTuple):
    """The weights of one layer's experts."""

    gate_up: Tensor
    """bfloat16 [E, 2 I, H]: the rows of the gate, then those of the up-projection."""
    down: Tensor
    """bfloat16 [E, H, I]."""


def bf16_experts(
    x: Tensor, routed: Routed, experts: Bf16Experts, *, rounded: Callable[[Part, Tensor], Tensor]
) -> Tensor:
    """Compute the routed experts of one layer.

    Args:
        x: bfloat16 [T, H].
        routed: ids int64 [T, J], each an expert's, and weights bfloat16 [T, J].
        experts: Weights.
        rounded: Q, given its site and rows: "x" [T, H] and "w2" [T * J, I], token-major.

    Returns:
        bfloat16 [T, H].
    """
    top_k, num_experts = routed.ids.shape[1], experts.gate_up.shape[0]
    sorted_ids, order = torch.sort(routed.ids.reshape(-1), stable=True)
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    sizes = torch.zeros(num_experts, dtype=torch.int64, device=order.device)
    sizes.scatter_add_(0, sorted_ids, torch.ones_like(sorted_ids))
    rows = rounded("x", x).index_select(0, order // top_k)
    gate_up = grouped_matmul(rows, experts.gate_up, sizes).index_select(0, inverse)
    m = rounded("w2", swiglu(gate_up).values).index_select(0, order)
    y = grouped_matmul(m, experts.down, sizes).index_select(0, inverse).view(len(x), top_k, -1)
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for slot in range(top_k):
        total.addcmul_(y[:, slot].float(), routed.weights[:, slot, None].float())
    return total.to(torch.bfloat16)

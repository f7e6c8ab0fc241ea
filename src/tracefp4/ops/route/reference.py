"""The definition of route: a stable sort of the logits, and a softmax over all experts in float32, rounded to bf16."""

import torch
from torch import Tensor

from tracefp4.ops.route.operands import Routed


def route_reference(logits: Tensor, top_k: int, renormalizes: bool) -> Routed:
    """Route checked tokens; see `route`."""
    logits = logits.detach()
    ids = logits.sort(dim=-1, descending=True, stable=True).indices[:, :top_k].contiguous()
    return Routed(ids, _weights(logits, ids, torch.float32, renormalizes).to(torch.bfloat16))


def outside(weights: Tensor, logits: Tensor, ids: Tensor, renormalizes: bool) -> Tensor:
    """Say which weights no value rounds to that is within 2^-20 of the exact one, or within 2^-120, bool [T, J].

    Exponentials and sums differ in their last bits between libraries, which shows where a weight lies next to the
    middle between two bf16 numbers, and nowhere else.
    """
    exact = _weights(logits.detach(), ids, torch.float64, renormalizes)
    error = exact * 2.0**-20 + 2.0**-120
    least, most = ((exact + by).to(torch.bfloat16) for by in (-error, error))
    return ~(((weights >= least) & (weights <= most)) | (weights.isnan() & exact.isnan()))


def _weights(logits: Tensor, ids: Tensor, dtype: torch.dtype, renormalizes: bool) -> Tensor:
    chosen = torch.softmax(logits, dim=-1, dtype=dtype).gather(1, ids)
    return chosen / chosen.sum(dim=-1, keepdim=True) if renormalizes else chosen

"""route by the kernel of kernel.cu: the reference's ids, and its weights up to the last bits of a softmax."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from tracefp4.ops.device import DeviceLibrary, Launch
from tracefp4.ops.kernels import first_difference
from tracefp4.ops.route.operands import Routed
from tracefp4.ops.route.reference import outside, route_reference

_THREADS = 128


class Case(NamedTuple):
    """What the kernel is specialised for."""

    num_experts: int
    """Experts."""
    top_k: int
    """Experts of a token."""


def route_on_device(logits: Tensor, top_k: int, renormalizes: bool) -> Routed:
    """Route checked tokens; see `route`."""
    logits = logits.detach().resolve_neg().contiguous()
    num_tokens, num_experts = logits.shape
    ids = torch.empty((num_tokens, top_k), dtype=torch.int64, device=logits.device)
    weights = torch.empty((num_tokens, top_k), dtype=torch.bfloat16, device=logits.device)
    grid = (-(-num_tokens * 32 // _THREADS),)
    launch = Launch("route_tokens", grid, _THREADS, {"EXPERTS": num_experts, "TOP_K": top_k})
    LIBRARY.launch(launch, logits, num_tokens, int(renormalizes), ids, weights, device=logits.device)
    return Routed(ids, weights)


def differences(device: torch.device, case: Case) -> str | None:
    """Compare with the reference; return what differs, or None."""
    return first_difference(_pairs(device, case))


def _pairs(device: torch.device, case: Case) -> Iterator[tuple[str, Tensor, Tensor]]:
    # many logits of a row are equal to another one
    logits = torch.arange(6 * case.num_experts, device=device) * 37 % 61 % 30 - 15
    logits = logits.view(6, case.num_experts).to(torch.bfloat16) / 4.0
    logits[1, case.num_experts // 2], logits[2] = float("nan"), 0.0
    for renormalizes in (False, True):
        got = route_on_device(logits, case.top_k, renormalizes)
        yield "expert ids", got.ids, route_reference(logits, case.top_k, renormalizes).ids
        is_wrong = outside(got.weights, logits, got.ids, renormalizes)
        yield "expert weights", is_wrong, torch.zeros_like(is_wrong)


LIBRARY = DeviceLibrary(Path(__file__).with_name("kernel.cu"), differences, Case(128, 8))
"""The kernel of kernel.cu."""

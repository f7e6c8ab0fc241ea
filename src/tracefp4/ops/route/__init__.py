"""route: the experts of every token and their weights, from router logits.

    ids = the J largest logits, the lowest id first among equals;   w = R(softmax(logits) at ids), renormalised if asked

The softmax is over all experts, in float32; R rounds to bf16. Following recorded choices is `guidance/rounding.py`'s.
Shapes: T tokens, E experts, J of each token.
"""

import torch
from torch import Tensor

from tracefp4.errors import FormatError
from tracefp4.ops.backend import Backend, choose
from tracefp4.ops.route.device import Case, route_on_device
from tracefp4.ops.route.operands import Routed
from tracefp4.ops.route.reference import route_reference

__all__ = ["Routed", "route"]

_ROUTE = {Backend.CUDA: route_on_device, Backend.REFERENCE: route_reference}
_MAX_TOP_K, _MAX_EXPERTS = 32, 1024


def route(logits: Tensor, *, top_k: int, renormalizes: bool, backend: Backend = Backend.AUTO) -> Routed:
    """Route tokens.

    Args:
        logits: bfloat16 [T, E], E up to 1,024; T = 0 is fine. Zeros of both signs are equal.
        top_k: J, from 1 to E and 32.
        renormalizes: Whether the weights of a token are divided by their sum.
        backend: Implementation.

    Returns:
        Ids, in descending order of logits, and weights. NaN comes first, and makes the weights of its token NaN. A
        backend's weights may be the neighbouring bf16 numbers of the reference's where they lie within 2^-20 of the
        middle between two. No autograd.

    Raises:
        FormatError: When shape, dtype or top_k do not fit.
        BackendError: When the backend cannot run here.
    """
    fits = logits.dim() == 2 and logits.dtype == torch.bfloat16 and 0 < logits.shape[1] <= _MAX_EXPERTS
    if not fits or not 0 < top_k <= min(_MAX_TOP_K, logits.shape[1]):
        raise FormatError(
            f"route needs bfloat16 logits [T, E], E up to {_MAX_EXPERTS}, and top_k from 1 to E and {_MAX_TOP_K}; got "
            f"{logits.dtype} {tuple(logits.shape)} and {top_k}. Check the config of the router."
        )
    chosen = choose("route", logits.device, backend, Case(logits.shape[1], top_k))
    return _ROUTE[chosen](logits, top_k, renormalizes)

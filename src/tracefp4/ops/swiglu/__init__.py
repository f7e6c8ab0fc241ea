"""swiglu: the gate of an MLP, with the rounding to FP4 after it.

    m = R(R(silu(gate)) * up);   codes, scales = Q(m)

R rounds to bf16, where a bf16 tensor would be written; silu is computed in float32. Shapes: P rows, I intermediate;
gate and up lie side by side in a row. Routed experts have this inside `expert_layer`.
"""

import torch
from torch import Tensor

from tracefp4.errors import FormatError
from tracefp4.formats.scheme import Scheme
from tracefp4.ops.backend import Backend, choose
from tracefp4.ops.nearest import check_scheme, rows_case
from tracefp4.ops.swiglu.device import swiglu_on_device
from tracefp4.ops.swiglu.operands import Gated
from tracefp4.ops.swiglu.reference import swiglu_reference

__all__ = ["Gated", "swiglu"]

_SWIGLU = {Backend.CUDA: swiglu_on_device, Backend.REFERENCE: swiglu_reference}
_MAX_WIDTH = 1 << 16


def swiglu(
    gate_up: Tensor,
    *,
    rule: tuple[Scheme, int | None] | None = None,
    backend: Backend = Backend.AUTO,
) -> Gated:
    """Gate rows.

    Args:
        gate_up: bfloat16 [P, 2 I], I a multiple of 16 up to 65,536; P = 0 is fine.
        rule: Scheme (outer scale per row, static or none) and static exponent of the FP4 copy; None makes none.
        backend: Implementation.

    Returns:
        The gated rows, and the bytes that `ops.quantize` would give for them. A backend's values may be
        the neighbouring bf16 numbers of the reference's where silu lies within 2^-20 of the middle between two
        (`outside`). No autograd.

    Raises:
        FormatError: When shape or dtype do not fit, or rows cannot be quantized under the rule.
        BackendError: When the backend cannot run here.
    """
    fits = gate_up.dim() == 2 and gate_up.shape[1] % 32 == 0 and 0 < gate_up.shape[1] <= 2 * _MAX_WIDTH
    if not fits or gate_up.dtype != torch.bfloat16:
        raise FormatError(
            f"swiglu needs bfloat16 rows [P, 2 I], I a multiple of 16 up to {_MAX_WIDTH}; got {gate_up.dtype} "
            f"{tuple(gate_up.shape)}. Cast, or flatten leading dimensions."
        )
    if rule is not None:
        check_scheme("swiglu", gate_up.shape[1] // 2, *rule)
    chosen = choose("swiglu", gate_up.device, backend, rows_case(gate_up.shape[1] // 2, rule))
    return _SWIGLU[chosen](gate_up, rule)

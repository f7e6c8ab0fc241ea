"""rms_norm: RMS norm of rows, with the addition before it and the rounding to FP4 after it.

    h = R(residual + x);   r = 1 / sqrt(mean(h^2) + epsilon);   n = R(weight * R(h * r));   codes, scales = Q(n)

R rounds to bf16, where a bf16 tensor would be written; under a float32 weight n = R(weight * (h * r)), rounded once. r
is computed in float64 and rounded to float32, so it does not depend on the order of a sum. Shapes: T rows, H hidden.
"""

import torch
from torch import Tensor

from tracefp4.errors import FormatError
from tracefp4.formats.scheme import Scheme
from tracefp4.ops.backend import Backend, choose
from tracefp4.ops.nearest import check_scheme, rows_case
from tracefp4.ops.rms_norm.device import rms_norm_on_device
from tracefp4.ops.rms_norm.operands import Normed
from tracefp4.ops.rms_norm.reference import rms_norm_reference

__all__ = ["Normed", "rms_norm"]

_RMS_NORM = {Backend.CUDA: rms_norm_on_device, Backend.REFERENCE: rms_norm_reference}
_MAX_WIDTH = 1 << 16


def rms_norm(
    x: Tensor,
    weight: Tensor,
    *,
    epsilon: float,
    residual: Tensor | None = None,
    rule: tuple[Scheme, int | None] | None = None,
    backend: Backend = Backend.AUTO,
) -> Normed:
    """Norm rows, after adding them to a residual stream if there is one.

    Args:
        x: bfloat16 [T, H], H a multiple of 16 up to 65,536; T = 0 is fine.
        weight: bfloat16 [H]; or float32 [H], as models have it whose weight is 1 + what they store.
        epsilon: Added to the mean square, as float32.
        residual: bfloat16 [T, H], to be added to x; not written.
        rule: Scheme (outer scale per row, static or none) and static exponent of the FP4 copy; None makes none.
        backend: Implementation.

    Returns:
        The normed rows, the sum, and the bytes that `ops.quantize` would give for the normed rows. NaN or Inf in a row
        make it NaN, except that an Inf leaves the others of its row zeros. No autograd.

    Raises:
        FormatError: When shapes or dtypes do not fit, or rows cannot be quantized under the rule.
        BackendError: When the backend cannot run here.
    """
    _check(x, weight, residual)
    if rule is not None:
        check_scheme("rms_norm", x.shape[1], *rule)
    chosen = choose("rms_norm", x.device, backend, rows_case(x.shape[1], rule))
    return _RMS_NORM[chosen](x, weight, epsilon, residual, rule)


def _check(x: Tensor, weight: Tensor, residual: Tensor | None) -> None:
    dtypes = {x.dtype} if residual is None else {x.dtype, residual.dtype}
    dtypes |= set() if weight.dtype == torch.float32 else {weight.dtype}
    fits = x.dim() == 2 and weight.shape == x.shape[1:] and (residual is None or residual.shape == x.shape)
    if not fits or dtypes != {torch.bfloat16} or x.shape[1] % 16 or not 0 < x.shape[1] <= _MAX_WIDTH:
        added = "no residual" if residual is None else f"a residual {residual.dtype} {tuple(residual.shape)}"
        raise FormatError(
            "rms_norm needs bfloat16 rows [T, H], a weight [H] in bfloat16 or float32 and a residual like the rows, H "
            f"a multiple of 16 up to {_MAX_WIDTH}; got {x.dtype} {tuple(x.shape)}, {weight.dtype} "
            f"{tuple(weight.shape)} and {added}. Cast, or flatten leading dimensions."
        )

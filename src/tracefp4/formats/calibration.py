"""Static outer exponents from a sample, and the check of what a scheme can quantize.

    k = smallest integer with amax <= 6 * 448 / 2^3 * 2^k

Three binades of headroom remain before a block scale saturates, and blocks down to 1/3584 of the largest value
keep a normal E4M3 scale. This module quantizes nothing.
"""

import torch
from torch import Tensor

from tracefp4.errors import FormatError
from tracefp4.formats.scaling import pow2_exponent
from tracefp4.formats.scheme import MAX_EXPONENT, MIN_EXPONENT, Scheme

HEADROOM_EXPONENT = 3
"""A calibrated static exponent leaves room for values 2^3 times the largest one seen before a block scale
saturates; block scales stay normal (no E4M3 subnormals) for blocks down to 1/3584 of that largest value."""


def calibrate_exponent(x: Tensor) -> int:
    """Return the static exponent of a sample of keys, values or activations.

    Args:
        x: Float tensor, any shape, not empty.

    Returns:
        k in [-107, 116] such that the largest block scale of the sample is <= 56 (more where k is held at 116); 0
        for a sample of zeros.

    Raises:
        FormatError: When the sample is empty or holds NaN or Inf.
    """
    if x.numel() == 0:
        raise FormatError(
            "calibrate_exponent needs values; got an empty tensor. Calibrate on a batch with tokens in it."
        )
    amax = x.detach().abs().amax().to(torch.float32).reshape(1)
    if not bool(torch.isfinite(amax).all()):
        raise FormatError(
            f"calibrate_exponent needs finite values; got x of shape {tuple(x.shape)} with NaN or Inf. "
            "Find the layer that produced them before calibrating."
        )
    if float(amax) == 0.0:
        return 0
    return min(int(pow2_exponent(amax)) + HEADROOM_EXPONENT, MAX_EXPONENT)


def check_operand(x: Tensor, scheme: Scheme, exponent: int | None) -> None:
    """Refuse a tensor or an exponent that the scheme cannot quantize (the shape is the op's own check).

    Raises:
        FormatError: No tensor, or no Scheme; an integer or 8-bit tensor; an exponent for a scheme that finds its
            own, or none for a static one; an exponent that is no int in [MIN_EXPONENT, MAX_EXPONENT].
    """
    if not isinstance(scheme, Scheme) or not isinstance(x, Tensor):
        raise FormatError(
            f"A tensor is quantized under a Scheme; got {type(x).__name__} and {type(scheme).__name__}. Names become "
            "schemes by formats.scheme_by_name, arrays become tensors by torch.from_numpy."
        )
    if not x.dtype.is_floating_point or x.dtype.itemsize < 2:
        raise FormatError(
            f"{scheme.name} needs a float tensor of 16 bits or more; got {x.dtype}. Cast it first."
        )
    if (exponent is None) == (scheme.outer == "static"):
        needs = (
            "needs an exponent (calibrate_exponent)" if scheme.outer == "static" else "finds its own scale"
        )
        raise FormatError(
            f"{scheme.name} {needs}; got exponent={exponent}. Pass it exactly when the scheme is static."
        )
    if exponent is None:
        return
    if not isinstance(exponent, int) or not MIN_EXPONENT <= exponent <= MAX_EXPONENT:
        raise FormatError(
            f"exponent must lie in [{MIN_EXPONENT}, {MAX_EXPONENT}], an int; got {exponent!r}. Calibrate it again."
        )

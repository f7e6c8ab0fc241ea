"""An outer scale in the three ways it is stored: a power of two 2^k, a multiplier g, a divisor G = 1 / g.

Engines decode s * g or s / G. The two are the same float32 numbers for every s only when g is a power of two, so
only powers of two are converted; anything else is refused, because the weights would change.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tracefp4.errors import FormatError
from tracefp4.formats.order import OuterKind
from tracefp4.formats.scaling import power_of_two
from tracefp4.formats.scheme import MAX_EXPONENT, MIN_EXPONENT

_MANTISSA = 0x7FFFFF


def converted(outer: Tensor, *, kind: OuterKind, to: OuterKind) -> Tensor:
    """Return an outer scale as another kind, exactly.

    Args:
        outer: any shape; int8 for kind `exponent`, else float32.
        kind: how it is stored now: `exponent`, `multiplier`, `divisor`.
        to: how it shall be stored.

    Returns:
        int8 or float32, same shape; the same tensor when the kinds are equal.

    Raises:
        FormatError: a scale that is no power of two of a supported size, or kind `amax`.
    """
    if kind == to:
        return outer
    if "amax" in (kind, to):
        _refuse(outer, kind, to)
    if kind == "exponent":
        return power_of_two(outer, negate=to == "divisor")
    if not bool(are_powers_of_two(outer).all()):
        _refuse(outer, kind, to)
    exponent = (outer.contiguous().view(torch.int32) >> 23) - 127
    exponent = -exponent if kind == "divisor" else exponent
    if to != "exponent":
        return power_of_two(exponent, negate=to == "divisor")
    if bool(((exponent < MIN_EXPONENT) | (exponent > MAX_EXPONENT)).any()):
        _refuse(outer, kind, to)
    return exponent.to(torch.int8)


def are_powers_of_two(outer: Tensor) -> Tensor:
    """Say of every float32 number whether it and its reciprocal are normal powers of two; bool, same shape."""
    bits = outer.contiguous().view(torch.int32)
    # exponent fields 1..253: 2^127 has no normal reciprocal
    return (bits & _MANTISSA == 0) & (bits >> 23 >= 1) & (bits >> 23 <= 253)


def _refuse(outer: Tensor, kind: OuterKind, to: OuterKind) -> None:
    raise FormatError(
        f"An outer scale stored as {kind} cannot be stored as {to}; got {outer.flatten()[:1].tolist()}. Only powers of "
        f"two in [2^{MIN_EXPONENT}, 2^{MAX_EXPONENT}] mean the same in both. Keep the layout that it has, or quantize "
        "the original weights under a power-of-two scheme such as NVFP4_TENSOR_POW2."
    )

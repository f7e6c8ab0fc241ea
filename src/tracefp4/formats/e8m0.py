"""E8M0 block scales: powers of two from 2^-127 to 2^127, and the four published rules that pick one from amax.

    FLOOR  e = floor(log2 amax) - 2                  EVEN  the same after rounding amax to one mantissa bit
    RCEIL  e = ceil(log2(amax / 6))                  CEIL  e = ceil(log2 amax) - 2
    byte = clamp(e, -127, 127) + 127                 0xFF marks a block that holds NaN or Inf

E2M1's largest value 6 is not a power of two, so the rules disagree on one block in three, and the rule is part of
the scheme. All four are one integer addition on the bits of amax and a shift: the addition carries into the
exponent field exactly when the fraction passes the rule's threshold (FLOOR never, EVEN from 1.75, RCEIL above 1.5,
CEIL above 1). Alternative not taken: floating-point log2, which is wrong next to powers of two.
"""

import torch
from torch import Tensor

from tracefp4.formats.constant import Constant
from tracefp4.formats.element import E8M0
from tracefp4.formats.order import ScaleRule

_CARRY = {
    ScaleRule.FLOOR: 0,
    ScaleRule.EVEN: 0x200000,
    ScaleRule.RCEIL: 0x7FFFFF - 0x400000,
    ScaleRule.CEIL: 0x7FFFFF,
}
"""What is added to the bits of amax before the fraction is dropped."""
FRACTION_BITS = 23
"""Fraction bits of a float32."""
_LARGEST_E2M1_EXPONENT = 2
_MAX_BYTE = 254
_VALUES = Constant(torch.tensor(E8M0.values(), dtype=torch.float64, device="cpu").to(torch.float32))


def encode_e8m0_scales(amax: Tensor, rule: ScaleRule) -> Tensor:
    """Return the E8M0 byte of every block.

    Args:
        amax: Finite float32, any shape, >= 0.
        rule: FLOOR, EVEN, RCEIL or CEIL.

    Returns:
        uint8, same shape. 0 gives byte 0 (2^-127, under which zeros stay zeros); so does every amax below
        2^-125. Subnormal amax are below all thresholds.

    Source: OCP Microscaling Formats v1.0, section 6.3, for FLOOR; torchao's names for the others.
    """
    return (unrounded_e8m0(amax, rule) >> FRACTION_BITS).to(torch.uint8)


def unrounded_e8m0(amax: Tensor, rule: ScaleRule) -> Tensor:
    """Return the scale of every block before its fraction is dropped, in units of 2^-23 of a byte.

        t = max(bits(amax) + carry - 2 * 2^23, 0),   byte = floor(t / 2^23)

    Args:
        amax: Finite float32, any shape, >= 0.
        rule: FLOOR, EVEN, RCEIL or CEIL.

    Returns:
        int32 in [0, 255 * 2^23), same shape: between powers of two linear in amax, not in its logarithm.
    """
    bits = amax.contiguous().view(torch.int32) + _CARRY[rule]
    return bits.sub_(_LARGEST_E2M1_EXPONENT << FRACTION_BITS).clamp_(0, (_MAX_BYTE + 1 << FRACTION_BITS) - 1)


def decode_e8m0(byte: Tensor) -> Tensor:
    """Return 2^(byte - 127) as float32, exact (byte 0 is the subnormal 2^-127); byte 255 gives NaN."""
    return _VALUES.on(byte.device)[byte.to(torch.int32)]

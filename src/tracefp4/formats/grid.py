"""The E2M1 and E4M3 grids on tensors: round, decode, and find the neighbours of a value.

E2M1 magnitudes are 0, .5, 1, 1.5, 2, 3, 4, 6 for the magnitude codes 0..7; `code & 1` is the mantissa bit
and bit 3 the sign. Ties go to the even code: .25 -> 0, .75 -> 1, 1.25 -> 1, 1.75 -> 2, 2.5 -> 2, 3.5 -> 4,
5 -> 4; above 6 saturates.

Rounding without a table (`round_magnitude_`). In float32, adding a large A to z and taking it away again
rounds z to a multiple of the spacing of A. With A = max(z * (2^22 - 4), 2^22) that spacing is the E2M1 step
at z: .5 below 2, 1 below 4, 2 up to 6. The "- 4" keeps z + A inside the binade of A for z just below a
power of two; A is an even multiple of the step whenever z is a tie, so the float32 rule (ties to even) is
the E2M1 rule. Tests check this against exact arithmetic for every bf16 number and around every boundary.

Magnitude codes and doubled magnitudes convert by piecewise-linear maps: v = 2|q| in {0,1,2,3,4,6,8,12} is
convex in the code, so code = min(v, v/2 + 2, v/4 + 4) and v = max(code, 2 code - 4, 4 code - 16).
Alternative not taken: gathers from a 16-entry table, ten times slower on a CPU.

Everything here is elementwise and never chooses a scale (`scaling.py`). Inputs must be finite unless a
function says otherwise.
"""

import torch
from torch import Tensor

from tracefp4.formats.constant import Constant
from tracefp4.formats.element import E2M1, E4M3
from tracefp4.formats.order import Tie

_E4M3_MAX = E4M3.max_value
_MIDPOINTS = Constant(torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], device="cpu"))
_E2M1_VALUES = Constant(torch.tensor(E2M1.values(), dtype=torch.float64, device="cpu"))


def round_magnitude_(magnitude: Tensor, tie: Tie = Tie.EVEN) -> tuple[Tensor, Tensor]:
    """Round non-negative float32 values to E2M1 magnitudes, to nearest, saturating at 6.

        q = (z + A) - A,  A = max(z * (2^22 - 4), 2^22),  z = min(magnitude, 6)      (ties to even)

    Args:
        magnitude: Finite float32, any shape, >= 0. Clamped to 6 in place: it holds z afterwards.
        tie: Which of two equally near magnitudes is taken.

    Returns:
        (z, q): the clamped input (same storage) and the rounded magnitudes, a new tensor.
    """
    z = magnitude.clamp_(max=6.0)
    if tie is Tie.TOWARD_ZERO:
        return z, code_to_magnitude(torch.bucketize(z, _MIDPOINTS.on(z.device)).to(torch.int8))
    anchor = z * 4194300.0
    anchor.clamp_(min=4194304.0)
    rounded = z + anchor
    return z, rounded.sub_(anchor)


def magnitude_to_code(rounded: Tensor) -> Tensor:
    """Return the magnitude code of E2M1 magnitudes: code = min(v, v/2 + 2, v/4 + 4) with v = 2 * rounded.

    Args:
        rounded: Float32, any shape, each an E2M1 magnitude.

    Returns:
        int8 in [0, 7], same shape.
    """
    doubled = (rounded * 2.0).to(torch.int8)
    half = (doubled >> 1).add_(2)
    quarter = (doubled >> 2).add_(4)
    return torch.minimum(torch.minimum(doubled, half, out=half), quarter, out=quarter)


def code_to_magnitude(code: Tensor) -> Tensor:
    """Return the float32 magnitude of magnitude codes: max(code, 2 code - 4, 4 code - 16) / 2.

    Args:
        code: int8 in [0, 7], any shape.

    Returns:
        float32, same shape, each an E2M1 magnitude.
    """
    twice = (code << 1).sub_(4)
    fourfold = (code << 2).sub_(16)
    torch.maximum(torch.maximum(code, twice, out=twice), fourfold, out=fourfold)
    return fourfold.to(torch.float32).mul_(0.5)


def sign_of(x: Tensor) -> Tensor:
    """Return int8 -1 where the sign bit of a float32 tensor is set (also for -0.0) and 0 elsewhere."""
    return (x.view(torch.int32) >> 31).to(torch.int8)


def round_e2m1(z: Tensor) -> Tensor:
    """Round to signed E2M1 codes, nearest even, saturating at +-6.

        code = 8 * signbit(z) + RNE(min(|z|, 6))

    Args:
        z: Float tensor of any shape, already divided by its decode scale. float64 is rounded to float32
            first.

    Returns:
        uint8 codes 0..15, same shape. A negative value that rounds to zero, and -0.0, give 0x8. +-Inf
        saturates; NaN gives code 0 or 8, because E2M1 has no NaN: callers carry NaN in the scale.
    """
    z32 = z.detach().to(torch.float32).contiguous()
    _, rounded = round_magnitude_(torch.nan_to_num(z32.abs(), nan=0.0, posinf=6.0))
    return magnitude_to_code(rounded).bitwise_or_(sign_of(z32).bitwise_and_(8)).view(torch.uint8)


def decode_e2m1(code: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the value of E2M1 codes.

    Args:
        code: uint8 codes 0..15, any shape.
        dtype: A float dtype; every E2M1 value is exact in float16, bfloat16, float32 and float64.

    Returns:
        Values in `dtype`, same shape; code 8 gives -0.0.
    """
    table = _E2M1_VALUES.on(code.device, dtype)
    return table[code.to(torch.int32)]


def encode_e4m3(x: Tensor) -> Tensor:
    """Round to E4M3 bytes, nearest even, saturating at +-448.

    The clamp comes before the cast because casts of values above 464 differ between libraries and versions
    (NaN or 448).

    Args:
        x: Float tensor, any shape.

    Returns:
        uint8 bytes, same shape. Inf saturates to 448 (callers that must carry it use byte 0x7F); NaN gives
        0x7F or 0xFF.
    """
    clamped = x.to(torch.float32).clamp(min=-_E4M3_MAX, max=_E4M3_MAX)
    return clamped.to(torch.float8_e4m3fn).view(torch.uint8)


def decode_e4m3(byte: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the value of E4M3 bytes: exact in every float dtype of 16 bits or more; 0x7F and 0xFF give NaN.

    Args:
        byte: uint8, any shape.
        dtype: A float dtype.

    Returns:
        Values in `dtype`, same shape.
    """
    return byte.contiguous().view(torch.float8_e4m3fn).to(torch.float32).to(dtype)


def bracket_e2m1(z: Tensor) -> tuple[Tensor, Tensor]:
    """Return the neighbouring magnitude codes around |clip(z, -6, 6)|.

    Args:
        z: Finite float tensor, any shape.

    Returns:
        (lower, upper): int8 magnitude codes with value(lower) <= |z| <= value(upper). They are equal when
        |z| is itself a codeword or was clipped, and differ by one (hence in the mantissa bit) otherwise.
    """
    magnitude, rounded = round_magnitude_(z.detach().to(torch.float32).abs())
    code = magnitude_to_code(rounded)
    towards = torch.sign(magnitude - rounded).to(torch.int8)
    return code + towards.clamp(max=0), code + towards.clamp(min=0)

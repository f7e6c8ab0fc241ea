"""The definition of guided_quantize, in plain torch, written for few elementwise passes.

Everything happens on magnitudes: q* never has the sign opposite to z's (a recorded codeword of the other sign is followed
as far as 0), so the sign of x is put back at the end. m is the magnitude code of nearest even (z), in 0..7.

    full codes     m* = clamp(g, lower, upper): g = the recorded magnitude code, 0 if its sign differs from z's
    bracket        m* = m if its parity is the recorded bit, else the other end of the bracket (m itself if z is a codeword)
    nearest_cell   m* = m if its parity is the recorded bit, else m + 1 where z lies above the middle of m's rounding cell
                   or m = 0, and m - 1 otherwise

The middle of the cell of m is its value, except for 2 (cell [1.75, 2.5]) and 4 (cell [3.5, 5]), where the step changes:
value + 1/8 and value + 2/8. Even m have m / 2 - 1 eighths: 0 at m = 2, 1 at 4, 2 at 6; and -1 at m = 0, which sends every
z >= 0 upwards, as the rule at zero asks. At m = 7, z <= 6 goes down.

Shapes: N rows, K columns, G = K / 16. Sign and code tensors are int8: on a CPU they cost a quarter of a float pass, while
`torch.where` and float comparisons cost several.
"""

import torch
from torch import Tensor

from tracefp4.errors import FormatError
from tracefp4.formats.grid import code_to_magnitude, magnitude_to_code, round_magnitude_, sign_of
from tracefp4.formats.scaling import (
    NAN_BYTE,
    block_amax,
    decode_scales,
    encode_block_scales,
    outer_exponent,
)
from tracefp4.formats.scheme import Scheme
from tracefp4.ops.guided_quantize.values import Guide, Rounded


def guided_quantize_reference(
    x: Tensor, scheme: Scheme, guide: Guide | None, exponent: int | None, with_codes: bool
) -> Rounded:
    """Round checked rows; see `guided_quantize`."""
    x_NK = x.detach().to(torch.float32).contiguous()
    magnitude_NK = x_NK.abs()
    x_NK, magnitude_NK, block_scales_NG, outer = _choose_scales(x_NK, magnitude_NK, scheme, guide, exponent)
    decode_scale_NG = decode_scales(block_scales_NG, outer)
    # Blocks with a zero or NaN scale: dividing by infinity makes z = 0 there.
    divisor_NG = decode_scale_NG.nan_to_num(nan=torch.inf).masked_fill_(decode_scale_NG == 0, torch.inf)
    magnitude_NK.unflatten(1, (-1, scheme.block_size)).div_(divisor_NG.unsqueeze(-1))
    z_NK, nearest_NK = round_magnitude_(magnitude_NK)
    code_NK, num_changed = None, torch.zeros((), dtype=torch.int64, device=x.device)
    if guide is None:
        code_NK = magnitude_to_code(nearest_NK) if with_codes else None
        values_NK = nearest_NK
    else:
        nearest_code_NK = magnitude_to_code(nearest_NK)
        code_NK = _follow(x_NK, z_NK, nearest_NK, nearest_code_NK, guide)
        _restrict(code_NK, nearest_code_NK, guide, decode_scale_NG, scheme.block_size)
        num_changed = (code_NK != nearest_code_NK).count_nonzero()
        values_NK = code_to_magnitude(code_NK)
    values_NK.unflatten(1, (-1, scheme.block_size)).mul_(decode_scale_NG.unsqueeze(-1))
    values_NK.copysign_(x_NK)
    codes_NK = None
    if with_codes and code_NK is not None:
        codes_NK = code_NK.bitwise_or_(sign_of(x_NK).bitwise_and_(8)).view(torch.uint8)
    return Rounded(
        values=values_NK.to(x.dtype),
        codes=codes_NK,
        block_scales=block_scales_NG,
        exponent=outer,
        nearest_changed=num_changed,
    )


def _choose_scales(
    x_NK: Tensor, magnitude_NK: Tensor, scheme: Scheme, guide: Guide | None, exponent: int | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return x and |x| with non-finite blocks zeroed, the block scale bytes [N, G] and the outer exponent."""
    all_valid = guide is not None and bool(guide.valid.all())
    if all_valid and bool(torch.isfinite(x_NK.sum())):  # a finite sum has finite terms; the own maxima are not needed
        assert guide is not None
        static = outer_exponent(x_NK, outer="static", exponent=exponent) if guide.exponent is None else guide.exponent
        return x_NK, magnitude_NK, _checked(guide.block_scales), static
    amax_NG, finite_NG = block_amax(magnitude_NK, scheme.block_size)
    outer = outer_exponent(amax_NG, outer=scheme.outer, exponent=exponent)
    block_scales_NG = encode_block_scales(amax_NG, outer, finite_NG)
    if guide is not None:
        block_scales_NG = torch.where(guide.valid[:, None], _checked(guide.block_scales), block_scales_NG)
        outer = outer if guide.exponent is None else torch.where(guide.valid, guide.exponent, outer)
    if finite_NG is not None:
        block_scales_NG = block_scales_NG.masked_fill(~finite_NG, NAN_BYTE)
        keep_NK = finite_NG.repeat_interleave(scheme.block_size, -1)
        x_NK, magnitude_NK = x_NK * keep_NK, magnitude_NK.masked_fill(~keep_NK, 0.0)
        x_NK = x_NK.masked_fill(~keep_NK, 0.0)
    return x_NK, magnitude_NK, block_scales_NG, outer


def _checked(block_scales_NG: Tensor) -> Tensor:
    if block_scales_NG.numel() and int(block_scales_NG.max()) > NAN_BYTE:
        raise FormatError(
            f"A guide's block scales are E4M3 bytes 0x00..0x7F; got 0x{int(block_scales_NG.max()):02X}, a negative scale. "
            "The record is damaged or belongs to another format."
        )
    return block_scales_NG


def _follow(x_NK: Tensor, z_NK: Tensor, nearest_NK: Tensor, nearest_code_NK: Tensor, guide: Guide) -> Tensor:
    """Return the guided magnitude codes, int8 [N, K], as if every row were valid. Overwrites z and nearest."""
    if guide.codes is not None:
        towards_NK = torch.sign(z_NK.sub_(nearest_NK)).to(torch.int8)
        recorded_NK = guide.codes.view(torch.int8)
        is_same_sign_NK = ((recorded_NK >> 3) ^ sign_of(x_NK).bitwise_and_(1)).sub_(1)  # -1 (all bits) or 0
        goal_NK = (recorded_NK & 7).bitwise_and_(is_same_sign_NK)
        lower_NK = nearest_code_NK + towards_NK.clamp(max=0)
        upper_NK = nearest_code_NK + towards_NK.clamp_(min=0)
        return torch.minimum(torch.maximum(goal_NK, lower_NK, out=lower_NK), upper_NK, out=upper_NK)
    assert guide.bits is not None
    is_mismatched_NK = (nearest_code_NK ^ guide.bits.view(torch.int8)).bitwise_and_(1)
    if guide.decoder == "bracket":
        towards_NK = torch.sign(z_NK.sub_(nearest_NK)).to(torch.int8)
    else:
        is_even_NK = (nearest_code_NK & 1).sub_(1)  # -1 (all bits) for even codes, 0 for odd ones
        eighths_NK = (nearest_code_NK >> 1).sub_(1).bitwise_and_(is_even_NK)
        below_middle_NK = nearest_NK.sub_(z_NK).add_(eighths_NK.to(torch.float32), alpha=0.125)
        towards_NK = sign_of(below_middle_NK).mul_(-2).sub_(1)  # +1 above the middle, else -1
    return towards_NK.mul_(is_mismatched_NK).add_(nearest_code_NK)


def _restrict(code_NK: Tensor, nearest_code_NK: Tensor, guide: Guide, decode_scale_NG: Tensor, block_size: int) -> None:
    """Put the nearest code back, in place, in rows without a record and in blocks whose scale is 0 or NaN."""
    is_guided_NG = (decode_scale_NG > 0) & guide.valid[:, None]
    if bool(is_guided_NG.all()):
        return
    step_NK = code_NK - nearest_code_NK
    step_NK.unflatten(1, (-1, block_size)).mul_(is_guided_NG.to(torch.int8).unsqueeze(-1))
    torch.add(nearest_code_NK, step_NK, out=code_NK)

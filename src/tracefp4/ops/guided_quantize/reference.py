"""The definition of guided_quantize, in plain torch, written for few elementwise passes.

Everything happens on magnitudes: q* never has the sign opposite to z's (a recorded codeword of the other sign
is followed as far as 0), so the sign of x is put back at the end. m is the magnitude code of RNE(z).

    full codes     m* = clamp(g, lower, upper): g = the recorded magnitude code, 0 if its sign is not z's
    bracket        m* = m if its parity is the recorded bit, else the other end of the bracket (m itself if z
                   is a codeword)
    nearest_cell   m* = m if its parity is the recorded bit, else m + 1 where z lies above the middle of m's
                   rounding cell or m = 0, and m - 1 otherwise

The middle of the cell of m is its value, except for 2 (cell [1.75, 2.5]) and 4 (cell [3.5, 5]), where the
step changes: value + 1/8 and value + 2/8. Even m have m / 2 - 1 eighths: 0 at m = 2, 1 at 4, 2 at 6; and -1
at m = 0, which sends every z >= 0 upwards, as the rule at zero asks. At m = 7, z <= 6 goes down.

Shapes: N rows, K columns, G = K / 16. Sign and code tensors are int8: on a CPU they cost a quarter of a float
pass, while `torch.where` and float comparisons cost several.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from tracefp4.errors import FormatError
from tracefp4.formats.grid import code_to_magnitude, magnitude_to_code, round_magnitude_, sign_of
from tracefp4.formats.scaling import (
    NAN_BYTE,
    block_amax,
    decode_scales,
    divisor_of,
    encode_block_scales,
    outer_exponent,
)
from tracefp4.formats.scheme import Scheme
from tracefp4.ops.guided_quantize.values import Guide, Rounded


class _Scaled(NamedTuple):
    """x and |x| with non-finite blocks set to 0, the scales to use, and whether all of them are > 0."""

    x_NK: Tensor
    magnitude_NK: Tensor
    block_scales_NG: Tensor
    exponent: Tensor
    is_positive: bool


def guided_quantize_reference(
    x: Tensor, scheme: Scheme, guide: Guide | None, exponent: int | None, with_codes: bool
) -> Rounded:
    """Round checked rows; see `guided_quantize`."""
    scaled = _choose_scales(x.detach().to(torch.float32).contiguous(), scheme, guide, exponent)
    decode_scale_NG = decode_scales(scaled.block_scales_NG, scaled.exponent)
    divisor_NG = decode_scale_NG if scaled.is_positive else divisor_of(decode_scale_NG)
    blocks = (x.shape[0], x.shape[1] // scheme.block_size, scheme.block_size)
    scaled.magnitude_NK.view(blocks).div_(divisor_NG.unsqueeze(2))
    z_NK, values_NK = round_magnitude_(scaled.magnitude_NK)
    code_NK, num_changed = None, torch.zeros((), dtype=torch.int64, device=x.device)
    if guide is not None or with_codes:
        code_NK = magnitude_to_code(values_NK)
    if guide is not None:
        assert code_NK is not None
        nearest_code_NK = code_NK
        code_NK = _follow(scaled.x_NK, z_NK, values_NK, nearest_code_NK, guide)
        _restrict(code_NK, nearest_code_NK, guide, decode_scale_NG, scaled.is_positive)
        num_changed = (code_NK != nearest_code_NK).count_nonzero()
        values_NK = code_to_magnitude(code_NK)
    values_NK.view(blocks).mul_(decode_scale_NG.unsqueeze(2))
    values_NK.copysign_(scaled.x_NK)
    codes_NK = None
    if with_codes and code_NK is not None:
        codes_NK = code_NK.bitwise_or_(sign_of(scaled.x_NK).bitwise_and_(8)).view(torch.uint8)
    return Rounded(
        values=values_NK.to(x.dtype),
        codes=codes_NK,
        block_scales=scaled.block_scales_NG,
        exponent=scaled.exponent,
        nearest_changed=num_changed,
    )


def _choose_scales(x_NK: Tensor, scheme: Scheme, guide: Guide | None, exponent: int | None) -> _Scaled:
    magnitude_NK, finite_NG = x_NK.abs(), None
    is_recorded = guide is not None and bool(guide.valid.all())
    # A finite sum has finite terms, so the maxima are not needed to find blocks that are not finite.
    if is_recorded and math.isfinite(x_NK.sum().item()):
        assert guide is not None
        block_scales_NG, outer = guide.block_scales, guide.exponent
        if outer is None:
            outer = outer_exponent(x_NK, outer="static", exponent=exponent)
    else:
        amax_NG, finite_NG = block_amax(magnitude_NK, scheme.block_size)
        outer = outer_exponent(amax_NG, outer=scheme.outer, exponent=exponent)
        block_scales_NG = encode_block_scales(amax_NG, outer, finite_NG)
        if guide is not None:
            block_scales_NG = torch.where(guide.valid[:, None], guide.block_scales, block_scales_NG)
            outer = outer if guide.exponent is None else torch.where(guide.valid, guide.exponent, outer)
    if finite_NG is not None:
        block_scales_NG = block_scales_NG.masked_fill(~finite_NG, NAN_BYTE)
        drop_NK = ~finite_NG.repeat_interleave(scheme.block_size, 1)
        x_NK, magnitude_NK = x_NK.masked_fill(drop_NK, 0.0), magnitude_NK.masked_fill(drop_NK, 0.0)
    return _Scaled(x_NK, magnitude_NK, block_scales_NG, outer, _are_positive(block_scales_NG))


def _are_positive(block_scales_NG: Tensor) -> bool:
    if block_scales_NG.numel() == 0:
        return True
    least, most = (int(end) for end in block_scales_NG.aminmax())
    if most > NAN_BYTE:
        raise FormatError(
            f"A guide's block scales are E4M3 bytes 0x00..0x7F; got 0x{most:02X}, a negative scale. "
            "The record is damaged or belongs to another format."
        )
    return least > 0 and most < NAN_BYTE


def _follow(x_NK: Tensor, z_NK: Tensor, nearest_NK: Tensor, nearest_code_NK: Tensor, guide: Guide) -> Tensor:
    """Return the guided magnitude codes, int8, as if every row were valid. Overwrites z and nearest."""
    if guide.codes is not None:
        towards_NK = torch.sign(z_NK.sub_(nearest_NK)).to(torch.int8)
        recorded_NK = guide.codes.view(torch.int8)
        is_same_sign_NK = (sign_of(x_NK).bitwise_and_(1) ^ (recorded_NK >> 3)).sub_(1)  # -1 (all bits) or 0
        goal_NK = is_same_sign_NK.bitwise_and_(recorded_NK).bitwise_and_(7)
        lower_NK = towards_NK.clamp(max=0).add_(nearest_code_NK)
        upper_NK = towards_NK.clamp_(min=0).add_(nearest_code_NK)
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


def _restrict(
    code_NK: Tensor, nearest_code_NK: Tensor, guide: Guide, decode_scale_NG: Tensor, is_positive: bool
) -> None:
    """Put the nearest code back, in place, in rows without a record and blocks whose scale is 0 or NaN."""
    if is_positive and bool(guide.valid.all()):
        return
    is_guided_NG = (decode_scale_NG > 0) & guide.valid[:, None]
    code_NK.sub_(nearest_code_NK)
    code_NK.view(*decode_scale_NG.shape, -1).mul_(is_guided_NG.to(torch.int8).unsqueeze(2))
    code_NK.add_(nearest_code_NK)

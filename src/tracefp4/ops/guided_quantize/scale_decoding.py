"""From recorded low bits of scale bytes to the bytes, in torch: the reader's own unrounded scale says which is meant.

Under the *recorded* outer scale the reader finds for every block its own byte o, by the scheme, and the number u that o
was rounded from:

    E4M3   u = min(raw, 448) in the scheme's order of operations; the value of o where the scheme does not store the
           rounded u (an all-zero block, underflow, a floor)
    E8M0   u = the biased exponent before its fraction is dropped (`formats.e8m0.unrounded_e8m0`)

    cosets     the byte with the recorded low bits whose scale is nearest to u: by value in 0..126 (E4M3), by the middle
               of its interval of u in 0..254 (E8M0); a tie goes to the lower byte
    syndromes  own = syndrome of the bits o & 1 of a row, D = own XOR recorded; the cheapest set of flips o -> o' that
               explains D (`search.py`). o' is o + 1 or o - 1, whichever rounding cell is nearer to u (a tie: o - 1);
               c = floor(65536 * distance to that cell / u). Candidates lie at most PLAUSIBLE_SCALE_DISTANCE of u from
               it, and their block is not all zeros. No such set: the own scales

If x is the rollout's own x, u lies in the cell of the recorded byte, so both give that byte. A block of x that is
not finite has the NaN byte. Its recorded bit is unknown: it is a candidate of cost 0, whose flip changes nothing.
A recorded NaN byte has no place among 0..126 or 0..254: its block gets the nearest number that has its low bits.

Cosets and syndromes cannot tell two competing scales of a block apart, so schemes with "four over six" keep raw
bytes: the byte of 1.5 * raw often has the low bits of the byte of raw. Shapes: N rows, G blocks of a row. This module
never reads codes.
"""

import torch
from torch import Tensor

from tracefp4.coding import ScaleCoding, SyndromeCode
from tracefp4.errors import FormatError
from tracefp4.formats.e8m0 import FRACTION_BITS, unrounded_e8m0
from tracefp4.formats.grid import decode_e4m3, encode_e4m3
from tracefp4.formats.order import Candidates, ScaleRule
from tracefp4.formats.scaling import align_outer, encode_block_scales, raw_block_scale
from tracefp4.formats.scheme import MAX_EXPONENT, MIN_EXPONENT, Scheme
from tracefp4.ops.guided_quantize.search import cheapest_flips
from tracefp4.ops.guided_quantize.values import Guide
from tracefp4.ops.parity_checks import in_blocks, syndrome_differences

SCALE_UNITS = 65536.0
"""A relative distance of 1 in the integers that the search adds: 2^16; E4M3 cells end within 2^-4 of their scale."""
PLAUSIBLE_SCALE_DISTANCE = 1 / 32
"""The search considers scales up to this share of the scale from the next cell: several times the numerical noise
of a block maximum between two orders of summation, and half a cell for a mantissa of 0."""
_E4M3_MAX_BYTE, _E8M0_MAX_BYTE = 126, 254
_E4M3_MAX = 448.0


def check_outer(guide: Guide, scheme: Scheme) -> None:
    """Refuse outer scales that no rollout records; reads them.

    Raises:
        FormatError: A valid row's outer scale outside the range of its kind.
    """
    if guide.outer is None:
        return
    if scheme.outer_kind == "exponent":
        is_right = (guide.outer >= MIN_EXPONENT) & (guide.outer <= MAX_EXPONENT)
        allowed = f"exponents {MIN_EXPONENT}..{MAX_EXPONENT}"
    else:
        is_right, allowed = (guide.outer >= 0) & guide.outer.isfinite(), "finite numbers of 0 or more"
    is_wrong = guide.valid & ~is_right
    if bool(is_wrong.any()):
        raise FormatError(
            f"Recorded outer scales of {scheme.name} are {allowed}; got {guide.outer[is_wrong][0].item()}. "
            "The record is damaged or belongs to another scheme. Check its digest."
        )


def check_decodable(coding: ScaleCoding, scheme: Scheme) -> None:
    """Refuse a coding of scales that cannot be decoded under a scheme.

    Raises:
        FormatError: "Four over six" without raw bytes, or syndromes of E8M0 bytes.
    """
    if coding is ScaleCoding.RAW:
        return
    if scheme.candidates is not Candidates.SIX:
        raise FormatError(
            f"{scheme.name} lets two scales compete for a block, and low bits do not tell which one won; got scales "
            f"coded as {coding.value!r}. Only 'raw' is allowed. Use a codec that ends in +raw."
        )
    if coding is ScaleCoding.SYNDROME and scheme.scale_rule is not ScaleRule.E4M3:
        raise FormatError(
            f"Syndromes of scales are decoded for E4M3 scales; got {scheme.name}, whose scales are E8M0. "
            "'raw', 'coset2' and 'coset1' are allowed. Use one of them."
        )


def recovered_scales(
    amax_NG: Tensor, finite_NG: Tensor | None, outer: Tensor, scheme: Scheme, guide: Guide
) -> tuple[Tensor, Tensor]:
    """Return the scale bytes that a guide means, for every row as if it were valid.

    Args:
        amax_NG: float32, the block maxima of x, 0 in blocks that are not finite.
        finite_NG: bool, or None when all blocks are finite.
        outer: The outer scale to use: recorded where the row is valid.
        scheme: The scheme; "four over six" only with raw bytes.
        guide: Whose scales.

    Returns:
        (bytes, undecoded): uint8 [N, G] without NaN bytes for blocks of x that are not finite, which callers put in;
        and int64, the number of blocks of syndromes of valid rows that nothing explains.
    """
    undecoded = torch.zeros((), dtype=torch.int64, device=amax_NG.device)
    if guide.scale_coding is ScaleCoding.RAW:
        return guide.block_scales, undecoded
    if guide.scale_coding is ScaleCoding.SYNDROME:
        return _by_syndrome(amax_NG, finite_NG, outer, scheme, guide)
    step = 4 if guide.scale_coding is ScaleCoding.COSET2 else 2
    low_NG = (guide.block_scales & (step - 1)).to(torch.int32)
    if scheme.scale_rule is ScaleRule.E4M3:
        own_NG, unrounded_NG = _own_e4m3(amax_NG, outer, scheme)
        lower_NG = own_NG - ((own_NG - low_NG) & (step - 1))
        is_upper_NG, top = unrounded_NG > _middle(lower_NG, lower_NG + step), _E4M3_MAX_BYTE
    else:
        fraction_NG = unrounded_e8m0(amax_NG, scheme.scale_rule)
        own_NG, top = fraction_NG >> FRACTION_BITS, _E8M0_MAX_BYTE
        lower_NG = own_NG - ((own_NG - low_NG) & (step - 1))
        # halfway between the middles of two intervals
        middle_NG = (2 * lower_NG.to(torch.int64) + step + 1) << FRACTION_BITS - 1
        is_upper_NG = fraction_NG > middle_NG
    is_upper_NG = (is_upper_NG & (lower_NG + step <= top)) | (lower_NG < 0)
    return torch.where(is_upper_NG, lower_NG + step, lower_NG).to(torch.uint8), undecoded


def _own_e4m3(amax_NG: Tensor, outer: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
    """Return the own bytes, int32, and the numbers that they were rounded from, float32."""
    raw_NG = raw_block_scale(amax_NG, align_outer(outer, amax_NG), scheme).clamp_(max=_E4M3_MAX)
    own_NG = encode_block_scales(amax_NG, outer, scheme)
    is_rounded_NG = (own_NG == encode_e4m3(raw_NG)).logical_and_(amax_NG > 0)
    return own_NG.to(torch.int32), torch.where(is_rounded_NG, raw_NG, decode_e4m3(own_NG))


def _middle(lower_NG: Tensor, upper_NG: Tensor) -> Tensor:
    """Return the number halfway between the values of two E4M3 bytes, exact; bytes beyond 0..126 count as these."""
    low, high = (decode_e4m3(b.clamp(0, _E4M3_MAX_BYTE).to(torch.uint8)) for b in (lower_NG, upper_NG))
    return low.add_(high).mul_(0.5)


def _by_syndrome(
    amax_NG: Tensor, finite_NG: Tensor | None, outer: Tensor, scheme: Scheme, guide: Guide
) -> tuple[Tensor, Tensor]:
    assert guide.scale_code is not None
    code: SyndromeCode = guide.scale_code
    own_NG, unrounded_NG = _own_e4m3(amax_NG, outer, scheme)
    up_NG, down_NG = (
        _middle(own_NG, own_NG + 1).sub_(unrounded_NG),
        unrounded_NG - _middle(own_NG - 1, own_NG),
    )
    goes_up_NG = ((up_NG < down_NG) & (own_NG < _E4M3_MAX_BYTE)) | (own_NG == 0)
    distance_NG = torch.where(goes_up_NG, up_NG, down_NG).div_(unrounded_NG)
    is_candidate_NG = (distance_NG <= PLAUSIBLE_SCALE_DISTANCE).logical_and_(amax_NG > 0)
    units_NG = (distance_NG * SCALE_UNITS).floor_().masked_fill_(~is_candidate_NG, 0.0).to(torch.int64)
    other_NG = own_NG + torch.where(goes_up_NG, 1, -1)
    bits_NG = own_NG & 1
    if finite_NG is not None:
        is_candidate_NG |= ~finite_NG  # their distance is 0
        bits_NG = bits_NG | (~finite_NG)  # the lowest bit of the NaN byte
    difference_NC = syndrome_differences(bits_NG, guide.block_scales, code)
    differs_NC = (difference_NC != 0).logical_and_(guide.valid[:, None])
    units_NCB, is_candidate_NCB = (
        in_blocks(part, code.length, fill=0) for part in (units_NG, is_candidate_NG)
    )
    flips_NCB = torch.zeros_like(is_candidate_NCB)
    flips_NCB[differs_NC], is_found_F = cheapest_flips(
        difference_NC[differs_NC], units_NCB[differs_NC], is_candidate_NCB[differs_NC], code
    )
    flips_NG = flips_NCB.view(len(flips_NCB), -1)[:, : own_NG.shape[1]]
    recovered = torch.where(flips_NG, other_NG, own_NG).to(torch.uint8)
    return recovered, differs_NC.count_nonzero() - is_found_F.count_nonzero()

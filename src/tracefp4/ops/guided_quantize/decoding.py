"""From recorded decisions to magnitude codes, in torch: whole codes, low bits, syndromes, and the noise gate.

With z in [0, 6], m the nearest magnitude code and m' its alternative (`cells.py`):

    full codes     m* = clamp(g, lower, upper): g = the recorded magnitude code, 0 if its sign is not z's
    bracket        m* = m if it has the recorded low bits, else the other end of the bracket if that has them, else m
    nearest_cell   one bit: m* = m if it has the bit, else m'. Two bits r: m* is r or r + 4, whichever has its cell
                   nearer to z; halfway between the two cells the smaller magnitude
    syndromes      own = syndrome of the bits m & 1 of a block, D = own XOR recorded. D = 0: m* = m. Else m* = m' at
                   the cheapest set of flips that explains D (`search.py`), c = floor(4096 * distance to the cell of
                   m'); candidates lie at most `band` from it, without a gate at most PLAUSIBLE_DISTANCE. No such set:
                   m* = m

A recorded sign is never read but for full codes, because the sign of x is kept: a codeword of z's own sign is never
further from z than its mirror image. The gate puts m back wherever z lies further than `band` from the cell of m*.
Values in blocks without a usable scale (0 or NaN) count in a syndrome with the bit of their code, which is 0, and are
never flipped. Where a block of x is not finite its rollout's bits are unknown: a block of a syndrome that touches it
and differs stays nearest.

Shapes: N rows, K columns, G = K / block size, F blocks of a syndrome that differ. This module never chooses scales.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tracefp4.formats.grid import sign_of
from tracefp4.ops.guided_quantize.cells import alternative_steps, cell_distance, gated, is_within
from tracefp4.ops.guided_quantize.search import cheapest_flips
from tracefp4.ops.guided_quantize.values import Guide
from tracefp4.ops.parity_checks import in_blocks, syndrome_differences

UNITS = 4096.0
"""A distance of 1 (one decode scale) in the integers that the search adds: 2^12, so that the product is exact and a
square fits into 25 bits."""
PLAUSIBLE_DISTANCE = 0.5
"""Without a gate the search considers values up to here, in units of the decode scale. Half a step of the coarsest cell
that is not an end: numerical noise never carries a value further, and most of 4's and 6's cells stay out."""


class Position(NamedTuple):
    """Where the rows stand on the grid, before any decision is read."""

    x_NK: Tensor
    """float32; its signs are read."""
    z_NK: Tensor
    """float32 in [0, 6]; overwritten."""
    nearest_NK: Tensor
    """float32, z rounded; overwritten."""
    code_NK: Tensor
    """int8, the code of that."""
    is_usable_NG: Tensor
    """bool: the row is valid and the block's decode scale is above 0."""
    is_finite_NG: Tensor | None
    """bool: the block of x is finite; None when all are."""


class Followed(NamedTuple):
    """The decided codes and what is counted of them."""

    code_NK: Tensor
    """int8 0..7."""
    in_band: Tensor
    """int64, as `Rounded.in_band`."""
    undecoded: Tensor
    """int64, blocks of syndromes without a plausible set of flips."""


def followed(position: Position, guide: Guide) -> Followed:
    """Return the magnitude codes that a guide asks for; the nearest ones in blocks that are not usable."""
    nearest_code_NK = position.code_NK
    block_size = nearest_code_NK.shape[1] // max(1, position.is_usable_NG.shape[1])
    in_band = position.is_usable_NG.count_nonzero() * block_size
    undecoded = torch.zeros_like(in_band)
    if guide.syndromes is not None:
        distance_NK, other_NK = _alternatives(position)
        is_near_NK = _is_candidate(position, distance_NK, guide)
        if guide.band is not None:
            in_band = is_near_NK.count_nonzero()
        flips_NK, undecoded = _flips(position, distance_NK, is_near_NK, guide)
        return Followed(torch.where(flips_NK, other_NK, nearest_code_NK), in_band, undecoded)
    if guide.band is None:
        code_NK = _asked_for(position, guide)
    else:
        kept = position._replace(nearest_NK=position.nearest_NK.clone())
        distance_NK, _ = _alternatives(kept)
        in_band = _is_candidate(position, distance_NK, guide).count_nonzero()
        code_NK = _asked_for(position._replace(z_NK=position.z_NK.clone()), guide)
        code_NK = gated(code_NK, nearest_code_NK, position.z_NK, guide.band)
    return Followed(_restricted(code_NK, nearest_code_NK, position.is_usable_NG), in_band, undecoded)


def _asked_for(position: Position, guide: Guide) -> Tensor:
    """Return the guided magnitude codes as if every block were usable and there were no gate."""
    code_NK = position.code_NK
    if guide.codes is not None:
        towards_NK = _towards(position)
        recorded_NK = guide.codes.contiguous().view(torch.int8)
        is_same_sign_NK = (sign_of(position.x_NK).bitwise_and_(1) ^ (recorded_NK >> 3)).sub_(1)  # -1 or 0
        goal_NK = is_same_sign_NK.bitwise_and_(recorded_NK).bitwise_and_(7)
        lower_NK = towards_NK.clamp(max=0).add_(code_NK)
        upper_NK = towards_NK.clamp_(min=0).add_(code_NK)
        return torch.minimum(torch.maximum(goal_NK, lower_NK, out=lower_NK), upper_NK, out=upper_NK)
    assert guide.bits is not None
    bits_NK = guide.bits.contiguous().view(torch.int8)
    if guide.num_bits == 2:
        return _low_codes(position, bits_NK.bitwise_and(3), guide.decoder)
    is_mismatched_NK = (code_NK ^ bits_NK).bitwise_and_(1)
    if guide.decoder == "bracket":
        steps_NK = _towards(position)
    else:
        steps_NK = alternative_steps(position.z_NK, position.nearest_NK, code_NK)
    return steps_NK.mul_(is_mismatched_NK).add_(code_NK)


def _low_codes(position: Position, low_NK: Tensor, decoder: str) -> Tensor:
    """Return the codes for two recorded low bits."""
    code_NK = position.code_NK
    if decoder == "bracket":
        other_NK = _towards(position).add_(code_NK)
        return torch.where((other_NK & 3) == low_NK, other_NK, code_NK)
    # The cells of r and r + 4 are equally far from (upper end of r's cell + lower end of (r + 4)'s) / 2.
    middles = torch.tensor([1.0, 1.625, 2.375, 3.375], device=low_NK.device)
    is_upper_NK = position.z_NK > middles[low_NK.to(torch.int32)]
    return is_upper_NK.to(torch.int8).mul_(4).add_(low_NK)


def _towards(position: Position) -> Tensor:
    """Return the step from the nearest code to the other end of the bracket, int8; 0 where z is a codeword."""
    return torch.sign(position.z_NK.sub_(position.nearest_NK)).to(torch.int8)


def _alternatives(position: Position) -> tuple[Tensor, Tensor]:
    """Return the distance to the cell of the alternative, float32, and its code, int8."""
    code_NK = position.code_NK
    other_NK = alternative_steps(position.z_NK, position.nearest_NK, code_NK).add_(code_NK)
    return cell_distance(position.z_NK, code_NK, other_NK), other_NK


def _is_candidate(position: Position, distance_NK: Tensor, guide: Guide) -> Tensor:
    """Return which values of usable blocks may have been rounded to their alternative."""
    is_near_NK = is_within(distance_NK, PLAUSIBLE_DISTANCE if guide.band is None else guide.band)
    blocks = is_near_NK.view(*position.is_usable_NG.shape, -1)
    return blocks.logical_and_(position.is_usable_NG.unsqueeze(2)).view(is_near_NK.shape)


def _flips(
    position: Position, distance_NK: Tensor, is_candidate_NK: Tensor, guide: Guide
) -> tuple[Tensor, Tensor]:
    """Return which values take their alternative, bool [N, K], and how many blocks of syndromes stay unexplained."""
    assert guide.syndromes is not None and guide.code is not None
    length, width = guide.code.length, distance_NK.shape[1]
    difference_NC = syndrome_differences(position.code_NK & 1, guide.syndromes, guide.code)
    differs_NC = (difference_NC != 0).logical_and_(guide.valid[:, None])
    is_known_NC = torch.ones_like(differs_NC)
    if position.is_finite_NG is not None:
        block_size = width // position.is_finite_NG.shape[1]
        is_finite_NK = position.is_finite_NG.repeat_interleave(block_size, 1)
        is_known_NC = in_blocks(is_finite_NK, length, fill=True).all(2)
    is_searched_NC = differs_NC & is_known_NC
    units_NCB = in_blocks(distance_NK * UNITS, length, fill=0.0)
    flips_NCB = torch.zeros(units_NCB.shape, dtype=torch.bool, device=units_NCB.device)
    flips_FB, is_found_F = cheapest_flips(
        difference_NC[is_searched_NC],
        units_NCB[is_searched_NC].floor_().to(torch.int64),
        in_blocks(is_candidate_NK, length, fill=False)[is_searched_NC],
        guide.code,
    )
    flips_NCB[is_searched_NC] = flips_FB
    undecoded = differs_NC.count_nonzero() - is_found_F.count_nonzero()
    return flips_NCB.view(len(flips_NCB), -1)[:, :width], undecoded


def _restricted(code_NK: Tensor, nearest_code_NK: Tensor, is_usable_NG: Tensor) -> Tensor:
    """Put the nearest codes back, in place, in blocks that are not usable."""
    if bool(is_usable_NG.all()):
        return code_NK
    code_NK.sub_(nearest_code_NK)
    code_NK.view(*is_usable_NG.shape, -1).mul_(is_usable_NG.to(torch.int8).unsqueeze(2))
    return code_NK.add_(nearest_code_NK)

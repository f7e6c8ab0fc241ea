"""Rounding cells in torch: the codeword that a value would have had next, how far it is from it, and the noise gate.

Everything happens on magnitudes: z in [0, 6] and magnitude codes m = 0..7, because a codeword of z's own sign is
never further than its mirror image. The cell of a code reaches from the midpoint with the code below to the midpoint
with the code above; m = 0 has no lower neighbour (its cell goes through zero), and z never leaves the cell of 7
upwards.

    alternative   m + 1 where z lies above the middle of m's cell or m = 0, else m - 1: of all codewords of the other
                  mantissa parity the one whose cell is nearest to z; in the very middle the smaller magnitude
    distance      |edge - z|, edge = the midpoint of m and its alternative: one float32 subtraction

Shapes: N rows, K columns, G = K / block size. This module never reads a recorded decision.
"""

import torch
from torch import Tensor

from tracefp4.errors import FormatError
from tracefp4.formats.grid import code_to_magnitude, magnitude_to_code, round_magnitude_, sign_of
from tracefp4.formats.scaling import block_amax, decode_scales, element_factor
from tracefp4.formats.scheme import Scheme


def alternative_steps(z_NK: Tensor, nearest_NK: Tensor, code_NK: Tensor) -> Tensor:
    """Return the step from the nearest magnitude code to its alternative: int8, +1 or -1.

    Args:
        z_NK: float32 in [0, 6].
        nearest_NK: float32, its rounded magnitude; overwritten.
        code_NK: int8 0..7, the code of that.
    """
    is_even_NK = (code_NK & 1).sub_(1)  # -1 (all bits) for even codes, 0 for odd ones
    eighths_NK = (code_NK >> 1).sub_(1).bitwise_and_(is_even_NK)
    below_middle_NK = nearest_NK.sub_(z_NK).add_(eighths_NK.to(torch.float32), alpha=0.125)
    return sign_of(below_middle_NK).mul_(-2).sub_(1)  # +1 above the middle, else -1


def cell_distance(z_NK: Tensor, code_NK: Tensor, other_NK: Tensor) -> Tensor:
    """Return how far z lies from the cell of another code than its nearest one, float32, 0 or more.

    Args:
        z_NK: float32 in [0, 6].
        code_NK: int8 0..7, the nearest code.
        other_NK: int8 0..7; where it is the nearest code, the result means nothing.
    """
    inner_NK = other_NK - torch.sign(other_NK - code_NK)
    edge_NK = code_to_magnitude(other_NK).add_(code_to_magnitude(inner_NK)).mul_(0.5)
    return edge_NK.sub_(z_NK).abs_()


def gated(code_NK: Tensor, nearest_code_NK: Tensor, z_NK: Tensor, band: float) -> Tensor:
    """Return the chosen codes where z lies at most `band` (as float32) from their cells, and the nearest elsewhere."""
    is_near_NK = is_within(cell_distance(z_NK, nearest_code_NK, code_NK), band)
    return torch.where(is_near_NK, code_NK, nearest_code_NK)


def is_within(distance: Tensor, band: float) -> Tensor:
    """Return distance <= band, with the band rounded to float32 as the kernels take it."""
    return distance <= torch.tensor(band, dtype=torch.float32, device=distance.device)


def boundary_distance(x: Tensor, *, scheme: Scheme, block_scales: Tensor, outer: Tensor) -> Tensor:
    """Measure how far every value is from the rounding cell that it would fall into next.

        z = clip(x / decode_scale, -6, 6),   d = |z - edge|,   edge = the nearer end of z's rounding cell that has a
        codeword beyond it

    Args:
        x: Float [N, K], K a multiple of the block size. Arithmetic is float32.
        scheme: The scheme.
        block_scales: uint8 [N, G], the scale bytes that x is rounded under.
        outer: The outer scale, [N] for row schemes, 0-dimensional for the others; int8 or float32 as the scheme has it.

    Returns:
        float32 [N, K], in units of the decode scale; at most 1. Infinity in blocks without a usable scale: a scale
        of 0 or NaN, or x with NaN or Inf inside.

    Raises:
        FormatError: Shapes or dtypes do not fit the scheme.
    """
    rows, width = x.shape if x.dim() == 2 else (0, -1)
    if width < 0 or width % scheme.block_size or block_scales.shape != (rows, width // scheme.block_size):
        raise FormatError(
            f"boundary_distance with {scheme.name} needs x [N, K] with K a multiple of {scheme.block_size} and one "
            f"scale byte per block; got x {tuple(x.shape)} and block_scales {tuple(block_scales.shape)}. "
            "Pass the scales that x was rounded under."
        )
    if outer.shape != ((rows,) if scheme.outer == "row" else ()):
        raise FormatError(
            f"boundary_distance with {scheme.name} needs one outer scale per "
            f"{'row' if scheme.outer == 'row' else 'tensor'}; got outer of shape {tuple(outer.shape)} for x "
            f"{tuple(x.shape)}. Pass the outer scale of the same rounding."
        )
    magnitude_NK = x.detach().resolve_neg().to(torch.float32).contiguous().abs()
    _, finite_NG = block_amax(magnitude_NK, scheme.block_size)
    is_usable_NG = decode_scales(block_scales, outer, scheme) > 0
    if finite_NG is not None:
        is_usable_NG &= finite_NG
        magnitude_NK.masked_fill_(~finite_NG.repeat_interleave(scheme.block_size, 1), 0.0)
    factor_NG, multiplies = element_factor(block_scales, outer, scheme)
    z_NGB, factor_NG1 = magnitude_NK.view(*block_scales.shape, scheme.block_size), factor_NG.unsqueeze(2)
    _ = z_NGB.mul_(factor_NG1) if multiplies else z_NGB.div_(factor_NG1)
    z_NK, nearest_NK = round_magnitude_(magnitude_NK, scheme.tie)
    code_NK = magnitude_to_code(nearest_NK)
    other_NK = alternative_steps(z_NK, nearest_NK, code_NK).add_(code_NK)
    distance_NK = cell_distance(z_NK, code_NK, other_NK)
    return distance_NK.masked_fill_(~is_usable_NG.repeat_interleave(scheme.block_size, 1), torch.inf)

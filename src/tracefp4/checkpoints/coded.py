"""Values that are codes times known scales become those codes again: the way back from a plain checkpoint.

    code = E2M1(value / decode_scale), and code * decode_scale must be the value, bit for bit

Scales are given, never found: finding them again would change values (4 of a block whose largest code is 4 would
become 6). The second function tells whether weights lie on such a grid at all, without knowing the scales.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tracefp4.errors import FormatError
from tracefp4.formats import BlockTensor, Scheme
from tracefp4.formats.grid import round_e2m1
from tracefp4.formats.packing import pack_codes
from tracefp4.formats.scaling import decode_scales
from tracefp4.ops.dequantize import dequantize

GRID_BLOCK = 16
"""Values looked at together; an MXFP4 block of 32 is two of them."""
_FIRST_ROWS, _GRID_ROWS = 8, 64
# Values stored in bf16 under a float32 outer scale, and their maximum, are off by half a step of 2^-8 each.
_TOLERANCE = 2.0**-7
# |value| / block maximum, times 12 where the maximum is 6 or 3, times 8 where it is 4, 2 or 1; 1.5 falls under 6.
_RATIOS = ((12.0, (1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0)), (8.0, (1.0, 2.0, 3.0, 4.0, 6.0, 8.0)))


def coded(values: Tensor, *, block_scales: Tensor, outer: Tensor, scheme: Scheme, name: str) -> BlockTensor:
    """Return the bytes of values under given scales.

    Args:
        values: bf16 or float32 [out, in].
        block_scales: uint8 [out, in / block].
        outer: as `BlockTensor.outer`.
        scheme: what made the scales.
        name: of the module, for errors.

    Raises:
        FormatError: a value that is no code times its scale: the weights were changed.
    """
    decode_scale = decode_scales(block_scales, outer, scheme)
    blocks = values.to(torch.float32).unflatten(-1, (-1, scheme.block_size))
    # a block without a scale, or with a NaN, holds code 0 only; the sign of its zeros stays
    divisor = torch.where(decode_scale > 0, decode_scale, torch.inf).unsqueeze(-1)
    codes = round_e2m1(torch.where(blocks.isnan(), 0.0, blocks) / divisor).flatten(-2)
    found = BlockTensor(packed=pack_codes(codes), block_scales=block_scales, outer=outer, scheme=scheme)
    again = dequantize(found)
    is_same = again.view(torch.int32) == values.to(torch.float32).contiguous().view(torch.int32)
    is_same |= again.isnan() & values.isnan()
    if not bool(is_same.all()):
        row, column = (~is_same).nonzero()[0].tolist()
        raise FormatError(
            f"{name}: {int((~is_same).sum())} of {values.numel()} values are no longer a code times the stored scale; "
            f"got {float(values[row, column])} at [{row}, {column}] beside {float(again[row, column])}. Scales can "
            "only be reused for unchanged weights. Quantize the original weights, or remove tracefp4.json and the "
            "scales beside the weights to quantize these as they are."
        )
    return found


def is_on_grid(weight: Tensor) -> bool:
    """Say whether a matrix already consists of E2M1 codes times one scale per 16 values.

    True when every block is {0, .5, 1, 1.5, 2, 3, 4, 6} times some number, up to a rounding to bf16, and at least one
    holds three different magnitudes: zeros, constants and signs prove nothing. Weights that were trained or drawn
    practically never are.

    Args:
        weight: float [out, in], `in` a multiple of 16; finite.
    """
    if weight.numel() == 0 or not _are_on_grid(weight[:_FIRST_ROWS])[0]:
        return False
    found = [_are_on_grid(rows) for rows in weight.split(_GRID_ROWS)]
    return all(on for on, _ in found) and any(telling for _, telling in found)


def _are_on_grid(rows: Tensor) -> tuple[bool, bool]:
    """(every block is on a grid, some block has three magnitudes)."""
    magnitude = rows.to(torch.float32).abs().unflatten(-1, (-1, GRID_BLOCK))
    largest = magnitude.amax(-1, keepdim=True)
    ratio = magnitude / torch.where(largest > 0, largest, 1.0)
    fits = torch.zeros(ratio.shape[:-1], dtype=torch.bool)
    for factor, targets in _RATIOS:
        is_near = magnitude == 0
        for target in targets:
            is_near |= (ratio * factor - target).abs() <= target * _TOLERANCE
        fits |= is_near.all(-1)
    if not bool(fits.all()):
        return False, False
    is_between = (magnitude > 0) & (ratio < 1.0 - _TOLERANCE)
    smallest = torch.where(is_between, ratio, 2.0).amin(-1, keepdim=True)
    return True, bool((is_between & (ratio > smallest * (1.0 + 2.0 * _TOLERANCE))).any())

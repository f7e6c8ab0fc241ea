"""What a rounding could not represent: values beyond the largest code, block scales beyond their format's ends.

    value clipped   |x| >= 7 * decode_scale: 7 is halfway between 6 and the 8 that E2M1 lacks; below it, becoming 6 is
                    no worse than any other rounding
    block clamped   byte 0x7E (448) and raw > 464, the same halfway point of E4M3's last step
    block floored   amax > 0 and E4M3(raw) below the smallest byte that the scheme stores for such a block; the block
                    was raised to it, or flushed to zeros

The facts are read off a finished rounding, so every backend shares them. Under its own dynamic scales a block can
be floored, or clipped where its scale is one of E4M3's smallest; else, both go with a static outer scale, with scales
that were recorded for other values, and (clipped only) with the FLOOR rule of MXFP4. Blocks with NaN or Inf count
nowhere. This module rounds nothing.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tracefp4.formats.grid import encode_e4m3
from tracefp4.formats.order import ScaleRule
from tracefp4.formats.scaling import align_outer, decode_scales, raw_block_scale
from tracefp4.formats.scheme import Scheme

CLIPPED_FROM = 7.0
"""In units of the decode scale; the tie itself would go to 8, whose mantissa bit is even."""
CLAMPED_ABOVE = 464.0
"""Halfway between 448 and the 480 that E4M3 lacks; the tie goes to 448."""
_LARGEST_BYTE = 0x7E
_COARSE_BYTE = 0x03
"""Up to 3 * 2^-9 rounding a scale down may leave values at 7 and beyond: 6 * 3.5 / 3 = 7."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Saturation:
    """Counts of one rounding, int64 tensors of dimension 0."""

    values_clipped: Tensor
    """Values at least one unit of the block's scale beyond the largest code."""
    blocks_clamped: Tensor
    """Blocks whose scale would have been larger than 448."""
    blocks_floored: Tensor
    """Blocks that are not zero and whose scale would have been smaller than any that the scheme stores."""


def saturation(
    x: Tensor,
    block_scales: Tensor,
    outer: Tensor,
    scheme: Scheme,
    *,
    is_recorded: bool = False,
    rows: Tensor | None = None,
) -> Saturation:
    """Count what a rounding could not represent.

    Only blocks whose scale byte lies at an end can count; if values may be beyond any block's scale (recorded scales,
    FLOOR), so can those with a large value. Nothing is read back from a GPU.

    Args:
        x: Float [..., K], what was rounded.
        block_scales: uint8 [..., G], the scale bytes used.
        outer: The outer scale used, as the scheme stores it; its shape must be a prefix of block_scales.shape.
        scheme: The rules.
        is_recorded: True where the scales came from somewhere else than x.
        rows: bool [...], False where nothing is counted; None counts everywhere.
    """
    is_suspect = _at_an_end(block_scales, scheme)
    blocks = x.detach().unflatten(-1, (-1, scheme.block_size))
    outer = align_outer(outer, block_scales).expand(block_scales.shape)
    looks_at_all = is_recorded or scheme.scale_rule is ScaleRule.FLOOR
    if rows is not None:
        is_suspect &= rows.unsqueeze(-1)
    if (
        not looks_at_all and x.device.type == "cpu"
    ):  # few blocks, but a GPU's host would have to wait for their number
        index = is_suspect.nonzero(as_tuple=True)
        blocks, block_scales, outer, is_suspect = (
            t[index] for t in (blocks, block_scales, outer, is_suspect)
        )
    counted = _Blocks(blocks, block_scales, outer, scheme)
    if looks_at_all:
        is_large = counted.amax >= counted.limit
        is_suspect |= is_large if rows is None else is_large & rows.unsqueeze(-1)
    return counted.among(is_suspect)


def _at_an_end(block_scales: Tensor, scheme: Scheme) -> Tensor:
    """Blocks that may be clamped or floored, by their byte."""
    if scheme.scale_rule is not ScaleRule.E4M3:
        return torch.zeros_like(block_scales, dtype=torch.bool)
    at_end = block_scales <= max(_COARSE_BYTE, scheme.least_byte)
    if scheme.underflow_byte != 0:
        at_end &= block_scales != 0
        at_end |= block_scales == scheme.underflow_byte
    return at_end | (block_scales == _LARGEST_BYTE) if scheme.outer == "static" else at_end


class _Blocks:
    """Blocks of B values: [..., B], with block_scales [...] and outer [...]."""

    def __init__(self, blocks: Tensor, block_scales: Tensor, outer: Tensor, scheme: Scheme) -> None:
        self._magnitude = (blocks.to(torch.float32) if blocks.dtype is torch.float64 else blocks).abs()
        largest = self._magnitude.amax(-1).to(torch.float32)
        self._is_finite = largest.isfinite()
        self.amax = torch.where(self._is_finite, largest, 0.0)
        """Largest magnitudes, 0 in blocks with NaN or Inf."""
        self._block_scales, self._outer, self._scheme = block_scales, outer, scheme
        self.limit = decode_scales(block_scales, outer, scheme).mul_(CLIPPED_FROM)
        """From where on values are clipped; 0 where the scale is, NaN where it is NaN."""

    def among(self, is_suspect: Tensor) -> Saturation:
        """Count in some of the blocks: bool [...]."""
        counts = is_suspect & self._is_finite
        limit = torch.where(counts & (self.limit > 0), self.limit, torch.nan)  # which nothing reaches
        clamped = floored = torch.zeros_like(counts)
        if self._scheme.scale_rule is ScaleRule.E4M3:
            raw = raw_block_scale(self.amax, self._outer, self._scheme)
            clamped = counts & (self._block_scales == _LARGEST_BYTE) & (raw > CLAMPED_ABOVE)
            floored = counts & (self.amax > 0) & (encode_e4m3(raw) < max(1, self._scheme.least_byte))
        return Saturation(
            values_clipped=(self._magnitude >= limit.unsqueeze(-1)).count_nonzero(),
            blocks_clamped=clamped.count_nonzero(),
            blocks_floored=floored.count_nonzero(),
        )

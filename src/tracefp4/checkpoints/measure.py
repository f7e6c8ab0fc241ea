"""How far a quantized matrix is from the weights: one row of numbers per module.

Chunks of rows stay in the processor's cache, and squares are summed in float32 along a row and in double precision
over rows, or in double precision throughout where float32 would run out of range: the numbers are for people, good
to six digits. Counts are exact.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tracefp4.errors import FormatError
from tracefp4.formats import BlockTensor
from tracefp4.formats.scaling import block_amax
from tracefp4.ops.dequantize import dequantize

_CHUNK_VALUES = 1 << 17
# Zero codes of either sign in every byte of two.
_ZERO_CODES = torch.tensor([(byte & 7 == 0) + (byte >> 4 & 7 == 0) for byte in range(256)])
_MAGNITUDES = 0x7777_7777_7777_7777
# A value above 7 would round to 8 if the grid went on: only there does its end at 6 cost more than a step.
_SATURATION = 7.0
# Below this sum, squares that float32 flushes to zero would show in the digits that are printed.
_LEAST_SQUARES = 1e-25


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleError:
    """Error of one module."""

    relative_error: float
    """|W - Q| / |W|, Frobenius norms; 0 for a matrix of zeros."""
    sqnr_db: float
    """20 log10 of the inverse; infinite where nothing changed."""
    max_error: float
    """Largest |w - q|."""
    zero_fraction: float
    """Share of values that read back 0."""
    saturated_values: int
    """Values beyond 7 times their decode scale, which the grid's end at 6 cuts."""
    lost_blocks: int
    """Blocks that are not zero and read back as zeros."""

    def to_dict(self) -> dict[str, float | int | None]:
        """As JSON holds it: an infinite ratio is null."""
        is_finite = math.isfinite(self.sqnr_db)
        return {
            "relative_error": self.relative_error,
            "sqnr_db": self.sqnr_db if is_finite else None,
            "max_error": self.max_error,
            "zero_fraction": self.zero_fraction,
            "saturated_values": self.saturated_values,
            "lost_blocks": self.lost_blocks,
        }


def measure(weight: Tensor, block: BlockTensor, *, name: str) -> ModuleError:
    """Compare a matrix with its bytes.

    Args:
        weight: float [out, in].
        block: its bytes.
        name: of the module, for errors.

    Raises:
        FormatError: NaN or Inf in the weights.
    """
    signal = noise = largest = 0.0
    zeros = saturated = lost = 0
    for start, rows, part in _chunks(weight, block):
        magnitude, finite = block_amax(rows.abs(), block.scheme.block_size)
        if finite is not None:
            raise FormatError(
                f"{name} holds NaN or Inf, first in rows {start} to {start + len(rows) - 1}. Weights must be finite "
                "to be quantized. Find what produced them; the checkpoint may be damaged."
            )
        values = dequantize(part)
        signal += _sum_of_squares(rows)
        difference = values - rows
        noise += _sum_of_squares(difference)
        largest = max(largest, *(abs(float(bound)) for bound in difference.aminmax()))
        scales = part.scales()
        zeros += _zeros(part, values, scales)
        saturated += _saturated(rows, magnitude, scales)
        lost += int(((_are_empty(part) | (scales == 0)) & (magnitude > 0)).sum())
    relative = math.sqrt(noise / signal) if signal else 0.0
    return ModuleError(
        relative_error=relative,
        sqnr_db=-20.0 * math.log10(relative) if relative else math.inf,
        max_error=largest,
        zero_fraction=zeros / weight.numel(),
        saturated_values=saturated,
        lost_blocks=lost,
    )


def _chunks(weight: Tensor, block: BlockTensor) -> Iterator[tuple[int, Tensor, BlockTensor]]:
    """Yield (first row, float32 rows, their bytes)."""
    step = max(1, _CHUNK_VALUES // weight.shape[-1])
    for start in range(0, weight.shape[0], step):
        yield start, weight[start : start + step].to(torch.float32), rows_of(block, start, start + step)


def _sum_of_squares(rows: Tensor) -> float:
    found = float(torch.linalg.vecdot(rows, rows).sum(dtype=torch.float64))
    if _LEAST_SQUARES < found < math.inf:
        return found
    return float(rows.to(torch.float64).square().sum())


def _zeros(part: BlockTensor, values: Tensor, scales: Tensor) -> int:
    """Count values that read back 0: from a histogram of bytes where every scale is above 0."""
    if bool((scales == 0).any()):
        return values.numel() - int(torch.count_nonzero(values))
    return int((torch.bincount(part.packed.flatten(), minlength=256) * _ZERO_CODES).sum())


def _saturated(rows: Tensor, magnitude: Tensor, scales: Tensor) -> int:
    """Count values beyond the end of the grid; only blocks whose maximum is there are looked at."""
    is_beyond = (magnitude > _SATURATION * scales) & (scales > 0)
    if not bool(is_beyond.any()):
        return 0
    blocks = rows.unflatten(-1, (magnitude.shape[-1], -1))[is_beyond].abs()
    return int((blocks > _SATURATION * scales[is_beyond].unsqueeze(-1)).sum())


def _are_empty(part: BlockTensor) -> Tensor:
    """Say of every block whether all its codes are zeros of either sign, 16 codes a word; bool [rows, G]."""
    words = part.packed.contiguous().view(torch.int64).bitwise_and(_MAGNITUDES) == 0
    return words.unflatten(-1, (part.block_scales.shape[-1], -1)).all(-1)


def rows_of(block: BlockTensor, start: int, stop: int) -> BlockTensor:
    """Return rows `start` to `stop` of a matrix with one outer scale; its bytes are shared."""
    return BlockTensor(
        packed=block.packed[start:stop],
        block_scales=block.block_scales[start:stop],
        outer=block.outer,
        scheme=block.scheme,
    )

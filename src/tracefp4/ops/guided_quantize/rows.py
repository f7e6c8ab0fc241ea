"""Rows over threads, for the launchers of this op: the Python side of rows.cuh. This module launches no rounding."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tracefp4.coding import SyndromeCode
from tracefp4.formats.scaling import outer_scale
from tracefp4.formats.scheme import Scheme
from tracefp4.ops.device import KernelFile, Launch, aligned
from tracefp4.ops.kernels import check_values, readable
from tracefp4.ops.nvrtc import Defines
from tracefp4.ops.rules import SchemeCase

WARP = 32
_SHORT_ROWS = 128
"""Threads of a block whose rows have up to 32 blocks of the scheme: several rows share it."""
_MAX_THREADS = 512


class Shape(NamedTuple):
    """How rows are spread over threads."""

    rows: int
    """Rows in all."""
    of_row: int
    """Threads of a row."""
    of_block: int
    """Threads of a thread block."""

    @property
    def slots(self) -> int:
        """Rows of a thread block."""
        return self.of_block // self.of_row

    @property
    def grid(self) -> int:
        """Thread blocks."""
        return -(-self.rows // self.slots)


def shape_of(x_NK: Tensor, scheme: Scheme) -> Shape:
    """Return how the rows of x are spread over threads: a block of the scheme each, if there are enough."""
    rows, num_blocks = x_NK.shape[0], x_NK.shape[1] // scheme.block_size
    if num_blocks <= WARP:
        return Shape(rows, 1 << (num_blocks - 1).bit_length(), _SHORT_ROWS)
    threads = min(-(-num_blocks // WARP) * WARP, _MAX_THREADS)
    return Shape(rows, threads, threads)


def readable_rows(x: Tensor) -> Tensor:
    """Return x as the kernels read it: contiguous and aligned float32 or bf16."""
    return aligned(readable(x if x.dtype is torch.bfloat16 else x.to(torch.float32)))


def rows_case(x: Tensor, scheme: Scheme) -> SchemeCase:
    """Return the case of rows that `readable_rows` makes readable."""
    return SchemeCase(scheme, torch.bfloat16 if x.dtype is torch.bfloat16 else torch.float32)


def check_rows(scheme: Scheme, codes: Sequence[SyndromeCode | None]) -> Tensor:
    """Return float32 rows on the CPU for comparisons with the reference, as wide as a block of every syndrome code: of
    values first, then of scales."""
    lengths = [0 if code is None else code.length for code in codes]
    widths = [length * unit for length, unit in zip(lengths, (1, scheme.block_size), strict=False)]
    x = check_values()
    return x.repeat(1, max(1, *(-(-width // x.shape[1]) for width in (*widths, 1))))


def outer_of(
    x_NK: Tensor, scheme: Scheme, exponent: int | None, file: KernelFile, defines: Defines
) -> Tensor:
    """Return the outer scales; those of rows are not found yet. The file has a kernel `row_maxima`."""
    if scheme.outer == "row":
        dtype = torch.int8 if scheme.is_exact_in_bf16 else torch.float32
        return torch.empty(len(x_NK), dtype=dtype, device=x_NK.device)
    amax = torch.empty((len(x_NK), 1), device=x_NK.device)
    if scheme.outer == "tensor":
        threads = min(-(-x_NK.shape[1] // (scheme.block_size * WARP)) * WARP, _MAX_THREADS)
        launch = Launch("row_maxima", (len(x_NK),), threads, defines)
        file.launch(launch, x_NK, x_NK.shape[1], amax, device=x_NK.device)
    return outer_scale(amax, scheme, exponent)


def row_variant(x_NK: Tensor, scheme: Scheme) -> dict[str, int | str]:
    """Return the defines of rows.cuh."""
    return rows_case(x_NK, scheme).defines | {"PER_ROW": int(scheme.outer == "row")}

"""Rows rounded to nearest, for ops that quantize what they compute: the definition, and room for the bytes.

Same bytes as `quantize`, which such ops cannot call: ops do not import each other. Schemes whose outer scale depends on
other rows are refused.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tracefp4.errors import FormatError
from tracefp4.formats.encoding import encode, read_operand
from tracefp4.formats.scaling import outer_scale
from tracefp4.formats.scheme import Scheme
from tracefp4.formats.schemes import NVFP4_ROW_POW2
from tracefp4.formats.selection import select_block_scales
from tracefp4.formats.tensor import BlockTensor
from tracefp4.ops.rules import SchemeCase

_WARP, _EIGHT = 32, 8
_MAX_THREADS = 512
"""Of a thread block, which takes a row."""


def check_scheme(op: str, width: int, scheme: Scheme, exponent: int | None) -> None:
    """Refuse what rows of a width cannot be quantized under.

    Raises:
        FormatError: When rows would depend on each other, the width is no multiple of the block, or a static scheme
            lacks its exponent, or another has one.
    """
    fits = scheme.outer != "tensor" and width % scheme.block_size == 0
    if not fits or (scheme.outer == "static") != (exponent is not None):
        raise FormatError(
            f"{op} quantizes rows one by one; got {scheme.name} with exponent {exponent} for rows of {width}. The "
            "outer scale must be per row, static with an exponent, or none, and the width a multiple of the block. "
            "Use NVFP4_ROW_POW2."
        )


def nearest_rows(x: Tensor, scheme: Scheme, exponent: int | None) -> BlockTensor:
    """Return checked rows [N, K] rounded to nearest."""
    operand = read_operand(x, scheme)
    outer = outer_scale(operand.amax, scheme, exponent)
    scales = select_block_scales(operand.magnitude, operand.amax, outer, scheme, operand.finite)
    return encode(operand, scales, outer, scheme)


def empty_rows(
    num_rows: int, width: int, scheme: Scheme, exponent: int | None, device: torch.device
) -> BlockTensor:
    """Return a BlockTensor to be filled; its outer scale is there already unless every row has one."""
    if scheme.outer == "row":
        dtype = torch.int8 if scheme.is_exact_in_bf16 else torch.float32
        outer = torch.empty(num_rows, dtype=dtype, device=device)
    else:
        outer = outer_scale(torch.empty(0, device=device), scheme, exponent)
    return BlockTensor(
        packed=torch.empty((num_rows, width // 2), dtype=torch.uint8, device=device),
        block_scales=torch.empty((num_rows, width // scheme.block_size), dtype=torch.uint8, device=device),
        outer=outer,
        scheme=scheme,
    )


class RowsCase(NamedTuple):
    """What kernels of rows are specialised for, which round what they wrote."""

    scheme: Scheme
    """Of the copy in FP4; the usual one where none is wanted."""
    parts: int
    """How often a thread takes eight elements."""

    @property
    def defines(self) -> dict[str, int | str]:
        """The constants of bf16_rows.cuh."""
        own = {"OUTER_OF_ROW": int(self.scheme.outer == "row"), "PARTS": self.parts}
        return SchemeCase(self.scheme, torch.bfloat16).defines | own

    def threads(self, width: int) -> int:
        """Threads for a row: one for every eight elements, if they are that many."""
        return min(-(-width // (_EIGHT * _WARP)) * _WARP, _MAX_THREADS)

    def rule(self) -> tuple[Scheme, int | None]:
        """A rule under the scheme, for comparisons with the reference."""
        return self.scheme, 3 if self.scheme.outer == "static" else None

    def widened(self, x: Tensor) -> Tensor:
        """Return rows [N, K] repeated until they are wide enough for this case."""
        least = ((self.parts - 1) * _MAX_THREADS + 1) * _EIGHT
        return x.repeat(1, -(-least // x.shape[1]))

    def __str__(self) -> str:
        return f"{self.scheme.name} with {_EIGHT * self.parts} elements a thread"


def rows_case(width: int, rule: tuple[Scheme, int | None] | None) -> RowsCase:
    """Return the case of rows of a width, rounded under a rule or not at all."""
    scheme = NVFP4_ROW_POW2 if rule is None else rule[0]
    return RowsCase(scheme, max(1, -(-width // (_EIGHT * _MAX_THREADS))))

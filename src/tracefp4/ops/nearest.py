"""Rows rounded to nearest, for ops that quantize what they compute: the definition, and room for the bytes.

Same bytes as `quantize`, which such ops cannot call: ops do not import each other. Schemes whose outer scale depends on
other rows are refused.
"""

import torch
from torch import Tensor

from tracefp4.errors import FormatError
from tracefp4.formats.encoding import encode, read_operand
from tracefp4.formats.scaling import outer_scale
from tracefp4.formats.scheme import Scheme
from tracefp4.formats.selection import select_block_scales
from tracefp4.formats.tensor import BlockTensor
from tracefp4.ops.rules import rules_of


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


def variant(scheme: Scheme) -> dict[str, int | str]:
    """Return the defines of rows.cuh for bf16 rows under a scheme."""
    rules = ",".join(str(n) for n in rules_of(scheme).tolist())
    return {"SCHEME": rules, "DTYPE": 1, "OUTER_OF_ROW": int(scheme.outer == "row")}

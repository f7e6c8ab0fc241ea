"""Quantizing a part of a tensor to the bytes that the whole tensor would have there.

    block scale, codes     depend on one block, so a part of whole blocks has them      (blocks are never split)
    outer scale            of a row or a matrix: from the maximum over all parts        (all-reduced with MAX)

A mean of maxima, a part's own maximum or a cut inside a block all give other bytes, and nothing says so later. The
trainer here needs none of this: it quantizes whole matrices (`experts`) and whole rows. It is for code that holds
parts, such as tensor-parallel layers. This module never decides how tensors are split.
"""

from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from tracefp4.errors import FormatError
from tracefp4.formats import BlockTensor, Scheme
from tracefp4.formats.calibration import check_operand
from tracefp4.formats.encoding import encode, read_operand
from tracefp4.formats.scaling import outer_scale
from tracefp4.formats.selection import select_block_scales
from tracefp4.ops.quantize import quantize

Split = Literal["rows", "columns", "matrices"]
"""Which dimension of [..., R, K] is split over ranks: R, K (the one with the blocks), or a leading one."""
SPLITS: tuple[Split, ...] = ("rows", "columns", "matrices")


def block_spans(
    width: int, num_parts: int, *, block_size: int = 16, needs_equal: bool = False
) -> list[tuple[int, int]]:
    """Return the [first, last) columns of every part, cut between blocks, as equal as whole blocks allow.

    Args:
        width: columns, a positive multiple of block_size.
        num_parts: parts, 1 .. width / block_size; the first ones get a block more where it does not divide.
        block_size: values that share a scale.
        needs_equal: refuse parts of different widths instead.

    Raises:
        FormatError: columns that are not whole blocks, more parts than blocks, or unequal parts where equal ones are
            needed; the message names the numbers of parts that would do.

    Example:
        >>> block_spans(464, 4)
        [(0, 128), (128, 240), (240, 352), (352, 464)]
    """
    blocks = width // block_size
    if width <= 0 or width % block_size or not 1 <= num_parts <= blocks:
        raise FormatError(
            f"A width of {width} cannot be cut into {num_parts} parts of whole blocks of {block_size}: it must be a "
            f"multiple of {block_size}, with at least a block per part. Pad it, or cut another dimension."
        )
    if needs_equal and blocks % num_parts:
        legal = [parts for parts in range(1, blocks + 1) if blocks % parts == 0]
        raise FormatError(
            f"A width of {width} has {blocks} blocks of {block_size}, which do not divide into {num_parts} equal "
            f"parts: each would get {width / num_parts:g} columns. Equal parts of whole blocks are possible for "
            f"{legal}. Use one of them, or unequal parts."
        )
    sizes = [blocks // num_parts + (part < blocks % num_parts) for part in range(num_parts)]
    ends = [sum(sizes[: part + 1]) * block_size for part in range(num_parts)]
    return [(end - size * block_size, end) for end, size in zip(ends, sizes, strict=True)]


def quantize_part(
    x: Tensor, *, scheme: Scheme, split: Split, group: ProcessGroup, exponent: int | None = None
) -> BlockTensor:
    """Quantize this rank's part of a tensor to the bytes that the whole tensor has there.

    Args:
        x: float [..., R, K], this rank's part, whole blocks. Parts may differ in size along the split dimension.
        scheme: the scheme of the whole tensor.
        split: which dimension the ranks split.
        group: the ranks that hold the parts; all of them must call.
        exponent: outer exponent of a static scheme, equal on all ranks; None for others.

    Returns:
        The part's bytes, with the outer scale of the whole: joined over the ranks they are `quantize(whole)`. Blocks
        with NaN or Inf do not count in the maximum, here as there.

    Raises:
        FormatError: an unknown split, or a part that is not whole blocks.
    """
    check_operand(x, scheme, exponent)
    if split not in SPLITS or x.dim() < 2 or x.shape[-1] == 0 or x.shape[-1] % scheme.block_size:
        raise FormatError(
            f"quantize_part needs a part [..., R, K] of whole blocks of {scheme.block_size} and a split among "
            f"{', '.join(SPLITS)}; got shape {tuple(x.shape)}, {split!r}. Cut at the columns of `block_spans`."
        )
    shares_outer = {"row": ("columns",), "tensor": ("rows", "columns")}.get(scheme.outer, ())
    if split not in shares_outer:
        return quantize(x, scheme=scheme, exponent=exponent)
    operand = read_operand(x, scheme)
    largest = operand.amax.amax(-1) if x.shape[-2] else operand.amax.new_zeros(x.shape[:-1])
    if scheme.outer == "tensor":
        largest = largest.amax(-1, keepdim=True) if x.shape[-2] else largest.new_zeros((*x.shape[:-2], 1))
    outer = outer_scale(largest_of_ranks(largest, group).unsqueeze(-1), scheme)
    block_scales = select_block_scales(operand.magnitude, operand.amax, outer, scheme, operand.finite)
    return encode(operand, block_scales, outer, scheme)


def largest_of_ranks(values: Tensor, group: ProcessGroup) -> Tensor:
    """Return the largest value over the ranks, elementwise: the one right way to join maxima and exponents.

    Args:
        values: any number dtype the backend can reduce; not changed.
        group: the ranks.
    """
    joined = values.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(joined, op=dist.ReduceOp.MAX, group=group)
    return joined

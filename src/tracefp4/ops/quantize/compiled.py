"""quantize by the functions of kernel.c: the same bytes as `reference.py`, in one sweep over x.

The sweep follows every scheme (`ops/scaling.h`). An outer scale per row is found in it; one per tensor needs a sweep
for the maxima before.
"""

from collections.abc import Iterator
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from tracefp4.formats.scaling import outer_scale
from tracefp4.formats.scheme import Scheme
from tracefp4.formats.schemes import SCHEMES
from tracefp4.formats.tensor import BlockTensor
from tracefp4.ops.kernels import DTYPE, Library, check_values, empty, first_difference, readable
from tracefp4.ops.quantize.reference import quantize_reference, quantize_with_scales_reference
from tracefp4.ops.rules import rules_of


def quantize_compiled(x: Tensor, scheme: Scheme, exponent: int | None) -> BlockTensor:
    """Quantize a checked tensor; see `quantize`."""
    x = readable(x)
    lead, width = x.shape[:-1], x.shape[-1]
    rows = prod(lead)
    if scheme.outer == "row":
        dtype = torch.int8 if scheme.is_exact_in_bf16 else torch.float32
        outer, rows_per_outer = torch.empty(lead, dtype=dtype, device="cpu"), 0
    elif scheme.outer == "tensor":
        amax = torch.empty((*lead, 1), device="cpu")
        LIBRARY.call("row_amax", rows, x.numel(), x, DTYPE[x.dtype], width, amax)
        outer, rows_per_outer = outer_scale(amax, scheme), lead[-1]
    else:
        outer, rows_per_outer = outer_scale(torch.empty(0, device="cpu"), scheme, exponent), rows
    block_scales = torch.empty((*lead, width // scheme.block_size), dtype=torch.uint8, device="cpu")
    packed = _encode(x, scheme, (rows_per_outer, outer), block_scales, has_scales=False)
    return BlockTensor(packed=packed, block_scales=block_scales, outer=outer, scheme=scheme)


def quantize_with_scales_compiled(
    x: Tensor, block_scales: Tensor, outer: Tensor, scheme: Scheme
) -> BlockTensor:
    """Choose the codes of a checked tensor under given scales; see `quantize_with_scales`."""
    block_scales = block_scales.clone(memory_format=torch.contiguous_format)
    rows_per_outer = prod(x.shape[outer.dim() : -1])
    packed = _encode(readable(x), scheme, (rows_per_outer, outer.contiguous()), block_scales, has_scales=True)
    return BlockTensor(packed=packed, block_scales=block_scales, outer=outer, scheme=scheme)


def _encode(
    x: Tensor, scheme: Scheme, outer_of_rows: tuple[int, Tensor], block_scales: Tensor, *, has_scales: bool
) -> Tensor:
    """Return the packed codes of x; `block_scales`, and the outer scale that no row shares, are written."""
    packed = empty((*x.shape[:-1], x.shape[-1] // 2), torch.uint8)
    operands = (rules_of(scheme), x, DTYPE[x.dtype], x.shape[-1], *outer_of_rows, int(has_scales))
    LIBRARY.call("quantize_rows", prod(x.shape[:-1]), x.numel(), *operands, block_scales, packed)
    return packed


def pack_codes_compiled(codes: Tensor) -> Tensor:
    """Pack two codes a byte, as `formats.packing.pack_codes`.

    Args:
        codes: Contiguous uint8 [..., K] on the CPU, values 0..15, K even.

    Returns:
        uint8 [..., K / 2].
    """
    packed = empty((*codes.shape[:-1], codes.shape[-1] // 2), torch.uint8)
    LIBRARY.call("pack_codes", packed.numel(), codes.numel(), codes, packed)
    return packed


def _pairs() -> Iterator[tuple[str, Tensor, Tensor]]:
    x = check_values()
    one_of_each = {(s.order, s.scale_rule, s.candidates, s.outer): s for s in SCHEMES.values()}
    for scheme in one_of_each.values():
        exponent = 3 if scheme.outer == "static" else None
        for dtype in (torch.float32, torch.bfloat16):
            got = quantize_compiled(x.to(dtype), scheme, exponent)
            wanted = quantize_reference(x.to(dtype), scheme, exponent)
            yield "outer scales", got.outer, wanted.outer
            yield "block scales", got.block_scales, wanted.block_scales
            yield "packed codes", got.packed, wanted.packed
            given = (x.flip(0).to(dtype), wanted.block_scales, wanted.outer, scheme)
            got, wanted = quantize_with_scales_compiled(*given), quantize_with_scales_reference(*given)
            yield "given block scales", got.block_scales, wanted.block_scales
            yield "packed codes under given scales", got.packed, wanted.packed


LIBRARY = Library(
    Path(__file__).with_name("kernel.c"),
    {
        "quantize_rows": "ppiqqpipp",
        "row_amax": "piqp",
        "pack_codes": "pp",
    },
    check=lambda: first_difference(_pairs()),
)
"""The functions of kernel.c."""

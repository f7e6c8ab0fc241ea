"""quantize by the kernels of kernel.cu: the same bytes as `reference.py`, x read once."""

from collections.abc import Iterator
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from tracefp4.formats.scaling import outer_scale
from tracefp4.formats.scheme import Scheme
from tracefp4.formats.schemes import NVFP4_ROW_POW2
from tracefp4.formats.tensor import BlockTensor
from tracefp4.ops.device import DeviceLibrary, Launch, aligned
from tracefp4.ops.kernels import check_values, first_difference, readable
from tracefp4.ops.quantize.reference import quantize_reference, quantize_with_scales_reference
from tracefp4.ops.rules import SchemeCase, case_of

_WARP, _MAX_THREADS = 32, 512
"""Threads of a warp, and of a thread block at most."""
_MANY_WARPS = 4096
"""Beyond so many warps of a block of the scheme per thread, which fill a GPU, a thread takes several blocks instead."""


def quantize_on_device(x: Tensor, scheme: Scheme, exponent: int | None) -> BlockTensor:
    """Quantize a checked tensor; see `quantize`."""
    x = aligned(readable(x))
    lead, width = x.shape[:-1], x.shape[-1]
    block_scales = torch.empty((*lead, width // scheme.block_size), dtype=torch.uint8, device=x.device)
    packed = torch.empty((*lead, width // 2), dtype=torch.uint8, device=x.device)
    if scheme.outer == "row":
        dtype = torch.int8 if scheme.is_exact_in_bf16 else torch.float32
        outer = torch.empty(lead, dtype=dtype, device=x.device)
        _encode_rows(x, scheme, outer, block_scales, packed)
    else:
        amax = torch.empty((*lead, 1) if scheme.outer == "tensor" else 0, device=x.device)
        if scheme.outer == "tensor":
            LIBRARY.launch(_over_rows("row_maxima", x, scheme), x, width, amax, device=x.device)
        outer = outer_scale(amax, scheme, exponent)
        _encode(x, scheme, outer, block_scales, packed, has_scales=False)
    return BlockTensor(packed=packed, block_scales=block_scales, outer=outer, scheme=scheme)


def quantize_with_scales_on_device(
    x: Tensor, block_scales: Tensor, outer: Tensor, scheme: Scheme
) -> BlockTensor:
    """Choose the codes of a checked tensor under given scales; see `quantize_with_scales`."""
    x = aligned(readable(x))
    block_scales = block_scales.clone(memory_format=torch.contiguous_format)
    packed = torch.empty((*x.shape[:-1], x.shape[-1] // 2), dtype=torch.uint8, device=x.device)
    _encode(x, scheme, outer.contiguous(), block_scales, packed, has_scales=True)
    return BlockTensor(packed=packed, block_scales=block_scales, outer=outer, scheme=scheme)


def _over_rows(kernel: str, x: Tensor, scheme: Scheme, held: int = 1) -> Launch:
    """A thread block per row, with a thread for so many blocks of the scheme, if they are not too many."""
    num_blocks = x.shape[-1] // scheme.block_size
    threads = min(-(-num_blocks // (_WARP * held)) * _WARP, _MAX_THREADS)
    return Launch(kernel, (prod(x.shape[:-1]),), threads, case_of(x, scheme).defines)


def _encode_rows(
    x: Tensor,
    scheme: Scheme,
    outer: Tensor,
    block_scales: Tensor,
    packed: Tensor,
    *,
    many: bool | None = None,
) -> None:
    """Find the outer scale of every row, and write everything; `many` overrules what the number of rows asks for."""
    if many is None:
        many = block_scales.numel() > _MANY_WARPS * _WARP
    held = (2 if x.dtype is torch.float32 else 4) if many else 1
    launch = _over_rows("quantize_many" if many else "quantize_few", x, scheme, held)
    LIBRARY.launch(launch, x, x.shape[-1], outer, block_scales, packed, device=x.device)


def _encode(
    x: Tensor, scheme: Scheme, outer: Tensor, block_scales: Tensor, packed: Tensor, *, has_scales: bool
) -> None:
    """Write the codes of x under outer scales that are known, and block scales unless they are given."""
    num_blocks = block_scales.numel()
    blocks_per_outer = max(1, prod(block_scales.shape[outer.dim() :]))
    launch = Launch("quantize_blocks", (-(-num_blocks // 256),), 256, case_of(x, scheme).defines)
    operands = (x, num_blocks, blocks_per_outer, outer, int(has_scales))
    LIBRARY.launch(launch, *operands, block_scales, packed, device=x.device)


def differences(device: torch.device, case: SchemeCase) -> str | None:
    """Compare with the reference under one scheme and dtype; return what differs, or None."""
    return first_difference(_pairs(device, case))


def _pairs(device: torch.device, case: SchemeCase) -> Iterator[tuple[str, Tensor, Tensor]]:
    scheme, x = case.scheme, check_values().to(device, case.dtype)
    exponent = 3 if scheme.outer == "static" else None
    got, wanted = quantize_on_device(x, scheme, exponent), quantize_reference(x, scheme, exponent)
    yield "outer scales", got.outer, wanted.outer
    yield "block scales", got.block_scales, wanted.block_scales
    yield "packed codes", got.packed, wanted.packed
    if scheme.outer == "row":  # a check has few rows
        parts = (got.outer, got.block_scales, got.packed)
        for part in parts:
            part.fill_(99)
        _encode_rows(x, scheme, *parts, many=True)
        yield "outer scales of many rows", got.outer, wanted.outer
        yield "block scales of many rows", got.block_scales, wanted.block_scales
        yield "packed codes of many rows", got.packed, wanted.packed
    given = (x.flip(0), wanted.block_scales, wanted.outer, scheme)
    got, wanted = quantize_with_scales_on_device(*given), quantize_with_scales_reference(*given)
    yield "given block scales", got.block_scales, wanted.block_scales
    yield "packed codes under given scales", got.packed, wanted.packed


LIBRARY = DeviceLibrary(
    Path(__file__).with_name("kernel.cu"), differences, SchemeCase(NVFP4_ROW_POW2, torch.bfloat16)
)
"""The kernels of kernel.cu."""

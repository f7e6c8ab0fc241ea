"""search_scales by the functions of kernel.c: the same bytes as `reference.py`, in one sweep after that for the
outer scale."""

from collections.abc import Iterator
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from tracefp4.formats.scaling import outer_scale
from tracefp4.formats.scheme import Scheme
from tracefp4.formats.schemes import NVFP4_ROW_POW2, NVFP4_STATIC_VLLM, NVFP4_TENSOR_FP32
from tracefp4.formats.tensor import BlockTensor
from tracefp4.ops.kernels import DTYPE, Library, check_values, empty, first_difference, readable
from tracefp4.ops.rules import rules_of
from tracefp4.ops.search_scales.reference import OFFSETS, search_scales_reference

_OFFSETS = torch.tensor(OFFSETS, dtype=torch.int32, device="cpu")


def search_scales_compiled(
    w: Tensor, importance: Tensor | None, scheme: Scheme, exponent: int | None
) -> BlockTensor:
    """Search the scales of a checked tensor; see `search_scales_reference`."""
    w = readable(w)
    lead, width = w.shape[:-1], w.shape[-1]
    rows, dtype = prod(lead), DTYPE[w.dtype]
    amax = torch.empty((*lead, 1), device="cpu")
    LIBRARY.call("row_amax", rows, w.numel(), w, dtype, width, amax)
    outer = outer_scale(amax, scheme, exponent)
    block_scales = torch.empty((*lead, width // scheme.block_size), dtype=torch.uint8, device="cpu")
    packed = empty((*lead, width // 2), torch.uint8)
    weights, weights_of_rows = (None, None) if importance is None else _matrix(importance, lead)
    operands = (rules_of(scheme), w, dtype, width, prod(lead[outer.dim() :]), outer)
    searched = (weights, weights_of_rows, _OFFSETS, len(OFFSETS))
    LIBRARY.call("search_rows", rows, w.numel() * len(OFFSETS), *operands, *searched, block_scales, packed)
    return BlockTensor(packed=packed, block_scales=block_scales, outer=outer, scheme=scheme)


def _matrix(importance: Tensor, lead: torch.Size) -> tuple[Tensor, Tensor]:
    """Return the different rows of importances [R, K], and which of them each row of the weight has, int64."""
    different = importance.reshape(-1, importance.shape[-1]).contiguous()
    index = torch.arange(len(different), device="cpu").view(importance.shape[:-1])
    return different, index.expand(lead).contiguous()


def _pairs() -> Iterator[tuple[str, Tensor, Tensor]]:
    w = check_values()
    channels = torch.linspace(0.0, 2.0, w.shape[-1], device="cpu").square()
    elements = torch.stack([channels.roll(row) for row in range(len(w))])
    for scheme, exponent in ((NVFP4_ROW_POW2, None), (NVFP4_STATIC_VLLM, 3), (NVFP4_TENSOR_FP32, None)):
        for importance in (None, channels, elements, torch.zeros_like(channels)):
            for dtype in (torch.float32, torch.bfloat16):
                got = search_scales_compiled(w.to(dtype), importance, scheme, exponent)
                wanted = search_scales_reference(w.to(dtype), importance, scheme, exponent)
                yield "outer scales", got.outer, wanted.outer
                yield "block scales", got.block_scales, wanted.block_scales
                yield "packed codes", got.packed, wanted.packed


LIBRARY = Library(
    Path(__file__).with_name("kernel.c"),
    {"search_rows": "ppiqqppppipp", "row_amax": "piqp"},
    check=lambda: first_difference(_pairs()),
)
"""The functions of kernel.c."""

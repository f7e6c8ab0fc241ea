"""kv_append by the kernels of kernel.cu and quantizing.cu: the same bytes as `reference.py`.

A launch writes bytes of its own tokens only, so appends to one page from several launches need no order among tokens.
"""

from collections.abc import Iterator
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from tracefp4.formats.fragments import FragmentPages, to_fragments
from tracefp4.formats.scheme import Scheme
from tracefp4.formats.schemes import NVFP4_KV
from tracefp4.formats.tensor import BlockTensor
from tracefp4.ops.device import DeviceLibrary, KernelFile, Launch, aligned, heads_in_place
from tracefp4.ops.kernels import DTYPE, check_values, first_difference
from tracefp4.ops.kv_append.reference import append_reference, quantize_append_reference
from tracefp4.ops.pages import Pages, QuantizedPages
from tracefp4.ops.rules import SchemeCase, case_of

_THREADS = 128
_ORDERS = {"k": 1, "v": 2}
"""`enum order_of_pages` of places.cuh; plain pages are 0."""


def append_on_device(pages: Pages, rows: BlockTensor | Tensor, slots: Tensor) -> None:
    """Store checked rows; see `kv_append`."""
    if isinstance(pages, Tensor):
        assert isinstance(rows, Tensor)
        _append(pages, rows.to(pages.dtype), slots)
        return
    assert isinstance(rows, BlockTensor)
    if isinstance(pages, BlockTensor):
        _append(pages.packed, rows.packed, slots)
        _append(pages.block_scales, rows.block_scales, slots)
        return
    num_tokens, num_heads, num_blocks = rows.block_scales.shape
    launch = Launch("append_blocks", (-(-rows.block_scales.numel() // _THREADS),), _THREADS, {})
    operands = (aligned(rows.packed), rows.block_scales.contiguous(), slots.contiguous())
    sizes = (num_tokens, num_heads, num_blocks, _num_slots(pages.packed), _ORDERS[pages.kind])
    LIBRARY.launch(launch, *operands, *sizes, pages.packed, pages.block_scales, device=slots.device)


def quantize_append_on_device(
    keys: QuantizedPages, values: QuantizedPages, k: Tensor, v: Tensor, slots: Tensor
) -> tuple[BlockTensor, BlockTensor]:
    """Quantize and store checked rows; see `kv_quantize_append`."""
    k, v = (heads_in_place(x if x.dtype in DTYPE else x.to(torch.float32)) for x in (k, v))
    num_tokens, num_heads, head_dim = k.shape
    num_blocks = head_dim // keys.scheme.block_size
    rows = [
        BlockTensor(
            packed=torch.empty((num_tokens, num_heads, head_dim // 2), dtype=torch.uint8, device=k.device),
            block_scales=torch.empty((num_tokens, num_heads, num_blocks), dtype=torch.uint8, device=k.device),
            outer=pages.outer,
            scheme=pages.scheme,
        )
        for pages in (keys, values)
    ]
    grid = (-(-num_tokens * num_heads * num_blocks // _THREADS), 2)
    sizes = (num_tokens, num_heads, num_blocks, _num_slots(keys.packed))
    strides = [x.stride(0) // keys.scheme.block_size for x in (k, v)]
    outers = [int(pages.outer) for pages in (keys, values)]
    orders = [_ORDERS[p.kind] if isinstance(p, FragmentPages) else 0 for p in (keys, values)]
    parts = [part for p in (*rows, keys, values) for part in (p.packed, p.block_scales)]
    launch = Launch("quantize_append", grid, _THREADS, case_of(k, keys.scheme).defines)
    places = (*sizes, *strides, *outers, *orders)
    QUANTIZING.launch(launch, k, v, slots.contiguous(), *places, *parts, device=k.device)
    return rows[0], rows[1]


def _append(pages: Tensor, rows: Tensor, slots: Tensor) -> None:
    """Copy rows [T, C, W] to slots [T] of pages [C, F, S, W], 16 bytes at a time where they fit."""
    rows = aligned(rows)
    width = rows.shape[-1] * rows.element_size()
    unit = 16 if width % 16 == 0 and pages.data_ptr() % 16 == 0 else 1
    count = prod(rows.shape[:2]) * width // unit
    launch = Launch(
        "append_16_bytes" if unit == 16 else "append_bytes", (-(-count // _THREADS),), _THREADS, {}
    )
    sizes = (*rows.shape[:2], width // unit, _num_slots(pages))
    LIBRARY.launch(launch, rows, slots.contiguous(), *sizes, pages, device=slots.device)


def _num_slots(pages: Tensor) -> int:
    return pages.shape[1] * pages.shape[2]


def differences(device: torch.device, case: SchemeCase | None) -> str | None:
    """Compare pages of every layout after an append with the reference's; return what differs, or None.

    Args:
        device: The GPU.
        case: Of `kv_quantize_append`; None for `kv_append`, whose kernels move bytes of any scheme.
    """
    return first_difference(_moved(device) if case is None else _quantized(device, case))


def _quantized(device: torch.device, case: SchemeCase) -> Iterator[tuple[str, Tensor, Tensor]]:
    rows, slots = _check_rows(device)
    rows = rows.to(case.dtype)
    for is_plain in (True, False):
        here, there = (_empty_pages(device, case.scheme, is_plain=is_plain) for _ in range(2))
        found = quantize_append_on_device(*there, rows, rows.flip(0), slots)
        wanted = quantize_append_reference(*here, rows, rows.flip(0), slots)
        for new, old in zip((*found, *there), (*wanted, *here), strict=True):
            yield "quantized codes", new.packed, old.packed
            yield "block scales", new.block_scales, old.block_scales


def _moved(device: torch.device) -> Iterator[tuple[str, Tensor, Tensor]]:
    rows, slots = _check_rows(device)
    quantized = quantize_append_reference(*_empty_pages(device, NVFP4_KV), rows, rows.flip(0), slots)
    for is_plain in (True, False):
        here, there = (_empty_pages(device, NVFP4_KV, is_plain=is_plain) for _ in range(2))
        for to, of, bytes_of in zip(there, here, quantized, strict=True):
            append_on_device(to, bytes_of, slots.flip(0))
            append_reference(of, bytes_of, slots.flip(0))
            yield "appended codes", to.packed, of.packed
            yield "appended block scales", to.block_scales, of.block_scales
    there_plain, here_plain = (torch.zeros(2, 3, 16, 64, dtype=rows.dtype, device=device) for _ in range(2))
    append_on_device(there_plain, rows, slots)
    append_reference(here_plain, rows, slots)
    yield "appended values", there_plain, here_plain


def _check_rows(device: torch.device) -> tuple[Tensor, Tensor]:
    rows = check_values().to(device, torch.bfloat16).view(4, 2, 64)
    return rows, torch.tensor([33, 0, 31, 17], device=device)


def _empty_pages(
    device: torch.device, scheme: Scheme, *, is_plain: bool = True
) -> tuple[QuantizedPages, QuantizedPages]:
    pages = [
        BlockTensor(
            packed=torch.zeros(2, 3, 16, 32, dtype=torch.uint8, device=device),
            block_scales=torch.zeros(2, 3, 16, 4, dtype=torch.uint8, device=device),
            outer=torch.tensor(exponent, dtype=torch.int8, device="cpu"),
            scheme=scheme,
        )
        for exponent in (2, -3)
    ]
    return (pages[0], pages[1]) if is_plain else (to_fragments(pages[0], "k"), to_fragments(pages[1], "v"))


LIBRARY = DeviceLibrary(Path(__file__).with_name("kernel.cu"), differences, None)
"""The kernels of kernel.cu, which move bytes; its check covers quantizing.cu, too."""
QUANTIZING = KernelFile(Path(__file__).with_name("quantizing.cu"))
"""The kernel of quantizing.cu."""

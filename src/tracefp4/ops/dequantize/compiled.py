"""dequantize by the functions of kernel.c: the same values as `reference.py`, decoded in one sweep. Under a
float32 outer scale, `formats` finds the decode scales first, on one number per block."""

from collections.abc import Iterator
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from tracefp4.formats.schemes import MXFP4_FLOOR, NVFP4_ROW_FP32, NVFP4_ROW_POW2
from tracefp4.formats.tensor import BlockTensor
from tracefp4.ops.dequantize.reference import dequantize_reference
from tracefp4.ops.kernels import DTYPE, Library, empty, first_difference

_SCALES = {"exponent": 0, "none": 1}
_FOUND = 2
"""`enum scales` of kernel.c: what the kernel decodes itself; other decode scales are found before."""


def dequantize_compiled(t: BlockTensor, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """Decode checked bytes; see `dequantize`. float64 values are float32 values, widened."""
    kept = dtype if dtype in (torch.float32, torch.bfloat16) else torch.float32
    values = out if out is not None and kept is dtype else empty(tuple(t.shape), kept)
    lead, width = t.shape[:-1], t.shape[-1]
    rows = prod(lead)
    rows_per_outer = {"row": 1, "tensor": lead[-1] if lead else 1}.get(t.scheme.outer, rows)
    scales = _SCALES.get(t.scheme.outer_kind, _FOUND)
    block_scales = t.scales() if scales == _FOUND else t.block_scales
    parts = (t.packed.contiguous(), block_scales.contiguous(), t.outer.contiguous())
    operands = (*parts, scales, width, rows_per_outer, DTYPE[kept], values)
    LIBRARY.call("dequantize", rows, values.numel(), *operands)
    if out is not None:
        return values if values is out else out.copy_(values)
    return values.to(dtype)


def unpack_codes_compiled(packed: Tensor) -> Tensor:
    """Unpack two codes a byte, as `formats.packing.unpack_codes`.

    Args:
        packed: Contiguous uint8 [..., K / 2] on the CPU.

    Returns:
        uint8 [..., K], values 0..15.
    """
    codes = empty((*packed.shape[:-1], packed.shape[-1] * 2), torch.uint8)
    LIBRARY.call("unpack_codes", packed.numel(), codes.numel(), packed, codes)
    return codes


def _pairs() -> Iterator[tuple[str, Tensor, Tensor]]:
    every_byte = torch.arange(256, dtype=torch.uint8, device="cpu")
    outer = torch.tensor([-110, -9, -1, 0, 1, 5, 60, 116], dtype=torch.int8, device="cpu")
    for scheme in (NVFP4_ROW_POW2, NVFP4_ROW_FP32, MXFP4_FLOOR):
        t = BlockTensor(
            packed=every_byte.repeat(8, scheme.block_size // 16),
            block_scales=every_byte.view(8, 32),
            outer={"exponent": outer, "multiplier": outer * 0.3}.get(scheme.outer_kind, outer.new_zeros(())),
            scheme=scheme,
        )
        for dtype in (torch.float32, torch.bfloat16)[: 1 + scheme.is_exact_in_bf16]:
            yield f"{scheme.name} values", dequantize_compiled(t, dtype), dequantize_reference(t, dtype)


LIBRARY = Library(
    Path(__file__).with_name("kernel.c"),
    {"dequantize": "pppiqqip", "unpack_codes": "pp"},
    check=lambda: first_difference(_pairs()),
)
"""The functions of kernel.c."""

"""dequantize by the kernel of kernel.cu: the same values as `reference.py`, codes read once."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from tracefp4.formats.schemes import NVFP4_ROW_POW2
from tracefp4.formats.tensor import BlockTensor
from tracefp4.ops.dequantize.reference import dequantize_reference
from tracefp4.ops.device import DeviceLibrary, Launch, aligned
from tracefp4.ops.kernels import first_difference
from tracefp4.ops.rules import SchemeCase

_THREADS = 256
_WORDS_PER_THREAD = 4
"""Words of eight codes: 16 bytes of loads and 64 of bf16 stores under way in a thread."""


def dequantize_on_device(t: BlockTensor, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """Decode checked bytes; see `dequantize`. float64 values are float32 values, widened."""
    case = case_of(t, dtype)
    kept = case.dtype
    is_in_place = out is not None and out.dtype is kept and out.data_ptr() % 16 == 0
    values = (
        out if is_in_place and out is not None else torch.empty(t.shape, dtype=kept, device=t.packed.device)
    )
    num_blocks = t.block_scales.numel()
    words = num_blocks * t.scheme.block_size // 8
    defines = case.defines | {"WORDS_PER_THREAD": _WORDS_PER_THREAD}
    launch = Launch("dequantize", (-(-words // (_THREADS * _WORDS_PER_THREAD)),), _THREADS, defines)
    parts = (aligned(t.packed), t.block_scales.contiguous(), t.outer.contiguous())
    per_outer = max(1, num_blocks // max(1, t.outer.numel()))
    LIBRARY.launch(launch, *parts, num_blocks, per_outer, values, device=values.device)
    if out is not None:
        return out if values is out else out.copy_(values)
    return values.to(dtype)


def case_of(t: BlockTensor, dtype: torch.dtype) -> SchemeCase:
    """Return what is compiled and compared for values in a dtype."""
    return SchemeCase(t.scheme, torch.bfloat16 if dtype is torch.bfloat16 else torch.float32)


def differences(device: torch.device, case: SchemeCase) -> str | None:
    """Compare every code under every scale with the reference; return what differs, or None."""
    return first_difference(_pairs(device, case))


def _pairs(device: torch.device, case: SchemeCase) -> Iterator[tuple[str, Tensor, Tensor]]:
    scheme = case.scheme
    every_byte = torch.arange(256, dtype=torch.uint8, device=device)
    outer = torch.tensor([-110, -9, -1, 0, 1, 5, 60, 116], dtype=torch.int8, device=device)
    stored = outer if scheme.is_exact_in_bf16 else outer.to(torch.float32).exp2()
    t = BlockTensor(
        packed=every_byte.repeat(8, scheme.block_size // 16),
        block_scales=every_byte.view(8, 32),
        outer=stored if scheme.outer == "row" else stored[0],
        scheme=scheme,
    )
    yield "values", dequantize_on_device(t, case.dtype), dequantize_reference(t, case.dtype)


LIBRARY = DeviceLibrary(
    Path(__file__).with_name("kernel.cu"), differences, SchemeCase(NVFP4_ROW_POW2, torch.bfloat16)
)
"""The kernel of kernel.cu."""

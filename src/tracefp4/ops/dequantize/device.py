"""dequantize by the kernel of kernel.cu: the same values as `reference.py`, codes read once."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from tracefp4.formats.schemes import SCHEMES
from tracefp4.formats.tensor import BlockTensor
from tracefp4.ops.dequantize.reference import dequantize_reference
from tracefp4.ops.device import DeviceLibrary, Launch, aligned
from tracefp4.ops.kernels import DTYPE, first_difference
from tracefp4.ops.rules import rules_of

_THREADS = 256
_WORDS_PER_THREAD = 4
"""Words of eight codes: 16 bytes of loads and 64 of bf16 stores under way in a thread."""


def dequantize_on_device(t: BlockTensor, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """Decode checked bytes; see `dequantize`. float64 values are float32 values, widened."""
    kept = torch.bfloat16 if dtype is torch.bfloat16 else torch.float32
    is_in_place = out is not None and out.dtype is kept and out.data_ptr() % 16 == 0
    values = (
        out if is_in_place and out is not None else torch.empty(t.shape, dtype=kept, device=t.packed.device)
    )
    num_blocks = t.block_scales.numel()
    words = num_blocks * t.scheme.block_size // 8
    launch = Launch("dequantize", (-(-words // (_THREADS * _WORDS_PER_THREAD)),), _THREADS, _variant(t, kept))
    parts = (aligned(t.packed), t.block_scales.contiguous(), t.outer.contiguous())
    per_outer = max(1, num_blocks // max(1, t.outer.numel()))
    LIBRARY.launch(launch, *parts, num_blocks, per_outer, values, device=values.device)
    if out is not None:
        return out if values is out else out.copy_(values)
    return values.to(dtype)


def _variant(t: BlockTensor, dtype: torch.dtype) -> dict[str, int | str]:
    rules = ",".join(str(n) for n in rules_of(t.scheme).tolist())
    return {"SCHEME": rules, "DTYPE": DTYPE[dtype], "WORDS_PER_THREAD": _WORDS_PER_THREAD}


def differences(device: torch.device) -> str | None:
    """Compare with the reference, for one scheme of each kind; return what differs, or None."""
    return first_difference(_pairs(device))


def _pairs(device: torch.device) -> Iterator[tuple[str, Tensor, Tensor]]:
    every_byte = torch.arange(256, dtype=torch.uint8, device=device)
    outer = torch.tensor([-110, -9, -1, 0, 1, 5, 60, 116], dtype=torch.int8, device=device)
    for scheme in {(s.order, s.outer == "row"): s for s in SCHEMES.values() if s.outer != "tensor"}.values():
        stored = outer if scheme.is_exact_in_bf16 else outer.to(torch.float32).exp2()
        t = BlockTensor(
            packed=every_byte.repeat(8, scheme.block_size // 16),
            block_scales=every_byte.view(8, 32),
            outer=stored if scheme.outer == "row" else stored[0],
            scheme=scheme,
        )
        for dtype in (torch.float32, torch.bfloat16)[: 1 + scheme.is_exact_in_bf16]:
            yield f"{scheme.name} values", dequantize_on_device(t, dtype), dequantize_reference(t, dtype)


LIBRARY = DeviceLibrary(Path(__file__).with_name("kernel.cu"), differences)
"""The kernel of kernel.cu."""

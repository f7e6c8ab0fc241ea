"""The other libraries, called as their users call them; and the plain torch that one would write without any.

Each function returns a contender, or None when its library is not installed. The calls leave out what the library
would do only once (its outer scale, its buffers), so they are timed at their best.
"""

import importlib
import importlib.util
import logging
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

Contender = Callable[[], Any]

BLOCK_SIZE = 16
_MIDPOINTS = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
_VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def torchao_quantize(x: Tensor) -> Contender | None:
    """Quantize and pack NVFP4 under torchao's two-level scheme, its outer scale given."""
    nvfp4 = _module("torchao.prototype.mx_formats.nvfp4_tensor")
    if nvfp4 is None:
        return None
    outer = nvfp4.per_tensor_amax_to_scale(x.abs().amax())
    return lambda: nvfp4.nvfp4_quantize(x, BLOCK_SIZE, outer)


def torchao_dequantize(x: Tensor) -> Contender | None:
    """Unpack and dequantize torchao's own NVFP4 tensor to float32."""
    nvfp4 = _module("torchao.prototype.mx_formats.nvfp4_tensor")
    if nvfp4 is None:
        return None
    outer = nvfp4.per_tensor_amax_to_scale(x.abs().amax())
    block_scales, packed = nvfp4.nvfp4_quantize(x, BLOCK_SIZE, outer)
    held = nvfp4.NVFP4Tensor(packed, block_scales, BLOCK_SIZE, x.dtype, per_tensor_scale=outer)
    return lambda: held.dequantize(torch.float32)


def torchao_mx_quantize(x: Tensor) -> Contender | None:
    """Quantize and pack MXFP4 under the rule FLOOR."""
    mx = _module("torchao.prototype.mx_formats.mx_tensor")
    if mx is None:
        return None
    return lambda: mx.to_mx(x, torch.float4_e2m1fn_x2, 2 * BLOCK_SIZE)


def compressed_tensors_pack(x: Tensor) -> Contender | None:
    """Pack numbers that are on the E2M1 grid, two a byte."""
    packing = _module("compressed_tensors.compressors.nvfp4.helpers")
    return None if packing is None else lambda: packing.pack_fp4_to_uint8(x)


def compressed_tensors_unpack(packed: Tensor) -> Contender | None:
    """Unpack to float32 grid values, scales not applied."""
    packing = _module("compressed_tensors.compressors.nvfp4.helpers")
    rows, width = packed.shape[0], packed.shape[1] * 2
    if packing is None:
        return None
    return lambda: packing.unpack_fp4_from_uint8(packed, rows, width, dtype=torch.float32)


class Tables(NamedTuple):
    """What the plain torch below looks up."""

    midpoints: Tensor
    """float32 [7], between neighbouring magnitudes."""
    values: Tensor
    """float32 [16], by code."""


def plain_tables(device: torch.device) -> Tables:
    """Return the tables on a device."""
    return Tables(_MIDPOINTS.to(device), torch.cat([_VALUES, -_VALUES]).to(device))


def quantize_plainly(x: Tensor, tables: Tables) -> tuple[Tensor, Tensor]:
    """Quantize and pack as one would write it in a few lines of torch, without an outer scale: codes and scales."""
    blocks = x.unflatten(-1, (-1, BLOCK_SIZE))
    stored = (blocks.abs().amax(-1) / 6).clamp(max=448).to(torch.float8_e4m3fn)
    z = blocks / stored.float().clamp(min=2.0**-9).unsqueeze(-1)
    codes = torch.bucketize(z.abs(), tables.midpoints).to(torch.uint8) | (z.signbit().to(torch.uint8) << 3)
    codes = codes.flatten(-2)
    return codes[..., ::2] | codes[..., 1::2] << 4, stored


def dequantize_plainly(packed: Tensor, decode_scale: Tensor, tables: Tables) -> Tensor:
    """Unpack by a table and multiply."""
    codes = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)
    blocks = tables.values[codes.int()].unflatten(-1, (-1, BLOCK_SIZE))
    return (blocks * decode_scale.unsqueeze(-1)).flatten(-2)


def round_plainly(x: Tensor, decode_scale: Tensor, tables: Tables) -> Tensor:
    """Round to the grid and back under given scales, as a training framework without kernels does."""
    z = x.unflatten(-1, (-1, BLOCK_SIZE)) / decode_scale.unsqueeze(-1)
    rounded = tables.values[torch.bucketize(z.abs(), tables.midpoints)].copysign(z)
    return (rounded * decode_scale.unsqueeze(-1)).flatten(-2)


def plain_quantize(x: Tensor) -> Contender:
    """Call `quantize_plainly`."""
    tables = plain_tables(x.device)
    return lambda: quantize_plainly(x, tables)


def plain_dequantize(packed: Tensor, decode_scale: Tensor) -> Contender:
    """Call `dequantize_plainly`."""
    tables = plain_tables(packed.device)
    return lambda: dequantize_plainly(packed, decode_scale, tables)


def plain_fake_quantize(x: Tensor, decode_scale: Tensor) -> Contender:
    """Call `round_plainly`."""
    tables = plain_tables(x.device)
    return lambda: round_plainly(x, decode_scale, tables)


def plain_pack(codes: Tensor) -> Contender:
    """Two strided halves, a shift and an or."""
    return lambda: codes[..., ::2] | codes[..., 1::2] << 4


def _module(name: str) -> Any:
    if importlib.util.find_spec(name.split(".")[0]) is None:
        return None
    logging.getLogger("torchao").setLevel(logging.ERROR)  # it reports missing CUDA libraries as errors
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(name)

"""The definition of quantize, in plain torch. Shapes: [..., K] elements, G = K / 16 blocks.

Order of rounding operations: x to float32; amax * 2^-k (exact); / 6 (float32); E4M3; x / (s_block * 2^k)
(float32, one division by an exact product); E2M1. Never a multiplication by a reciprocal.
"""

import torch
from torch import Tensor

from tracefp4.formats.grid import magnitude_to_code, round_magnitude_, sign_of
from tracefp4.formats.packing import pack_codes
from tracefp4.formats.scaling import (
    block_amax,
    decode_scales,
    divisor_of,
    encode_block_scales,
    outer_exponent,
)
from tracefp4.formats.scheme import Scheme
from tracefp4.formats.tensor import BlockTensor


def quantize_reference(x: Tensor, scheme: Scheme, exponent: int | None) -> BlockTensor:
    """Quantize a checked tensor; see `quantize`."""
    x = x.detach().to(torch.float32).contiguous()
    magnitude = x.abs()
    amax, finite = block_amax(magnitude, scheme.block_size)
    if finite is not None:
        keep = finite.repeat_interleave(scheme.block_size, -1)
        x, magnitude = x.masked_fill(~keep, 0.0), magnitude.masked_fill(~keep, 0.0)
    outer = outer_exponent(amax, outer=scheme.outer, exponent=exponent)
    block_scales = encode_block_scales(amax, outer, finite)
    decode_scale = decode_scales(block_scales, outer)
    magnitude.unflatten(-1, (-1, scheme.block_size)).div_(divisor_of(decode_scale).unsqueeze(-1))
    _, rounded = round_magnitude_(magnitude)
    codes = magnitude_to_code(rounded).bitwise_or_(sign_of(x).bitwise_and_(8)).view(torch.uint8)
    return BlockTensor(packed=pack_codes(codes), block_scales=block_scales, exponent=outer, scheme=scheme)

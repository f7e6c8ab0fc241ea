"""What a codec keeps of codes and scale bytes, in the layout of records: the definition, in plain torch.

    codes    full       two a byte, even index in the low nibble
             low2       two low bits, four values a byte
             mantissa   the lowest bit, eight values a byte
             syndromes  of the lowest bits of a row
    scales   raw        the bytes
             coset2/1   two low bits, four values a byte; the lowest, eight values a byte
             syndromes  of the lowest bits of a row

Every row is padded with zero bits to whole bytes. This module never chooses a codeword.
"""

from dataclasses import dataclass

from torch import Tensor

from tracefp4.coding import Codec, Payload, ScaleCoding, SyndromeCode
from tracefp4.formats.packing import pack_codes, pack_low_bits
from tracefp4.ops.guided_quantize.values import Rounded
from tracefp4.ops.parity_checks import bytes_of_bits, syndromes_of_bits

CODE_BITS = {Payload.FULL: 4, Payload.LOW2: 2, Payload.MANTISSA: 1, Payload.SYNDROME: 0}
"""Bits of every code that are kept as they are."""
SCALE_BITS = {ScaleCoding.RAW: 8, ScaleCoding.COSET2: 2, ScaleCoding.COSET1: 1, ScaleCoding.SYNDROME: 0}
"""Bits of every scale byte that are kept as they are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recorded:
    """The result of rounding N rows, and what a codec keeps of it."""

    rounded: Rounded
    """Values and the bytes behind them."""
    payload: Tensor
    """uint8 [N, codec.payload_bytes(K)], kept of the codes."""
    scales: Tensor
    """uint8 [N, codec.scale_bytes(G)], kept of the scale bytes; `rounded.block_scales` itself for raw scales."""


def kept_codes(codes: Tensor, codec: Codec) -> Tensor:
    """Return the payload of uint8 [N, K] codes; see `Recorded.payload`."""
    if codec.code is not None:
        return _syndromes(codes, codec.code)
    if codec.payload is Payload.FULL:
        return pack_codes(codes)
    return pack_low_bits(codes, num_bits=1 if codec.payload is Payload.MANTISSA else 2)


def kept_scales(block_scales: Tensor, codec: Codec) -> Tensor:
    """Return what is kept of uint8 [N, G] scale bytes; see `Recorded.scales`."""
    if codec.scale_code is not None:
        return _syndromes(block_scales, codec.scale_code)
    if codec.scale_coding is ScaleCoding.RAW:
        return block_scales
    return pack_low_bits(block_scales, num_bits=1 if codec.scale_coding is ScaleCoding.COSET1 else 2)


def _syndromes(rows: Tensor, code: SyndromeCode) -> Tensor:
    return bytes_of_bits(syndromes_of_bits(rows & 1, code).flatten(1))

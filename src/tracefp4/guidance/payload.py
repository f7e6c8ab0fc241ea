"""The tensor side of codecs: codes and block scales become stored bytes, and stored bytes the parts of a Guide.

    payload   full          two codes a byte, even index in the low nibble
              low2          four values a byte, value 4j + i in the bits 2i and 2i + 1 of byte j
              mantissa      eight values a byte, bit i of byte j is value 8j + i
              syndromes     `coding.syndrome` states the layout
    scales    raw           the byte of every block
              coset2        as low2, of the scale bytes
              coset1        as mantissa, of the scale bytes
              syndromes     of the lowest bits of all scale bytes of a row

Every row is padded with zero bits to whole bytes, payload and scales apart. Names, rates and sizes are
`coding.codec`'s; how a reader finds the codeword behind the kept bits is `ops/guided_quantize`'s. This file never sees
positions or identities.
"""

from __future__ import annotations

from typing import Literal, TypedDict

from torch import Tensor

from tracefp4.coding import Codec, Payload, ScaleCoding, SyndromeCode
from tracefp4.formats.packing import pack_codes, pack_low_bits, unpack_codes, unpack_low_bits
from tracefp4.ops.syndromes import encode_syndromes

_LOW_BITS: dict[Payload | ScaleCoding, Literal[1, 2]] = {
    Payload.MANTISSA: 1,
    Payload.LOW2: 2,
    ScaleCoding.COSET1: 1,
    ScaleCoding.COSET2: 2,
}


class GuideParts(TypedDict):
    """The fields of a Guide that a codec fills."""

    block_scales: Tensor
    """As `Guide.block_scales`: bytes, low bits [n, G], or syndromes."""
    scale_coding: ScaleCoding
    """How to read them."""
    scale_code: SyndromeCode | None
    """Code of the scales' syndromes."""
    codes: Tensor | None
    """uint8 [n, K], whole codes."""
    bits: Tensor | None
    """uint8 [n, K], low bits of the codes."""
    num_bits: Literal[1, 2]
    """How many low bits."""
    syndromes: Tensor | None
    """uint8 [n, bytes], syndromes of the mantissa bits."""
    code: SyndromeCode | None
    """Code of the syndromes."""


def encode_codes(codes: Tensor, *, codec: Codec) -> Tensor:
    """Return what a codec keeps of codes.

    Args:
        codes: uint8 [n, K], 0..15, unpacked; K a multiple of 16.
        codec: the codec.

    Returns:
        uint8 [n, codec.payload_bytes(K)]; a row's bytes depend on that row alone.
    """
    if codec.code is not None:
        return encode_syndromes(codes, code=codec.code)
    if codec.payload is Payload.FULL:
        return pack_codes(codes)
    return pack_low_bits(codes, num_bits=_LOW_BITS[codec.payload])


def encode_block_scales(block_scales: Tensor, *, codec: Codec) -> Tensor:
    """Return what a codec keeps of block scales.

    Args:
        block_scales: uint8 [n, G], scale bytes.
        codec: the codec.

    Returns:
        uint8 [n, codec.scale_bytes(G)]; raw scales are the input itself.
    """
    if codec.scale_code is not None:
        return encode_syndromes(block_scales, code=codec.scale_code)
    if codec.scale_coding is ScaleCoding.RAW:
        return block_scales
    return pack_low_bits(block_scales, num_bits=_LOW_BITS[codec.scale_coding])


def guide_parts(
    payload: Tensor, block_scales: Tensor, *, codec: Codec, width: int, num_blocks: int
) -> GuideParts:
    """Unpack what a codec kept into the fields of a Guide.

    Args:
        payload: uint8 [n, codec.payload_bytes(width)].
        block_scales: uint8 [n, codec.scale_bytes(num_blocks)].
        codec: the codec of both.
        width: K, values per row.
        num_blocks: G, blocks per row.
    """
    coding = codec.scale_coding
    if coding in _LOW_BITS:
        block_scales = unpack_low_bits(block_scales, num_bits=_LOW_BITS[coding], count=num_blocks)
    num_bits = _LOW_BITS.get(codec.payload)
    return GuideParts(
        block_scales=block_scales,
        scale_coding=coding,
        scale_code=codec.scale_code,
        codes=unpack_codes(payload) if codec.payload is Payload.FULL else None,
        bits=None if num_bits is None else unpack_low_bits(payload, num_bits=num_bits, count=width),
        num_bits=1 if num_bits is None else num_bits,
        syndromes=None if codec.code is None else payload,
        code=codec.code,
    )

"""How the codes of one site are kept: a codec turns unpacked E2M1 codes into payload bytes and back.

`full` keeps the four bits of every code, `mantissa` the low bit only. Neighbouring E2M1 codewords always
differ in that bit, so it names a rounding direction. Both keep every block's E4M3 byte beside the payload,
which for blocks of 16 adds half a bit a value: 4.5 and 1.5 bits. Low nibble and low bit hold the lower index
(formats.packing states the order once). This file never sees scales, positions or identities.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tracefp4.errors import ConfigError
from tracefp4.formats.packing import pack_bits, pack_codes, unpack_bits, unpack_codes

BLOCK_SIZE = 16
BLOCK_SCALE_BITS = 8


class Codec(Protocol):
    """What a payload codec can do; `codes` are unpacked: uint8 [..., K], 0..15, K a multiple of 16."""

    @property
    def name(self) -> str: ...

    @property
    def value_bits(self) -> int: ...

    @property
    def bits_per_value(self) -> float: ...

    def payload_width(self, width: int) -> int: ...

    def encode(self, codes: Tensor) -> Tensor: ...

    def guide_codes(self, payload: Tensor) -> Tensor | None: ...

    def guide_bits(self, payload: Tensor) -> Tensor | None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class FullCodec:
    """Every code as it was: payload [..., K/2], two codes a byte."""

    name: str = "full"
    """Name stored with every record."""
    value_bits: int = 4
    """Payload bits per value."""

    @property
    def bits_per_value(self) -> float:
        """Payload and block-scale bits per value."""
        return self.value_bits + BLOCK_SCALE_BITS / BLOCK_SIZE

    def payload_width(self, width: int) -> int:
        """Payload bytes for one row of `width` values."""
        return width // 2

    def encode(self, codes: Tensor) -> Tensor:
        """Pack codes [..., K] into payload [..., K/2]."""
        return pack_codes(codes)

    def guide_codes(self, payload: Tensor) -> Tensor:
        """Unpack payload [..., K/2] into codes [..., K]."""
        return unpack_codes(payload)

    def guide_bits(self, payload: Tensor) -> None:
        """None: this codec keeps whole codes."""
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class MantissaCodec:
    """The mantissa bit (code & 1) of every code: payload [..., K/8], bit i of byte j is value 8*j + i."""

    name: str = "mantissa"
    """Name stored with every record."""
    value_bits: int = 1
    """Payload bits per value."""

    @property
    def bits_per_value(self) -> float:
        """Payload and block-scale bits per value."""
        return self.value_bits + BLOCK_SCALE_BITS / BLOCK_SIZE

    def payload_width(self, width: int) -> int:
        """Payload bytes for one row of `width` values."""
        return width // 8

    def encode(self, codes: Tensor) -> Tensor:
        """Keep the low bit of codes [..., K] in payload [..., K/8]."""
        return pack_bits(torch.bitwise_and(codes, 1))

    def guide_codes(self, payload: Tensor) -> None:
        """None: this codec keeps one bit of each code."""
        return None

    def guide_bits(self, payload: Tensor) -> Tensor:
        """Unpack payload [..., K/8] into bits [..., K] (uint8, 0 or 1)."""
        return unpack_bits(payload)


FULL = FullCodec()
MANTISSA = MantissaCodec()
CODECS: dict[str, Codec] = {FULL.name: FULL, MANTISSA.name: MANTISSA}


def codec_by_name(name: str) -> Codec:
    """Look a codec up by the name stored in a record.

    Raises: ConfigError naming the codecs that exist.
    """
    codec = CODECS.get(name)
    if codec is None:
        raise ConfigError(
            f"Unknown guidance codec; got {name!r}. The codecs are {', '.join(sorted(CODECS))}. "
            "Choose one of them in the recipe's guidance table."
        )
    return codec

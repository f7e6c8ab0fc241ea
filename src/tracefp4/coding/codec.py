"""The codecs of guidance records by name: what is kept of every code and of every block scale, and the bytes of a row.

A name is `<payload>` or `<payload>+<scales>`.

    payload     kept of the codes                          bits per value
    full        all four bits                              4
    low2        the two low bits                           2
    mantissa    the lowest bit                             1
    <code>      syndromes of the lowest bits               that code's (`coding.syndrome`)

    scales      kept of the block scales                   bits per block
    raw         the byte                                   8
    coset2      its two low bits                           2
    coset1      its lowest bit                             1
    <code>      syndromes of the lowest bits of a row      that code's

Without `+<scales>`, full, low2 and mantissa keep raw scales and syndromes keep coset2; `mantissa_lean` is
mantissa+coset2. Every row is padded to whole bytes, payload and scales apart. This module never sees a tensor.
"""

from dataclasses import dataclass
from enum import StrEnum
from functools import cache

from tracefp4.coding.syndrome import SyndromeCode, syndrome_code
from tracefp4.errors import ConfigError, FormatError


class Payload(StrEnum):
    """What is kept of the codes."""

    FULL = "full"
    """All four bits."""
    LOW2 = "low2"
    """The two low bits, code & 3."""
    MANTISSA = "mantissa"
    """The lowest bit, code & 1."""
    SYNDROME = "syndrome"
    """Syndromes of the lowest bits."""


class ScaleCoding(StrEnum):
    """What is kept of a block scale; the reader has a scale of his own and finds the recorded byte near it."""

    RAW = "raw"
    """The byte."""
    COSET2 = "coset2"
    """Its two low bits: the byte with these bits whose scale is nearest to the reader's own unrounded one."""
    COSET1 = "coset1"
    """Its lowest bit, read in the same way."""
    SYNDROME = "syndrome"
    """The syndrome of the lowest bits of all scale bytes of a row."""


_VALUE_BITS = {Payload.FULL: 4, Payload.LOW2: 2, Payload.MANTISSA: 1}
_SCALE_BITS = {ScaleCoding.RAW: 8, ScaleCoding.COSET2: 2, ScaleCoding.COSET1: 1}
_ALIASES = {"mantissa_lean": "mantissa+coset2"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Codec:
    """What a record keeps of one site."""

    name: str
    """As in records and recipes."""
    payload: Payload
    """Kept of the codes."""
    code: SyndromeCode | None
    """Code of the codes' syndromes; None for the other payloads."""
    scale_coding: ScaleCoding
    """Kept of the block scales."""
    scale_code: SyndromeCode | None
    """Code of the scales' syndromes; None for the other codings."""

    def payload_bytes(self, width: int) -> int:
        """Bytes of the payload of one row of `width` values."""
        if self.code is not None:
            return self.code.row_bytes(width)
        return -(-width * _VALUE_BITS[self.payload] // 8)

    def scale_bytes(self, num_blocks: int) -> int:
        """Bytes of the scales of one row of `num_blocks` blocks."""
        if self.scale_code is not None:
            return self.scale_code.row_bytes(num_blocks)
        return -(-num_blocks * _SCALE_BITS[self.scale_coding] // 8)

    def row_bytes(self, width: int, *, block_size: int) -> int:
        """Bytes of one row: payload and scales. The outer exponent of a row is not a codec's."""
        return self.payload_bytes(width) + self.scale_bytes(width // block_size)

    def bits_per_value(self, *, block_size: int = 16) -> float:
        """Bits per value of long rows: payload and scales, without padding."""
        payload = _VALUE_BITS[self.payload] if self.code is None else self.code.bits_per_value
        scales = _SCALE_BITS[self.scale_coding] if self.scale_code is None else self.scale_code.bits_per_value
        return payload + scales / block_size


def codec_names() -> str:
    """Say in a clause what names a codec can have, for the errors that refuse another."""
    return (
        f"<payload> or <payload>+<scales>: payloads are {', '.join(_VALUE_BITS)}, parity<g>, secded, bch<n>_<t>; "
        f"scales are {', '.join(_SCALE_BITS)} or one of these codes. In use: {', '.join(CODECS)}"
    )


@cache
def codec_by_name(name: str) -> Codec:
    """Return the codec of this name.

    Raises:
        ConfigError: no such payload, scale coding or code; names what exists.
    """
    payload_name, plus, scales_name = _ALIASES.get(name, name).partition("+")
    try:
        is_plain = payload_name in _VALUE_BITS
        payload = Payload(payload_name) if is_plain else Payload.SYNDROME
        code = None if is_plain else syndrome_code(payload_name)
        if not plus:
            scales_name = "raw" if is_plain else "coset2"
        is_coset = scales_name in _SCALE_BITS
        scale_coding = ScaleCoding(scales_name) if is_coset else ScaleCoding.SYNDROME
        scale_code = None if is_coset else syndrome_code(scales_name)
    except FormatError:
        raise ConfigError(
            f"Unknown guidance codec; got {name!r}. A codec is {codec_names()}. Choose one of them."
        ) from None
    return Codec(name=name, payload=payload, code=code, scale_coding=scale_coding, scale_code=scale_code)


CODECS = (
    "full",
    "low2",
    "mantissa",
    "mantissa_lean",
    "secded",
    "parity2",
    "parity4",
    "parity8",
    "parity16",
    "bch64_3",
    "bch64_3+coset1",
    "bch128_3",
    "bch128_3+coset1",
    "bch256_3+bch128_2",
)
"""Names that tables and documents list; other combinations work as well."""

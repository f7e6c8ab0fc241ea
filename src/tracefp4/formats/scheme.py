"""Schemes: a block format plus every choice that turns data into bytes, as one frozen value with a stable
digest.

A format says which numbers exist; a scheme says where the outer scale lives and how it is stored, how a block
maximum becomes a scale, what a zero, tiny or non-finite block does, which way a tie goes, and in which order
the operations run. Two schemes under one name are a common bug, so the digest of a scheme is stored with every
record, checkpoint and export, and a mismatch is refused. Changing any field changes the digest. This module
never touches a tensor; the constants are in `schemes.py`.
"""

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from typing import Literal

from tracefp4.errors import FormatError
from tracefp4.formats.block import MXFP4, NVFP4, BlockFormat
from tracefp4.formats.order import Candidates, ErrorSum, NonFinite, Order, OuterKind, ScaleRule, Sign, Tie

Outer = Literal["row", "tensor", "static", "none"]
"""Where the outer scale lives: one per row, one per matrix of the last two dimensions, one power of two given
by the caller, or nowhere."""

MIN_EXPONENT = -110
"""Smallest outer exponent. Keeps code * s_block * 2^k a normal bf16 number and 1 / 2^k a normal float32
number."""
MAX_EXPONENT = 116
"""Largest outer exponent. 6 * 448 * 2^116 is below the largest bf16 number."""
MIN_MULTIPLIER = 2.0**-116
"""Smallest float32 outer multiplier, and the reciprocal of the largest divisor: s_block times it, and the
reciprocal of that, are normal float32 numbers. A tensor so small that it needs less keeps this one."""

_OF_E4M3 = ("scale_max", "candidates", "error_sum", "zero_byte", "underflow_byte", "least_byte")
"""Fields that a scheme with E8M0 block scales does not read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scheme:
    """How a tensor becomes codes, block scales and an outer scale: value = code * s_block * s_outer."""

    name: str
    """Upper-case constant name; unique."""
    block_format: BlockFormat
    """Which numbers exist."""
    outer: Outer
    """Where the outer scale lives."""
    order: Order
    """The order of the float32 operations, and with it how the outer scale is stored."""
    scale_rule: ScaleRule = ScaleRule.E4M3
    """How a maximum becomes the byte of a block scale."""
    scale_max: float = 448.0
    """The block scale of the block that holds the largest value under the outer scale: a tensor's maximum becomes
    6 * scale_max. 448, or 256 where a block may also take a scale 1.5 times larger. Not read where k, g or
    G is given (static schemes) or nothing is stored."""
    candidates: Candidates = Candidates.SIX
    """Which block scales compete."""
    error_sum: ErrorSum = ErrorSum.TREE
    """How the errors of a block are added where scales compete: candidates by a sum, and any scales in a search."""
    zero_byte: int = 0x00
    """Scale byte of an all-zero block; it reads back 0 whatever the byte."""
    underflow_byte: int = 0x01
    """Scale byte of a block that is not zero but whose scale would round to 0: 0x01 (2^-9) keeps what can be kept,
    0x00 flushes the block to zeros."""
    least_byte: int = 0x00
    """Smaller scale bytes of non-zero blocks are raised to this one."""
    tie: Tie = Tie.EVEN
    """Which code a value halfway between two codes takes."""
    sign: Sign = Sign.KEPT
    """When the sign bit of a code is set."""
    nonfinite_rule: NonFinite = NonFinite.BLOCK
    """What a block with NaN or Inf becomes."""

    def __post_init__(self) -> None:
        """Refuse parts that do not belong together, and choices that would change the digest and no byte."""
        is_mx = self.block_format == MXFP4
        parts = (self.order is Order.MX, self.outer == "none", self.scale_rule is not ScaleRule.E4M3)
        if not (is_mx or self.block_format == NVFP4) or any(part != is_mx for part in parts):
            raise FormatError(
                f"Scheme {self.name}: MXFP4 goes with order MX, an E8M0 rule and no outer scale, NVFP4 with the "
                f"others; got {self.block_format.name} in blocks of {self.block_size}, {self.order.name}, rule "
                f"{self.scale_rule.name}, outer {self.outer!r}. Correct the four together."
            )
        is_given = self.outer == "static" and self.outer_kind != "amax"
        unread = _OF_E4M3 if is_mx else ("scale_max",) if is_given else ()
        changed = [f.name for f in fields(self) if f.name in unread and getattr(self, f.name) != f.default]
        if changed or not isinstance(self.nonfinite_rule, NonFinite):
            names = changed or ["nonfinite_rule"]
            raise FormatError(
                f"Scheme {self.name}: {', '.join(names)} would change the digest and no byte; got "
                f"{', '.join(repr(getattr(self, name)) for name in names)}. Only the default is allowed here. "
                "Leave it out."
            )

    @property
    def block_size(self) -> int:
        """Number of elements that share a block scale."""
        return self.block_format.block_size

    @property
    def outer_kind(self) -> OuterKind:
        """What is stored of the outer scale: int8 exponent; float32 multiplier, divisor or maximum; or nothing."""
        return self.order.outer_kind

    @property
    def nan_byte(self) -> int:
        """The scale byte that marks a block with NaN or Inf inside."""
        return 0xFF if self.block_format.scale_format.name == "E8M0" else 0x7F

    @property
    def is_exact_in_bf16(self) -> bool:
        """True when every dequantized value is a bf16 number: the outer scale, if any, is a power of two."""
        return self.outer_kind in ("exponent", "none")

    @property
    def digest(self) -> str:
        """First 16 hexadecimal digits of the SHA-256 of all fields, in a fixed order and encoding."""
        return _digest_of(self)


@lru_cache(maxsize=256)
def _digest_of(scheme: Scheme) -> str:
    limits = [MIN_EXPONENT, MAX_EXPONENT, MIN_MULTIPLIER]
    text = json.dumps({"limits": limits, "scheme": asdict(scheme)}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("ascii")).hexdigest()[:16]

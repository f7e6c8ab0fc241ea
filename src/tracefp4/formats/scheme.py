"""Schemes: a block format plus every choice that turns data into bytes, as one frozen value with a stable
digest.

A format says which numbers exist; a scheme says where the outer scale lives, how a block maximum becomes a
scale, what a zero, tiny or non-finite block does, which way a tie goes, and in which order the operations
run. Two schemes under one name are a common bug, so the digest of a scheme is stored with every record,
checkpoint and export, and a mismatch is refused. Changing any field changes the digest. This module never
touches a tensor.
"""

import difflib
import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Literal

from tracefp4.errors import ConfigError
from tracefp4.formats.block import NVFP4, BlockFormat

Outer = Literal["row", "tensor", "static"]
"""Where the outer power of two lives: one per row, one per matrix of the last two dimensions, or given by
the caller."""

MIN_EXPONENT = -110
"""Smallest outer exponent. Keeps code * s_block * 2^k a normal bf16 number and 1 / 2^k a normal float32
number."""
MAX_EXPONENT = 116
"""Largest outer exponent. 6 * 448 * 2^116 is below the largest bf16 number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scheme:
    """How a tensor becomes codes, block scales and an outer scale: value = code * s_block * 2^k."""

    name: str
    """Upper-case constant name; unique."""
    block_format: BlockFormat
    """Which numbers exist."""
    outer: Outer
    """Where the outer power of two 2^k lives."""
    scale_rule: str = "e4m3_nearest_even(amax_block/6/2^k);k=min{k:amax<=2688*2^k}"
    """How maxima become scales. A static scheme takes k from the caller instead of the second half."""
    floor: str = "zero->0x00;underflow->0x01"
    """An all-zero block stores scale byte 0; a non-zero block whose scale would round to 0 stores 2^-9."""
    tie_rule: str = "nearest_even"
    """Which code a value halfway between two codes takes."""
    operation_order: str = "float32:x/(s_block*2^k)"
    """One division by the stored, rounded scale; never a multiplication by a reciprocal."""
    nonfinite_rule: str = "block->0x7f;outer_over_finite_blocks"
    """A block that holds NaN or Inf stores scale byte 0x7F and reads back NaN; the row's other blocks are
    unaffected."""

    @property
    def block_size(self) -> int:
        """Number of elements that share a block scale."""
        return self.block_format.block_size

    @property
    def digest(self) -> str:
        """First 16 hexadecimal digits of the SHA-256 of all fields, in a fixed order and encoding."""
        text = json.dumps(
            {"exponents": [MIN_EXPONENT, MAX_EXPONENT], "scheme": asdict(self)},
            sort_keys=True,
            separators=(",", ":"),
        )
        return hashlib.sha256(text.encode("ascii")).hexdigest()[:16]


NVFP4_ROW_POW2 = Scheme(name="NVFP4_ROW_POW2", block_format=NVFP4, outer="row")
"""Default for activations: one power of two per row, so that a row's bytes never depend on another row."""

NVFP4_TENSOR_POW2 = Scheme(name="NVFP4_TENSOR_POW2", block_format=NVFP4, outer="tensor")
"""Default for weights: one power of two per expert matrix; gate and up are one matrix and share it."""

NVFP4_KV = Scheme(
    name="NVFP4_KV",
    block_format=NVFP4,
    outer="static",
    scale_rule="e4m3_nearest_even(amax_block/6/2^k);k=calibrated,static",
)
"""Default for keys and values: one calibrated power of two per layer and tensor kind."""

SCHEMES: dict[str, Scheme] = {scheme.name: scheme for scheme in (NVFP4_ROW_POW2, NVFP4_TENSOR_POW2, NVFP4_KV)}
"""Every scheme by name."""


def scheme_by_name(name: str) -> Scheme:
    """Return the scheme with this name.

    Args:
        name: One of the keys of SCHEMES, exactly.

    Returns:
        The scheme constant.

    Raises:
        ConfigError: When no scheme has the name; the message lists all names and the nearest one.
    """
    if name in SCHEMES:
        return SCHEMES[name]
    near = difflib.get_close_matches(str(name).upper(), SCHEMES, n=1, cutoff=0.0)
    raise ConfigError(f"Unknown scheme {name!r}. Schemes: {', '.join(SCHEMES)}. Did you mean {near[0]!r}?")

"""What goes into and comes out of guided_quantize: two frozen values, no arithmetic. Shapes: N rows, K
columns, G = K / 16."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from tracefp4.errors import FormatError


@dataclass(frozen=True, kw_only=True, slots=True)
class Guide:
    """The rollout's decisions for N rows; exactly one of `codes` and `bits` is present."""

    valid: Tensor
    """bool [N]; False = nothing was recorded for this row, which is rounded to nearest even under its own
    scales."""
    exponent: Tensor | None
    """int8 [N], the recorded outer exponents, read where valid; None for a static scheme, which has its
    own."""
    block_scales: Tensor
    """uint8 [N, G], the recorded E4M3 bytes (0..0x7F), read where valid."""
    codes: Tensor | None
    """uint8 [N, K], the recorded codes 0..15; None when only mantissa bits were recorded."""
    bits: Tensor | None
    """uint8 [N, K], the recorded mantissa bits, 0 or 1; None when full codes were recorded."""
    decoder: Literal["bracket", "nearest_cell"] = "nearest_cell"
    """How a mantissa bit is decoded; full codes are always decoded inside the bracket."""

    def __post_init__(self) -> None:
        """Refuse a guide that names no decision or two."""
        if (self.codes is None) == (self.bits is None):
            got = "neither" if self.codes is None else "both"
            raise FormatError(f"A guide holds codes or bits; got {got}. Pass exactly one of them.")
        if self.decoder not in ("bracket", "nearest_cell"):
            raise FormatError(
                f"Unknown decoder {self.decoder!r}. Decoders: 'bracket', 'nearest_cell'. Pass one of them."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Rounded:
    """The result of rounding N rows."""

    values: Tensor
    """[N, K] in the input's dtype: code * s_block * 2^k, exact."""
    codes: Tensor | None
    """uint8 [N, K], codes 0..15, unpacked; None when they were not asked for."""
    block_scales: Tensor
    """uint8 [N, G], the E4M3 bytes used: the guide's where it is valid, else the row's own."""
    exponent: Tensor
    """int8, the outer exponents used: [N] (row schemes), 0-dimensional (static and tensor schemes)."""
    nearest_changed: Tensor
    """int64, 0-dimensional: values where guidance chose another codeword than nearest even under the same
    scale; +0 and -0 are one codeword. 0 without a guide."""

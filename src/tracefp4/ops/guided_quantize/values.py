"""What goes into and comes out of guided_quantize: frozen values, no arithmetic. Shapes: N rows, K columns,
G = K / block size."""

import math
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from tracefp4.coding import ScaleCoding, SyndromeCode
from tracefp4.errors import FormatError


@dataclass(frozen=True, kw_only=True, slots=True)
class Guide:
    """The rollout's decisions for N rows; exactly one of `codes`, `bits` and `syndromes` is present."""

    valid: Tensor
    """bool [N]; False = nothing was recorded for this row, which is rounded to nearest even under its own
    scales."""
    outer: Tensor | None
    """[N], the recorded outer scales as the scheme stores them (int8 or float32), read where valid; None unless it
    is a row scheme: a static one has its own, MXFP4 none."""
    block_scales: Tensor
    """What was recorded of the scale bytes, read where valid: uint8 [N, G], the bytes (RAW, E4M3: 0..0x7F) or their
    low bits (COSET2: 0..3, COSET1: 0..1); uint8 [N, scale_code.row_bytes(G)] for SYNDROME."""
    scale_coding: ScaleCoding = ScaleCoding.RAW
    """How to read `block_scales`."""
    scale_code: SyndromeCode | None = None
    """Code of the scales' syndromes; None for every other coding."""
    codes: Tensor | None = None
    """uint8 [N, K], the recorded codes 0..15; None when less was recorded."""
    bits: Tensor | None = None
    """uint8 [N, K], the recorded low bits of every code: the mantissa bit 0..1, or two bits 0..3; else None."""
    num_bits: Literal[1, 2] = 1
    """How many low bits `bits` holds."""
    syndromes: Tensor | None = None
    """uint8 [N, code.row_bytes(K)], syndromes of the mantissa bits (code & 1) of every row; else None."""
    code: SyndromeCode | None = None
    """Code of `syndromes`; None without them."""
    decoder: Literal["bracket", "nearest_cell"] = "nearest_cell"
    """How recorded bits become a codeword; full codes are always decoded inside the bracket, syndromes always to the
    nearest cell."""
    band: float | None = None
    """The noise gate, finite, at least 0, in units of the block's decode scale: another codeword than the nearest is
    taken only where z lies at most this far from its rounding cell; rounded to float32. None: no gate."""

    def __post_init__(self) -> None:
        """Refuse a guide whose parts do not go together."""
        held = [name for name in ("codes", "bits", "syndromes") if getattr(self, name) is not None]
        if len(held) != 1:
            got = ", ".join(held) or "none of them"
            raise FormatError(f"A guide holds codes, bits or syndromes; got {got}. Pass exactly one of them.")
        if self.decoder not in ("bracket", "nearest_cell"):
            raise FormatError(
                f"Unknown decoder {self.decoder!r}. Decoders: 'bracket', 'nearest_cell'. Pass one of them."
            )
        for name, code, is_needed in (
            ("syndromes", self.code, self.syndromes is not None),
            ("scale_coding 'syndrome'", self.scale_code, self.scale_coding is ScaleCoding.SYNDROME),
        ):
            if (code is not None) != is_needed:
                got = "no code" if code is None else code.name
                raise FormatError(
                    f"A guide names a syndrome code exactly where it holds syndromes; got {got} for {name}. "
                    "Pass both or neither."
                )
        if self.num_bits not in (1, 2):
            raise FormatError(
                f"A guide's bits are one or two of every code; got num_bits={self.num_bits}. Pass 1 or 2."
            )
        if self.band is not None and not 0 <= self.band < math.inf:
            raise FormatError(
                f"A noise gate's band is a finite number of 0 or more; got {self.band}. None switches the gate off."
            )

    def rows(self, first: int, last: int) -> "Guide":
        """Return the decisions of rows first .. last - 1, as views."""
        parts = ("valid", "outer", "block_scales", "codes", "bits", "syndromes")
        held = {name: part for name in parts if (part := getattr(self, name)) is not None}
        return replace(self, **{name: part[first:last] for name, part in held.items()})


@dataclass(frozen=True, kw_only=True, slots=True)
class Rounded:
    """The result of rounding N rows."""

    values: Tensor
    """[N, K] in the input's dtype: code * decode_scale; exact unless a float32 outer scale meets a bf16 input."""
    codes: Tensor | None
    """uint8 [N, K], codes 0..15, unpacked; None when they were not asked for."""
    block_scales: Tensor
    """uint8 [N, G], the scale bytes used: the guide's where it is valid (decoded, if it holds less than the bytes),
    else the row's own."""
    outer: Tensor
    """The outer scales used, int8 or float32: [N] (row schemes), 0-dimensional (all others)."""
    nearest_changed: Tensor
    """int64, 0-dimensional: values where guidance chose another codeword than nearest even under the same
    scale; +0 and -0 are one codeword. 0 without a guide."""
    in_band: Tensor | None = None
    """int64, 0-dimensional: values of valid rows and positive scales that the gate leaves to the guide: z lies at most
    `band` from the cell of another codeword. Without a gate all of them; None without a guide."""
    undecoded: Tensor | None = None
    """int64, 0-dimensional: blocks of syndromes, of values and of scales, for which no plausible set of flips was
    found: nearest there, or the row's own scales. 0 for guides without syndromes; None without a guide."""

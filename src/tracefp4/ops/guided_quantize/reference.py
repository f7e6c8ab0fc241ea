"""The definition of guided_quantize, in plain torch, written for few elementwise passes.

Everything happens on magnitudes: q* never has the sign opposite to z's (a recorded codeword of the other sign
is followed as far as 0), so the sign of x is put back at the end. `decoding.py` finds the magnitude codes that a guide
asks for, `scale_decoding.py` the scale bytes where it holds less than these; this module chooses the scales, brings x
onto the grid and writes the result.

With one recorded bit and the decoder "nearest_cell" a mismatched m goes to m + 1 where z lies above the middle of m's
rounding cell or m = 0, and to m - 1 otherwise. The middle of the cell of m is its value, except for 2 (cell
[1.75, 2.5]) and 4 (cell [3.5, 5]), where the step changes: value + 1/8 and value + 2/8. Even m have m / 2 - 1 eighths:
0 at m = 2, 1 at 4, 2 at 6; and -1 at m = 0, which sends every z >= 0 upwards, as the rule at zero asks. At m = 7,
z <= 6 goes down.

Shapes: N rows, K columns, G = K / block size. Sign and code tensors are int8: on a CPU they cost a quarter of a float
pass, while `torch.where` and float comparisons cost several.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from tracefp4.coding import ScaleCoding
from tracefp4.errors import FormatError
from tracefp4.formats.grid import code_to_magnitude, magnitude_to_code, round_magnitude_, sign_of
from tracefp4.formats.scaling import block_amax, decode_scales, element_factor, outer_scale
from tracefp4.formats.scheme import Scheme
from tracefp4.formats.selection import select_block_scales, signed_zeros
from tracefp4.ops.guided_quantize.decoding import Position, followed
from tracefp4.ops.guided_quantize.scale_decoding import recovered_scales
from tracefp4.ops.guided_quantize.values import Guide, Rounded
from tracefp4.ops.spans import row_spans


class _Scaled(NamedTuple):
    """What the rows are rounded under."""

    x_NK: Tensor
    """x with non-finite blocks set to 0."""
    magnitude_NK: Tensor
    """|x|, likewise."""
    block_scales_NG: Tensor
    """The scale bytes to use."""
    outer: Tensor
    """The outer scales to use."""
    finite_NG: Tensor | None
    """bool, the finite blocks of x; None when all are."""
    undecoded: Tensor | None
    """int64, blocks of syndromes of scales that nothing explains; None for 0."""


def guided_quantize_reference(
    x: Tensor, scheme: Scheme, guide: Guide | None, exponent: int | None, with_codes: bool
) -> Rounded:
    """Round checked rows, in spans that stay in cache; see `guided_quantize`."""
    spans = row_spans(x.shape[0], x.shape[1], x.device)
    if len(spans) == 1 or scheme.outer == "tensor":
        return _round_rows(x, scheme, guide, exponent, with_codes)
    parts = [
        _round_rows(x[a:b], scheme, None if guide is None else guide.rows(a, b), exponent, with_codes)
        for a, b in spans
    ]
    codes = [part.codes for part in parts if part.codes is not None]
    return Rounded(
        values=torch.cat([part.values for part in parts]),
        codes=torch.cat(codes) if codes else None,
        block_scales=torch.cat([part.block_scales for part in parts]),
        outer=torch.cat([part.outer for part in parts]) if scheme.outer == "row" else parts[0].outer,
        nearest_changed=torch.stack([part.nearest_changed for part in parts]).sum(),
        in_band=_total([part.in_band for part in parts]),
        undecoded=_total([part.undecoded for part in parts]),
    )


def _total(counts: list[Tensor | None]) -> Tensor | None:
    known = [count for count in counts if count is not None]
    return torch.stack(known).sum() if known else None


def _round_rows(
    x: Tensor, scheme: Scheme, guide: Guide | None, exponent: int | None, with_codes: bool
) -> Rounded:
    x_NK = signed_zeros(x.detach().resolve_neg().to(torch.float32).contiguous(), scheme.sign)
    scaled = _choose_scales(x_NK, scheme, guide, exponent)
    decode_scale_NG = decode_scales(scaled.block_scales_NG, scaled.outer, scheme)
    blocks = (x.shape[0], x.shape[1] // scheme.block_size, scheme.block_size)
    factor_NG, multiplies = element_factor(scaled.block_scales_NG, scaled.outer, scheme)
    magnitude_NGB, factor_NG1 = scaled.magnitude_NK.view(blocks), factor_NG.unsqueeze(2)
    _ = magnitude_NGB.mul_(factor_NG1) if multiplies else magnitude_NGB.div_(factor_NG1)
    z_NK, values_NK = round_magnitude_(scaled.magnitude_NK, scheme.tie)
    code_NK, num_changed = None, torch.zeros((), dtype=torch.int64, device=x.device)
    in_band, undecoded = None, None
    if guide is not None or with_codes:
        code_NK = magnitude_to_code(values_NK)
    if guide is not None:
        assert code_NK is not None
        nearest_code_NK = code_NK
        is_usable_NG = (decode_scale_NG > 0).logical_and_(guide.valid[:, None])
        position = Position(scaled.x_NK, z_NK, values_NK, nearest_code_NK, is_usable_NG, scaled.finite_NG)
        code_NK, in_band, undecoded = followed(position, guide)
        undecoded = undecoded if scaled.undecoded is None else undecoded + scaled.undecoded
        num_changed = (code_NK != nearest_code_NK).count_nonzero()
        values_NK = code_to_magnitude(code_NK)
    values_NK.view(blocks).mul_(decode_scale_NG.unsqueeze(2))
    values_NK.copysign_(scaled.x_NK)
    codes_NK = None
    if with_codes and code_NK is not None:
        codes_NK = code_NK.bitwise_or_(sign_of(scaled.x_NK).bitwise_and_(8)).view(torch.uint8)
    return Rounded(
        values=values_NK.to(x.dtype),
        codes=codes_NK,
        block_scales=scaled.block_scales_NG,
        outer=scaled.outer,
        nearest_changed=num_changed,
        in_band=in_band,
        undecoded=undecoded,
    )


def _choose_scales(x_NK: Tensor, scheme: Scheme, guide: Guide | None, exponent: int | None) -> _Scaled:
    magnitude_NK, finite_NG, undecoded = x_NK.abs(), None, None
    is_raw = guide is not None and guide.scale_coding is ScaleCoding.RAW
    # A finite sum has finite terms, so the maxima are not needed to find blocks that are not finite.
    if is_raw and guide is not None and bool(guide.valid.all()) and math.isfinite(x_NK.sum().item()):
        block_scales_NG, outer = guide.block_scales, guide.outer
        if outer is None:
            outer = outer_scale(magnitude_NK, scheme, exponent)
    else:
        amax_NG, finite_NG = block_amax(magnitude_NK, scheme.block_size)
        if finite_NG is not None:
            drop_NK = ~finite_NG.repeat_interleave(scheme.block_size, 1)
            x_NK, magnitude_NK = x_NK.masked_fill(drop_NK, 0.0), magnitude_NK.masked_fill(drop_NK, 0.0)
        outer = outer_scale(amax_NG, scheme, exponent)
        block_scales_NG = select_block_scales(magnitude_NK, amax_NG, outer, scheme, finite_NG)
        if guide is not None:
            outer = outer if guide.outer is None else torch.where(guide.valid, guide.outer, outer)
            recovered_NG, undecoded = recovered_scales(amax_NG, finite_NG, outer, scheme, guide)
            block_scales_NG = torch.where(guide.valid[:, None], recovered_NG, block_scales_NG)
        if finite_NG is not None:
            block_scales_NG = block_scales_NG.masked_fill(~finite_NG, scheme.nan_byte)
    if is_raw:
        check_scale_bytes(block_scales_NG, scheme)
    return _Scaled(x_NK, magnitude_NK, block_scales_NG, outer, finite_NG, undecoded)


def check_scale_bytes(block_scales_NG: Tensor, scheme: Scheme) -> None:
    """Refuse bytes that are no scale.

    Raises:
        FormatError: A byte above the scheme's NaN byte.
    """
    if block_scales_NG.numel() == 0 or scheme.nan_byte == 0xFF:
        return
    most = int(block_scales_NG.max())
    if most > scheme.nan_byte:
        raise FormatError(
            f"A guide's block scales are E4M3 bytes 0x00..0x7F; got 0x{most:02X}, a negative scale. "
            "The record is damaged or belongs to another format."
        )

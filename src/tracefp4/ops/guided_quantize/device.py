"""guided_quantize by the kernels of kernel.cu: the same values and bytes as `reference.py`, x read once.

Nothing is read back: what is counted stays on the device, and a recorded scale that no scheme stores ends the kernel
with an error, as an index out of range does in torch. float32 and bf16 are read as they are, other dtypes as float32.
"""

import math
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from tracefp4.coding import Codec, SyndromeCode
from tracefp4.formats.scheme import Scheme
from tracefp4.formats.schemes import NVFP4_ROW_POW2
from tracefp4.ops.device import DeviceLibrary, Launch, aligned
from tracefp4.ops.guided_quantize import recording
from tracefp4.ops.guided_quantize.decisions import SCALE_CODINGS, GuideKind, decisions_of, guide_of
from tracefp4.ops.guided_quantize.nearness import near_bounds
from tracefp4.ops.guided_quantize.reference import guided_quantize_reference
from tracefp4.ops.guided_quantize.rows import (
    WARP,
    Shape,
    check_rows,
    outer_of,
    readable_rows,
    row_variant,
    shape_of,
)
from tracefp4.ops.guided_quantize.values import Guide, Rounded
from tracefp4.ops.kernels import first_difference
from tracefp4.ops.parity_checks import numbers_on
from tracefp4.ops.rules import SchemeCase

_NEAR = 1 / 16
"""NEAR of flips.cuh, in decode scales."""
_RANKING_BYTES = 1024
"""`struct ranking` of search.cuh, one for every warp."""


def guided_quantize_on_device(
    x: Tensor, scheme: Scheme, guide: Guide | None, exponent: int | None, with_codes: bool
) -> Rounded:
    """Round checked rows; see `guided_quantize`."""
    x_NK = readable_rows(x)
    shape, (rows, width), device = shape_of(x_NK, scheme), x_NK.shape, x_NK.device
    block_scales_NG = torch.empty((rows, width // scheme.block_size), dtype=torch.uint8, device=device)
    values_NK = torch.empty_like(x_NK)
    codes_NK = torch.empty((rows, width), dtype=torch.uint8, device=device) if with_codes else None
    variant = {**row_variant(x_NK, scheme), **_variant(guide)}
    outer = outer_of(x_NK, scheme, exponent, LIBRARY, variant)
    counts = torch.empty((shape.grid, 3), dtype=torch.int32, device=device)
    launch = Launch(
        "guided_rows",
        (shape.grid,),
        shape.of_block,
        variant,
        _shared_bytes(shape, width, scheme, guide),
    )
    results = (outer, block_scales_NG, values_NK, codes_NK, None if guide is None else counts)
    LIBRARY.launch(
        launch, x_NK, rows, width, shape.of_row, *_operands(guide, device), *results, device=device
    )
    if guide is None:
        changed, in_band, undecoded = torch.zeros((), dtype=torch.int64, device=device), None, None
    else:
        changed, in_band, undecoded = counts.sum(0).unbind()
    return Rounded(
        values=values_NK.to(x.dtype),
        codes=codes_NK,
        block_scales=block_scales_NG,
        outer=outer,
        nearest_changed=changed,
        in_band=in_band,
        undecoded=undecoded,
    )


def _variant(guide: Guide | None) -> dict[str, int | str]:
    if guide is None:
        return {"RULE": 0, "SCALES": 0, "HAS_BAND": 0, "KEYS": 1, "SCALE_KEYS": 1}
    return {
        "RULE": decisions_of(guide)[0],
        "SCALES": SCALE_CODINGS[guide.scale_coding],
        "HAS_BAND": int(guide.band is not None),
        "KEYS": _keys(guide.code),
        "SCALE_KEYS": _keys(guide.scale_code),
    }


def _keys(code: SyndromeCode | None) -> int:
    return 1 if code is None else -(-code.length // WARP)


def _shared_bytes(shape: Shape, width: int, scheme: Scheme, guide: Guide | None) -> int:
    """Return the bytes of `struct scratch` of kernel.cu; 0 without syndromes."""
    if guide is None or (guide.code is None and guide.scale_code is None):
        return 0
    num_blocks = width // scheme.block_size
    words = num_blocks
    for code, num_bits in ((guide.code, width), (guide.scale_code, num_blocks)):
        words += 0 if code is None else -(-num_bits // 32) + 1
    return shape.of_block // WARP * _RANKING_BYTES + 4 * words * shape.slots


def _operands(guide: Guide | None, device: torch.device) -> tuple[Tensor | float | None, ...]:
    """Return the band and what the kernel reads of a guide."""
    if guide is None:
        return math.inf, None, None, None, None, None, None, None
    has_bounds = guide.code is not None
    return (
        math.inf if guide.band is None else guide.band,
        near_bounds(_NEAR if guide.band is None else guide.band, device) if has_bounds else None,
        guide.valid.contiguous(),
        aligned(decisions_of(guide)[1]),
        None if guide.code is None else numbers_on(guide.code, device),
        None if guide.outer is None else guide.outer.contiguous(),
        guide.block_scales.contiguous(),
        None if guide.scale_code is None else numbers_on(guide.scale_code, device),
    )


class Case(NamedTuple):
    """What kernels are specialised for."""

    rows: SchemeCase
    """Scheme and dtype of x."""
    what: GuideKind | Codec | None = None
    """What is followed, or what `recorded_quantize` keeps; None without either."""

    def __str__(self) -> str:
        what = self.what.name if isinstance(self.what, Codec) else self.what
        return f"{self.rows}, {what}"


def differences(device: torch.device, case: Case) -> str | None:
    """Compare with the reference under one scheme and dtype, with one kind of guide or codec; return what differs."""
    if isinstance(case.what, Codec):
        return recording.differences(device, case.rows, case.what)
    return first_difference(_pairs(device, case.rows, case.what))


def _pairs(
    device: torch.device, case: SchemeCase, kind: GuideKind | None
) -> Iterator[tuple[str, Tensor, Tensor]]:
    scheme, exponent = case.scheme, 3 if case.scheme.outer == "static" else None
    x = check_rows(scheme, () if kind is None else (kind.code, kind.scale_code)).to(device)
    guides: list[Guide | None] = [None]
    if kind is not None:  # of a rounding nearby, where few decisions differ, and of another one
        roundings = (
            guided_quantize_reference(r, scheme, None, exponent, True) for r in (x * 1.02, x.flip(1))
        )
        guides = [guide_of(kind, rounding) for rounding in roundings]
    rows = x.to(case.dtype)
    for guide in guides:
        got = guided_quantize_on_device(rows, scheme, guide, exponent, True)
        wanted = guided_quantize_reference(rows, scheme, guide, exponent, True)
        for field in fields(wanted):
            mine, theirs = getattr(got, field.name), getattr(wanted, field.name)
            if theirs is not None:
                yield field.name, mine, theirs


LIBRARY = DeviceLibrary(
    Path(__file__).with_name("kernel.cu"), differences, Case(SchemeCase(NVFP4_ROW_POW2, torch.bfloat16))
)
"""The kernels of kernel.cu; their check covers recording.cu, too."""

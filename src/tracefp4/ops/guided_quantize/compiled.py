"""guided_quantize by the functions of kernel.c: the same values and bytes as `reference.py`, in one sweep over x.

The sweep follows every scheme (`ops/scaling.h`); one outer scale per tensor needs a sweep for the maxima before.
float32 and bf16 are read as they are, other dtypes as float32.
"""

import math
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import torch
from torch import Tensor

from tracefp4.coding import ScaleCoding, SyndromeCode
from tracefp4.formats.scaling import outer_scale
from tracefp4.formats.scheme import Scheme
from tracefp4.formats.schemes import SCHEMES
from tracefp4.ops.guided_quantize.decisions import SCALE_CODINGS, decisions_of, guide_of, kinds_for
from tracefp4.ops.guided_quantize.reference import check_scale_bytes, guided_quantize_reference
from tracefp4.ops.guided_quantize.values import Guide, Rounded
from tracefp4.ops.kernels import DTYPE, Library, check_values, empty, first_difference, readable
from tracefp4.ops.parity_checks import code_numbers
from tracefp4.ops.rules import rules_of


def guided_quantize_compiled(
    x: Tensor, scheme: Scheme, guide: Guide | None, exponent: int | None, with_codes: bool
) -> Rounded:
    """Round checked rows; see `guided_quantize`."""
    x_NK = readable(x if x.dtype is torch.bfloat16 else x.to(torch.float32))
    rows, width = x_NK.shape
    values_NK = empty((rows, width), x_NK.dtype)
    codes_NK = empty((rows, width), torch.uint8) if with_codes else None
    outer = _outer(x_NK, scheme, guide, exponent)
    counts_N2 = None if guide is None else torch.empty((rows, 2), dtype=torch.int32, device="cpu")
    if guide is None or guide.scale_coding is not ScaleCoding.RAW:
        block_scales_NG = torch.empty((rows, width // scheme.block_size), dtype=torch.uint8, device="cpu")
    else:
        block_scales_NG = guide.block_scales.clone(memory_format=torch.contiguous_format)
    operands = (
        rules_of(scheme),
        x_NK,
        DTYPE[x_NK.dtype],
        width,
        *_decisions(guide),
        int(scheme.outer == "row"),
    )
    results = (outer, block_scales_NG, values_NK, codes_NK, counts_N2)
    num_changed = LIBRARY.call("guided_rows", rows, x_NK.numel(), *operands, *results)
    if guide is not None and guide.scale_coding is ScaleCoding.RAW:
        check_scale_bytes(block_scales_NG, scheme)
    in_band, undecoded = (None, None) if counts_N2 is None else counts_N2.sum(0).unbind()
    return Rounded(
        values=values_NK.to(x.dtype),
        codes=codes_NK,
        block_scales=block_scales_NG,
        outer=outer,
        nearest_changed=torch.tensor(num_changed, dtype=torch.int64, device="cpu"),
        in_band=in_band,
        undecoded=undecoded,
    )


def syndromes_compiled(rows_NB: Tensor, code: SyndromeCode) -> Tensor:
    """Return the syndromes of the lowest bits of uint8 [N, B] rows on the CPU, as records hold them."""
    rows, width = rows_NB.shape
    syndromes = empty((rows, code.row_bytes(width)), torch.uint8)
    LIBRARY.call(
        "encode_rows", rows, rows_NB.numel(), code_numbers(code), width, rows_NB.contiguous(), syndromes
    )
    return syndromes


def _outer(x_NK: Tensor, scheme: Scheme, guide: Guide | None, exponent: int | None) -> Tensor:
    """Return the outer scales, new; the kernel finds those of rows that have none yet."""
    if guide is not None and guide.outer is not None:
        return guide.outer.clone(memory_format=torch.contiguous_format)
    if scheme.outer == "row":
        return torch.empty(
            len(x_NK), dtype=torch.int8 if scheme.is_exact_in_bf16 else torch.float32, device="cpu"
        )
    amax = torch.empty((len(x_NK), 1), device="cpu")
    if scheme.outer == "tensor":
        LIBRARY.call("row_amax", len(x_NK), x_NK.numel(), x_NK, DTYPE[x_NK.dtype], x_NK.shape[1], amax)
    return outer_scale(amax, scheme, exponent)


def _decisions(guide: Guide | None) -> tuple[Tensor | float | None, ...]:
    """Return what the kernel reads of a guide: rule, band, valid rows, decisions, their code, the coding of the scales,
    the scales unless they are bytes, and their code."""
    if guide is None:
        return 0, math.inf, None, None, None, 0, None, None
    rule, decisions = decisions_of(guide)
    return (
        rule,
        math.inf if guide.band is None else guide.band,
        guide.valid.contiguous(),
        decisions.contiguous(),
        None if guide.code is None else code_numbers(guide.code),
        SCALE_CODINGS[guide.scale_coding],
        None if guide.scale_coding is ScaleCoding.RAW else guide.block_scales.contiguous(),
        None if guide.scale_code is None else code_numbers(guide.scale_code),
    )


def _pairs() -> Iterator[tuple[str, Tensor, Tensor]]:
    x = check_values()
    for scheme in _CHECKED:
        exponent = 3 if scheme.outer == "static" else None
        guides: list[Guide | None] = [None]
        if scheme.outer != "tensor":
            rollout = guided_quantize_reference(x.flip(1) * 1.1, scheme, None, exponent, True)
            guides.extend(guide_of(kind, rollout) for kind in kinds_for(scheme))
        for guide in guides:
            for dtype in (torch.float32, torch.bfloat16):
                got = guided_quantize_compiled(x.to(dtype), scheme, guide, exponent, True)
                wanted = guided_quantize_reference(x.to(dtype), scheme, guide, exponent, True)
                for field in fields(wanted):
                    mine, theirs = getattr(got, field.name), getattr(wanted, field.name)
                    if theirs is not None:
                        yield field.name, mine, theirs


_CHECKED = {
    (s.order, s.scale_rule, s.candidates, s.tie, s.sign, s.outer): s for s in SCHEMES.values()
}.values()
"""One scheme of each kind that the kernel tells apart."""

LIBRARY = Library(
    Path(__file__).with_name("kernel.c"),
    {"guided_rows": "ppiqif" + "ppp" + "ipp" + "i" + "ppppp", "row_amax": "piqp", "encode_rows": "pqpp"},
    check=lambda: first_difference(_pairs()),
    headers=(
        "syndromes.h",
        "guided_quantize/keys.h",
        "guided_quantize/cells.h",
        "guided_quantize/scale_cells.h",
        "guided_quantize/search.h",
        "guided_quantize/recovery.h",
        "guided_quantize/segments.h",
    ),
)
"""The functions of kernel.c."""

"""A guide as the kernels read it: which rule decides, what it reads, and guides of a kind for comparisons with the
reference."""

from dataclasses import replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from tracefp4.coding import ScaleCoding, SyndromeCode, syndrome_code
from tracefp4.formats.order import Candidates, ScaleRule
from tracefp4.formats.scheme import Scheme
from tracefp4.ops.guided_quantize.values import Guide, Rounded
from tracefp4.ops.parity_checks import bytes_of_bits, syndromes_of_bits

_RULES: dict[tuple[Literal["bracket", "nearest_cell"], Literal[1, 2]], int] = {
    ("bracket", 1): 2,
    ("nearest_cell", 1): 3,
    ("bracket", 2): 4,
    ("nearest_cell", 2): 5,
}
"""Decoder and number of recorded bits -> `enum rule` of cells.h."""
_FULL, _SYNDROMES = 1, 6
SCALE_CODINGS = {
    ScaleCoding.RAW: 0,
    ScaleCoding.SYNDROME: 1,
    ScaleCoding.COSET1: 2,
    ScaleCoding.COSET2: 4,
}
"""How scales were recorded -> the numbers of scale_cells.h."""


def decisions_of(guide: Guide) -> tuple[int, Tensor]:
    """Return `enum rule` of cells.h and what it reads: codes, bits or syndromes."""
    if guide.codes is not None:
        return _FULL, guide.codes
    if guide.syndromes is not None:
        return _SYNDROMES, guide.syndromes
    assert guide.bits is not None
    return _RULES[guide.decoder, guide.num_bits], guide.bits


class GuideKind(NamedTuple):
    """What kernels are specialised for: everything about a guide but its tensors."""

    rule: int
    """`enum rule` of cells.h."""
    scale_coding: ScaleCoding
    """How scales were recorded."""
    code: SyndromeCode | None = None
    """Of the syndromes of values, if these were recorded."""
    scale_code: SyndromeCode | None = None
    """Of the syndromes of scales."""
    has_band: bool = False
    """Whether there is a band."""

    def __str__(self) -> str:
        names = [code.name for code in (self.code, self.scale_code) if code is not None]
        band = " and a band" if self.has_band else ""
        return f"rule {self.rule} with scales {self.scale_coding.value} {'+'.join(names)}{band}"


def kind_of(guide: Guide) -> GuideKind:
    """Return the kind of a guide."""
    rule = decisions_of(guide)[0]
    return GuideKind(rule, guide.scale_coding, guide.code, guide.scale_code, guide.band is not None)


def guide_of(kind: GuideKind, rollout: Rounded) -> Guide:
    """Return a guide of a kind that says what a rounding decided, with a row that is not valid."""
    assert rollout.codes is not None
    guide = Guide(
        valid=torch.arange(len(rollout.codes), device=rollout.codes.device) != 2,
        outer=rollout.outer if rollout.outer.dim() else None,
        block_scales=rollout.block_scales,
        codes=rollout.codes,
        band=0.3 if kind.has_band else None,
    )
    if kind.scale_code is not None:
        scales = _syndromes(rollout.block_scales, kind.scale_code)
        guide = replace(
            guide, block_scales=scales, scale_coding=kind.scale_coding, scale_code=kind.scale_code
        )
    elif kind.scale_coding is not ScaleCoding.RAW:
        low_bits = rollout.block_scales & SCALE_CODINGS[kind.scale_coding] - 1
        guide = replace(guide, block_scales=low_bits, scale_coding=kind.scale_coding)
    if kind.code is not None:
        return replace(guide, codes=None, syndromes=_syndromes(rollout.codes, kind.code), code=kind.code)
    if kind.rule == _FULL:
        return guide
    decoder, num_bits = next(decision for decision, rule in _RULES.items() if rule == kind.rule)
    bits = rollout.codes & (1 << num_bits) - 1
    return replace(guide, codes=None, bits=bits, decoder=decoder, num_bits=num_bits)


def kinds_for(scheme: Scheme) -> list[GuideKind]:
    """Return guides of every kind under a scheme, for the check of a library that has one variant for all."""
    kinds = [GuideKind(rule, ScaleCoding.RAW) for rule in (_FULL, *_RULES.values())]
    kinds.append(kinds[0]._replace(has_band=True))
    if scheme.candidates is Candidates.SIX:
        secded, bch, parity = (syndrome_code(name) for name in ("secded", "bch32_2", "parity3"))
        kinds.append(GuideKind(_SYNDROMES, ScaleCoding.COSET2, secded, has_band=True))
        if scheme.scale_rule is ScaleRule.E4M3:
            kinds.append(GuideKind(_SYNDROMES, ScaleCoding.SYNDROME, bch, parity))
    return kinds


def _syndromes(codes: Tensor, code: SyndromeCode) -> Tensor:
    """Return the syndromes of the lowest bits of rows as they are stored."""
    return bytes_of_bits(syndromes_of_bits(codes & 1, code).flatten(1))

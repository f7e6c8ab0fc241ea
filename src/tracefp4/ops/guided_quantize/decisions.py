"""A guide as the kernels read it: which rule decides, what it reads, and one guide of each kind for self-checks."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from tracefp4.coding import ScaleCoding, SyndromeCode, syndrome_code
from tracefp4.formats.order import Candidates, ScaleRule
from tracefp4.formats.scheme import Scheme
from tracefp4.ops.guided_quantize.values import Guide, Rounded
from tracefp4.ops.parity_checks import bytes_of_bits, syndromes_of_bits

_RULES = {("bracket", 1): 2, ("nearest_cell", 1): 3, ("bracket", 2): 4, ("nearest_cell", 2): 5}
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


def guides_of(rollout: Rounded, scheme: Scheme) -> Iterator[Guide]:
    """Give one guide of each kind from a rounding, with a row that is not valid."""
    assert rollout.codes is not None
    guide = Guide(
        valid=torch.arange(len(rollout.codes), device=rollout.codes.device) != 2,
        outer=rollout.outer if rollout.outer.dim() else None,
        block_scales=rollout.block_scales,
        codes=rollout.codes,
    )
    yield guide
    yield replace(guide, band=0.05)
    one = replace(guide, codes=None, bits=rollout.codes & 1)
    two = replace(guide, codes=None, bits=rollout.codes & 3, num_bits=2)
    for bits in (one, two):
        yield replace(bits, decoder="bracket")
        yield bits
    if scheme.candidates is Candidates.SIX:
        cosets = replace(guide, block_scales=rollout.block_scales & 3, scale_coding=ScaleCoding.COSET2)
        secded, bch, parity = (syndrome_code(name) for name in ("secded", "bch32_2", "parity3"))
        yield replace(cosets, codes=None, syndromes=_syndromes(rollout.codes, secded), code=secded, band=0.3)
        if scheme.scale_rule is ScaleRule.E4M3:
            yield replace(
                guide,
                codes=None,
                syndromes=_syndromes(rollout.codes, bch),
                code=bch,
                block_scales=_syndromes(rollout.block_scales, parity),
                scale_coding=ScaleCoding.SYNDROME,
                scale_code=parity,
            )


def _syndromes(codes: Tensor, code: SyndromeCode) -> Tensor:
    """Return the syndromes of the lowest bits of rows as they are stored."""
    return bytes_of_bits(syndromes_of_bits(codes & 1, code).flatten(1))

"""How well a replayed pass agreed with the rollout: counts per site and per router, never a log of events.

A site's counts are written as one value and overwritten when the site runs again, so activation recomputation
cannot count twice. Counts of codes treat 0x0 and 0x8 (zero and negative zero) as equal. Counts against a
reference exist only where a full record was given for measuring; None there (and in values_clipped) means not
measured, which is not zero. What is left wrong after guidance is `mismatched_after`; what other codecs would have left
is in `Counters.residuals`. Counts may stay 0-dim tensors until they are read, so counting does not wait for a
device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tracefp4.guidance.record import Site
from tracefp4.guidance.site_record import SiteRecord

if TYPE_CHECKING:
    from tracefp4.ops.guided_quantize import Rounded


@dataclass(frozen=True, kw_only=True, slots=True)
class SiteCounts:
    """What one site did in one pass over one batch (real positions only; padding is not counted)."""

    values: int
    """Values rounded."""
    positions: int
    """Real positions seen."""
    positions_guided: int
    """Real positions whose record was followed."""
    positions_missing: int
    """Real positions without a usable record: rounded to nearest."""
    values_changed: int | Tensor
    """Values where guidance chose another codeword than rounding to nearest at the same scale."""
    values_in_band: int | Tensor | None = None
    """Values that the noise gate left to the record; without a gate all values of guided rows but those of blocks
    whose scale is 0 or NaN. None without a guide."""
    syndrome_blocks: int = 0
    """Blocks of syndromes, of codes and of scales, in guided rows."""
    blocks_undecoded: int | Tensor | None = None
    """Syndrome blocks for which no plausible set of flips was found: nearest there; None without a guide."""
    blocks: int = 0
    """Blocks rounded."""
    blocks_clamped: int | Tensor = 0
    """Blocks whose scale was cut at 448: a static outer scale calibrated on smaller values."""
    blocks_floored: int | Tensor = 0
    """Blocks that are not zero and whose scale was raised to the smallest stored one, or flushed."""
    values_clipped: int | Tensor | None = None
    """Values beyond the largest code of their block's scale (`formats.saturation`); None where a record was followed
    and nothing was measured against a reference: finding them there needs one more look at all values."""
    values_compared: int | Tensor | None = None
    """Values at positions that the reference covers; None when there is no reference."""
    mismatched_before: int | Tensor | None = None
    """Compared values whose nearest code under the trainer's own scale is not the reference's code."""
    mismatched_after: int | Tensor | None = None
    """Compared values whose code after guidance is not the reference's code."""
    blocks_compared: int | Tensor | None = None
    """Blocks at positions that the reference covers."""
    blocks_mismatched: int | Tensor | None = None
    """Compared blocks whose own scale byte or row exponent is not the reference's."""

    def resolved(self) -> SiteCounts:
        """The same counts as plain ints, read from a device at once."""
        return resolve([self])[0]


def resolve(entries: Sequence[SiteCounts]) -> list[SiteCounts]:
    """Return counts as plain ints, all of them read from their device at once."""
    names = [item.name for item in fields(SiteCounts)]
    counted = [{n: v for n in names if isinstance(v := getattr(entry, n), Tensor)} for entry in entries]
    values = [value.to(torch.int64) for found in counted for value in found.values()]
    read = iter(torch.stack(values).tolist() if values else [])
    return [
        replace(entry, **{name: next(read) for name in found})
        for entry, found in zip(entries, counted, strict=True)
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutingCounts:
    """What one router did in one pass over one batch (real positions only)."""

    positions: int
    """Real positions routed."""
    positions_replayed: int | Tensor
    """Positions that took the recorded experts; the others used the live router."""
    positions_changed: int | Tensor
    """Replayed positions where the live router would have chosen another set of experts."""


@dataclass(kw_only=True, eq=False, slots=True)
class Counters:
    """Counts of one batch, by site and by layer."""

    sites: dict[Site, SiteCounts] = field(default_factory=dict)
    """Last counts of every site that ran."""
    routing: dict[int, RoutingCounts] = field(default_factory=dict)
    """Last counts of every router that ran, by decoder layer."""
    noise: dict[Site, Tensor] = field(default_factory=dict)
    """int64 [2, NUM_BINS] of every site with a reference, as `noise.measure_noise` counts; read with
    `noise.histograms`."""
    residuals: dict[Site, dict[str, Tensor]] = field(default_factory=dict)
    """Compared values that each candidate codec would have left wrong, by site and codec (`guidance.rates`); empty
    unless the batch has candidates and references."""

    def total(self) -> SiteCounts:
        """Sums over the sites, as ints; a measured count is the sum over the sites that were measured."""
        counts = [entry.resolved() for entry in self.sites.values()]
        total = SiteCounts(values=0, positions=0, positions_guided=0, positions_missing=0, values_changed=0)
        for item in fields(SiteCounts):
            found = [value for entry in counts if (value := getattr(entry, item.name)) is not None]
            if found:
                total = replace(total, **{item.name: sum(found)})
        return total


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Reference:
    """Full codes to measure against, one row per row of the site."""

    codes: Tensor
    """uint8 [N, K], unpacked."""
    block_scales: Tensor
    """uint8 [N, K/16]."""
    exponent: Tensor | None
    """int8 [N]; None for static schemes."""
    valid: Tensor
    """bool [N]: rows that the reference covers."""
    part: SiteRecord
    """The same rows as a site record, to be recoded."""


def compare(*, rounded: Rounded, nearest: Rounded, reference: Reference) -> dict[str, Tensor]:
    """Count disagreements with a reference; the keys are fields of SiteCounts.

    Args:
        rounded: what the pass used.
        nearest: the same input rounded to nearest under its own scales.
        reference: the rollout's codes and scales.
    """
    assert rounded.codes is not None and nearest.codes is not None
    rows = reference.valid.sum()
    other_blocks = nearest.block_scales != reference.block_scales
    if reference.exponent is not None:
        other_blocks |= (nearest.outer != reference.exponent)[:, None]
    return {
        "values_compared": rows * reference.codes.shape[1],
        "mismatched_before": num_mismatched(nearest.codes, reference.codes, valid=reference.valid),
        "mismatched_after": num_mismatched(rounded.codes, reference.codes, valid=reference.valid),
        "blocks_compared": rows * reference.block_scales.shape[1],
        "blocks_mismatched": (other_blocks & reference.valid[:, None]).sum(),
    }


def num_mismatched(codes: Tensor, other_codes: Tensor, *, valid: Tensor) -> Tensor:
    """Codes that differ in value, over the rows where `valid`; 0x0 and 0x8 are equal.

    Args: codes, other_codes uint8 [N, K] unpacked; valid bool [N]. Returns: int64, 0-dim.
    """
    return (is_mismatched(codes, other_codes) & valid[:, None]).sum()


def is_mismatched(codes: Tensor, other_codes: Tensor) -> Tensor:
    """Return where codes differ in value, bool [N, K]; 0x0 and 0x8 are equal."""
    is_nonzero = ((codes | other_codes) & 7) != 0
    return (codes != other_codes) & is_nonzero

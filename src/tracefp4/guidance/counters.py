"""How well a replayed pass agreed with the rollout: counts per site and per router, never a log of events.

A site's counts are written as one value and overwritten when the site runs again, so activation recomputation
cannot count twice. Counts of codes treat 0x0 and 0x8 (zero and negative zero) as equal. Counts against a
reference exist only where a full record was given for measuring; None there means not measured, which is not
zero. Counts may stay 0-dim tensors until they are read, so counting does not wait for a device.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING

from torch import Tensor

from tracefp4.guidance.record import Site

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
        """The same counts as plain ints."""
        read = {item.name: getattr(self, item.name) for item in fields(self)}
        return replace(self, **{name: int(value) for name, value in read.items() if value is not None})


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
        other_blocks |= (nearest.exponent != reference.exponent)[:, None]
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
    is_nonzero = ((codes | other_codes) & 7) != 0
    return ((codes != other_codes) & is_nonzero & valid[:, None]).sum()

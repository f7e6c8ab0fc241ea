"""Do trainer and rollout hold the same codes? Counts per site, added over batches, turned into rates.

Counts are integers, so merging is exact and independent of the order of batches; rates are made only at the
end, by site, by layer, by kind of site, or over all. The codes 0x0 and 0x8 are +0 and -0, the same value, and
count as equal.
A rate without anything to count is left out: it is not 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields

from torch import Tensor
from tracefp4.errors import ConfigError

NEGATIVE_ZERO = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class AgreementCounts:
    """What was counted at one site, or at several after adding. All are >= 0."""

    values: int = 0
    """Values that passed the site (real tokens, not padding)."""
    positions_guided: int = 0
    """Token positions that had a decision to follow."""
    positions_missing: int = 0
    """Token positions that had none and were rounded to nearest."""
    changed: int = 0
    """Values that guidance gave another codeword than nearest rounding at the same scale."""
    compared: int = 0
    """Values compared with the rollout's codes; 0 when no reference record was given."""
    mismatched_before: int = 0
    """Compared values whose code under the trainer's own scale, rounded to nearest, differs from the
    rollout's."""
    mismatched_after: int = 0
    """Compared values whose code after guidance differs from the rollout's."""
    compared_scales: int = 0
    """Block scale bytes compared."""
    mismatched_scales: int = 0
    """Block scale bytes of the trainer's own that differ from the rollout's."""

    def __post_init__(self) -> None:
        for name, part, whole in (
            ("mismatched_before", self.mismatched_before, self.compared),
            ("mismatched_after", self.mismatched_after, self.compared),
            ("mismatched_scales", self.mismatched_scales, self.compared_scales),
        ):
            if not 0 <= part <= whole:
                raise ConfigError(
                    f"AgreementCounts.{name} is refused: got {part}; allowed is 0 .. {whole}, what was "
                    "compared. Count both over the same values."
                )

    def __add__(self, other: AgreementCounts) -> AgreementCounts:
        """Add two counts, field by field."""
        return AgreementCounts(
            **{item.name: getattr(self, item.name) + getattr(other, item.name) for item in fields(self)}
        )

    def rates(self) -> dict[str, float]:
        """Return the rates that are defined.

        mismatch_before, mismatch_after: of compared values. scale_mismatch: of compared scale bytes. changed:
        of values. missing: positions without a decision, of all positions.
        """
        positions = self.positions_guided + self.positions_missing
        parts = {
            "mismatch_before": (self.mismatched_before, self.compared),
            "mismatch_after": (self.mismatched_after, self.compared),
            "scale_mismatch": (self.mismatched_scales, self.compared_scales),
            "changed": (self.changed, self.values),
            "missing": (self.positions_missing, positions),
        }
        return {name: part / whole for name, (part, whole) in parts.items() if whole > 0}


# (kind, layer) of a guidance Site: "x" expert input, "w2" down-projection input, "k", "v"; layer from 0
SiteCounts = Mapping[tuple[str, int], AgreementCounts]


def count_mismatches(codes: Tensor, reference: Tensor) -> int:
    """Count E2M1 codes that stand for different values.

    Args:
        codes: uint8, unpacked codes 0..15, any shape.
        reference: uint8 of the same shape.

    Returns:
        Number of entries whose values differ; 0x0 and 0x8 are equal. 0 for empty tensors.

    Raises:
        ConfigError: shapes that differ.
    """
    if codes.shape != reference.shape:
        raise ConfigError(
            f"count_mismatches needs codes of one shape; got {tuple(codes.shape)} and "
            f"{tuple(reference.shape)}. Compare the same rows."
        )
    is_zero = ((codes | reference) & (NEGATIVE_ZERO - 1)) == 0
    return int(((codes != reference) & ~is_zero).sum())


def merge_sites(parts: Iterable[SiteCounts]) -> dict[tuple[str, int], AgreementCounts]:
    """Add the counts of several batches, site by site; a site may be absent from some of them."""
    merged: dict[tuple[str, int], AgreementCounts] = {}
    for part in parts:
        for site, counts in part.items():
            merged[site] = merged[site] + counts if site in merged else counts
    return merged


def total(counts: SiteCounts) -> AgreementCounts:
    """Add the counts of all sites."""
    return sum(counts.values(), AgreementCounts())


def by_layer(counts: SiteCounts) -> dict[int, AgreementCounts]:
    """Add the counts of all sites of each layer; layers ascending."""
    layers = sorted({layer for _, layer in counts})
    return {
        wanted: total({site: part for site, part in counts.items() if site[1] == wanted}) for wanted in layers
    }


def by_kind(counts: SiteCounts) -> dict[str, AgreementCounts]:
    """Add the counts of all layers for each kind of site; kinds in alphabetical order."""
    kinds = sorted({kind for kind, _ in counts})
    return {
        wanted: total({site: part for site, part in counts.items() if site[0] == wanted}) for wanted in kinds
    }


def agreement_metrics(counts: SiteCounts) -> dict[str, float]:
    """Name the rates over all sites, by kind and by site.

    Names: agreement/<rate>, agreement/<kind>/<rate>, agreement/<kind>/layer_<n>/<rate>.
    """
    metrics = {f"agreement/{name}": value for name, value in total(counts).rates().items()}
    for kind, part in by_kind(counts).items():
        metrics |= {f"agreement/{kind}/{name}": value for name, value in part.rates().items()}
    for (kind, layer), part in sorted(counts.items()):
        metrics |= {f"agreement/{kind}/layer_{layer}/{name}": value for name, value in part.rates().items()}
    return metrics

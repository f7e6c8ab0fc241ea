"""Do trainer and rollout hold the same codes? The counters of replayed batches, added and turned into rates.

Counts are integers, so merging is exact and independent of the order of batches; rates are made only at the
end, by site, by kind of site, by layer, or over all. The counters already treat the codes 0x0 and 0x8 (+0 and
-0) as equal. A rate with nothing to count is left out: not measured is not 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields

from tracefp4.errors import ConfigError
from tracefp4.guidance import counters as guidance_counters
from tracefp4.guidance.counters import Counters


@dataclass(frozen=True, kw_only=True, slots=True)
class AgreementCounts:
    """What was counted at one site, or at several after adding. All are >= 0."""

    values: int = 0
    """Values rounded at real positions."""
    positions_guided: int = 0
    """Positions that had a decision to follow."""
    positions_missing: int = 0
    """Positions that had none and were rounded to nearest."""
    changed: int = 0
    """Values that guidance gave another codeword than nearest rounding at the same scale."""
    guidable: int = 0
    """Values at sites that had a guide; 0: nothing was guided."""
    in_band: int = 0
    """Those that were followed: inside the noise gate's band and in a row with a record (all such rows without a
    gate)."""
    syndrome_blocks: int = 0
    """Blocks of syndromes that were decoded; 0 for codecs without syndromes."""
    undecoded: int = 0
    """Those for which no plausible set of flips was found; their values were rounded to nearest."""
    compared: int = 0
    """Values compared with the rollout's codes; 0: not measured."""
    mismatched_before: int = 0
    """Compared values whose nearest code under the trainer's own scale differs from the rollout's."""
    mismatched_after: int = 0
    """Compared values whose code after guidance differs from the rollout's."""
    compared_scales: int = 0
    """Blocks whose scale was compared; 0: not measured."""
    mismatched_scales: int = 0
    """Compared blocks whose own scale byte or row exponent differs from the rollout's."""
    examined: int = 0
    """Values looked at for clipping; 0: not measured."""
    clipped: int = 0
    """Examined values beyond the largest code of the block scale in use (a recorded or static one)."""

    def __post_init__(self) -> None:
        for name, whole in (
            ("mismatched_before", self.compared),
            ("mismatched_after", self.compared),
            ("mismatched_scales", self.compared_scales),
            ("changed", self.values),
            ("in_band", self.guidable),
            ("undecoded", self.syndrome_blocks),
            ("clipped", self.examined),
        ):
            if not 0 <= getattr(self, name) <= whole:
                raise ConfigError(
                    f"AgreementCounts.{name} is refused: got {getattr(self, name)}; allowed is 0 .. {whole}, "
                    "what was looked at. Count both over the same values."
                )

    @classmethod
    def from_site(cls, counts: guidance_counters.SiteCounts) -> AgreementCounts:
        """Read one site's counters; what was not measured counts as 0 compared."""
        found = counts.resolved()
        return cls(
            values=found.values,
            positions_guided=found.positions_guided,
            positions_missing=found.positions_missing,
            changed=int(found.values_changed),
            guidable=0 if found.values_in_band is None else found.values,
            in_band=int(found.values_in_band or 0),
            syndrome_blocks=found.syndrome_blocks,
            undecoded=int(found.blocks_undecoded or 0),
            compared=int(found.values_compared or 0),
            mismatched_before=int(found.mismatched_before or 0),
            mismatched_after=int(found.mismatched_after or 0),
            compared_scales=int(found.blocks_compared or 0),
            mismatched_scales=int(found.blocks_mismatched or 0),
            examined=0 if found.values_clipped is None else found.values,
            clipped=int(found.values_clipped or 0),
        )

    def __add__(self, other: AgreementCounts) -> AgreementCounts:
        """Add two counts, field by field."""
        return AgreementCounts(
            **{item.name: getattr(self, item.name) + getattr(other, item.name) for item in fields(self)}
        )

    def rates(self) -> dict[str, float]:
        """Return the rates that are defined.

        mismatch_before and mismatch_after: of compared values. scale_mismatch: of compared blocks.
        changed: of values. followed: values left to the record by the gate, of values at guided sites. undecoded: of
        syndrome blocks. clipped: of examined values. missing: positions without a decision, of all positions.
        """
        parts = {
            "mismatch_before": (self.mismatched_before, self.compared),
            "mismatch_after": (self.mismatched_after, self.compared),
            "scale_mismatch": (self.mismatched_scales, self.compared_scales),
            "changed": (self.changed, self.values),
            "followed": (self.in_band, self.guidable),
            "undecoded": (self.undecoded, self.syndrome_blocks),
            "clipped": (self.clipped, self.examined),
            "missing": (self.positions_missing, self.positions_guided + self.positions_missing),
        }
        return {name: part / whole for name, (part, whole) in parts.items() if whole > 0}


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutingAgreement:
    """What was counted at one router, or at several after adding. All are >= 0."""

    positions: int = 0
    """Positions routed."""
    positions_replayed: int = 0
    """Positions that took the recorded experts."""
    positions_changed: int = 0
    """Replayed positions where the live router would have chosen another set of experts."""

    @classmethod
    def from_router(cls, counts: guidance_counters.RoutingCounts) -> RoutingAgreement:
        """Read one router's counters."""
        return cls(**{item.name: int(getattr(counts, item.name)) for item in fields(cls)})

    def __add__(self, other: RoutingAgreement) -> RoutingAgreement:
        """Add two counts, field by field."""
        return RoutingAgreement(
            positions=self.positions + other.positions,
            positions_replayed=self.positions_replayed + other.positions_replayed,
            positions_changed=self.positions_changed + other.positions_changed,
        )

    def rates(self) -> dict[str, float]:
        """Return `replayed` (of positions) and `changed` (of replayed positions), where defined."""
        parts = {
            "replayed": (self.positions_replayed, self.positions),
            "changed": (self.positions_changed, self.positions_replayed),
        }
        return {name: part / whole for name, (part, whole) in parts.items() if whole > 0}


# (kind, layer) of a guidance Site: "x" expert input, "w2" down-projection input, "k", "v"; layer from 0
SiteKey = tuple[str, int]
SiteCounts = Mapping[SiteKey, AgreementCounts]


def collect_sites(counters: Counters) -> dict[SiteKey, AgreementCounts]:
    """Read the site counters of one replayed batch, after its last pass (a later pass overwrites them)."""
    return {
        (site.kind, site.layer): AgreementCounts.from_site(found) for site, found in counters.sites.items()
    }


def collect_routing(counters: Counters) -> dict[int, RoutingAgreement]:
    """Read the router counters of one replayed batch, by decoder layer, after its last pass."""
    return {layer: RoutingAgreement.from_router(found) for layer, found in counters.routing.items()}


def merge_sites(parts: Iterable[SiteCounts]) -> dict[SiteKey, AgreementCounts]:
    """Add the counts of several batches, site by site; a site may be absent from some of them."""
    merged: dict[SiteKey, AgreementCounts] = {}
    for part in parts:
        for site, counts in part.items():
            merged[site] = merged.get(site, AgreementCounts()) + counts
    return merged


def merge_routing(parts: Iterable[Mapping[int, RoutingAgreement]]) -> dict[int, RoutingAgreement]:
    """Add the counts of several batches, router by router."""
    merged: dict[int, RoutingAgreement] = {}
    for part in parts:
        for layer, counts in part.items():
            merged[layer] = merged.get(layer, RoutingAgreement()) + counts
    return merged


def total(counts: SiteCounts) -> AgreementCounts:
    """Add the counts of all sites."""
    return sum(counts.values(), AgreementCounts())


def by_layer(counts: SiteCounts) -> dict[int, AgreementCounts]:
    """Add the counts of each layer's sites; layers ascending."""
    found: dict[int, AgreementCounts] = {}
    for kind, layer in sorted(counts, key=lambda site: site[1]):
        found[layer] = found.get(layer, AgreementCounts()) + counts[kind, layer]
    return found


def by_kind(counts: SiteCounts) -> dict[str, AgreementCounts]:
    """Add the counts of all layers for each kind of site; kinds in alphabetical order."""
    found: dict[str, AgreementCounts] = {}
    for kind, layer in sorted(counts):
        found[kind] = found.get(kind, AgreementCounts()) + counts[kind, layer]
    return found


def agreement_metrics(
    counts: SiteCounts, *, routing: Mapping[int, RoutingAgreement] | None = None
) -> dict[str, float]:
    """Name the rates over all sites, by kind, by site and by router.

    Names: agreement/<rate>, agreement/<kind>/<rate>, agreement/<kind>/layer_<n>/<rate>,
    agreement/routing/<rate>, agreement/routing/layer_<n>/<rate>; the report plots those with a layer.

    Args:
        counts: counts by site.
        routing: counts by decoder layer of the router. None: routing was not replayed.
    """
    routers = routing or {}
    named: dict[str, AgreementCounts | RoutingAgreement] = {"": total(counts)}
    named |= {f"{kind}/": part for kind, part in by_kind(counts).items()}
    named |= {f"{kind}/layer_{layer}/": part for (kind, layer), part in sorted(counts.items())}
    named["routing/"] = sum(routers.values(), RoutingAgreement())
    named |= {f"routing/layer_{layer}/": part for layer, part in sorted(routers.items())}
    return {
        f"agreement/{prefix}{name}": value
        for prefix, part in named.items()
        for name, value in part.rates().items()
    }

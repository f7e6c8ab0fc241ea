"""How much of the records the passes of a step followed, and what their roundings could not represent.

Sums over micro-batches, read as shares: a rising `rounding/clamped_fraction` says that a static exponent was calibrated
on smaller values than the policy now makes; `rounding/floored_fraction` counts blocks next to which something much
larger stands. This module counts nothing itself (`guidance.counters` does).
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from tracefp4.guidance import Site
from tracefp4.guidance.counters import Counters, SiteCounts, resolve
from tracefp4.patching import Plan


@dataclass(kw_only=True, slots=True)
class Following:
    """Counts added over micro-batches: of records at the plan's guided sites, of roundings at every site."""

    values: int = 0
    """Values rounded at guided sites."""
    values_guided: int = 0
    """Those of positions with a usable record."""
    changed: int = 0
    """Of these, those whose codeword differs from nearest rounding at the same scale."""
    in_band: int = 0
    """Values that the noise gate left to the record, all values with a record without a gate: the values followed."""
    positions: int = 0
    """Positions times guided sites."""
    positions_guided: int = 0
    """Those with a usable record; the others were rounded to nearest."""
    blocks: Counter[Site] = field(default_factory=Counter)
    """Blocks rounded, by site."""
    clamped: Counter[Site] = field(default_factory=Counter)
    """Those whose scale was cut at 448."""
    floored: int = 0
    """Those that are not zero and whose scale was raised to the smallest stored one, or flushed."""
    values_examined: int = 0
    """Values at sites where clipping was looked for (`SiteCounts.values_clipped`)."""
    clipped: int = 0
    """Those beyond the largest code of their block's scale."""

    @classmethod
    def of(cls, batches: Iterable[Counters], *, plan: Plan) -> "Following":
        """Return the sums over the counters of batches that have run, read from a device at once."""
        total = cls()
        counted = [entry for counters in batches for entry in counters.sites.items()]
        for (site, _), found in zip(counted, resolve([counts for _, counts in counted]), strict=True):
            total.add(site, found, plan=plan)
        return total

    def add(self, site: Site, found: SiteCounts, *, plan: Plan) -> None:
        """Add the counts of one site in one batch, as plain ints."""
        self._add_rounding(site, found)
        if site in plan.guided_sites:
            self.values += found.values
            if found.positions:  # a site has as many values at every position
                self.values_guided += found.values // found.positions * found.positions_guided
            self.changed += int(found.values_changed)
            self.in_band += int(found.values_in_band or 0)
            self.positions += found.positions
            self.positions_guided += found.positions_guided

    def _add_rounding(self, site: Site, found: SiteCounts) -> None:
        self.blocks[site] += found.blocks
        self.clamped[site] += int(found.blocks_clamped)
        self.floored += int(found.blocks_floored)
        if found.values_clipped is not None:
            self.values_examined += found.values
            self.clipped += int(found.values_clipped)

    @property
    def changed_fraction(self) -> float:
        """Share of the values with a record that guidance moved; 0 without any."""
        return self.changed / self.values_guided if self.values_guided else 0.0

    @property
    def followed_values_fraction(self) -> float:
        """Share of values left to the record; 0 without any."""
        return self.in_band / self.values if self.values else 0.0

    def clamped_shares(self) -> dict[Site, float]:
        """Return the share of each site's blocks whose scale was cut at 448; sites without blocks are left out."""
        return {site: self.clamped[site] / blocks for site, blocks in self.blocks.items() if blocks}

    def metrics(self) -> dict[str, float]:
        """Return `guidance/...` and `rounding/...` metrics, those whose whole is not empty."""
        blocks = self.blocks.total()
        parts = {
            "guidance/followed_fraction": (self.positions_guided, self.positions),
            "guidance/followed_values_fraction": (self.in_band, self.values),
            "guidance/changed_fraction": (self.changed, self.values_guided),
            "rounding/clamped_fraction": (self.clamped.total(), blocks),
            "rounding/floored_fraction": (self.floored, blocks),
            "rounding/clipped_fraction": (self.clipped, self.values_examined),
        }
        return {name: part / whole for name, (part, whole) in parts.items() if whole}

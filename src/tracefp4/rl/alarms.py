"""An alarm for static outer scales that training has outgrown.

A static exponent is calibrated once and kept for a run, because records and pages are read under it. Where values grow
beyond it, blocks are cut at the largest scale and what lies above is clipped, in engine and trainer alike, so no
mismatch tells. Here a site that loses more blocks than a limit is named, once. This module changes nothing.
"""

import warnings
from dataclasses import dataclass, field

from tracefp4.guidance import Site
from tracefp4.rl.following import Following


@dataclass(kw_only=True, slots=True)
class SaturationAlarm:
    """Watches the share of every site's blocks whose scale was cut at 448."""

    limit: float
    """Largest share that is no alarm, 0 .. 1; with 1 there never is one."""
    named: set[Site] = field(default_factory=set)
    """Sites that a warning has named."""

    def hear(self, following: Following) -> dict[str, float]:
        """Take the counts of a step; warn of sites above the limit that were not named before.

        Returns: `rounding/saturated_sites`, how many sites are above the limit now.
        """
        shares = following.clamped_shares()
        loud = {site: share for site, share in shares.items() if share > self.limit}
        if new := sorted(loud.keys() - self.named):
            self.named.update(new)
            cut = ", ".join(f"{site} ({loud[site]:.1%})" for site in new)
            warnings.warn(
                f"Values have outgrown static scales; got blocks cut at the largest scale at {cut}. At most "
                f"{self.limit:.1%} of a site's blocks is no alarm (train.saturation_alarm); what lies beyond it is "
                "clipped. Start a new run from the newest checkpoint, which calibrates anew.",
                stacklevel=1,
            )
        return {"rounding/saturated_sites": float(len(loud))}

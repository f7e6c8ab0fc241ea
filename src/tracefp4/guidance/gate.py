"""The noise gate: how near to a rounding boundary a value must lie for the trainer to follow the rollout's decision.

Following a record everywhere hides the policy update from the trainer, because the rollout's codewords are followed
also where the weights have moved a value. So the trainer follows inside a band around the boundaries that is as wide as
the numerical noise between the two paths, and rounds to nearest outside, where another codeword means that the value
has moved. One band per site, in units of the block's decode scale,

    band = clip(distance d with `coverage` of the disagreeing values at or below d, floor, cap)

measured under the same weights on both sides (`noise.py`). A share `coverage` can be seen only in 1 / (1 - coverage)
disagreeing values or more. A site with fewer borrows: its histogram is added to those of the sites of its kind within
1, 2, .. layers until there are enough, then to those of all sites; if there are still too few, what there is decides,
and without a single disagreement the floor does. Borrowing sites are listed.

Bands are the trainer's state: they go into checkpoints and the manifest and are no part of a plan's digest. The
alternative not taken, one band for all sites, would be as wide as the noisiest layer's noise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tracefp4.errors import ConfigError, RecordError
from tracefp4.guidance.noise import EMPTY, NoiseHistogram
from tracefp4.guidance.record import Site, site_by_name

COVERAGE = 0.999
"""Share of the disagreeing values that the band holds. With .995 what is left outside comes back as noise: the mean
|d log p| of a closed loop is then measurably above that without a gate, with .999 it is not."""
FLOOR = 2.0**-8
"""A bf16 step at 1: where two paths in bf16 differ at all, they differ by about this much."""
CAP = 0.25
"""Half the smallest step of E2M1: no value below 2 is further from a boundary, and a wider band gates little."""
STATE_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class NoiseGate:
    """Bands of all sites, and what they were read from."""

    histograms: Mapping[Site, NoiseHistogram]
    """Noise of every gated site, measured under the same weights on both sides."""
    coverage: float = COVERAGE
    """Share of the disagreeing values inside the band; in (0, 1)."""
    floor: float = FLOOR
    """Smallest band, in units of the decode scale; at least 0."""
    cap: float = CAP
    """Largest band; at least the floor."""
    bands: Mapping[Site, float] = field(init=False)
    """Band of every site: `ReplayBatch.bands`."""
    borrowed: Mapping[Site, int] = field(init=False)
    """Sites with too few disagreements of their own -> how many layers away the furthest site of their kind is that
    was added; -1 where all sites were."""

    def __post_init__(self) -> None:
        if not (0 < self.coverage < 1 and 0 <= self.floor <= self.cap):
            raise ConfigError(
                f"A noise gate cannot have coverage {self.coverage}, floor {self.floor} and cap {self.cap}; coverage "
                "lies between 0 and 1, and 0 <= floor <= cap. Correct the gate's options."
            )
        found = {site: self._pooled(site) for site in sorted(self.histograms)}
        bands = {site: self._band(pooled) for site, (pooled, _) in found.items()}
        borrowed = {site: reach for site, (_, reach) in found.items() if reach is not None}
        object.__setattr__(self, "bands", bands)
        object.__setattr__(self, "borrowed", borrowed)

    @classmethod
    def calibrated(
        cls,
        histograms: Mapping[Site, NoiseHistogram],
        *,
        coverage: float = COVERAGE,
        floor: float = FLOOR,
        cap: float = CAP,
    ) -> NoiseGate:
        """Read the bands off a measurement under the same weights.

        Args:
            histograms: of every guided site (`noise.histograms`, merged over batches).
            coverage, floor, cap: as in the class.

        Raises: ConfigError for options out of range, or without any site.
        """
        if not histograms:
            raise ConfigError(
                "A noise gate needs measurements; got none. Replay samples of the current weights with their full "
                "records as references, and pass the histograms of the guided sites."
            )
        return cls(histograms=dict(histograms), coverage=coverage, floor=floor, cap=cap)

    def refreshed(self, histograms: Mapping[Site, NoiseHistogram], *, momentum: float) -> NoiseGate:
        """Return the gate after another measurement under the same weights.

            counts = momentum * counts held + counts measured

        so a measurement fades as 1, momentum, momentum^2, .. and weighs by its number of values. Sites that were not
        measured keep what they have; new sites are added.

        Args:
            histograms: what was measured.
            momentum: in [0, 1); 0 forgets everything older.
        """
        if not 0 <= momentum < 1:
            raise ConfigError(
                f"A noise gate cannot be refreshed with momentum {momentum}; it lies in [0, 1). 0 keeps the newest "
                "measurement alone. Correct the option."
            )
        measured = {
            site: self.histograms.get(site, EMPTY).weighted(momentum, plus=found)
            for site, found in histograms.items()
        }
        return replace(self, histograms={**self.histograms, **measured})

    def state_dict(self) -> dict[str, Any]:
        """Return everything as plain data that JSON holds exactly."""
        return {
            "version": STATE_VERSION,
            "coverage": self.coverage,
            "floor": self.floor,
            "cap": self.cap,
            "histograms": {
                str(site): {"values": list(found.values), "disagreeing": list(found.disagreeing)}
                for site, found in self.histograms.items()
            },
        }

    @classmethod
    def load_state_dict(cls, state: Mapping[str, Any]) -> NoiseGate:
        """Return the gate that `state_dict` wrote. Raises: RecordError for another version of the state."""
        if state.get("version") != STATE_VERSION:
            raise RecordError(
                f"State of a noise gate refused: its version is {state.get('version')!r}, this tracefp4 reads "
                f"{STATE_VERSION}. Calibrate the gate again."
            )
        histograms = {
            site_by_name(name): NoiseHistogram(
                values=tuple(found["values"]), disagreeing=tuple(found["disagreeing"])
            )
            for name, found in state["histograms"].items()
        }
        return cls(histograms=histograms, coverage=state["coverage"], floor=state["floor"], cap=state["cap"])

    def describe(self) -> dict[str, Any]:
        """Return what a manifest says of the gate: options, bands by site, which were borrowed, and the noise seen."""
        widths = sorted(self.bands.values())
        total = sum(self.histograms.values(), EMPTY)
        return {
            "coverage": self.coverage,
            "floor": self.floor,
            "cap": self.cap,
            "bands": {str(site): band for site, band in self.bands.items()},
            "band_median": widths[len(widths) // 2],
            "num_sites": len(self.bands),
            "num_borrowed": len(self.borrowed),
            "borrowed": {str(site): reach for site, reach in self.borrowed.items()},
            "num_disagreeing": total.num_disagreeing,
            "share_disagreeing": total.share_disagreeing,
        }

    def _pooled(self, site: Site) -> tuple[NoiseHistogram, int | None]:
        """Histogram that decides a site's band, and how far it was borrowed; None: its own."""
        needed = math.ceil(round(1 / (1 - self.coverage), 6))
        own = self.histograms[site]
        if own.num_disagreeing >= needed:
            return own, None
        alike = {other.layer: found for other, found in self.histograms.items() if other.kind == site.kind}
        furthest = max(abs(layer - site.layer) for layer in alike)
        for reach in range(1, furthest + 1):
            near = (found for layer, found in alike.items() if abs(layer - site.layer) <= reach)
            pooled = sum(near, EMPTY)
            if pooled.num_disagreeing >= needed:
                return pooled, reach
        return sum(self.histograms.values(), EMPTY), -1

    def _band(self, pooled: NoiseHistogram) -> float:
        distance = pooled.distance_covering(self.coverage)
        return self.floor if distance is None else min(max(distance, self.floor), self.cap)

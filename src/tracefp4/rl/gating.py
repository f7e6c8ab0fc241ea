"""The run's noise gate: measured under the same weights on both sides, refreshed as training goes, restored on resume.

Bands come from samples that the engine has just drawn with the very weights the trainer holds, so what disagrees there
is numerical noise and no update (`guidance.gate` reads them off). The first measurement happens before the first
update; each later one (`train.agreement_every`) is mixed in. The gate is trainer state: checkpoints and the manifest
hold it, the plan's digest does not.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tracefp4.guidance import Site
from tracefp4.guidance.gate import NoiseGate
from tracefp4.guidance.noise import EMPTY
from tracefp4.rl.trainer import PolicyTrainer, Scored

MOMENTUM = 0.7
"""Weight of older measurements at a refresh: half of what decides is from the last two."""


@dataclass(kw_only=True, slots=True)
class Gating:
    """Holds the gate of a run and gives its bands to the trainer."""

    trainer: PolicyTrainer
    """Follows records inside the bands."""
    gate: NoiseGate | None = None
    """None: not measured yet."""

    @property
    def is_on(self) -> bool:
        """True if the plan gates: its rules say so and some site is guided."""
        plan = self.trainer.plan
        return plan.rules.is_gated and bool(plan.guided_sites)

    @property
    def needs_measurement(self) -> bool:
        """True until the first measurement, of a plan that gates."""
        return self.is_on and self.gate is None

    def observe(self, scored: Scored) -> dict[str, float]:
        """Take a measurement under the same weights; returns `gate/...` metrics, {} when the plan does not gate.

        Args: scored: of fresh samples with full records as references (`PolicyTrainer.score(measure=True)`).
        """
        guided = self.trainer.plan.guided_sites
        noise = {site: found for site, found in scored.noise.items() if site in set(guided)}
        if not self.is_on or not noise:
            return {}
        if self.gate is None:
            # a site of which nothing was recorded borrows its band: without one it would be followed everywhere
            self.gate = NoiseGate.calibrated(dict.fromkeys(guided, EMPTY) | noise)
        else:
            self.gate = self.gate.refreshed(noise, momentum=MOMENTUM)
        self.trainer.bands = self.gate.bands
        widths = sorted(self.gate.bands.values())
        return {
            "gate/band_median": widths[len(widths) // 2],
            "gate/band_max": widths[-1],
            "gate/sites_borrowed": float(len(self.gate.borrowed)),
        }

    def state(self) -> dict[str, Any]:
        """Return the gate as plain data; {} before the first measurement."""
        return {} if self.gate is None else self.gate.state_dict()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Put back what `state` returned. Raises: RecordError for the state of another version."""
        if state:
            self.gate = NoiseGate.load_state_dict(state)
            self.trainer.bands = self.gate.bands

    def bands(self) -> Mapping[Site, float]:
        """Bands in force by site; empty before the first measurement."""
        return {} if self.gate is None else self.gate.bands

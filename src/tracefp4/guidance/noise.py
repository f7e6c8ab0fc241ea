"""How far numerical noise reaches: distances to the next rounding boundary, of all values and of those that disagree.

Trainer and rollout compute one value in two orders of operations. Under the recorded scales they round it to another
codeword only if it lies near a rounding boundary, so the boundary distances d (`ops.guided_quantize.boundary_distance`,
in units of the block's decode scale, 0 .. 1) of the values that disagree say how wide the noise is. They are counted on
fixed bins, four to an octave, whose upper ends are

    e_i = 2^(-14 + i // 4) * (1 + (i % 4) / 4)          bin 0: d <= e_0          bin i: e_(i-1) < d <= e_i,  i = 1 .. 56

so histograms of micro-batches, steps and sites add exactly. The ends are float32 numbers whose last 21 bits are 0: the
bin of d is read off its bits, on every device alike. Under the same weights what is counted is noise alone; across an
update it is not, and whoever measures says which it was. This file chooses no band (`gate.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tracefp4.errors import RecordError
from tracefp4.formats.scheme import Scheme
from tracefp4.guidance.counters import Counters, Reference, is_mismatched
from tracefp4.guidance.record import Site
from tracefp4.ops.guided_quantize import boundary_distance
from tracefp4.ops.quantize import quantize_with_scales

LOWEST_EXPONENT = -14
"""Bin 0 ends at 2^-14: z is at least 2^-3 wherever a boundary is near, and float32 resolves 2^-27 there."""
BINS_PER_OCTAVE = 4
"""A band read off the bins is at most 25% too wide."""
NUM_BINS = 1 - LOWEST_EXPONENT * BINS_PER_OCTAVE
"""57; the last bin ends at 1, the largest distance there is."""
UPPER_EDGES = tuple(2.0 ** (LOWEST_EXPONENT + i // 4) * (1 + i % 4 / 4) for i in range(NUM_BINS))
"""Largest distance of every bin."""
_BIN_SHIFT = 21
"""Bits of a float32 below its exponent and the two mantissa bits that number the bins of an octave."""
_FIRST_BIN = ((127 + LOWEST_EXPONENT) * BINS_PER_OCTAVE) - 1
"""What is left of the bits of e_0, less one, after the shift."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NoiseHistogram:
    """Counts of one site by boundary distance; floats, because old counts may be weighted down."""

    values: tuple[float, ...]
    """Compared values by bin, NUM_BINS of them."""
    disagreeing: tuple[float, ...]
    """Those whose nearest codeword under the recorded scales is not the recorded one."""

    def __post_init__(self) -> None:
        if len(self.values) != NUM_BINS or len(self.disagreeing) != NUM_BINS:
            raise RecordError(
                f"A noise histogram has {NUM_BINS} bins; got {len(self.values)} and {len(self.disagreeing)}. "
                "Both must be counted on the same fixed bins. Measure again."
            )

    @property
    def num_disagreeing(self) -> float:
        """Disagreeing values in all bins."""
        return sum(self.disagreeing)

    @property
    def share_disagreeing(self) -> float:
        """Share of all values that disagree; 0 where nothing was compared."""
        total = sum(self.values)
        return self.num_disagreeing / total if total else 0.0

    def __add__(self, other: NoiseHistogram) -> NoiseHistogram:
        """Add two histograms, bin by bin."""
        return self.weighted(1.0, plus=other)

    def weighted(self, weight: float, *, plus: NoiseHistogram) -> NoiseHistogram:
        """Return weight * this + plus."""
        return NoiseHistogram(
            values=_weighted(self.values, weight, plus.values),
            disagreeing=_weighted(self.disagreeing, weight, plus.disagreeing),
        )

    def distance_covering(self, coverage: float) -> float | None:
        """Return the smallest bin edge with at least this share of the disagreeing values at or below it.

        Args: coverage: in (0, 1].
        Returns: one of UPPER_EDGES; None where nothing disagrees.
        """
        total, below = self.num_disagreeing, 0.0
        if total == 0:
            return None
        for edge, count in zip(UPPER_EDGES, self.disagreeing, strict=True):
            below += count
            if below >= coverage * total:
                return edge
        return UPPER_EDGES[-1]


EMPTY = NoiseHistogram(values=(0.0,) * NUM_BINS, disagreeing=(0.0,) * NUM_BINS)
"""Nothing counted."""


def measure_noise(x: Tensor, *, scheme: Scheme, outer: Tensor, reference: Reference) -> Tensor:
    """Count boundary distances under the recorded scales.

    Args:
        x: Float [N, K], the trainer's values.
        scheme: The scheme of the site.
        outer: This side's outer scale, used where the reference has no row exponents (0-dimensional).
        reference: The rollout's whole codes and scales; rows that are not valid count nowhere.

    Returns:
        int64 [2, NUM_BINS]: all compared values, and those whose nearest code is not the recorded one (0x0 and 0x8 are
        equal). Values of blocks without a usable scale are in no bin. Stays on x's device.
    """
    recorded = outer if reference.exponent is None else reference.exponent
    scales = {"block_scales": reference.block_scales, "outer": recorded, "scheme": scheme}
    distance = boundary_distance(x, **scales)  # type: ignore[arg-type]
    nearest = quantize_with_scales(x, **scales).codes()  # type: ignore[arg-type]
    differs = is_mismatched(nearest, reference.codes)
    bins = _bins(distance)
    counted = reference.valid[:, None].expand_as(bins)
    return torch.stack([_counted(bins, counted), _counted(bins, counted & differs)])


def histograms(counters: Counters) -> dict[Site, NoiseHistogram]:
    """Read the noise that a replayed batch counted, after its last pass: one histogram per site with a reference."""
    return {
        site: NoiseHistogram(values=tuple(map(float, rows[0])), disagreeing=tuple(map(float, rows[1])))
        for site, rows in ((site, found.tolist()) for site, found in counters.noise.items())
    }


def merge_histograms(parts: Iterable[Mapping[Site, NoiseHistogram]]) -> dict[Site, NoiseHistogram]:
    """Add the histograms of several batches, site by site; a site may be absent from some of them."""
    merged: dict[Site, NoiseHistogram] = {}
    for part in parts:
        for site, found in part.items():
            merged[site] = merged.get(site, EMPTY) + found
    return merged


def _weighted(held: tuple[float, ...], weight: float, plus: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(weight * a + b for a, b in zip(held, plus, strict=True))


def _bins(distance: Tensor) -> Tensor:
    """Return the bin of every distance, int64, NUM_BINS for infinities. Distances are at most 1 or infinite."""
    # Less one, because an upper end belongs to its own bin.
    steps = (distance.contiguous().view(torch.int32) - 1) >> _BIN_SHIFT
    return steps.sub_(_FIRST_BIN).clamp_(min=0, max=NUM_BINS).to(torch.int64)


def _counted(bins: Tensor, counted: Tensor) -> Tensor:
    """Values by bin where `counted`; the bin beyond the last holds infinities and is dropped."""
    # Added up by index, not selected by mask: nothing waits for a device.
    totals = torch.zeros(NUM_BINS + 1, dtype=torch.int64, device=bins.device)
    return totals.scatter_add_(0, bins.reshape(-1), counted.reshape(-1).to(torch.int64))[:NUM_BINS]

"""Paired comparisons of a study's runs: differences of one quantity between two arms over the same seeds.

    d_s = area(arm, seed s) - area(base, seed s)
    low = mean(d) - t_(.95, n-1) * sd(d) / sqrt(n)        one-sided 95% bound; high likewise

with sd over n - 1. A single seed has no bound (NaN), which no claim accepts. Nothing here runs anything.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any

from tracefp4.diagnostics.transmission import student_quantile

CONFIDENCE = 0.95
PAIRS = (
    ("gated", "ungated"),
    ("coded", "ungated"),
    ("coded", "gated"),
    ("ungated", "qat"),
    ("gated", "qat"),
    ("coded", "qat"),
    ("ungated", "bf16"),
    ("gated", "bf16"),
    ("coded", "bf16"),
    ("qat", "bf16"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """One pair of arms in one cell."""

    cell: str
    """Cell of the grid."""
    arm: str
    """Arm whose gain over `base` is compared."""
    base: str
    """The other arm."""
    difference: float
    """Mean over the seeds of the difference in area under the reward curve."""
    low: float
    """One-sided 95% lower bound of the difference; NaN for a single seed."""
    high: float
    """One-sided 95% upper bound."""
    num_seeds: int
    """Seeds that both arms have."""


def compare_cells(rows: Sequence[Mapping[str, Any]], *, quantity: str = "area") -> list[Comparison]:
    """Compare the arms of PAIRS in every cell.

    Args:
        rows: one per run: cell, arm, seed and the quantity.
        quantity: key of the number that is compared.

    Returns:
        Comparisons in order of cell and pair; pairs without common seeds are left out.
    """
    found = []
    for cell in sorted({row["cell"] for row in rows}):
        by_arm: dict[str, dict[int, float]] = {}
        for row in rows:
            if row["cell"] == cell:
                by_arm.setdefault(row["arm"], {})[row["seed"]] = row[quantity]
        for arm, base in PAIRS:
            seeds = sorted(by_arm.get(arm, {}).keys() & by_arm.get(base, {}).keys())
            if seeds:
                differences = [by_arm[arm][seed] - by_arm[base][seed] for seed in seeds]
                found.append(_comparison(cell, arm, base, differences))
    return found


def gains(rows: Sequence[Mapping[str, Any]], *, arm: str) -> dict[str, float]:
    """Return cell -> mean gain in held-out accuracy of one arm over its seeds."""
    cells = sorted({row["cell"] for row in rows if row["arm"] == arm})
    return {
        cell: mean(
            row["accuracy_after"] - row["accuracy_before"]
            for row in rows
            if (row["cell"], row["arm"]) == (cell, arm)
        )
        for cell in cells
    }


def _comparison(cell: str, arm: str, base: str, differences: Sequence[float]) -> Comparison:
    count, middle, half_width = len(differences), mean(differences), math.nan
    if count > 1:
        quantile = student_quantile(CONFIDENCE, degrees=count - 1)
        half_width = quantile * stdev(differences) / math.sqrt(count)
    return Comparison(
        cell=cell,
        arm=arm,
        base=base,
        difference=middle,
        low=middle - half_width,
        high=middle + half_width,
        num_seeds=count,
    )

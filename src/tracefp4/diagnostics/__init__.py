"""Measures of how equal trainer and rollout are. They read; they never change training."""

from tracefp4.diagnostics.agreement import AgreementCounts, agreement_metrics, collect_sites, merge_sites
from tracefp4.diagnostics.mismatch import mismatch_by_lag, mismatch_metrics
from tracefp4.diagnostics.transmission import UpdateTransmission, update_transmission

__all__ = [
    "AgreementCounts",
    "UpdateTransmission",
    "agreement_metrics",
    "collect_sites",
    "merge_sites",
    "mismatch_by_lag",
    "mismatch_metrics",
    "update_transmission",
]

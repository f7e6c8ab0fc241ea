"""What the rollout decided, and how training follows it: records, codecs, sessions, rounding at a site.

The context managers `record` and `replay` are imported from guidance.session: here their names are
submodules.
"""

from tracefp4.guidance.builder import SequenceRows, StepLog
from tracefp4.guidance.codec import record_from_bytes, record_to_bytes
from tracefp4.guidance.counters import Counters, RoutingCounts, SiteCounts
from tracefp4.guidance.gate import NoiseGate
from tracefp4.guidance.joining import concat, recode_all, records_equal
from tracefp4.guidance.noise import NoiseHistogram, histograms, merge_histograms
from tracefp4.guidance.rates import ResidualCounts, choose_codecs, residual_counts
from tracefp4.guidance.record import Record, RecordIdentity, Site
from tracefp4.guidance.replay import ReplayBatch
from tracefp4.guidance.rounding import round_site, route_site
from tracefp4.guidance.session import Session, Sink, bind, current
from tracefp4.guidance.site_record import SiteRecord

__all__ = [
    "Counters",
    "NoiseGate",
    "NoiseHistogram",
    "Record",
    "RecordIdentity",
    "ReplayBatch",
    "ResidualCounts",
    "RoutingCounts",
    "SequenceRows",
    "Session",
    "Sink",
    "Site",
    "SiteCounts",
    "SiteRecord",
    "StepLog",
    "bind",
    "choose_codecs",
    "concat",
    "current",
    "histograms",
    "merge_histograms",
    "recode_all",
    "record_from_bytes",
    "record_to_bytes",
    "records_equal",
    "residual_counts",
    "round_site",
    "route_site",
]

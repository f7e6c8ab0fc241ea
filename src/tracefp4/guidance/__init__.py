"""What the rollout decided, and how training follows it: records, codecs, sessions, rounding at a site.

The context managers `record` and `replay` are imported from guidance.session: here their names are
submodules.
"""

from tracefp4.guidance.builder import SequenceRows, StepLog
from tracefp4.guidance.codec import record_from_bytes, record_to_bytes
from tracefp4.guidance.counters import Counters, RoutingCounts, SiteCounts
from tracefp4.guidance.joining import concat, recode_all, records_equal
from tracefp4.guidance.payload import CODECS, Codec, codec_by_name
from tracefp4.guidance.record import Record, RecordIdentity, Site, SiteRecord
from tracefp4.guidance.replay import ReplayBatch
from tracefp4.guidance.rounding import round_site, route_site
from tracefp4.guidance.session import Session, Sink, bind, current

__all__ = [
    "CODECS",
    "Codec",
    "Counters",
    "Record",
    "RecordIdentity",
    "ReplayBatch",
    "RoutingCounts",
    "SequenceRows",
    "Session",
    "Sink",
    "Site",
    "SiteCounts",
    "SiteRecord",
    "StepLog",
    "bind",
    "codec_by_name",
    "concat",
    "current",
    "recode_all",
    "record_from_bytes",
    "record_to_bytes",
    "records_equal",
    "round_site",
    "route_site",
]

"""Where bytes go: rows of trajectories, durable and checked, without torch and without knowing what they mean."""

from tracefp4.store.pending import WriterOptions
from tracefp4.store.prefetch import Prefetcher
from tracefp4.store.protocol import (
    Handle,
    Reader,
    Removed,
    Request,
    Retention,
    Segment,
    Slices,
    Stat,
    Writer,
    WriterStats,
)
from tracefp4.store.reader import DirectoryReader
from tracefp4.store.refusals import (
    AbsentSpan,
    ConflictError,
    DroppedError,
    GoneError,
    MissingTrajectoryError,
    SpanError,
)
from tracefp4.store.retention import DirectoryRetention
from tracefp4.store.writer import DirectoryWriter

__all__ = [
    "AbsentSpan",
    "ConflictError",
    "DirectoryReader",
    "DirectoryRetention",
    "DirectoryWriter",
    "DroppedError",
    "GoneError",
    "Handle",
    "MissingTrajectoryError",
    "Prefetcher",
    "Reader",
    "Removed",
    "Request",
    "Retention",
    "Segment",
    "Slices",
    "SpanError",
    "Stat",
    "Writer",
    "WriterOptions",
    "WriterStats",
]

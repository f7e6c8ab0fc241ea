"""Records for the trainer, read from a store while it trains: the sites, layers and positions that it follows, no more.

The next micro-batch's records are read and decoded in a background thread while this one is in the model, so at most
two micro-batches of records are in memory. What the store cannot give (never written, damaged, removed) is not an
error here: those positions are not valid in the record, so they round to nearest, and they are counted, once per
sample and step. A store that cannot be reached at all is an error. Samples that hold their record keep it.
"""

import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from tracefp4.errors import RecordError
from tracefp4.guidance import Record, Site
from tracefp4.guidance.columns import (
    VALID,
    VERSIONS,
    RecordColumns,
    columns_to_record,
    needed_columns,
)
from tracefp4.rl.samples import TrainingSample
from tracefp4.store import Handle, Reader, Request

Records = tuple[Record | None, ...]


class RecordFetcher:
    """Reads the records of samples by their handles."""

    def __init__(
        self,
        reader: Reader,
        *,
        sites: Collection[Site] | None = None,
        routed_layers: Collection[int] | None = None,
    ) -> None:
        """Keep a reader and say what is followed.

        Args:
            reader: of the store that the handles are of.
            sites: sites to read; None means all.
            routed_layers: layers whose routing is read; None means all, an empty collection none.
        """
        self._reader, self._sites, self._routed_layers = reader, sites, routed_layers
        self._missing: dict[str, int] = {}
        self._followed: dict[str, set[int]] = {}
        self._num_bytes, self._wait_s = 0, 0.0

    def batches(self, groups: Sequence[Sequence[TrainingSample]]) -> Iterator[Records]:
        """Yield the records of each group's samples, in order; the next group is read meanwhile.

        Raises:
            BackendError: the store cannot be read. RecordError: columns of another schema.
        """
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="tracefp4-records") as pool:
            following: Future[Records] | None = None
            for place in range(len(groups)):
                current = following or pool.submit(self._group, groups[place])
                is_last = place + 1 == len(groups)
                following = None if is_last else pool.submit(self._group, groups[place + 1])
                started = time.perf_counter()
                records = current.result()
                self._wait_s += time.perf_counter() - started
                yield records

    def fetch(self, sample: TrainingSample, *, start: int = 0, stop: int | None = None) -> Record | None:
        """Read the positions start .. stop - 1 of a sample's record; None if nothing of it is there.

        A sample that holds its record gives that one, cut to the positions.
        """
        if sample.handle is None:
            return None if sample.record is None else _cut(sample.record, start=start, stop=stop)
        stop = min(sample.handle.num_rows, sample.num_tokens) if stop is None else stop
        return self._read(sample, sample.handle, start=start, stop=stop)

    def followed_positions(self, sample: TrainingSample) -> set[int]:
        """Return the positions of a sample that had a usable record when it was read last; empty before that."""
        return self._followed.get(sample.trajectory, set())

    def take_metrics(self) -> dict[str, float]:
        """Return `records/missing_positions`, `records/read_bytes` and `records/read_wait_s` since the last call."""
        found = {
            "records/missing_positions": float(sum(self._missing.values())),
            "records/read_bytes": float(self._num_bytes),
            "records/read_wait_s": self._wait_s,
        }
        self._missing, self._followed = {}, {}
        self._num_bytes, self._wait_s = 0, 0.0
        return found

    def _group(self, samples: Sequence[TrainingSample]) -> Records:
        return tuple(self.fetch(sample) for sample in samples)

    def _read(self, sample: TrainingSample, handle: Handle, *, start: int, stop: int) -> Record | None:
        try:
            meta = self._reader.stat(handle).meta
        except RecordError:  # never written, removed, given up, or damaged
            self._missing[sample.trajectory] = stop - start
            return None
        names = needed_columns(meta, sites=self._sites, routed_layers=self._routed_layers)
        request = Request(trajectory=handle, columns=tuple(names), start=start, stop=stop)
        found = self._reader.read_available(request)
        self._num_bytes += sum(len(data) for data in found.data.values())
        absent = [(span.start, span.stop) for span in found.absent]
        self._missing[sample.trajectory] = _num_covered(absent)
        if VALID not in found.data or VERSIONS not in found.data:
            return None
        columns = RecordColumns(
            trajectory=sample.trajectory, start=start, num_rows=stop - start, columns=found.data, meta=meta
        )
        record = columns_to_record(columns, missing=absent)
        self._followed[sample.trajectory] = set((record.valid.nonzero()[:, 0] + start).tolist())
        return record


def records_of(
    fetcher: RecordFetcher | None, groups: Sequence[Sequence[TrainingSample]]
) -> Iterator[Records]:
    """Yield the records of each group's samples: read from the store if there is one, else the samples' own."""
    if fetcher is None:
        return iter([tuple(sample.record for sample in group) for group in groups])
    return fetcher.batches(groups)


def _cut(record: Record, *, start: int, stop: int | None) -> Record:
    """The part of a record for the positions start .. stop - 1, or to its end."""
    end = record.length if stop is None else max(0, min(stop - record.start, record.length))
    begin = min(max(0, start - record.start), end)
    return record if (begin, end) == (0, record.length) else record.rows(begin, end)


def _num_covered(spans: Sequence[tuple[int, int]]) -> int:
    """Positions that at least one of the spans covers."""
    total, end = 0, -1
    for begin, stop in sorted(spans):
        total += max(0, stop - max(begin, end))
        end = max(end, stop)
    return total

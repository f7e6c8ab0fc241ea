"""Guidance records of a run in a store: written in the background, named by step, bounded, cut where a run is resumed.

A sample gives its record to the store and carries a handle instead, a few hundred bytes. The store's writer works
while the run goes on; `settled` waits for it where the handles are needed. A trajectory that the store could not take
(`when_full = "drop_trajectory"`) has no handle: all its positions round to nearest, counted and named. Records leave
by weight version: a sample's record belongs to the version that began it, and the newest `keep_versions` versions stay.
A resumed run first removes the records of the steps that it will make again. Reading is `rl/fetching.py`'s.
"""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

from tracefp4.errors import RecordError
from tracefp4.guidance import Record
from tracefp4.guidance.columns import record_to_columns
from tracefp4.patching import Plan
from tracefp4.rl.fetching import RecordFetcher
from tracefp4.rl.samples import TrainingSample
from tracefp4.store import Handle, Segment, WriterStats
from tracefp4.store.backends import OpenStore
from tracefp4.store.refusals import ConflictError, DroppedError
from tracefp4.store.wire import ForgottenError


@dataclass(frozen=True, kw_only=True, slots=True)
class Retention:
    """How long a run's records stay."""

    keep_versions: int
    """Newest weight versions whose records stay, at least 1."""
    prefix: str = ""
    """Before every trajectory's name, so that runs can share a store; "" where the store is the run's own."""


class RunRecords:
    """The records of one run."""

    def __init__(self, store: OpenStore, *, retention: Retention, first_step: int = 0) -> None:
        """Keep an open store, and remove what will be made again.

        Args:
            store: its writer, reader and retention.
            retention: how long records stay.
            first_step: step that the run continues with; records of it and of later ones are removed.
        """
        self._store, self._retention = store, retention
        self._pending: dict[str, Future[Handle]] = {}
        self._before = WriterStats()
        own = [name for name in store.reader.trajectories() if name.startswith(retention.prefix)]
        again = {name for name in own if self._is_made_again(name, first_step)}
        store.retention.remove(sorted(again))
        self._generations = {name: self._generation(name) for name in own if name not in again}

    def put(
        self, samples: Sequence[TrainingSample], *, weight_version: int
    ) -> tuple[list[TrainingSample], dict[str, float]]:
        """Give the records of one rollout's samples to the store, and forget those of old versions.

        Args:
            samples: with their records, in the plan's codecs.
            weight_version: of the engine now.

        Returns:
            (the samples without records, metrics of this step: `records/count`, `records/bytes`,
            `records/dropped_trajectories`, `records/wait_s`).

        Raises:
            BackendError: the store refuses (a full disk, with path and bytes needed; a server that is gone).
        """
        self._forget_old(weight_version)
        count, num_bytes = 0, 0
        kept = []
        for sample in samples:
            record = sample.record
            if record is None or record.length == 0:
                kept.append(sample)
                continue
            segment = self._segment(record, generation=weight_version)
            if self._store.writer.append(segment):
                self._pending[sample.trajectory] = self._store.writer.finish_soon(segment.trajectory)
                self._generations[segment.trajectory] = weight_version
                count, num_bytes = count + 1, num_bytes + segment.num_bytes
            else:  # dropped and counted; nothing more of it will come, so the writer need not remember it
                self._store.writer.abandon(segment.trajectory)
            kept.append(replace(sample, record=None))
        return kept, {
            "records/count": float(count),
            "records/bytes": float(num_bytes),
            **self._writer_metrics(),
        }

    def settled(self, samples: Sequence[TrainingSample]) -> list[TrainingSample]:
        """Wait until the records of these samples are kept, and give every sample its handle.

        A record that was dropped, that another writer holds, or that its server lost unfinished, leaves its sample
        without a handle.

        Raises:
            BackendError: a record was lost to the medium, or the server cannot be reached.
        """
        found = []
        for sample in samples:
            future = self._pending.pop(sample.trajectory, None)
            found.append(sample if future is None else self._settled(sample, future))
        return found

    def loaded(self, samples: Sequence[TrainingSample]) -> list[TrainingSample]:
        """Return the samples with their whole records in memory, for a checkpoint that must stand alone.

        The samples given keep what they have; their handles stay valid.
        """
        fetcher = RecordFetcher(self._store.reader)
        found = []
        for sample in samples:
            future = self._pending.get(sample.trajectory)
            settled = sample if future is None else self._settled(sample, future)
            found.append(replace(settled, record=fetcher.fetch(settled), handle=None))
        return found

    def fetcher(self, plan: Plan) -> RecordFetcher:
        """Make the reader of what a plan follows."""
        return RecordFetcher(
            self._store.reader,
            sites=plan.guided_sites,
            routed_layers=None if plan.rules.replay_routing else (),
        )

    def dropped(self) -> dict[str, str]:
        """Name -> reason of the trajectories that were given up since the run was opened, the newest ones."""
        return dict(self._store.writer.stats.dropped)

    def close(self) -> None:
        """Write what is queued and close the store."""
        self._store.close()

    def _settled(self, sample: TrainingSample, future: Future[Handle]) -> TrainingSample:
        try:
            return replace(sample, handle=future.result())
        except (DroppedError, ConflictError, ForgottenError):
            return sample  # counted by the writer, by name; the sample rounds to nearest

    def _segment(self, record: Record, *, generation: int) -> Segment:
        columns = record_to_columns(record)
        return Segment(
            trajectory=self._retention.prefix + columns.trajectory,
            start=columns.start,
            num_rows=columns.num_rows,
            columns=columns.columns,
            meta=columns.meta,
            generation=generation,
        )

    def _forget_old(self, weight_version: int) -> None:
        # By name, not by generation: in a store that runs share, another run's versions are its own.
        below = weight_version - self._retention.keep_versions + 1
        old = [name for name, generation in self._generations.items() if generation < below]
        if old:
            self._store.retention.remove(old)
            for name in old:
                del self._generations[name]

    def _generation(self, name: str) -> int:
        """Weight version of a record that the store holds; -1, the first to leave, if it is damaged."""
        try:
            return self._store.reader.stat(name).generation
        except RecordError:
            return -1

    def _is_made_again(self, name: str, first_step: int) -> bool:
        step = name.removeprefix(self._retention.prefix).partition(".")[0]
        return not step.isdecimal() or int(step) >= first_step

    def _writer_metrics(self) -> dict[str, float]:
        before, now = self._before, self._store.writer.stats
        self._before = now
        return {
            "records/dropped_trajectories": float(now.num_dropped - before.num_dropped),
            "records/wait_s": now.wait_seconds - before.wait_seconds,
        }

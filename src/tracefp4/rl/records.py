"""Guidance records of a run on disk: one chunk per trajectory, the latest steps only.

Keys are `<step>/<trajectory>`, so a record is found by the step that sampled it. A store grows with every
token; here the oldest steps leave as new ones come. A resumed run first removes the records of the steps that
it will make again.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from tracefp4.guidance import Record
from tracefp4.guidance.codec import record_from_bytes, record_to_bytes
from tracefp4.rl.samples import TrainingSample
from tracefp4.store import DirectoryStore


class RecordKeeper:
    """Writes the records of a step and forgets those of old steps."""

    def __init__(self, path: Path, *, keep_steps: int, first_step: int = 0) -> None:
        """Open the store.

        Args:
            path: directory of the store.
            keep_steps: steps whose records stay, at least 1.
            first_step: step that the run continues with; records of it and of later ones are removed.

        Raises:
            BackendError: the directory cannot be used.
        """
        self.store, self._keep_steps = DirectoryStore(path), keep_steps
        self._forget(lambda step: step >= first_step)

    def put(self, step: int, samples: Sequence[TrainingSample]) -> dict[str, float]:
        """Write the records of one step's samples and drop those that are too old.

        Returns:
            `records/bytes` and `records/count` of this step.

        Raises:
            BackendError: the disk is full, with path and bytes needed.
        """
        total, count = 0, 0
        for sample in samples:
            if sample.record is not None:
                data = record_to_bytes(sample.record)
                self.store.put(record_key(step, sample.trajectory), data)
                total, count = total + len(data), count + 1
        self._forget(lambda old: old <= step - self._keep_steps)
        return {"records/bytes": float(total), "records/count": float(count)}

    def get(self, step: int, trajectory: str) -> Record:
        """Read one record. Raises: MissingKeyError, or RecordError for damaged bytes."""
        return record_from_bytes(self.store.get(record_key(step, trajectory)))

    def _forget(self, is_dropped: Callable[[int], bool]) -> None:
        old = [key for key in self.store.keys() if is_dropped(int(key.partition("/")[0]))]  # noqa: SIM118
        for key in old:
            self.store.delete(key)


def record_key(step: int, trajectory: str) -> str:
    """Return the key of one trajectory's record."""
    return f"{step:06d}/{trajectory}"

"""Samples and completions as bytes and back, exactly and without pickle: what a checkpoint keeps of rollouts made ahead
of training, and of groups under way.

Layout: header length (u64, little-endian), a JSON header with every field of every item, and the items' records one
after another, each in the record's own checked form. JSON writes the shortest text that reads back as the same float,
so log-probs survive bit for bit.
"""

import json
import struct
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from tracefp4.guidance.codec import record_from_bytes, record_to_bytes
from tracefp4.rl.partial import Group
from tracefp4.rl.samples import TrainingSample
from tracefp4.rl.tasks import Task
from tracefp4.rollout import Completion

_LENGTH = struct.Struct("<Q")


def samples_to_bytes(rollouts: Sequence[Sequence[TrainingSample]]) -> bytes:
    """Write rollouts, oldest first; an empty sequence is fine. Records that a store keeps must have been read."""
    writer = _Writer()
    for sample in (sample for rollout in rollouts for sample in rollout):
        assert sample.handle is None, "a checkpoint stands alone: its records are read from the store first"
    return writer.to_bytes([[writer.entry(sample) for sample in rollout] for rollout in rollouts])


def samples_from_bytes(data: bytes) -> list[list[TrainingSample]]:
    """Read what `samples_to_bytes` wrote.

    Raises:
        RecordError: a record is damaged, or a sample's arrays disagree.
    """
    reader = _Reader(data)
    return [[TrainingSample(**reader.fields(entry)) for entry in rollout] for rollout in reader.header]


def groups_to_bytes(groups: Sequence[Group]) -> bytes:
    """Write groups under way, oldest first, with their finished and suspended completions and whole records."""
    writer = _Writer()
    return writer.to_bytes(
        [
            {
                "task": group.task.index,
                "seed": group.seed,
                "prompt_ids": group.prompt_ids,
                "num_samples": group.num_samples,
                "completions": [writer.entry(found) for found in group.completions.values()],
            }
            for group in groups
        ]
    )


def groups_from_bytes(data: bytes, *, task_of: Callable[[int], Task]) -> list[Group]:
    """Read what `groups_to_bytes` wrote.

    Args:
        data: its result.
        task_of: the task with an index.

    Raises:
        RecordError: a record is damaged.
    """
    reader = _Reader(data)
    groups = []
    for entry in reader.header:
        completions = [Completion(**reader.fields(found)) for found in entry.pop("completions")]
        by_sample = {completion.sample_index: completion for completion in completions}
        groups.append(Group(**entry | {"task": task_of(entry["task"]), "completions": by_sample}))
    return groups


class _Writer:
    """Collects records while their owners are put into the header, in one order."""

    def __init__(self) -> None:
        self._records: list[bytes] = []

    def entry(self, item: TrainingSample | Completion) -> dict[str, Any]:
        data = b"" if item.record is None else record_to_bytes(item.record)
        self._records.append(data)
        names = [found.name for found in fields(item) if found.name not in ("record", "handle")]
        return {**{name: getattr(item, name) for name in names}, "record_bytes": len(data)}

    def to_bytes(self, header: Any) -> bytes:
        text = json.dumps(header).encode()
        return b"".join([_LENGTH.pack(len(text)), text, *self._records])


class _Reader:
    """Gives every entry its record, in the order in which they were written."""

    def __init__(self, data: bytes) -> None:
        (length,) = _LENGTH.unpack_from(data)
        self._data, self._offset = data, _LENGTH.size + length
        self.header = json.loads(data[_LENGTH.size : self._offset])

    def fields(self, entry: dict[str, Any]) -> dict[str, Any]:
        begin = self._offset
        self._offset += entry.pop("record_bytes")
        record = record_from_bytes(self._data[begin : self._offset]) if self._offset > begin else None
        return {**entry, "record": record}

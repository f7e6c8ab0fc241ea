"""Samples as bytes and back, exactly and without pickle: what a checkpoint keeps of rollouts made ahead of training.

Layout: header length (u64, little-endian), a JSON header with every field of every sample, and the samples'
records one after another, each in the record's own checked form. JSON writes the shortest text that reads back
as the same float, so log-probs survive bit for bit.
"""

import json
import struct
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from tracefp4.guidance.codec import record_from_bytes, record_to_bytes
from tracefp4.rl.samples import TrainingSample

_LENGTH = struct.Struct("<Q")


def samples_to_bytes(rollouts: Sequence[Sequence[TrainingSample]]) -> bytes:
    """Write rollouts, oldest first; an empty sequence is fine."""
    records: list[bytes] = []

    def entry(sample: TrainingSample) -> dict[str, Any]:
        data = b"" if sample.record is None else record_to_bytes(sample.record)
        records.append(data)
        values = {item.name: getattr(sample, item.name) for item in fields(sample) if item.name != "record"}
        return {**values, "record_bytes": len(data)}

    header = json.dumps([[entry(sample) for sample in rollout] for rollout in rollouts]).encode()
    return b"".join([_LENGTH.pack(len(header)), header, *records])


def samples_from_bytes(data: bytes) -> list[list[TrainingSample]]:
    """Read what `samples_to_bytes` wrote.

    Raises:
        RecordError: a record is damaged, or a sample's arrays disagree.
    """
    (length,) = _LENGTH.unpack_from(data)
    offset = _LENGTH.size + length

    def sample(entry: dict[str, Any]) -> TrainingSample:
        nonlocal offset
        begin, offset = offset, offset + entry.pop("record_bytes")
        record = record_from_bytes(data[begin:offset]) if offset > begin else None
        return TrainingSample(**entry, record=record)

    header = json.loads(data[_LENGTH.size : offset])
    return [[sample(entry) for entry in rollout] for rollout in header]

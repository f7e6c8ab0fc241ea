"""Messages between a store's client and its server: their bytes, limits and checks. No sockets here, no pickle.

A message is two frames. The head: magic (8 bytes), protocol version (u16), 2 zero bytes, length of the JSON that
follows (u32), length of the body (u64), a 16-byte BLAKE2b digest of JSON and body, and the JSON object (ASCII).
The body: raw bytes, whose parts the JSON gives lengths of. A message of another version, above a limit, or whose
bytes do not match its digest is refused before anything of it is used; reading one runs no code of the sender.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NoReturn

from tracefp4.errors import BackendError, ConfigError, RecordError
from tracefp4.store.protocol import Handle, Removed, Segment, Slices, Stat
from tracefp4.store.refusals import (
    CHECKSUM_BYTES,
    AbsentSpan,
    Buffer,
    ConflictError,
    DroppedError,
    GoneError,
    MissingTrajectoryError,
    SpanError,
)

MAGIC = b"TFP4NET\n"
PROTOCOL = 2
MAX_HEAD_BYTES = 1 << 22
"""JSON of one message: 100,000 trajectory names, or the columns of the largest segment."""
DEFAULT_MESSAGE_BYTES = 1 << 24
"""Body of one message, 16 MiB; larger segments and answers travel in several."""
NAMES_PER_MESSAGE = 2048
"""Names of trajectories in one message: fits its JSON for names of 160 characters of any text, 12 bytes each."""
_PREFIX = struct.Struct(f"<8sHHIQ{CHECKSUM_BYTES}s")
FRAME_OVERHEAD = _PREFIX.size + MAX_HEAD_BYTES

_KINDS: Mapping[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (
        BackendError,
        ConfigError,
        ConflictError,
        DroppedError,
        GoneError,
        MissingTrajectoryError,
        RecordError,
        SpanError,
    )
}


class ForgottenError(BackendError):
    """The server no longer has what this client had unfinished: it was started anew, or heard nothing for too long."""


class UnreachableError(BackendError):
    """No answer came, however often it was asked."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """One message, checked."""

    content: dict[str, Any]
    """The JSON object."""
    body: bytes = b""
    """Raw bytes."""


def pack(message: Message, *, max_bytes: int = DEFAULT_MESSAGE_BYTES) -> list[bytes]:
    """Write a message as its two frames. Raises: RecordError if it is above the limits."""
    text = json.dumps(message.content, separators=(",", ":")).encode("ascii")
    if len(text) > MAX_HEAD_BYTES or len(message.body) > max_bytes:
        raise RecordError(
            f"Message refused: a head of {len(text)} and a body of {len(message.body)} bytes. At most "
            f"{MAX_HEAD_BYTES} and {max_bytes} travel at once. Ask for fewer rows or columns, or raise the message "
            "size on both sides."
        )
    digest = _digest(text, message.body)
    return [_PREFIX.pack(MAGIC, PROTOCOL, 0, len(text), len(message.body), digest) + text, message.body]


def unpack(frames: Sequence[bytes], *, max_bytes: int = DEFAULT_MESSAGE_BYTES) -> Message:
    """Read the two frames of a message.

    Raises:
        RecordError: another number of frames, no message, another protocol version, lengths that do not match, a
            wrong digest, or a head that is no JSON object.
    """
    if len(frames) != 2 or len(frames[0]) < _PREFIX.size:
        _refuse(f"{len(frames)} frames of {[len(frame) for frame in frames[:4]]} bytes", "a head and a body")
    magic, protocol, zero, head_bytes, body_bytes, digest = _PREFIX.unpack_from(frames[0])
    if magic != MAGIC:
        _refuse(f"a head that begins with {magic!r}", f"{MAGIC!r}")
    if (protocol, zero) != (PROTOCOL, 0):
        _refuse(f"protocol version {protocol}", f"version {PROTOCOL}; use the same tracefp4 on both sides")
    text, body = frames[0][_PREFIX.size :], frames[1]
    found = (len(text), len(body))
    if found != (head_bytes, body_bytes) or len(text) > MAX_HEAD_BYTES or len(body) > max_bytes:
        _refuse(
            f"frames of {found} bytes that announce {(head_bytes, body_bytes)}",
            f"equal lengths of at most {MAX_HEAD_BYTES} and {max_bytes}",
        )
    if _digest(text, body) != digest:
        _refuse(f"the digest {digest.hex()}", "that of its bytes")
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        _refuse("a head that is not a JSON object", "one")
    return Message(content=content, body=body)


def segment_message(segment: Segment) -> Message:
    """Write a segment; `segment_of` reads it."""
    sizes = [[name, memoryview(data).nbytes] for name, data in segment.columns.items()]
    content = {
        "trajectory": segment.trajectory,
        "start": segment.start,
        "num_rows": segment.num_rows,
        "generation": segment.generation,
        "meta": len(segment.meta),
        "columns": sizes,
    }
    return Message(content=content, body=b"".join([segment.meta, *segment.columns.values()]))


def segment_of(message: Message) -> Segment:
    """Read a segment. Raises: RecordError for parts that do not add up, or what no segment may be."""
    content = message.content
    sizes = [("", content["meta"]), *((name, size) for name, size in content["columns"])]
    meta, *columns = _split(message.body, [size for _, size in sizes])
    return Segment(
        trajectory=content["trajectory"],
        start=content["start"],
        num_rows=content["num_rows"],
        generation=content["generation"],
        meta=meta,
        columns={name: data for (name, _), data in zip(sizes[1:], columns, strict=True)},
    )


def cut_segment(segment: Segment, *, max_bytes: int) -> list[Segment]:
    """Cut a segment between rows, so that meta and columns of every part are at most max_bytes.

    Raises: RecordError if one row alone is larger.
    """
    row_bytes = -(-segment.num_bytes // segment.num_rows)
    num_rows = (max_bytes - len(segment.meta)) // max(1, row_bytes)
    if num_rows < 1:
        raise RecordError(
            f"Segment of trajectory {segment.trajectory!r} refused: one row has {row_bytes} bytes and its meta "
            f"{len(segment.meta)}. A message takes {max_bytes}. Raise the message size on both sides."
        )
    if num_rows >= segment.num_rows:
        return [segment]
    parts = []
    for begin in range(0, segment.num_rows, num_rows):
        end = min(begin + num_rows, segment.num_rows)
        columns = {}
        for name, data in segment.columns.items():
            view = memoryview(data).cast("B")
            width = view.nbytes // segment.num_rows
            columns[name] = bytes(view[begin * width : end * width])
        parts.append(replace(segment, start=segment.start + begin, num_rows=end - begin, columns=columns))
    return parts


def slices_message(slices: Slices) -> Message:
    """Write an answer to a read; `slices_of` reads it."""
    content = {
        "columns": [[name, len(data)] for name, data in slices.data.items()],
        "absent": [asdict(span) for span in slices.absent],
    }
    return Message(content=content, body=b"".join(slices.data.values()))


def slices_of(message: Message) -> Slices:
    """Read an answer to a read. Raises: RecordError for parts that do not add up."""
    sizes = message.content["columns"]
    parts = _split(message.body, [size for _, size in sizes])
    data = {name: part for (name, _), part in zip(sizes, parts, strict=True)}
    return Slices(data=data, absent=tuple(AbsentSpan(**span) for span in message.content["absent"]))


def stat_content(stat: Stat) -> dict[str, Any]:
    """Write a Stat as JSON values; `stat_of` reads it."""
    return asdict(stat) | {"columns": dict(stat.columns), "meta": stat.meta.hex()}


def stat_of(content: Mapping[str, Any]) -> Stat:
    """Read a Stat."""
    return Stat(**{**content, "meta": bytes.fromhex(content["meta"])})


def removed_content(removed: Removed) -> dict[str, Any]:
    """Write a Removed as JSON values, with its first names only: any number may have gone; `removed_of` reads it."""
    return asdict(replace(removed, trajectories=removed.trajectories[:NAMES_PER_MESSAGE]))


def removed_of(content: Mapping[str, Any]) -> Removed:
    """Read a Removed."""
    return Removed(**{**content, "trajectories": tuple(content["trajectories"])})


def target_content(trajectory: Handle | str) -> dict[str, Any]:
    """Write a handle or a name."""
    return {"handle": trajectory.to_json()} if isinstance(trajectory, Handle) else {"trajectory": trajectory}


def target_of(content: Mapping[str, Any]) -> Handle | str:
    """Read a handle or a name. Raises: RecordError for a handle of another schema."""
    return Handle.from_json(content["handle"]) if "handle" in content else str(content["trajectory"])


def error_content(error: Exception) -> dict[str, Any]:
    """Write an error of the store's as JSON values; others become a BackendError that says so."""
    name = type(error).__name__
    absent = [asdict(span) for span in error.absent] if isinstance(error, SpanError) else []
    return {"error": name if name in _KINDS else "BackendError", "text": str(error), "absent": absent}


def raise_error(content: Mapping[str, Any]) -> NoReturn:
    """Raise the error that a message carries."""
    kind = _KINDS.get(content["error"], BackendError)
    if kind is SpanError:
        raise SpanError(content["text"], [AbsentSpan(**span) for span in content["absent"]])
    raise kind(content["text"])


def _split(body: bytes, sizes: Sequence[int]) -> list[bytes]:
    if any(type(size) is not int or size < 0 for size in sizes) or sum(sizes) != len(body):
        _refuse(f"{len(sizes)} parts that do not add up to its {len(body)} bytes", "parts that do")
    view, parts, offset = memoryview(body), [], 0
    for size in sizes:
        parts.append(bytes(view[offset : offset + size]))
        offset += size
    return parts


def _digest(text: bytes, body: Buffer) -> bytes:
    found = hashlib.blake2b(text, digest_size=CHECKSUM_BYTES)
    found.update(body)
    return found.digest()


def _refuse(got: str, allowed: str) -> NoReturn:
    raise RecordError(
        f"Message refused: it has {got}. Allowed is {allowed}. Check that both ends are tracefp4 stores of one "
        "version, and the network between them."
    )

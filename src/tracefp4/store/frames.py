"""Frames: how every file of a store is cut, so that torn and damaged bytes are recognised and never misread.

A file is a header and frames. The header (32 bytes: magic, schema version, kind of file, writer, number, CRC-32)
never changes its layout, so that a store of another schema is refused by name. A frame is a prefix, a head and a
body. The prefix holds a 16-byte BLAKE2b digest over the identity of the file, the offset of the frame, the lengths
and the head: a frame that lies elsewhere, or in another file, is no frame. The body is covered by digests that the
head carries. Files only grow. Where no valid frame starts, reading goes on at the next valid one; the bytes between
are reported, and a tail without any is a frame not yet, or never, completed. Never knows what heads mean.
"""

from __future__ import annotations

import hashlib
import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tracefp4.errors import RecordError
from tracefp4.store.disk import read_at
from tracefp4.store.protocol import STORE_SCHEMA
from tracefp4.store.refusals import CHECKSUM_BYTES

FILE_MAGIC = b"TFP4RECS"
FRAME_MAGIC = b"\x93TFrame\n"
MANIFEST_FILE, CHUNK_FILE = 1, 2
# Far above any head (a segment's stays below 200 KiB, a manifest entry has 28 bytes a segment): larger is damage.
MAX_HEAD_BYTES = 1 << 26
# First read at a frame: prefix and most heads at once.
_FIRST_READ = 8192
_SEARCH_BLOCK = 1 << 20

_HEADER = struct.Struct("<8sIIQI")
_CRC = struct.Struct("<I")
HEADER_BYTES = _HEADER.size + _CRC.size
_LENGTHS = struct.Struct("<8sIIQ")
PREFIX_BYTES = _LENGTHS.size + CHECKSUM_BYTES
_SALT = struct.Struct("<IQIQ")


@dataclass(frozen=True, kw_only=True, slots=True)
class FileIdentity:
    """Which file a frame belongs to; part of every frame's digest."""

    kind: int
    """MANIFEST_FILE or CHUNK_FILE."""
    writer: int = 0
    """Number of the writer that the file belongs to; 0 for the manifest, which all share."""
    number: int = 0
    """Number of the file among those of its writer, from 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    """A frame whose prefix and head are verified; the body is not yet."""

    offset: int
    """Where it starts."""
    kind: int
    """What the head means; kinds are those of the file's owner."""
    head: bytes
    """Verified bytes."""
    body_bytes: int
    """Length of the body, which follows the head."""

    @property
    def body_offset(self) -> int:
        """Where the body starts."""
        return self.offset + PREFIX_BYTES + len(self.head)

    @property
    def end(self) -> int:
        """Where the next frame starts."""
        return self.body_offset + self.body_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Gap:
    """Bytes of a file that belong to no frame."""

    start: int
    """First byte."""
    stop: int
    """One past the last byte."""
    is_tail: bool
    """Whether no frame follows: being written, or torn."""


def file_header(identity: FileIdentity) -> bytes:
    """The first 32 bytes of a file."""
    fields = _HEADER.pack(FILE_MAGIC, STORE_SCHEMA, identity.kind, identity.writer, identity.number)
    return fields + _CRC.pack(zlib.crc32(fields))


def check_header(data: bytes, identity: FileIdentity, path: Path) -> None:
    """Check the first bytes of a file. Raises: RecordError if they are damaged or of another schema."""
    fields = data[: _HEADER.size]
    if len(data) < HEADER_BYTES or _CRC.unpack_from(data, _HEADER.size)[0] != zlib.crc32(fields):
        raise RecordError(
            f"Store file {path} refused; got the header {data[:HEADER_BYTES].hex()!r}. A header has "
            f"{HEADER_BYTES} bytes and a right CRC-32. The file is damaged: what it held is absent."
        )
    magic, schema, kind, writer, number = _HEADER.unpack(fields)
    if (magic, schema) != (FILE_MAGIC, STORE_SCHEMA):
        raise RecordError(
            f"Store file {path} refused; it has magic {magic!r} and schema version {schema}. This version reads "
            f"{FILE_MAGIC!r} and {STORE_SCHEMA}. Use the tracefp4 that wrote it, or record again."
        )
    if (kind, writer, number) != (identity.kind, identity.writer, identity.number):
        raise RecordError(
            f"Store file {path} refused; its header says kind {kind}, writer {writer}, number {number}. Its name "
            f"asks for {identity}. Files of a store keep their names: undo the renaming."
        )


def encode_frame(identity: FileIdentity, offset: int, kind: int, head: bytes, body_bytes: int = 0) -> bytes:
    """Prefix and head of a frame at `offset`; the body of `body_bytes` bytes must follow."""
    assert len(head) <= MAX_HEAD_BYTES
    lengths = _LENGTHS.pack(FRAME_MAGIC, kind, len(head), body_bytes)
    return lengths + _digest(identity, offset, lengths, head) + head


def read_frame(
    descriptor: int, identity: FileIdentity, offset: int, *, head_bytes: int | None = None
) -> Frame | None:
    """The frame at `offset`, or None if no complete frame starts there.

    Args:
        descriptor: of a file open for reading.
        identity: of that file.
        offset: where the frame starts.
        head_bytes: length of its head if it is known, so that one read is enough.
    """
    first = _FIRST_READ if head_bytes is None else PREFIX_BYTES + head_bytes
    data = read_at(descriptor, first, offset)
    if len(data) < PREFIX_BYTES or not data.startswith(FRAME_MAGIC):
        return None
    _, kind, size, body_bytes = _LENGTHS.unpack_from(data)
    if size > MAX_HEAD_BYTES:
        return None
    if len(data) < PREFIX_BYTES + size:
        data += read_at(descriptor, PREFIX_BYTES + size - len(data), offset + len(data))
    head = data[PREFIX_BYTES : PREFIX_BYTES + size]
    expected = data[_LENGTHS.size : PREFIX_BYTES]
    if len(head) < size or _digest(identity, offset, data[: _LENGTHS.size], head) != expected:
        return None
    frame = Frame(offset=offset, kind=kind, head=head, body_bytes=body_bytes)
    # The body of a frame that is being written, or was torn, is not there yet.
    return frame if os.fstat(descriptor).st_size >= frame.end else None


def scan(descriptor: int, identity: FileIdentity, offset: int) -> Iterator[Frame | Gap]:
    """Every frame from `offset` to the end, in order, and the gaps between and behind them.

    A gap inside is damage. A gap at the end (`is_tail`) is where a later scan should start again.
    """
    while True:
        frame, later = read_frame(descriptor, identity, offset), None
        if frame is None:
            size = os.fstat(descriptor).st_size
            if offset >= size:
                return
            later = _next_frame(descriptor, identity, offset + 1)
            # A writer may have completed this frame meanwhile, and the next one too: frames come in order.
            frame = read_frame(descriptor, identity, offset)
        if frame is None:
            frame = later
            yield Gap(start=offset, stop=size if frame is None else frame.offset, is_tail=frame is None)
            if frame is None:
                return
        yield frame
        offset = frame.end


def _next_frame(descriptor: int, identity: FileIdentity, offset: int) -> Frame | None:
    keep = len(FRAME_MAGIC) - 1
    while block := read_at(descriptor, _SEARCH_BLOCK, offset):
        place = block.find(FRAME_MAGIC)
        while place >= 0:
            frame = read_frame(descriptor, identity, offset + place)
            if frame is not None:
                return frame
            place = block.find(FRAME_MAGIC, place + 1)
        if len(block) <= keep:
            return None
        offset += len(block) - keep
    return None


def _digest(identity: FileIdentity, offset: int, lengths: bytes, head: bytes) -> bytes:
    salt = _SALT.pack(identity.kind, identity.writer, identity.number, offset)
    digest = hashlib.blake2b(salt + lengths, digest_size=CHECKSUM_BYTES)
    digest.update(head)
    return digest.digest()

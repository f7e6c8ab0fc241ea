"""Record <-> bytes: self-describing, exact, and refused when anything is off.

Layout, little-endian (as is every machine that torch is built for): magic (8 bytes), schema version (u32),
header length (u32), header (ASCII JSON: identity, span, type and shape of every array), the arrays one after another
as raw bytes, and a 16-byte BLAKE2b digest of all before it. Expert ids are read as the header types them, one byte or
two. The schema version is read first, so a reader of another schema is told so instead of a checksum error; every bit
is under one check or another. No pickle: reading a record runs no code of the writer.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from tracefp4.errors import RecordError
from tracefp4.guidance.record import SITE_KINDS, Record, RecordIdentity, Site, SiteKind
from tracefp4.guidance.site_record import SiteRecord

MAGIC = b"TFP4REC\n"
SCHEMA_VERSION = 2
"""Of the container: a site states its block size, and its scales are stored as its codec keeps them."""
CHECKSUM_BYTES = 16
_PREFIX = struct.Struct("<8sII")
_DTYPES = {"i1": torch.int8, "i2": torch.int16, "i4": torch.int32}
_KINDS = {torch.uint8: "u1"} | {dtype: kind for kind, dtype in _DTYPES.items()}


def record_to_bytes(record: Record) -> bytes:
    """Write a record; `record_from_bytes` gives back an equal one (records_equal)."""
    buffers: list[bytes] = []

    def put(array: Tensor | None) -> list[Any] | None:
        if array is None:
            return None
        buffers.append(array.cpu().contiguous().numpy().tobytes())
        return [_KINDS[array.dtype], list(array.shape)]

    identity = record.identity
    versions = identity.weight_versions
    header = {
        "trajectory": identity.trajectory,
        "scheme_digest": identity.scheme_digest,
        "plan_digest": identity.plan_digest,
        "weight_version": versions if isinstance(versions, int) else None,
        "weight_versions": put(versions.to(torch.int32)) if isinstance(versions, Tensor) else None,
        "start": record.start,
        "length": record.length,
        "routed_layers": record.routed_layers,
        "routed": put(record.routed),
        "valid": put(record.valid.to(torch.uint8)),
        "sites": [
            {
                "site": [site.kind, site.layer],
                "codec": part.codec,
                "width": part.width,
                "block_size": part.block_size,
                "rows_per_token": part.rows_per_token,
                "static_exponent": part.static_exponent,
                "payload": put(part.payload),
                "block_scales": put(part.block_scales),
                "exponent": put(part.exponent),
            }
            for site, part in sorted(record.sites.items())
        ],
    }
    text = json.dumps(header, separators=(",", ":")).encode("ascii")
    body = b"".join([_PREFIX.pack(MAGIC, SCHEMA_VERSION, len(text)), text, *buffers])
    return body + _checksum(body)


def record_from_bytes(
    data: bytes, *, scheme_digest: str | None = None, plan_digest: str | None = None
) -> Record:
    """Read a record, refusing what is not one or does not belong here.

    Args:
        data: what record_to_bytes wrote.
        scheme_digest, plan_digest: this side's digests, checked when given (give both in a trainer).
    Raises: RecordError for bytes that are no record, another schema version, a wrong checksum or another
    digest,
        each with the value found and the value expected.
    """
    header, buffer = _opened(data)
    arrays = _Arrays(buffer=buffer)
    versions = arrays.take(header["weight_versions"])
    identity = RecordIdentity(
        trajectory=header["trajectory"],
        weight_versions=header["weight_version"] if versions is None else versions,
        scheme_digest=header["scheme_digest"],
        plan_digest=header["plan_digest"],
    )
    routed = arrays.take(header["routed"])
    valid = arrays.take(header["valid"])
    assert valid is not None
    layers = header["routed_layers"]
    record = Record(
        identity=identity,
        start=header["start"],
        length=header["length"],
        sites=dict(_site(entry, arrays) for entry in header["sites"]),
        routed=routed,
        valid=valid.to(torch.bool),
        routed_layers=None if layers is None else tuple(layers),
    )
    record.check(
        scheme_digest=identity.scheme_digest if scheme_digest is None else scheme_digest,
        plan_digest=identity.plan_digest if plan_digest is None else plan_digest,
    )
    return record


@dataclass(kw_only=True, eq=False, slots=True)
class _Arrays:
    """Arrays read one after another, in the order in which they were written."""

    buffer: Tensor
    """uint8, all arrays end to end."""
    offset: int = 0
    """First byte not yet read."""

    def take(self, layout: list[Any] | None) -> Tensor | None:
        if layout is None:
            return None
        kind, shape = layout
        end = self.offset + math.prod(shape) * int(kind[1:])
        raw, self.offset = self.buffer[self.offset : end], end
        if kind == "u1":
            return raw.view(shape)
        # Copied: a wider element may lie at an odd offset.
        return raw.clone().view(_DTYPES[kind]).view(shape)


def _site(entry: dict[str, Any], arrays: _Arrays) -> tuple[Site, SiteRecord]:
    kind, layer = entry["site"]
    assert kind in SITE_KINDS
    payload, block_scales = arrays.take(entry["payload"]), arrays.take(entry["block_scales"])
    assert payload is not None and block_scales is not None
    part = SiteRecord(
        codec=entry["codec"],
        payload=payload,
        block_scales=block_scales,
        exponent=arrays.take(entry["exponent"]),
        width=entry["width"],
        block_size=entry["block_size"],
        rows_per_token=entry["rows_per_token"],
        static_exponent=entry["static_exponent"],
    )
    return Site(cast(SiteKind, kind), layer), part


def _opened(data: bytes) -> tuple[dict[str, Any], Tensor]:
    """Header and array bytes, after magic, schema and checksum."""
    if len(data) < _PREFIX.size + CHECKSUM_BYTES or data[: len(MAGIC)] != MAGIC:
        raise RecordError(
            f"Not a record; got {len(data)} bytes that begin with {data[: len(MAGIC)]!r}. A record begins "
            f"with {MAGIC!r}. Check the store key."
        )
    _, schema, header_bytes = _PREFIX.unpack_from(data)
    if schema != SCHEMA_VERSION:
        age = "an older" if schema < SCHEMA_VERSION else "a newer"
        raise RecordError(
            f"Record refused: its schema version is {schema}, this version reads {SCHEMA_VERSION} only. It was written "
            f"by {age} tracefp4. Read it with that one, or record again."
        )
    body, found = data[:-CHECKSUM_BYTES], data[-CHECKSUM_BYTES:]
    expected = _checksum(body)
    if found != expected:
        raise RecordError(
            f"Record refused: its checksum is {found.hex()}, its bytes give {expected.hex()}. Both must be "
            "equal. The bytes were damaged or cut; drop this record (its positions round to nearest)."
        )
    end = _PREFIX.size + header_bytes
    raw = bytearray(body[end:])
    arrays = (
        torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.zeros(0, dtype=torch.uint8, device="cpu")
    )
    return json.loads(body[_PREFIX.size : end]), arrays


def _checksum(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=CHECKSUM_BYTES).digest()

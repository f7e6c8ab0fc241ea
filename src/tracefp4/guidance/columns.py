"""Records as columns of bytes per position, so that a store can keep them and a reader can take a part.

A record of n positions becomes one column per site ("3.x", "3.k", ...: layer, kind), one per routed layer
("3.routed"), "valid" and "versions"; row i of every column belongs to position start + i, and rows of one column
all have the same number of bytes. A site's row is its payload, then its block scales, then its row exponents, of
all rows_per_token rows in order. What is the same for all positions (codecs, widths, digests, layers) is the meta
text, which knows no position: columns of any span of a record go with the meta of the whole. Integers wider than
a byte are little-endian. A position that a column lacks is not valid in the record read back, so it rounds to
nearest; nothing here is ever filled in and followed. This file touches neither disk nor network.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, cast

import torch
from torch import Tensor

from tracefp4.errors import RecordError
from tracefp4.guidance.record import SITE_KINDS, Record, RecordIdentity, Site, SiteKind
from tracefp4.guidance.site_record import SiteRecord

META_SCHEMA = 1
VALID, VERSIONS = "valid", "versions"
_ARRAYS = ("payload", "block_scales", "exponent")
_DTYPES = {"u1": torch.uint8, "i1": torch.int8, "i2": torch.int16, "i4": torch.int32}
_KINDS = {dtype: kind for kind, dtype in _DTYPES.items()}
# What a site shares with others of its kind; the static exponent is its own.
_SCALARS = tuple(f.name for f in fields(SiteRecord) if f.name not in (*_ARRAYS, "static_exponent"))


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class RecordColumns:
    """One record, or the part of it that was read, as bytes."""

    trajectory: str
    """Name of the trajectory."""
    start: int
    """Position of row 0."""
    num_rows: int
    """Positions."""
    columns: Mapping[str, bytes | bytearray | memoryview]
    """Column name -> num_rows rows of equal size, end to end."""
    meta: bytes
    """ASCII JSON: what is the same for all positions."""


def record_to_columns(record: Record) -> RecordColumns:
    """Write a record as columns; `columns_to_record` gives back an equal one (records_equal)."""
    columns = {
        VALID: _rows(record.valid.to(torch.uint8)),
        VERSIONS: _rows(record.versions().to(torch.int32)),
    }
    layouts: list[dict[str, Any]] = []
    sites = []
    for site, part in sorted(record.sites.items()):
        arrays = [getattr(part, name) for name in _ARRAYS]
        raw = [_as_bytes(array) for array in arrays if array is not None]
        columns[site_column(site)] = _rows(torch.cat(raw, dim=1))
        layout = {name: getattr(part, name) for name in _SCALARS}
        layout["arrays"] = [None if a is None else [_KINDS[a.dtype], list(a.shape[1:])] for a in arrays]
        if layout not in layouts:
            layouts.append(layout)
        sites.append([site.kind, site.layer, layouts.index(layout), part.static_exponent])
    routed = record.routed
    if routed is not None:
        for place, layer in enumerate(record.layers_routed):
            columns[routed_column(layer)] = _rows(routed[:, place])
    meta = {
        "schema": META_SCHEMA,
        "scheme_digest": record.identity.scheme_digest,
        "plan_digest": record.identity.plan_digest,
        "layouts": layouts,
        "sites": sites,
        "routed_layers": None if routed is None else list(record.layers_routed),
        "routed": None if routed is None else [_KINDS[routed.dtype], routed.shape[2]],
    }
    return RecordColumns(
        trajectory=record.identity.trajectory,
        start=record.start,
        num_rows=record.length,
        columns=columns,
        meta=json.dumps(meta, separators=(",", ":")).encode("ascii"),
    )


def needed_columns(
    meta: bytes, *, sites: Collection[Site] | None = None, routed_layers: Collection[int] | None = None
) -> list[str]:
    """Name the columns that a consumer of some sites and layers must read.

    Args:
        meta: of the record.
        sites: sites that are followed; None means all. Sites that were not recorded are left out.
        routed_layers: layers whose routing is followed; None means all, an empty collection none.

    Raises:
        RecordError: the meta text is of another schema.
    """
    content = _opened(meta)
    found = [_site(entry) for entry in content["sites"]]
    names = [site_column(site) for site in found if sites is None or site in sites]
    layers = content["routed_layers"] or []
    names += [routed_column(layer) for layer in layers if routed_layers is None or layer in routed_layers]
    return [VALID, VERSIONS, *names]


def columns_to_record(found: RecordColumns, *, missing: Sequence[tuple[int, int]] = ()) -> Record:
    """Read a record from some or all of its columns.

    Args:
        found: the columns; sites and routed layers without a column are not in the record.
        missing: spans of positions [begin, end) that some column lacks; their bytes are arbitrary (of full length)
            and the record is not valid there.

    Returns:
        The record. Its arrays own their memory: nothing of `found` is kept alive.

    Raises:
        RecordError: a meta text of another schema, no "valid" or "versions" column, a column of another length.
    """
    content, num_rows = _opened(found.meta), found.num_rows
    valid = _column(found, VALID, kind="u1", row_shape=()).to(torch.bool)
    versions = _column(found, VERSIONS, kind="i4", row_shape=())
    lost = torch.zeros(num_rows, dtype=torch.bool, device="cpu")
    for begin, end in missing:
        lost[max(0, begin - found.start) : max(0, end - found.start)] = True
    versions = versions.masked_fill(lost, _newest(versions, lost))
    routed, layers = _routed(found, content)
    held = [e for e in content["sites"] if site_column(_site(e)) in found.columns]
    sites = {_site(e): _site_record(found, e, layout=content["layouts"][e[2]]) for e in held}
    return Record(
        identity=RecordIdentity(
            trajectory=found.trajectory,
            weight_versions=_collapsed(versions),
            scheme_digest=content["scheme_digest"],
            plan_digest=content["plan_digest"],
        ),
        start=found.start,
        length=num_rows,
        sites=sites,
        routed=routed,
        valid=valid & ~lost,
        routed_layers=layers,
    )


def site_column(site: Site) -> str:
    """Return the name of a site's column."""
    return f"{site.layer}.{site.kind}"


def routed_column(layer: int) -> str:
    """Return the name of the column of one layer's routed experts."""
    return f"{layer}.routed"


def _rows(array: Tensor) -> bytes:
    return array.cpu().contiguous().numpy().tobytes()


def _as_bytes(array: Tensor) -> Tensor:
    """uint8 [n, bytes of a row]."""
    flat = array.cpu().reshape(array.shape[0], array.shape[1:].numel()).contiguous()
    return flat.view(torch.uint8)


def _opened(meta: bytes) -> dict[str, Any]:
    content = json.loads(bytes(meta))
    if content.get("schema") != META_SCHEMA:
        raise RecordError(
            f"Columns of a record refused: their schema is {content.get('schema')!r}, this version reads "
            f"{META_SCHEMA}. Use the tracefp4 that wrote them, or record again."
        )
    return cast(dict[str, Any], content)


def _site(entry: Sequence[Any]) -> Site:
    kind, layer = entry[:2]
    assert kind in SITE_KINDS
    return Site(cast(SiteKind, kind), layer)


def _column(found: RecordColumns, name: str, *, kind: str, row_shape: tuple[int, ...]) -> Tensor:
    """A column as a tensor of its own [num_rows, *row_shape]."""
    dtype, data = _DTYPES[kind], found.columns.get(name)
    shape = (found.num_rows, *row_shape)
    expected = torch.empty(shape, dtype=dtype, device="meta").numel() * dtype.itemsize
    if data is None or len(data) != expected:
        raise RecordError(
            f"Column {name!r} of trajectory {found.trajectory!r} does not fit; got "
            f"{'none' if data is None else f'{len(data)} bytes'} for {found.num_rows} positions. It must have "
            f"{expected} bytes. Read it from the store again, with the meta of the same trajectory."
        )
    if not expected:
        return torch.zeros(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(bytearray(data), dtype=dtype).view(shape)


def _site_record(found: RecordColumns, entry: Sequence[Any], *, layout: Mapping[str, Any]) -> SiteRecord:
    per_token = int(layout["rows_per_token"])
    sizes = [0 if spec is None else _row_bytes(spec) for spec in layout["arrays"]]
    rows = _column(found, site_column(_site(entry)), kind="u1", row_shape=(per_token, sum(sizes)))
    parts = rows.view(found.num_rows * per_token, sum(sizes)).split(sizes, dim=1)
    values: dict[str, Any] = {name: layout[name] for name in _SCALARS}
    values |= {
        name: None if spec is None else part.contiguous().view(_DTYPES[spec[0]]).view(part.shape[0], *spec[1])
        for name, part, spec in zip(_ARRAYS, parts, layout["arrays"], strict=True)
    }
    return SiteRecord(**values, static_exponent=entry[3])


def _row_bytes(spec: Sequence[Any]) -> int:
    kind, shape = spec
    return int(torch.Size(shape).numel()) * _DTYPES[kind].itemsize


def _routed(found: RecordColumns, content: Mapping[str, Any]) -> tuple[Tensor | None, tuple[int, ...] | None]:
    layers = [n for n in content["routed_layers"] or () if routed_column(n) in found.columns]
    if content["routed"] is None or not layers:
        return None, None
    kind, top_k = content["routed"]
    columns = [_column(found, routed_column(n), kind=kind, row_shape=(top_k,)) for n in layers]
    return torch.stack(columns, dim=1), tuple(layers)


def _newest(versions: Tensor, lost: Tensor) -> int:
    """Version that lost positions are given: it must not make the record look older than it is."""
    kept = versions[~lost]
    return int(kept.max()) if kept.numel() else 0


def _collapsed(versions: Tensor) -> Tensor | int:
    """One int where all positions have the same version."""
    return int(versions[0]) if versions.numel() and bool((versions == versions[0]).all()) else versions

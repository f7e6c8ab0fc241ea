"""Look rows of many records up by (batch row, position): one index per batch, one index_select per array.

The index is a pure function of the positions and the records, so asking twice, in any order, from a
recomputation or another micro-batch, gives the same rows. A place is invalid where its position is -1
(padding), where it has no record, where the position lies outside the record or outside the site's records,
and where the record itself says so. Invalid places read row 0 and must be ignored through `valid`.

Rows are looked at while they are in host memory: scales that no rollout records are refused here, before a kernel,
which cannot say whose they are, meets them, and expert ids are known to be a router's or not before one is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tracefp4.errors import RecordError
from tracefp4.guidance.record import Record, Site, has_repeats
from tracefp4.guidance.site_record import SiteRecord
from tracefp4.ops.upload import upload


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class GatheredSite:
    """One site's rows in batch order, N = places * rows_per_token."""

    part: SiteRecord
    """Payload, block scales and exponents, one row per batch row; on the device where rows are wanted."""
    valid: Tensor
    """bool [N]."""
    num_places: int
    """Places that are valid, counted before anything moves to a device."""


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class GatheredRouting:
    """Recorded expert ids in batch order."""

    expert_ids: Tensor
    """uint8 or int16 [places, L, top_k]."""
    valid: Tensor
    """bool [places]."""
    layers: tuple[int, ...]
    """Decoder layer of each of the L entries."""
    has_repeats: bool
    """Whether a valid place has an expert twice in a layer; looked at in host memory."""
    id_range: tuple[int, int]
    """Smallest and largest id of valid places; (0, 0) without any."""


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class _Index:
    """Where every place finds its row."""

    present: tuple[bool, ...]
    """Which records have rows."""
    rows: Tensor
    """int64 [places], row in the concatenation of the records; 0 where not valid."""
    valid: Tensor
    """bool [places]."""
    num_valid: int
    """Places that are valid."""


class RecordRows:
    """The records of one batch, addressed by place.

    Args:
        records: records, or None where a trajectory has none.
        owners: int64 [places], which record a place belongs to; -1 for none.
        positions: int64 [places], position in the trajectory; -1 for padding.
        device: where rows are wanted; None: where the positions are.
    """

    def __init__(
        self,
        *,
        records: Sequence[Record | None],
        owners: Tensor,
        positions: Tensor,
        device: torch.device | None = None,
    ) -> None:
        self._records = tuple(records)
        self._device = positions.device if device is None else device
        self._owners = owners.cpu()
        self._positions = positions.cpu()
        self._indices: dict[tuple[bool, ...], _Index] = {}
        self._valid: dict[tuple[tuple[bool, ...], int], Tensor] = {}
        self._sites: dict[Site, GatheredSite | None] = {}
        self._routing: list[GatheredRouting | None] = []

    def sites(self) -> set[Site]:
        """Every site that at least one record has."""
        return {site for record in self._records if record is not None for site in record.sites}

    def site(self, site: Site) -> GatheredSite | None:
        """Rows of one site; None when no place has any. Kept after the first call, packed.

        Raises: RecordError for records of unlike layouts, or impossible scales at a place that is valid.
        """
        if site not in self._sites:
            self._sites[site] = self._gather_site(site)
        return self._sites[site]

    def routing(self) -> GatheredRouting | None:
        """Routed ids of all layers; None when no place has any. Kept after the first call."""
        if not self._routing:
            self._routing.append(self._gather_routing())
        return self._routing[0]

    def _gather_site(self, site: Site) -> GatheredSite | None:
        index = self._index(lambda record: site in record.sites)
        if index is None:
            return None
        parts = [
            record.sites[site] for record in self._records if record is not None and site in record.sites
        ]
        first = parts[0]
        _check_same_layout(site, parts)
        rows, valid = index.rows, index.valid
        if first.rows_per_token != 1:
            steps = torch.arange(first.rows_per_token, device="cpu")
            rows = (rows[:, None] * first.rows_per_token + steps).reshape(-1)
            valid = valid.repeat_interleave(first.rows_per_token)
        exponent = None
        if first.exponent is not None:
            exponent = _selected([part.exponent for part in parts if part.exponent is not None], rows)
        part = replace(
            first,
            payload=_selected([part.payload for part in parts], rows),
            block_scales=_selected([part.block_scales for part in parts], rows),
            exponent=exponent,
        )
        self._check_scales(part, valid)
        key = (index.present, first.rows_per_token)
        if key not in self._valid:  # the same for most sites
            self._valid[key] = upload(valid, self._device)
        return GatheredSite(part=part.on(self._device), valid=self._valid[key], num_places=index.num_valid)

    def _check_scales(self, part: SiteRecord, valid: Tensor) -> None:
        """One look at all rows; the records are asked one by one only to name what is wrong."""
        if bool((part.damaged_rows() & valid).any()):
            for record in self._records:
                if record is not None:
                    record.check_scales()

    def _gather_routing(self) -> GatheredRouting | None:
        index = self._index(lambda record: record.routed is not None)
        if index is None:
            return None
        found = [record for record in self._records if record is not None and record.routed is not None]
        layouts = {(record.layers_routed, tuple(_routed(record).shape[1:])) for record in found}
        if len(layouts) != 1:
            raise RecordError(
                f"Records of one batch route differently; got (layers, shape per token) {sorted(layouts)}. "
                "All must be equal. Replay records of one plan together."
            )
        ids = _selected([_routed(record) for record in found], index.rows)
        known = ids if index.num_valid == len(ids) else ids[index.valid]
        return GatheredRouting(
            expert_ids=upload(ids, self._device),
            valid=upload(index.valid, self._device),
            layers=found[0].layers_routed,
            has_repeats=bool(has_repeats(known).any()),
            id_range=(int(known.min()), int(known.max())) if known.numel() else (0, 0),
        )

    def _index(self, has_rows: Callable[[Record], bool]) -> _Index | None:
        """Row of every place in the concatenated records that have rows; None if no place is valid."""
        present = tuple(record is not None and has_rows(record) for record in self._records)
        if present not in self._indices:
            self._indices[present] = self._locate(present)
        index = self._indices[present]
        return index if index.num_valid else None

    def _locate(self, present: tuple[bool, ...]) -> _Index:
        starts, lengths, offsets, flags = [], [], [], []
        total = 0
        for record, is_present in zip(self._records, present, strict=True):
            length = record.length if record is not None and is_present else 0
            starts.append(0 if record is None else record.start)
            lengths.append(length)
            offsets.append(total)
            total += length
            if record is not None and length:
                flags.append(record.valid)
        if total == 0:
            empty = torch.zeros_like(self._positions)
            return _Index(present=present, rows=empty, valid=empty.bool(), num_valid=0)
        owners = self._owners.clamp(min=0)
        relative = self._positions - torch.tensor(starts, device="cpu")[owners]
        inside = (self._positions >= 0) & (self._owners >= 0)
        inside &= (relative >= 0) & (relative < torch.tensor(lengths, device="cpu")[owners])
        rows = torch.where(inside, torch.tensor(offsets, device="cpu")[owners] + relative, 0)
        valid = inside & torch.cat(flags)[rows]
        return _Index(present=present, rows=rows, valid=valid, num_valid=int(valid.sum()))


def _selected(arrays: list[Tensor], rows: Tensor) -> Tensor:
    joined = arrays[0] if len(arrays) == 1 else torch.cat(arrays)
    return joined.index_select(0, rows)


def _routed(record: Record) -> Tensor:
    assert record.routed is not None
    return record.routed


def check_same_rules(records: Iterable[Record | None], *, references: Iterable[Record | None] = ()) -> None:
    """Refuse records of one batch, and references beside them, that were made under different schemes or plans.

    Raises: RecordError with the digests of both.
    """
    found, measured = (
        {(r.identity.scheme_digest, r.identity.plan_digest) for r in held if r is not None}
        for held in (records, references)
    )
    if len(found | measured) > 1:
        raise RecordError(
            "Records of one batch were made under different rules; got (scheme digest, plan digest) "
            f"{sorted(found)} of records and {sorted(measured)} of references. All must be equal. Replay, and measure "
            "against, only records of this run's scheme and plan."
        )


def _check_same_layout(site: Site, parts: list[SiteRecord]) -> None:
    found = {
        (part.codec, part.width, part.block_size, part.rows_per_token, part.static_exponent) for part in parts
    }
    if len(found) > 1:
        raise RecordError(
            f"Records of one batch differ at {site}; got (codec, width, block size, rows per "
            "token, static exponent) "
            f"{sorted(found, key=str)}. All must be equal. Recode them to one codec."
        )

"""Whole records: join a prompt's with a completion's, recode a batch of them, compare two bit for bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tracefp4.coding import ScaleCoding, codec_by_name
from tracefp4.errors import RecordError
from tracefp4.formats.packing import unpack_codes
from tracefp4.guidance.payload import encode_block_scales, encode_codes
from tracefp4.guidance.record import Record, Site
from tracefp4.guidance.site_record import SiteRecord


def concat(prompt: Record, completion: Record) -> Record:
    """Join a prompt's record and the record that continues it.

    The result has the completion's trajectory, starts where the prompt starts and keeps each position's
    version.
    Raises: RecordError if the second does not start where the first ends, or if digests, sites, codecs or
    shapes differ.
    """
    end = prompt.start + prompt.length
    if completion.start != end:
        raise RecordError(
            f"Records are not adjacent; got one that ends before position {end} and one that starts at "
            f"{completion.start}. The second must start at {end}. Check this completion's prompt."
        )
    prompt.check(
        scheme_digest=completion.identity.scheme_digest,
        plan_digest=completion.identity.plan_digest,
    )
    _check_same_layout(prompt, completion)
    routed = None
    if prompt.routed is not None and completion.routed is not None:
        routed = torch.cat([prompt.routed, completion.routed])
    return replace(
        completion,
        identity=replace(completion.identity, weight_versions=_joined_versions(prompt, completion)),
        start=prompt.start,
        length=prompt.length + completion.length,
        sites={site: _joined(part, completion.sites[site]) for site, part in prompt.sites.items()},
        routed=routed,
        valid=torch.cat([prompt.valid, completion.valid]),
    )


def recode_all(records: Sequence[Record | None], codec: str | Mapping[Site, str]) -> list[Record | None]:
    """Recode many records with one encoding per site; the result is `record.recode(codec)` for each.

    None (a trajectory without a record) stays None. Raises: RecordError if a record has dropped the bits that
    a codec needs.
    """
    present = [record for record in records if record is not None]
    layouts = {(site, _layout(part)) for record in present for site, part in record.sites.items()}
    sites = {site for site, _ in layouts}
    is_whole = all(part.is_whole for record in present for part in record.sites.values())
    if not is_whole or len(layouts) != len(sites):
        return [None if record is None else record.recode(codec) for record in records]
    recoded: list[dict[Site, SiteRecord]] = [{} for _ in present]
    for site in sorted(sites):
        held = [(i, record.sites[site]) for i, record in enumerate(present) if site in record.sites]
        name = codec if isinstance(codec, str) else codec.get(site, held[0][1].codec)
        if name == held[0][1].codec:
            for i, part in held:
                recoded[i][site] = part
            continue
        target, lengths = codec_by_name(name), [part.payload.shape[0] for _, part in held]
        codes = unpack_codes(torch.cat([part.payload for _, part in held]))
        payloads = encode_codes(codes, codec=target).split(lengths)
        scales = [part.block_scales for _, part in held]
        if target.scale_coding is not ScaleCoding.RAW:
            scales = list(encode_block_scales(torch.cat(scales), codec=target).split(lengths))
        for (i, part), payload, block_scales in zip(held, payloads, scales, strict=True):
            recoded[i][site] = replace(part, codec=name, payload=payload, block_scales=block_scales)
    done = iter([replace(record, sites=new) for record, new in zip(present, recoded, strict=True)])
    return [None if record is None else next(done) for record in records]


def records_equal(first: Record, second: Record) -> bool:
    """True if both records hold the same bytes under the same identity; layout of memory does not matter."""
    own, other = first.identity, second.identity
    return (
        (own.trajectory, own.scheme_digest, own.plan_digest)
        == (other.trajectory, other.scheme_digest, other.plan_digest)
        and (first.start, first.length, first.layers_routed)
        == (second.start, second.length, second.layers_routed)
        and torch.equal(first.versions(), second.versions())
        and torch.equal(first.valid, second.valid)
        and _optional_equal(first.routed, second.routed)
        and first.sites.keys() == second.sites.keys()
        and all(_site_equal(part, second.sites[site]) for site, part in first.sites.items())
    )


def _site_equal(first: SiteRecord, second: SiteRecord) -> bool:
    return (
        _layout(first) == _layout(second)
        and torch.equal(first.payload, second.payload)
        and torch.equal(first.block_scales, second.block_scales)
        and _optional_equal(first.exponent, second.exponent)
    )


def _optional_equal(first: Tensor | None, second: Tensor | None) -> bool:
    if first is None or second is None:
        return first is second
    return first.dtype == second.dtype and torch.equal(first, second)


def _optional_cat(arrays: Sequence[Tensor | None]) -> Tensor | None:
    held = [array for array in arrays if array is not None]
    return torch.cat(held) if held else None


def _layout(part: SiteRecord) -> tuple[str, int, int, int, int | None]:
    return part.codec, part.width, part.block_size, part.rows_per_token, part.static_exponent


def _check_same_layout(first: Record, second: Record) -> None:
    found = tuple(
        ({str(site): _layout(part) for site, part in record.sites.items()}, record.layers_routed)
        for record in (first, second)
    )
    if found[0] != found[1]:
        raise RecordError(
            f"Records of different layout cannot be joined; got {found[0]} and {found[1]} "
            "(codec, width, block size, rows per token, static exponent by site; routed layers). Both must be equal. "
            "Recode both to one codec, and record the same sites."
        )


def _joined(first: SiteRecord, second: SiteRecord) -> SiteRecord:
    return replace(
        first,
        payload=torch.cat([first.payload, second.payload]),
        block_scales=torch.cat([first.block_scales, second.block_scales]),
        exponent=_optional_cat([first.exponent, second.exponent]),
    )


def _joined_versions(first: Record, second: Record) -> Tensor | int:
    own, other = first.identity.weight_versions, second.identity.weight_versions
    if isinstance(own, int) and isinstance(other, int) and own == other:
        return own
    return torch.cat([first.versions(), second.versions()])

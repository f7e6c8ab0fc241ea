"""Bytes that no rollout records: refused in host memory, with a name, wherever they would be followed; nowhere else."""

from dataclasses import replace

import pytest
import torch
from tests.guidance.sample_records import K0, TOP_K, W0, X0, activations, recorded, round_at

from tracefp4.errors import RecordError
from tracefp4.formats.schemes import MXFP4_RCEIL
from tracefp4.guidance import (
    ReplayBatch,
    SequenceRows,
    StepLog,
    record_from_bytes,
    record_to_bytes,
    records_equal,
    round_site,
)
from tracefp4.guidance.session import record as record_to
from tracefp4.guidance.session import replay
from tracefp4.guidance.site_record import SiteRecord

LENGTH = 6
KEPT = slice(0, 4)
DAMAGE = [("exponent", X0, -111), ("exponent", X0, 117), ("exponent", W0, -128), ("exponent", W0, 127)] + [
    ("block_scales", site, byte) for site in (X0, K0, W0) for byte in (0x80, 0xFF)
]


def sites(codec):
    return recorded(length=LENGTH, sites=(X0, K0, W0)).recode(codec)


def damaged(record, name, site, value, *, position=4, slot=0):
    """The record with one byte of one site changed."""
    part = record.sites[site]
    array = getattr(part, name).clone()
    array.view(array.shape[0], -1)[position * part.rows_per_token + slot, -1] = value
    return replace(record, sites={**record.sites, site: replace(part, **{name: array})})


def values_at(site, batch):
    rows = TOP_K if site is W0 else 1
    x = torch.cat([activations(0, [p], site=site, rows=rows) for p in batch.positions.flatten().abs()])
    with replay(batch):
        return round_at(site, 1.02 * x).values


@pytest.mark.parametrize("codec", ["full", "mantissa+raw", "secded+raw"])
@pytest.mark.parametrize(("name", "site", "value"), DAMAGE, ids=str)
@pytest.mark.parametrize("role", ["records", "references"])
def test_damage_that_would_be_followed_is_refused_before_anything_is_moved(
    monkeypatch, codec, name, site, value, role
):
    whole, moved = sites("full"), []
    monkeypatch.setattr(SiteRecord, "on", lambda self, device: moved.append(device) or self)
    given = {"records": [whole.recode(codec)], "references": [whole]}
    given[role] = [damaged(given[role][0], name, site, value, slot=TOP_K - 1 if site is W0 else 0)]
    batch = ReplayBatch(positions=torch.arange(LENGTH)[None], **given)
    ask = batch.guide if role == "records" else batch.reference
    with pytest.raises(
        RecordError, match=rf"impossible scales at position 4, {site}; got exponent"
    ) as caught:
        ask(site)
    assert moved == []
    expected = f"exponent {value} " if name == "exponent" else f"up to 0x{value:02X}"
    assert expected in str(caught.value) and "prompt0/sample0" in str(caught.value)
    others = [other for other in (X0, K0, W0) if other is not site]
    assert all(ask(other) is not None for other in others)


@pytest.mark.parametrize(("name", "site", "value"), DAMAGE, ids=str)
def test_damage_that_nothing_follows_changes_nothing(name, site, value):
    # At a position that no place has, at a padded one, and at one whose decisions are not valid.
    whole = sites("full")
    bad = damaged(whole, name, site, value)
    elsewhere = torch.tensor([[0, 1, 2, 3, -1, 5]])
    assert torch.equal(
        *(values_at(site, ReplayBatch(positions=elsewhere, records=[r])) for r in (whole, bad))
    )
    at_the_row_that_padding_reads = damaged(whole, name, site, value, position=0)
    padded = torch.tensor([[-1, 1, 2, 3]])
    assert ReplayBatch(positions=padded, records=[at_the_row_that_padding_reads]).guide(site) is not None
    is_valid = torch.arange(LENGTH) != 4
    everywhere = torch.arange(LENGTH)[None]
    batches = [ReplayBatch(positions=everywhere, records=[replace(r, valid=is_valid)]) for r in (whole, bad)]
    assert torch.equal(*(values_at(site, batch) for batch in batches))
    assert batches[1].counters.sites[site].positions_missing == 1
    first_record = ReplayBatch(
        positions=everywhere.repeat(2, 1)[:, KEPT], records=[whole, replace(bad, start=40)]
    )
    assert first_record.guide(site) is not None


def test_the_record_that_is_damaged_is_named_among_others():
    others = [recorded(i, length=LENGTH, sites=(X0, K0, W0)) for i in range(3)]
    others[1] = damaged(others[1], "block_scales", K0, 0x9A)
    batch = ReplayBatch(positions=torch.arange(LENGTH).repeat(3, 1), records=others)
    with pytest.raises(
        RecordError, match="'prompt0/sample1' has impossible scales at position 4, layers.0.k"
    ):
        batch.guide(K0)
    record = others[1].rows(2, LENGTH)
    with pytest.raises(RecordError, match="position 4, layers.0.k"):
        record.check_scales()
    record.check_scales(kinds=("x", "w2"))
    unfollowed = replace(record, valid=torch.zeros(4, dtype=torch.bool))
    unfollowed.check_scales()
    with pytest.raises(RecordError, match="position 4"):
        unfollowed.check_scales(only_valid=False)


@pytest.mark.parametrize("value", [0x00, 0x7E, 0x7F])
def test_every_byte_that_a_scheme_stores_is_followed(value):
    record = damaged(sites("full"), "block_scales", X0, value)
    record.check_scales()
    assert ReplayBatch(positions=torch.arange(LENGTH)[None], records=[record]).guide(X0) is not None


@pytest.mark.parametrize("value", [-110, 116])
def test_the_ends_of_the_exponents_are_followed(value):
    damaged(sites("full"), "exponent", X0, value).check_scales()


@pytest.mark.parametrize("codec", ["mantissa_lean", "secded", "bch64_3+coset1", "bch32_2+parity4"])
def test_low_bits_and_syndromes_of_scales_can_all_be_meant(codec):
    record = damaged(sites(codec), "block_scales", X0, 0xFF)
    record.check_scales()
    assert values_at(X0, ReplayBatch(positions=torch.arange(LENGTH)[None], records=[record])).isfinite().all()


def test_every_e8m0_byte_can_be_meant():
    log = StepLog(sites=[X0])
    log.begin_step(num_tokens=LENGTH)
    with record_to(log):
        round_site(activations(0, range(LENGTH)), site=X0, scheme=MXFP4_RCEIL)
    log.end_step()
    (record,) = log.build([SequenceRows(identity=recorded().identity, rows=range(LENGTH))])
    damaged(record, "block_scales", X0, 0xFE).check_scales()


def test_empty_records_are_whole():
    sites("full").rows(0, 0).check_scales()


def test_a_checksum_does_not_tell_who_wrote_the_damage():
    # A record whose bytes were wrong before they were summed reads back as it was, and is refused when followed.
    bad = damaged(sites("full"), "block_scales", X0, 0xC0)
    read = record_from_bytes(record_to_bytes(bad))
    assert records_equal(read, bad)
    with pytest.raises(RecordError, match="impossible scales"):
        ReplayBatch(positions=torch.arange(LENGTH)[None], records=[read]).guide(X0)


def test_rows_are_looked_at_once(monkeypatch):
    asked = []
    look = SiteRecord.damaged_rows
    monkeypatch.setattr(SiteRecord, "damaged_rows", lambda self: asked.append(1) or look(self))
    batch = ReplayBatch(positions=torch.arange(LENGTH)[None], records=[sites("full")])
    for _ in range(3):
        assert batch.guide(X0) is not None
    assert len(asked) == 1

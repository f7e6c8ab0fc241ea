"""Records as columns: exact both ways, any part alone, and a missing position is not followed."""

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.guidance.sample_records import K0, W0, X0, X1, recorded
from tests.guidance.test_codec import records

from tracefp4.coding import codec_by_name
from tracefp4.errors import RecordError
from tracefp4.guidance import Site, records_equal
from tracefp4.guidance.columns import (
    RecordColumns,
    columns_to_record,
    needed_columns,
    record_to_columns,
    routed_column,
    site_column,
)


def cut(found, begin, end, names=None):
    """Rows begin .. end-1 of some columns, as a store reads them."""
    width = {name: len(data) // found.num_rows for name, data in found.columns.items()}
    columns = {
        name: bytes(data[begin * width[name] : end * width[name]])
        for name, data in found.columns.items()
        if names is None or name in names
    }
    return replace(found, start=found.start + begin, num_rows=end - begin, columns=columns)


@settings(max_examples=60, deadline=None)
@given(records())
def test_a_record_comes_back_as_it_was(record):
    assert records_equal(columns_to_record(record_to_columns(record)), record)


@settings(max_examples=40, deadline=None)
@given(records(), st.data())
def test_any_span_is_the_records_rows(record, data):
    begin = data.draw(st.integers(0, record.length))
    end = data.draw(st.integers(begin, record.length))
    if record.length:
        part = cut(record_to_columns(record), begin, end)
        assert records_equal(columns_to_record(part), record.rows(begin, end))


@pytest.mark.parametrize(
    "codec", ["full", "low2", "mantissa", "mantissa_lean", "secded", "parity4", "bch64_3"]
)
def test_every_codec_comes_back(codec):
    record = recorded(length=7, start=3, weight_versions=torch.arange(7, dtype=torch.int32)).recode(codec)
    found = record_to_columns(record)
    assert records_equal(columns_to_record(found), record)
    part = record.sites[X0]
    exponent_bytes = 0 if part.exponent is None else 1
    row = codec_by_name(codec).row_bytes(part.width, block_size=16) + exponent_bytes
    assert len(found.columns[site_column(X0)]) == 7 * row


def test_golden_bytes_of_one_position():
    record = recorded(length=1, start=5, sites=(X0, W0), weight_versions=258)
    found = record_to_columns(record)
    x, w2 = record.sites[X0], record.sites[W0]
    assert found.columns["valid"] == b"\x01"
    assert found.columns["versions"] == b"\x02\x01\x00\x00"
    assert found.columns["0.x"] == bytes(
        x.payload[0].tolist() + x.block_scales[0].tolist() + [int(x.exponent[0]) % 256]
    )
    rows = [
        w2.payload[i].tolist() + w2.block_scales[i].tolist() + [int(w2.exponent[i]) % 256] for i in range(2)
    ]
    assert found.columns["0.w2"] == bytes(rows[0] + rows[1])
    first, second = record.routed[0, 1].tolist()
    assert found.columns["1.routed"] == bytes([first, second])
    assert sorted(found.columns) == ["0.routed", "0.w2", "0.x", "1.routed", "valid", "versions"]


def test_a_consumer_reads_only_its_sites_and_layers():
    record = recorded(length=6)
    found = record_to_columns(record)
    names = needed_columns(found.meta, sites={X1, Site("x", 9)}, routed_layers=[1])
    assert names == ["valid", "versions", "1.x", "1.routed"]
    part = columns_to_record(cut(found, 2, 4, names))
    assert set(part.sites) == {X1} and part.layers_routed == (1,) and (part.start, part.length) == (2, 2)
    assert torch.equal(part.routed[:, 0], record.routed[2:4, 1])
    assert needed_columns(found.meta, sites=(), routed_layers=()) == ["valid", "versions"]
    assert set(needed_columns(found.meta)) == set(found.columns)


def test_missing_positions_are_not_valid_and_look_no_older():
    record = recorded(length=6, start=10, weight_versions=torch.full((6,), 4, dtype=torch.int32))
    found = record_to_columns(record)
    torn = {name: bytes(len(data)) for name, data in found.columns.items()}
    kept = dict(found.columns)
    for name in ("0.x", "versions"):
        data = found.columns[name]
        kept[name] = torn[name][: len(data) // 2] + data[len(data) // 2 :]
    part = columns_to_record(replace(found, columns=kept), missing=[(10, 13)])
    assert part.valid.tolist() == [False] * 3 + [True] * 3
    assert part.versions().tolist() == [4] * 6
    assert records_equal(part.rows(3, 6), record.rows(3, 6))
    none_left = columns_to_record(replace(found, columns=torn), missing=[(0, 99)])
    assert not none_left.valid.any()


def test_res_1_a_record_read_back_owns_its_memory():
    found = record_to_columns(recorded(length=1))
    held = {name: bytearray(data) for name, data in found.columns.items()}
    record = columns_to_record(replace(found, columns=held))
    before = record.sites[K0].payload.clone()
    for data in held.values():
        data[:] = bytes(len(data))
        data.clear()
    assert torch.equal(record.sites[K0].payload, before)


def test_res_1_columns_of_a_kept_piece_hold_its_bytes_alone():
    record = recorded(length=50)
    piece = record_to_columns(record.rows(48, 50))
    assert all(isinstance(data, bytes) for data in piece.columns.values())
    whole = record_to_columns(record)
    assert sum(map(len, piece.columns.values())) * 25 == sum(map(len, whole.columns.values()))


@pytest.mark.parametrize("name", ["valid", "0.x", "1.routed"])
@pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: data + b"0", None])
def test_columns_that_do_not_fit_are_refused(name, change):
    found = record_to_columns(recorded(length=4))
    columns = dict(found.columns)
    if change is None:
        if name != "valid":
            return  # an absent site or layer is simply not read
        del columns[name]
    else:
        columns[name] = change(columns[name])
    with pytest.raises(
        RecordError, match=rf"Column '{name}' .* does not fit; .* 4 positions. It must have \d+"
    ):
        columns_to_record(replace(found, columns=columns))


def test_the_meta_text_of_a_deep_model_fits_a_store():
    record = recorded(length=1, sites=[Site(kind, n) for n in range(128) for kind in ("x", "k", "v", "w2")])
    assert len(record_to_columns(record).meta) < 1 << 14


def test_another_schema_is_refused():
    found = record_to_columns(recorded(length=1))
    meta = json.dumps(json.loads(found.meta) | {"schema": 9}).encode()
    with pytest.raises(RecordError, match="schema is 9, this version reads 1"):
        columns_to_record(replace(found, meta=meta))
    with pytest.raises(RecordError, match="schema is 9"):
        needed_columns(meta)


def test_routed_column_names_are_not_site_names():
    assert routed_column(3) not in {site_column(Site(kind, 3)) for kind in ("x", "k", "v", "w2")}
    assert isinstance(record_to_columns(recorded(length=1)), RecordColumns)

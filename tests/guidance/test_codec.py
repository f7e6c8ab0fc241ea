import hashlib
import struct
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.guidance.sample_records import K0, W0, X0, identity, recorded

from tracefp4.coding import CODECS, codec_by_name
from tracefp4.errors import RecordError
from tracefp4.guidance import (
    Record,
    Site,
    SiteRecord,
    record_from_bytes,
    record_to_bytes,
    records_equal,
)


@st.composite
def records(draw):
    """Records of any bytes, not only of bytes that rounding can produce."""
    length = draw(st.integers(0, 5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def filled(low, high, shape, dtype):
        return torch.randint(low, high, shape, generator=generator).to(dtype)

    sites = {}
    for site in draw(st.lists(st.sampled_from([Site("x", 3), X0, K0, Site("v", 2), W0]), unique=True)):
        name, block_size = draw(st.sampled_from(CODECS)), draw(st.sampled_from([16, 32]))
        codec, num_blocks = codec_by_name(name), draw(st.integers(1, 5))
        width = block_size * num_blocks
        per_token = draw(st.integers(1, 3)) if site.kind == "w2" else 1
        rows, is_static = length * per_token, site.kind in ("k", "v")
        sites[site] = SiteRecord(
            codec=name,
            payload=filled(0, 256, (rows, codec.payload_bytes(width)), torch.uint8),
            block_scales=filled(0, 256, (rows, codec.scale_bytes(num_blocks)), torch.uint8),
            exponent=None if is_static else filled(-110, 117, (rows,), torch.int8),
            width=width,
            block_size=block_size,
            rows_per_token=per_token,
            static_exponent=draw(st.integers(-110, 116)) if is_static else None,
        )
    versions = draw(st.one_of(st.integers(0, 10**6), st.just(None)))
    has_routing = draw(st.booleans())
    last, dtype = draw(st.sampled_from([(2**8, torch.uint8), (2**15, torch.int16)]))
    return Record(
        identity=replace(
            identity(),
            trajectory=draw(st.text(max_size=12)),
            weight_versions=filled(0, 2**31 - 1, (length,), torch.int32) if versions is None else versions,
        ),
        start=draw(st.integers(0, 1000)),
        length=length,
        sites=sites,
        routed=filled(0, last, (length, 2, 3), dtype) if has_routing else None,
        valid=filled(0, 2, (length,), torch.bool),
        routed_layers=draw(st.sampled_from([None, (4, 9)])) if has_routing else None,
    )


@settings(max_examples=60, deadline=None)
@given(record=records())
def test_bytes_round_trip_exactly(record):
    data = record_to_bytes(record)
    back = record_from_bytes(data)
    assert records_equal(back, record)
    assert type(back.identity.weight_versions) is type(record.identity.weight_versions)
    assert record_to_bytes(back) == data


GOLDEN_HEADER = (
    '{"trajectory":"a","scheme_digest":"s","plan_digest":"p","weight_version":7,"weight_versions":null,"start":2,'
    '"length":2,"routed_layers":null,"routed":["i2",[2,1,2]],"valid":["u1",[2]],"sites":[{"site":["k",0],'
    '"codec":"secded","width":32,"block_size":16,"rows_per_token":1,"static_exponent":-2,"payload":["u1",[2,2]],'
    '"block_scales":["u1",[2,1]],"exponent":null},{"site":["x",3],"codec":"mantissa","width":32,"block_size":32,'
    '"rows_per_token":1,"static_exponent":null,"payload":["u1",[2,4]],"block_scales":["u1",[2,1]],'
    '"exponent":["i1",[2]]}]}'
)
GOLDEN_ARRAYS = "01020304050607080100aabbccdd0e0f11223344556677889a9bfe03"


def test_a_container_as_golden_bytes():
    # Mutations: another order of the arrays, big-endian ids, no block size.
    def rows(*texts):
        return torch.tensor([list(bytes.fromhex(text)) for text in texts], dtype=torch.uint8)

    record = Record(
        identity=replace(identity(), trajectory="a", weight_versions=7, scheme_digest="s", plan_digest="p"),
        start=2,
        length=2,
        sites={
            Site("x", 3): SiteRecord(
                codec="mantissa",
                payload=rows("11223344", "55667788"),
                block_scales=rows("9a", "9b"),
                exponent=torch.tensor([-2, 3], dtype=torch.int8),
                width=32,
                block_size=32,
            ),
            K0: SiteRecord(
                codec="secded",
                payload=rows("aabb", "ccdd"),
                block_scales=rows("0e", "0f"),
                exponent=None,
                width=32,
                block_size=16,
                static_exponent=-2,
            ),
        },
        routed=torch.tensor([[[0x0201, 0x0403]], [[0x0605, 0x0807]]], dtype=torch.int16),
        valid=torch.tensor([True, False]),
    )
    body = b"TFP4REC\n" + struct.pack("<II", 2, len(GOLDEN_HEADER)) + GOLDEN_HEADER.encode()
    body += bytes.fromhex(GOLDEN_ARRAYS)
    data = body + hashlib.blake2b(body, digest_size=16).digest()
    assert record_to_bytes(record) == data
    assert records_equal(record_from_bytes(data), record)


@settings(max_examples=150, deadline=None)
@given(record=records(), place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_flipped_bit_anywhere_is_refused(record, place, bit):
    data = bytearray(record_to_bytes(record))
    data[int(place * len(data))] ^= 1 << bit
    with pytest.raises(RecordError):
        record_from_bytes(bytes(data))


def test_every_single_bit_of_a_small_record_is_guarded():
    data = record_to_bytes(recorded(length=1, sites=(X0,), routed_layers=(0,)))
    for place in range(len(data)):
        for bit in (0, 3, 7):
            damaged = bytearray(data)
            damaged[place] ^= 1 << bit
            with pytest.raises(RecordError):
                record_from_bytes(bytes(damaged))


@pytest.mark.parametrize("keep", [0, 5, 8, 16, 40, -17, -1])
def test_cut_bytes_are_refused(keep):
    data = record_to_bytes(recorded(length=2))
    with pytest.raises(RecordError):
        record_from_bytes(data[:keep])
    with pytest.raises(RecordError, match="checksum"):
        record_from_bytes(data + b"\0")


@pytest.mark.parametrize(("schema", "age"), [(1, "an older"), (3, "a newer")])
def test_another_schema_is_refused_with_both_versions(schema, age):
    data = bytearray(record_to_bytes(recorded(length=1)))
    struct.pack_into("<I", data, 8, schema)
    with pytest.raises(
        RecordError, match=rf"version is {schema}, this version reads 2 only.*by {age} tracefp4"
    ):
        record_from_bytes(bytes(data))


def test_another_checksum_is_refused_with_both_values():
    data = record_to_bytes(recorded(length=1))
    found, wrong = data[-16:].hex(), data[:-1] + bytes([data[-1] ^ 255])
    with pytest.raises(RecordError) as refusal:
        record_from_bytes(wrong)
    assert found in str(refusal.value)
    assert wrong[-16:].hex() in str(refusal.value)


@pytest.mark.parametrize("name", ["scheme_digest", "plan_digest"])
def test_another_digest_is_refused_with_both_values(name):
    data = record_to_bytes(recorded(length=1))
    own = {"scheme_digest": "5c4e3e0000000001", "plan_digest": "91a0000000000002"}
    record_from_bytes(data, **own)
    with pytest.raises(RecordError, match=rf"digest is '{own[name]}', this side's is 'beef'"):
        record_from_bytes(data, **(own | {name: "beef"}))


def test_views_of_shared_memory_write_their_own_rows_only():
    record = recorded(length=10)
    part = record.rows(3, 6)
    back = record_from_bytes(record_to_bytes(part))
    assert records_equal(back, part)
    assert len(record_to_bytes(part)) < len(record_to_bytes(record))


def test_bytes_hold_no_pickle():
    data = record_to_bytes(recorded(length=2))
    assert b"torch" not in data
    assert data.startswith(b"TFP4REC\n")

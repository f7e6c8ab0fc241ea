"""The bytes of files: golden header and frames, and finding frames again behind damage."""

import hashlib
import os
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.store.material import segment

from tracefp4.errors import RecordError
from tracefp4.store import DirectoryWriter
from tracefp4.store.chunks import chunk_path
from tracefp4.store.frames import (
    CHUNK_FILE,
    HEADER_BYTES,
    PREFIX_BYTES,
    FileIdentity,
    Frame,
    Gap,
    check_header,
    encode_frame,
    file_header,
    read_frame,
    scan,
)

IDENTITY = FileIdentity(kind=CHUNK_FILE, writer=3, number=1)
GOLDEN_HEADER = "54465034524543530100000002000000030000000000000001000000"


def test_the_header_is_these_bytes():
    fields = bytes.fromhex(GOLDEN_HEADER)
    assert file_header(IDENTITY) == fields + zlib.crc32(fields).to_bytes(4, "little")
    assert len(file_header(IDENTITY)) == HEADER_BYTES


def test_a_frame_is_these_bytes():
    lengths = b"\x93TFrame\n" + bytes.fromhex("05000000020000000400000000000000")
    salt = bytes.fromhex("020000000300000000000000010000002000000000000000")
    digest = hashlib.blake2b(salt + lengths + b"hd", digest_size=16).digest()
    assert encode_frame(IDENTITY, 32, 5, b"hd", 4) == lengths + digest + b"hd"


def test_a_chunk_of_schema_1_is_these_bytes(tmp_path):
    with DirectoryWriter(tmp_path) as writer:
        writer.append(segment("a", 2, 2, columns=("routed", "valid"), generation=7, meta=b"meta"))
        writer.finish("a")
    data = chunk_path(tmp_path, 1, 0).read_bytes()
    layout = b'[["routed",3],["valid",1]]'
    columns = [hashlib.shake_128(f"a|{name}|{row}|".encode()).digest(width) for name, width in
               (("routed", 3), ("valid", 1)) for row in (2, 3)]  # fmt: skip
    first = HEADER_BYTES + PREFIX_BYTES
    assert data[first : first + len(layout)] == layout
    head = first + len(layout) + PREFIX_BYTES
    routed, valid = b"".join(columns[:2]), b"".join(columns[2:])
    fixed = (2).to_bytes(8, "little") + (2).to_bytes(4, "little") + (7).to_bytes(8, "little")
    fixed += HEADER_BYTES.to_bytes(8, "little") + (1).to_bytes(2, "little") + (4).to_bytes(4, "little")
    digests = b"".join(hashlib.blake2b(part, digest_size=16).digest() for part in (routed, valid))
    expected = fixed + b"a" + b"meta" + digests + routed + valid
    assert data[head : head + len(expected)] == expected


def written(tmp_path, heads):
    path, data, places = tmp_path / "file", bytearray(file_header(IDENTITY)), []
    for kind, head, body in heads:
        places.append(len(data))
        data += encode_frame(IDENTITY, len(data), kind, head, len(body)) + body
    path.write_bytes(data)
    return path, bytes(data), places


def scanned(path, offset=HEADER_BYTES):
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return list(scan(descriptor, IDENTITY, offset))
    finally:
        os.close(descriptor)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.binary(max_size=40), st.binary(max_size=40)), min_size=1, max_size=6),
    st.data(),
)  # fmt: skip
def test_any_damage_loses_the_frames_that_it_hits_and_no_others(tmp_path_factory, heads, data):
    path, whole, places = written(tmp_path_factory.mktemp("frames"), heads)
    assert [(item.kind, item.head, item.offset) for item in scanned(path)] == [
        (kind, head, place) for (kind, head, _), place in zip(heads, places, strict=True)
    ]
    begin = data.draw(st.integers(HEADER_BYTES, len(whole) - 1))
    end = data.draw(st.integers(begin + 1, min(len(whole), begin + 60)))
    changed = bytearray(whole)
    for index in range(begin, end):
        changed[index] ^= data.draw(st.integers(1, 255))
    path.write_bytes(changed)
    intact = [
        (kind, head)
        for (kind, head, body), place in zip(heads, places, strict=True)
        if not (begin < place + PREFIX_BYTES + len(head) and place < end)
    ]
    found = scanned(path)
    assert [(item.kind, item.head) for item in found if isinstance(item, Frame)] == intact
    for item in found:
        if isinstance(item, Gap):
            assert item.start in places and (item.stop in places or item.stop == len(whole))


def test_a_body_that_looks_like_frames_is_no_frame(tmp_path):
    other = FileIdentity(kind=CHUNK_FILE, writer=4, number=1)
    inner = encode_frame(IDENTITY, 0, 1, b"inner") + encode_frame(other, 100, 1, b"inner")
    path, whole, places = written(tmp_path, [(1, b"a", inner * 3), (2, b"b", b"")])
    changed = bytearray(whole)
    changed[places[0] + 8] ^= 1
    path.write_bytes(changed)
    found = scanned(path)
    assert [type(item) for item in found] == [Gap, Frame]
    assert found[1].head == b"b"


def test_a_frame_of_absurd_length_is_damage_and_costs_no_memory(tmp_path):
    path, whole, places = written(tmp_path, [(1, b"a", b"")])
    changed = bytearray(whole)
    changed[places[0] + 12 : places[0] + 16] = b"\xff\xff\xff\xff"
    path.write_bytes(changed)
    assert [item.is_tail for item in scanned(path)] == [True]


def test_a_frame_whose_end_is_not_there_yet_is_found_when_it_is(tmp_path):
    path, whole, places = written(tmp_path, [(1, b"a", b""), (2, b"b", b"body")])
    path.write_bytes(whole[:-1])
    first, tail = scanned(path)
    assert isinstance(tail, Gap)
    assert (first.head, tail.start, tail.is_tail) == (b"a", places[1], True)
    path.write_bytes(whole)
    assert [item.head for item in scanned(path, tail.start)] == [b"b"]


def test_frames_completed_during_a_search_are_no_damage(tmp_path, monkeypatch):
    path, whole, places = written(tmp_path, [(1, b"a", b"body"), (2, b"b", b"")])
    path.write_bytes(whole[: places[0] + 10])
    calls = []

    def slow_read(descriptor, identity, offset, **known):
        calls.append(offset)
        if len(calls) == 1:
            found = read_frame(descriptor, identity, offset, **known)
            path.write_bytes(whole)
            return found
        return read_frame(descriptor, identity, offset, **known)

    monkeypatch.setattr("tracefp4.store.frames.read_frame", slow_read)
    found = scanned(path)
    assert not any(isinstance(item, Gap) for item in found)
    assert [item.head for item in found] == [b"a", b"b"]


@pytest.mark.parametrize("length", [0, 5, HEADER_BYTES - 1])
def test_a_short_header_is_refused(tmp_path, length):
    with pytest.raises(RecordError, match="A header has 32 bytes"):
        check_header(file_header(IDENTITY)[:length], IDENTITY, tmp_path)

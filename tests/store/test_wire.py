"""Messages: exact both ways, and refused when anything about them is off."""

import json
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tracefp4.errors import BackendError, RecordError
from tracefp4.store import AbsentSpan, GoneError, Segment, Slices, SpanError, Stat
from tracefp4.store.wire import (
    MAX_HEAD_BYTES,
    Message,
    cut_segment,
    error_content,
    pack,
    raise_error,
    segment_message,
    segment_of,
    slices_message,
    slices_of,
    stat_content,
    stat_of,
    unpack,
)

TEXT = st.text(min_size=1, max_size=20).filter(lambda text: not any(0xD800 <= ord(c) < 0xE000 for c in text))


@st.composite
def segments(draw):
    num_rows = draw(st.integers(1, 6))
    names = draw(st.lists(TEXT, min_size=1, max_size=4, unique=True))
    columns = {}
    for name in names:
        width = draw(st.integers(0, 5))
        columns[name] = draw(st.binary(min_size=width * num_rows, max_size=width * num_rows))
    return Segment(
        trajectory=draw(TEXT),
        start=draw(st.integers(0, 1 << 39)),
        num_rows=num_rows,
        columns=columns,
        meta=draw(st.binary(max_size=9)),
        generation=draw(st.integers(0, 1 << 40)),
    )


@settings(max_examples=60, deadline=None)
@given(segments())
def test_a_segment_comes_back_as_it_was(segment):
    assert segment_of(unpack(pack(segment_message(segment)))) == segment


@settings(max_examples=60, deadline=None)
@given(segments(), st.integers(1, 40))
def test_cut_segments_join_to_the_whole(segment, max_bytes):
    row = sum(len(data) for data in segment.columns.values()) // segment.num_rows
    if max_bytes - len(segment.meta) < max(1, row):
        with pytest.raises(RecordError, match="one row has"):
            cut_segment(segment, max_bytes=max_bytes)
        return
    parts = cut_segment(segment, max_bytes=max_bytes)
    assert [part.start for part in parts[1:]] == [part.stop for part in parts[:-1]]
    assert (parts[0].start, parts[-1].stop) == (segment.start, segment.stop)
    for name, data in segment.columns.items():
        assert b"".join(part.columns[name] for part in parts) == data
    assert all(len(part.meta) + part.num_bytes <= max_bytes for part in parts)


def test_answers_come_back_as_they_were():
    absent = AbsentSpan(trajectory="a", column="x", start=1, stop=2, reason="damaged")
    slices = Slices(data={"x": b"abc", "y": b""}, absent=(absent,))
    assert slices_of(unpack(pack(slices_message(slices)))) == slices
    stat = Stat(
        trajectory="a",
        finished=True,
        num_rows=3,
        columns={"x": 1},
        meta=b"\x00\xff",
        generation=4,
        num_writers=2,
    )
    assert stat_of(json.loads(json.dumps(stat_content(stat)))) == stat


def test_errors_keep_their_kind_and_text():
    with pytest.raises(GoneError, match="it left"):
        raise_error(error_content(GoneError("it left")))
    absent = AbsentSpan(trajectory="a", column="x", start=1, stop=2, reason="gone")
    with pytest.raises(SpanError) as caught:
        raise_error(json.loads(json.dumps(error_content(SpanError("rows", [absent])))))
    assert caught.value.absent == (absent,)
    with pytest.raises(BackendError, match="odd"):
        raise_error(error_content(KeyError("odd")))


def test_golden_bytes_of_a_message():
    head, body = pack(Message(content={"op": "stat"}, body=b"xy"))
    text = b'{"op":"stat"}'
    assert head[:24] == b"TFP4NET\n" + struct.pack("<HHIQ", 2, 0, len(text), 2)
    assert head[40:] == text and body == b"xy"


def test_every_flipped_bit_is_refused():
    frames = pack(segment_message(Segment(trajectory="a", start=0, num_rows=2, columns={"x": b"abcd"})))
    for place, frame in enumerate(frames):
        for i in range(len(frame) * 8):
            torn = bytearray(frame)
            torn[i // 8] ^= 1 << i % 8
            with pytest.raises(RecordError, match="Message refused"):
                unpack([*frames[:place], bytes(torn), *frames[place + 1 :]])


def test_every_cut_is_refused():
    frames = pack(segment_message(Segment(trajectory="a", start=0, num_rows=2, columns={"x": b"abcd"})))
    for size in range(len(frames[0])):
        with pytest.raises(RecordError):
            unpack([frames[0][:size], frames[1]])
    for size in range(len(frames[1])):
        with pytest.raises(RecordError):
            unpack([frames[0], frames[1][:size]])
    for odd in ([], frames[:1], [*frames, b""]):
        with pytest.raises(RecordError, match="frames"):
            unpack(odd)


def test_what_is_too_large_is_refused_on_both_sides():
    with pytest.raises(RecordError, match="a body of 11"):
        pack(Message(content={}, body=bytes(11)), max_bytes=10)
    with pytest.raises(RecordError, match="at most"):
        unpack(pack(Message(content={}, body=bytes(11))), max_bytes=10)
    with pytest.raises(RecordError, match="a head of"):
        pack(Message(content={"x": "y" * MAX_HEAD_BYTES}))


def test_another_protocol_version_is_named():
    frames = pack(Message(content={}))
    newer = frames[0][:8] + struct.pack("<H", 3) + frames[0][10:]
    with pytest.raises(RecordError, match="protocol version 3. Allowed is version 2"):
        unpack([newer, frames[1]])


@pytest.mark.parametrize("sizes", [[5], [1, 1], [-1, 5], ["4"], [True, 3]])
def test_parts_that_do_not_add_up_are_refused(sizes):
    content = {"columns": [[str(i), size] for i, size in enumerate(sizes)], "absent": []}
    with pytest.raises(RecordError, match="do not add up"):
        slices_of(Message(content=content, body=b"abcd"))


def test_a_head_that_is_no_object_is_refused():
    import hashlib

    text = b"[1]"
    digest = hashlib.blake2b(text, digest_size=16).digest()
    head = struct.pack("<8sHHIQ16s", b"TFP4NET\n", 2, 0, len(text), 0, digest) + text
    with pytest.raises(RecordError, match="not a JSON object"):
        unpack([head, b""])

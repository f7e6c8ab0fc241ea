"""Stored bytes of every codec: as golden bytes, against arithmetic bit by bit, and back into the parts of a guide."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tracefp4.coding import CODECS, Payload, ScaleCoding, codec_by_name
from tracefp4.guidance.payload import encode_block_scales, encode_codes, guide_parts

MORE = ("full+coset2", "low2+coset1", "mantissa+secded", "parity3+parity5", "bch32_2+bch64_2", "secded+raw")


def bits_of(data: bytes) -> list[int]:
    return [byte >> i & 1 for byte in data for i in range(8)]


def packed(bits: list[int]) -> bytes:
    """Bit i of the string is bit i % 8 of byte i // 8; the last byte is padded with zeros."""
    padded = bits + [0] * (-len(bits) % 8)
    return bytes(
        sum(bit << i for i, bit in enumerate(padded[at : at + 8])) for at in range(0, len(padded), 8)
    )


def low_bits(values: list[int], count: int) -> bytes:
    return packed([value >> i & 1 for value in values for i in range(count)])


def syndromes(values: list[int], code) -> bytes:
    bits = []
    for at in range(0, len(values), code.length):
        total = 0
        for value, column in zip(values[at : at + code.length], code.columns, strict=False):
            total ^= column if value & 1 else 0
        bits += [total >> i & 1 for i in range(code.num_bits)]
    return packed(bits)


def expected_payload(codes: list[int], codec) -> bytes:
    if codec.code is not None:
        return syndromes(codes, codec.code)
    return low_bits(codes, {Payload.FULL: 4, Payload.LOW2: 2, Payload.MANTISSA: 1}[codec.payload])


def expected_scales(scales: list[int], codec) -> bytes:
    if codec.scale_code is not None:
        return syndromes(scales, codec.scale_code)
    return low_bits(
        scales, {ScaleCoding.RAW: 8, ScaleCoding.COSET2: 2, ScaleCoding.COSET1: 1}[codec.scale_coding]
    )


CODES = torch.tensor(
    [[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, *range(15, -1, -1)]], dtype=torch.uint8
)
SCALES = torch.tensor([[0x39, 0x7E]], dtype=torch.uint8)
GOLDEN = {
    # Codes 0..15 and back; scale bytes 0x39 (low bits 01) and 0x7E (low bits 10).
    "full": ("1032547698badcfeefcdab8967452301", "397e"),
    "low2": ("e4e4e4e41b1b1b1b", "397e"),
    "mantissa": ("aaaa5555", "397e"),
    "mantissa_lean": ("aaaa5555", "09"),
    "mantissa+coset1": ("aaaa5555", "01"),
    # Odd places 1, 3 .. 15 of the first block: eight columns 16 | j; their XOR is 0. Even places of the second: 0 too.
    "secded": ("0000", "09"),
    "parity2": ("ffff", "09"),
    "parity16": ("00", "09"),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_bytes(name):
    codec = codec_by_name(name)
    found = encode_codes(CODES, codec=codec), encode_block_scales(SCALES, codec=codec)
    assert tuple(bytes(part[0].tolist()).hex() for part in found) == GOLDEN[name]


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from((*CODECS, *MORE)),
    seed=st.integers(0, 2**31),
    rows=st.integers(0, 3),
    blocks=st.integers(1, 19),
)
def test_every_codec_stores_the_bytes_that_its_layout_says(name, seed, rows, blocks):
    generator = torch.Generator().manual_seed(seed)
    codec, width = codec_by_name(name), 16 * blocks
    codes = torch.randint(0, 16, (rows, width), generator=generator, dtype=torch.uint8)
    scales = torch.randint(0, 127, (rows, blocks), generator=generator, dtype=torch.uint8)
    payload, stored = encode_codes(codes, codec=codec), encode_block_scales(scales, codec=codec)
    assert payload.shape == (rows, codec.payload_bytes(width)) and payload.dtype == torch.uint8
    assert stored.shape == (rows, codec.scale_bytes(blocks)) and stored.dtype == torch.uint8
    for row in range(rows):
        assert bytes(payload[row].tolist()) == expected_payload(codes[row].tolist(), codec)
        assert bytes(stored[row].tolist()) == expected_scales(scales[row].tolist(), codec)
    parts = guide_parts(payload, stored, codec=codec, width=width, num_blocks=blocks)
    assert (parts["scale_coding"], parts["scale_code"], parts["code"]) == (
        codec.scale_coding,
        codec.scale_code,
        codec.code,
    )
    wanted = {
        Payload.FULL: ("codes", codes),
        Payload.LOW2: ("bits", codes & 3),
        Payload.MANTISSA: ("bits", codes & 1),
    }
    held, value = wanted.get(codec.payload, ("syndromes", payload))
    assert torch.equal(parts[held], value)
    assert [name for name in ("codes", "bits", "syndromes") if parts[name] is not None] == [held]
    assert parts["num_bits"] == (2 if codec.payload is Payload.LOW2 else 1)
    kept = {ScaleCoding.RAW: scales, ScaleCoding.COSET2: scales & 3, ScaleCoding.COSET1: scales & 1}
    assert torch.equal(parts["block_scales"], kept.get(codec.scale_coding, stored))


@pytest.mark.parametrize("name", (*CODECS, *MORE))
def test_a_rows_bytes_depend_on_that_row_alone(name):
    # What lets a step log encode before it knows which rows a sequence takes.
    codec = codec_by_name(name)
    codes = torch.randint(0, 16, (7, 208), generator=torch.Generator().manual_seed(3), dtype=torch.uint8)
    scales = torch.randint(0, 127, (7, 13), generator=torch.Generator().manual_seed(4), dtype=torch.uint8)
    order = torch.tensor([6, 0, 0, 3])
    assert torch.equal(encode_codes(codes[order], codec=codec), encode_codes(codes, codec=codec)[order])
    assert torch.equal(
        encode_block_scales(scales[order], codec=codec), encode_block_scales(scales, codec=codec)[order]
    )

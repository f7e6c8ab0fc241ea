"""Packing: golden bytes, round trips, refusals."""

import pytest
import torch
from tests.assertions import assert_bitwise

from tracefp4.errors import FormatError
from tracefp4.formats.packing import HalfPacked, pack_bits, pack_codes, pack_halves, unpack_bits, unpack_codes
from tracefp4.formats.schemes import MXFP4_FLOOR
from tracefp4.formats.tensor import BlockTensor


def test_even_index_lies_in_the_low_nibble():
    assert pack_codes(torch.tensor([[1, 2, 15, 8]], dtype=torch.uint8)).tolist() == [[0x21, 0x8F]]


def test_all_pairs_of_codes_round_trip():
    bytes_ = torch.arange(256, dtype=torch.uint8)
    codes = unpack_codes(bytes_)
    assert codes[0x21 * 2 : 0x21 * 2 + 2].tolist() == [1, 2]
    assert_bitwise(pack_codes(codes), bytes_)


def test_lay_1_the_two_layouts_of_a_block_as_bytes():
    codes = (torch.arange(32) % 8).to(torch.uint8)
    assert bytes(pack_codes(codes).tolist()) == bytes.fromhex("10325476" * 4)
    halves = pack_halves(codes, block_size=32)
    assert bytes(halves.packed.tolist()) == bytes(j % 8 * 0x11 for j in range(16))
    assert_bitwise(halves.codes(), codes)


@pytest.mark.parametrize(
    ("shape", "block_size"), [((64,), 32), ((3, 64), 32), ((2, 0, 32), 32), ((2, 48), 16)]
)
def test_lay_1_halves_round_trip(shape, block_size):
    codes = torch.randint(0, 16, shape, dtype=torch.uint8)
    halves = pack_halves(codes, block_size=block_size)
    assert halves.packed.shape == (*shape[:-1], shape[-1] // 2)
    assert_bitwise(halves.codes(), codes)
    if codes.numel():
        assert not torch.equal(halves.packed, pack_codes(codes))


def test_lay_1_halves_are_never_read_as_pairs():
    halves = pack_halves(torch.arange(32, dtype=torch.uint8) % 16, block_size=32)
    with pytest.raises(FormatError, match=r"unpack_codes reads codes packed in pairs; got HalfPacked"):
        unpack_codes(halves)
    scales = {"block_scales": torch.zeros(1, dtype=torch.uint8), "outer": torch.zeros((), dtype=torch.int8)}
    with pytest.raises(FormatError, match="needs packed as a tensor of pairs; got HalfPacked"):
        BlockTensor(packed=halves, scheme=MXFP4_FLOOR, **scales)
    assert isinstance(halves, HalfPacked)


def test_bit_i_of_byte_j_is_value_8j_plus_i():
    bits = torch.zeros(2, 16, dtype=torch.uint8)
    bits[0, 0] = bits[0, 11] = bits[1, 7] = 1
    assert pack_bits(bits).tolist() == [[0x01, 0x08], [0x80, 0x00]]


def test_all_bytes_of_bits_round_trip():
    bytes_ = torch.arange(256, dtype=torch.uint8)
    bits = unpack_bits(bytes_)
    assert bits.max() == 1 and bits.view(256, 8)[6].tolist() == [0, 1, 1, 0, 0, 0, 0, 0]
    assert_bitwise(pack_bits(bits), bytes_)


@pytest.mark.parametrize("shape", [(0, 16), (1, 16), (3, 2, 32), (16,)])
def test_shapes_and_strides(shape):
    codes = torch.randint(0, 16, shape, dtype=torch.uint8)
    assert_bitwise(unpack_codes(pack_codes(codes)), codes)
    assert_bitwise(unpack_bits(pack_bits(codes & 1)), codes & 1)
    wide = torch.randint(0, 2, (*shape, 2), dtype=torch.uint8)
    assert_bitwise(pack_codes(wide[..., 1]), pack_codes(wide[..., 1].contiguous()))
    assert_bitwise(pack_bits(wide[..., 1]), pack_bits(wide[..., 1].contiguous()))


def test_a_view_that_starts_at_an_odd_byte():
    codes = torch.randint(0, 2, (41,), dtype=torch.uint8)
    one_row = torch.randint(0, 2, (2, 41), dtype=torch.uint8)[:1, :40]
    assert_bitwise(unpack_codes(pack_codes(one_row)), one_row.contiguous())
    assert_bitwise(unpack_codes(pack_codes(codes[1:])), codes[1:])
    assert_bitwise(unpack_bits(pack_bits(codes[1:])), codes[1:])


@pytest.mark.parametrize(
    ("call", "tensor", "message"),
    [
        (pack_codes, torch.zeros(2, 3, dtype=torch.uint8), "divisible by 2"),
        (pack_bits, torch.zeros(2, 12, dtype=torch.uint8), "divisible by 8"),
        (pack_codes, torch.zeros(2, 4), "uint8"),
        (unpack_codes, torch.zeros(2, 4, dtype=torch.int16), "uint8"),
        (unpack_bits, torch.zeros(2, 4, dtype=torch.int8), "uint8"),
    ],
)
def test_refusals_say_what_is_needed(call, tensor, message):
    with pytest.raises(FormatError, match=message):
        call(tensor)

"""Packing: golden bytes, round trips, refusals."""

import pytest
import torch
from tests.assertions import assert_bitwise

from tracefp4.errors import FormatError
from tracefp4.formats.packing import pack_bits, pack_codes, unpack_bits, unpack_codes


def test_even_index_lies_in_the_low_nibble():
    assert pack_codes(torch.tensor([[1, 2, 15, 8]], dtype=torch.uint8)).tolist() == [[0x21, 0x8F]]


def test_all_pairs_of_codes_round_trip():
    bytes_ = torch.arange(256, dtype=torch.uint8)
    codes = unpack_codes(bytes_)
    assert codes[0x21 * 2 : 0x21 * 2 + 2].tolist() == [1, 2]
    assert_bitwise(pack_codes(codes), bytes_)


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

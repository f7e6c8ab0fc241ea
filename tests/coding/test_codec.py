"""Names, rates and sizes of codecs, against the method's table and against arithmetic by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracefp4.coding import CODECS, Payload, ScaleCoding, codec_by_name
from tracefp4.errors import ConfigError

# name -> payload, code of it, scale coding, code of the scales, bits per value at blocks of 16
PARTS = {
    "full": (Payload.FULL, None, ScaleCoding.RAW, None, 4.5),
    "low2": (Payload.LOW2, None, ScaleCoding.RAW, None, 2.5),
    "mantissa": (Payload.MANTISSA, None, ScaleCoding.RAW, None, 1.5),
    "mantissa_lean": (Payload.MANTISSA, None, ScaleCoding.COSET2, None, 1.125),
    "mantissa+coset2": (Payload.MANTISSA, None, ScaleCoding.COSET2, None, 1.125),
    "mantissa+coset1": (Payload.MANTISSA, None, ScaleCoding.COSET1, None, 1.0625),
    "full+coset2": (Payload.FULL, None, ScaleCoding.COSET2, None, 4.125),
    "secded": (Payload.SYNDROME, "secded", ScaleCoding.COSET2, None, 0.4375),
    "secded+raw": (Payload.SYNDROME, "secded", ScaleCoding.RAW, None, 0.8125),
    "parity2": (Payload.SYNDROME, "parity2", ScaleCoding.COSET2, None, 0.625),
    "parity16": (Payload.SYNDROME, "parity16", ScaleCoding.COSET2, None, 0.1875),
    "bch64_3": (Payload.SYNDROME, "bch64_3", ScaleCoding.COSET2, None, 19 / 64 + 0.125),
    "bch128_3+coset1": (Payload.SYNDROME, "bch128_3", ScaleCoding.COSET1, None, 22 / 128 + 0.0625),
    "bch256_3+bch128_2": (
        Payload.SYNDROME,
        "bch256_3",
        ScaleCoding.SYNDROME,
        "bch128_2",
        25 / 256 + 15 / 2048,
    ),
}


@pytest.mark.parametrize("name", PARTS)
def test_names_say_what_is_kept_and_at_which_rate(name):
    payload, code, scale_coding, scale_code, bits = PARTS[name]
    found = codec_by_name(name)
    assert found.name == name
    assert (found.payload, found.scale_coding) == (payload, scale_coding)
    assert (found.code and found.code.name, found.scale_code and found.scale_code.name) == (code, scale_code)
    assert found.bits_per_value() == bits


@pytest.mark.parametrize("name", CODECS)
def test_listed_codecs_exist_and_larger_blocks_cost_less(name):
    found = codec_by_name(name)
    assert found.bits_per_value(block_size=32) < found.bits_per_value(block_size=16) <= 4.5


def test_rows_are_padded_to_whole_bytes_payload_and_scales_apart():
    # 48 values, 3 blocks: secded 3 * 5 = 15 bits -> 2 bytes, coset2 6 bits -> 1 byte.
    assert codec_by_name("secded").row_bytes(48, block_size=16) == 2 + 1
    assert codec_by_name("mantissa+coset1").row_bytes(48, block_size=16) == 6 + 1
    assert codec_by_name("parity16+secded").row_bytes(48, block_size=16) == 1 + 1
    # A last block that is shorter still has its whole syndrome: 80 values are 2 blocks of 64.
    assert codec_by_name("bch64_3+raw").row_bytes(80, block_size=16) == 5 + 5
    assert codec_by_name("full").row_bytes(64, block_size=32) == 32 + 2
    assert codec_by_name("full").row_bytes(0, block_size=16) == 0


@given(name=st.sampled_from(CODECS), blocks=st.integers(1, 300), block_size=st.sampled_from([16, 32]))
def test_a_row_takes_its_rate_and_less_than_a_block_of_each_code_and_two_bytes_more(name, blocks, block_size):
    codec, width = codec_by_name(name), blocks * block_size
    spare = 0 if codec.code is None else codec.code.num_bits
    spare += 0 if codec.scale_code is None else codec.scale_code.num_bits
    rate = codec.bits_per_value(block_size=block_size) * width
    assert rate <= 8 * codec.row_bytes(width, block_size=block_size) + 1e-9 < rate + spare + 16


@pytest.mark.parametrize(
    "name",
    ["", "half", "full+", "+raw", "raw", "mantissa+full", "secded+low2", "bch64", "bch64_0", "bch100_2", "bch1024_2",
     "bch512_7", "parity1", "parity65", "parity", "full+coset3", "full+raw+raw", "Full"],
)  # fmt: skip
def test_unknown_names_are_refused_with_what_exists(name):
    with pytest.raises(
        ConfigError, match=r"(?s)Unknown guidance codec; got '.*payloads are full, low2, mantissa.*bch"
    ):
        codec_by_name(name)

"""encode_syndromes: against a bit-by-bit encoder, on every backend."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.assertions import assert_bitwise
from tests.ops import brute_force as brute

from tracefp4.coding import syndrome_code
from tracefp4.errors import FormatError
from tracefp4.ops.backend import Backend
from tracefp4.ops.parity_checks import bits_of_bytes, bytes_of_bits, syndrome_differences
from tracefp4.ops.syndromes import encode_syndromes

CODES = ["parity2", "parity3", "parity64", "secded", "bch32_1", "bch32_9", "bch64_3", "bch128_3", "bch512_6"]
BACKENDS = [Backend.REFERENCE, Backend.AUTO]
every_backend = pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.value)
every_code = pytest.mark.parametrize("name", CODES)


def random_codes(seed, rows, width):
    return torch.randint(
        0, 256, (rows, width), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )


@every_backend
@every_code
@given(st.integers(0, 2**32 - 1), st.integers(0, 3), st.integers(1, 700))
@settings(max_examples=12, deadline=None)
def test_every_row_equals_a_bit_by_bit_encoder(name, backend, seed, rows, width):
    code, codes = syndrome_code(name), random_codes(seed, rows, width)
    got = encode_syndromes(codes, code=code, backend=backend)
    assert tuple(got.shape) == (rows, code.row_bytes(width))
    for row in range(rows):
        wanted = brute.packed(brute.syndromes(codes[row].tolist(), code), code.num_bits)
        assert got[row].tolist() == wanted


@every_backend
def test_golden_bytes(backend):
    """secded: bit j of the codes at 1, 2 and 17 is set: 1^2 with two parities; then column 1 of the next block."""
    codes = torch.zeros(1, 20, dtype=torch.uint8)
    codes[0, [1, 2, 17]] = 1
    # block 0: 0b10001 ^ 0b10010 = 0b00011; block 1: 0b10001 << 5 = 0b10_0010_0000; the row is 0b10_0010_0011.
    got = encode_syndromes(codes, code=syndrome_code("secded"), backend=backend)
    assert got.tolist() == [[0b00100011, 0b00000010]]


@every_backend
@every_code
def test_only_the_lowest_bit_is_read_and_rows_are_independent(name, backend):
    code, codes = syndrome_code(name), random_codes(1, 9, 130)
    got = encode_syndromes(codes, code=code, backend=backend)
    assert_bitwise(encode_syndromes(codes & 1, code=code, backend=backend), got)
    assert_bitwise(encode_syndromes(codes[::2], code=code, backend=backend), got[::2])
    assert_bitwise(encode_syndromes(codes.t().contiguous().t(), code=code, backend=backend), got)


@every_code
@given(st.integers(0, 2**32 - 1), st.integers(1, 300), st.data())
@settings(max_examples=12, deadline=None)
def test_the_difference_of_two_syndromes_is_the_sum_of_the_columns_that_differ(name, seed, width, data):
    code, codes = syndrome_code(name), random_codes(seed, 1, width) & 1
    flipped = data.draw(st.sets(st.integers(0, width - 1), max_size=5))
    other = codes.clone()
    other[0, sorted(flipped)] ^= 1
    recorded = encode_syndromes(codes, code=code)
    wanted = [0] * code.num_blocks(width)
    for position in flipped:
        wanted[position // code.length] ^= code.columns[position % code.length]
    assert syndrome_differences(other, recorded, code).tolist() == [wanted]


@given(st.integers(0, 2**32 - 1), st.integers(1, 70))
@settings(max_examples=20, deadline=None)
def test_bits_survive_packing(seed, width):
    bits = random_codes(seed, 3, width) & 1
    assert_bitwise(bits_of_bytes(bytes_of_bits(bits), width), bits)


def test_refusals():
    code = syndrome_code("secded")
    for codes in (torch.zeros(2, 8), torch.zeros(8, dtype=torch.uint8), torch.zeros(2, 0, dtype=torch.uint8)):
        with pytest.raises(FormatError, match=r"reads uint8 \[N, K\]"):
            encode_syndromes(codes, code=code)


@pytest.mark.parametrize("name", ["bch512_3", "bch256_3"])
def test_syndromes_are_the_same_under_autocast(name):
    # Mutation: the matrix product of the parity checks is left to autocast, whose bf16 sums are exact up to 256 only.
    code = syndrome_code(name)
    codes = (torch.rand(16, 1024, generator=torch.Generator().manual_seed(3)) < 0.7).to(torch.uint8)
    expected = encode_syndromes(codes, code=code, backend=Backend.REFERENCE)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = encode_syndromes(codes, code=code, backend=Backend.REFERENCE)
        difference = syndrome_differences(codes, expected, code)
    assert_bitwise(found, expected)
    assert int(difference.abs().max()) == 0

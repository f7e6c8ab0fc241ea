"""Binary codes by their defining property: which sets of differences their syndromes tell apart."""

from functools import reduce
from itertools import combinations
from operator import xor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracefp4.coding import syndrome_code
from tracefp4.coding.syndrome import PRIMITIVE_POLYNOMIALS
from tracefp4.errors import FormatError


def fold(columns):
    return reduce(xor, columns, 0)


def test_secded_columns_as_bytes():
    # Row 4 of the matrix is all ones, rows 0..3 count.
    assert syndrome_code("secded").columns == tuple(range(16, 32))
    assert syndrome_code("secded").num_bits == 5


def test_bch_columns_as_bytes():
    # Field of 32 elements modulo x^5 + x^2 + 1: a^0 .. a^5 = 1, 2, 4, 8, 16, 5; a column is 1 + 2 * a^j.
    code = syndrome_code("bch32_1")
    assert code.columns[:6] == (3, 5, 9, 17, 33, 11)
    assert code.columns[-1] == 1
    assert (code.length, code.num_bits) == (32, 6)


@pytest.mark.parametrize("degree", PRIMITIVE_POLYNOMIALS)
def test_the_polynomials_are_primitive(degree):
    # A column of bch<n>_1 is 1 + 2 * a^j: all n are different if and only if a generates the field.
    code = syndrome_code(f"bch{1 << degree}_1")
    assert sorted(column >> 1 for column in code.columns) == list(range(1 << degree))


def products(degree):
    """Multiplication of field elements, written as polynomials: an oracle without powers."""
    polynomial = PRIMITIVE_POLYNOMIALS[degree]

    def multiply(a, b):
        result = 0
        while b:
            result ^= a if b & 1 else 0
            a = a << 1 ^ (polynomial if a << 1 >> degree else 0)
            b >>= 1
        return result

    return multiply


@pytest.mark.parametrize("name", ["bch32_3", "bch64_3", "bch128_3", "bch256_2", "bch512_4"])
def test_bch_columns_hold_the_odd_powers_of_one_element(name):
    code = syndrome_code(name)
    degree = code.length.bit_length() - 1
    multiply = products(degree)
    for column in code.columns[:-1]:
        element = column >> 1 & (code.length - 1)
        power, square = element, multiply(element, element)
        for i in range((code.num_bits - 1) // degree):
            assert column >> (1 + degree * i) & (code.length - 1) == power
            power = multiply(power, square)


@pytest.mark.parametrize(
    ("name", "distance"), [("secded", 4), ("bch32_1", 4), ("bch32_2", 6), ("bch64_1", 4), ("parity8", 2)]
)
def test_no_small_set_of_differences_is_invisible(name, distance):
    # Distance d: sets of fewer than d / 2 differences are all told apart, and those of d / 2 are noticed.
    code = syndrome_code(name)
    assert code.distance == distance
    half = distance // 2
    sums = [{fold(chosen) for chosen in combinations(code.columns, size)} for size in range(half + 1)]
    for size in range(1, half + 1):
        assert 0 not in sums[size]
        for other in range(size):
            if size + other < distance:
                assert not sums[size] & sums[other]
    for size in range(1, half):
        count = len(list(combinations(code.columns, size)))
        assert len(sums[size]) == count
    assert len(sums[half]) < len(list(combinations(code.columns, half)))


@given(st.sampled_from(["bch64_3", "bch128_3", "bch256_3", "bch512_3", "bch128_2"]), st.data())
def test_up_to_t_differences_have_a_syndrome_of_their_own(name, data):
    code = syndrome_code(name)
    t = (code.distance - 2) // 2
    places = st.sets(st.integers(0, code.length - 1), max_size=t)
    first, second = data.draw(places), data.draw(places)
    syndromes = [fold(code.columns[j] for j in chosen) for chosen in (first, second)]
    assert (syndromes[0] == syndromes[1]) == (first == second)


def test_sizes_of_rows():
    code = syndrome_code("bch128_3")
    assert (code.num_bits, code.length, code.bits_per_value) == (22, 128, 22 / 128)
    assert [code.num_blocks(width) for width in (0, 1, 128, 129, 2048)] == [0, 1, 1, 2, 16]
    assert [code.row_bytes(width) for width in (0, 1, 128, 129, 2048)] == [0, 3, 3, 6, 44]


@pytest.mark.parametrize("name", ["secded", "parity4", "parity64", "bch32_3", "bch64_9", "bch512_6"])
def test_columns_are_distinct_bits_and_fit(name):
    code = syndrome_code(name)
    assert all(0 < column < 1 << code.num_bits for column in code.columns)
    assert code.num_bits <= 63
    assert 1 <= code.max_flips <= code.num_candidates


@pytest.mark.parametrize(
    "name", ["bch64", "bch16_1", "bch1024_1", "bch512_7", "parity1", "parity65", "hamming"]
)
def test_codes_that_do_not_exist_are_refused(name):
    with pytest.raises(FormatError, match=rf"Unknown syndrome code '{name}'. There are parity<g>"):
        syndrome_code(name)

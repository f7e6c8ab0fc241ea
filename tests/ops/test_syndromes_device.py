"""The GPU kernel of encode_syndromes: run on the processor against the reference, and compiled for architectures."""

import pytest
import torch
from tests.assertions import assert_bitwise
from tests.emulation.emulator import COMPILER, Emulator
from tests.ops.test_syndromes import CODES, random_codes

from tracefp4.coding import syndrome_code
from tracefp4.ops import nvrtc
from tracefp4.ops.parity_checks import numbers_on
from tracefp4.ops.syndromes import device as syndromes_device
from tracefp4.ops.syndromes.device import differences, encode_syndromes_on_device
from tracefp4.ops.syndromes.reference import encode_syndromes_reference

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="the emulation needs g++")


@pytest.fixture(params=[0, 1, 2, 3])
def emulator(request, monkeypatch):
    emulator = Emulator(request.param)
    monkeypatch.setattr(syndromes_device.LIBRARY, "runner", emulator)
    return emulator


@needs_compiler
@pytest.mark.parametrize("name", [*CODES, "parity63", "bch32_8", "bch256_7"])
def test_bytes_are_those_of_the_reference(emulator, name):
    code = syndrome_code(name)
    for seed, (rows, width) in enumerate(
        ((5, 1), (0, 64), (37, 128), (3, 1040), (2, 4099), (4, 63), (1, 2048))
    ):
        codes = random_codes(seed, rows, width)
        assert_bitwise(encode_syndromes_on_device(codes, code), encode_syndromes_reference(codes, code))
    assert emulator.launches == {"encode_rows": 6}


@needs_compiler
def test_an_unaligned_or_strided_operand_is_read_right(emulator):
    code, base = syndrome_code("secded"), random_codes(3, 9, 65)
    for codes in (base[:, 1:], base.flatten()[1:577].view(9, 64), base[:8].T):
        assert_bitwise(encode_syndromes_on_device(codes, code), encode_syndromes_reference(codes, code))


def test_the_sums_of_four_columns():
    code = syndrome_code("parity3")
    sums = numbers_on(code, torch.device("cpu"))[5 + 3 :][:64].view(4, 16)
    assert sums[0].tolist() == [(value & 7).bit_count() % 2 for value in range(16)]
    assert not sums[1:].any()


@pytest.mark.parametrize("name", ["secded", "bch32_2", "bch64_3", "bch512_6", "parity7"])
def test_columns_are_found_by_their_tags(name):
    code = syndrome_code(name)
    start = 5 + code.length + 64 * -(-code.length // 16)
    distance, shift, *found = numbers_on(code, torch.device("cpu"))[start:][: 2 + 2 * code.length].tolist()
    columns, positions = found[: code.length], found[code.length :]
    assert distance == code.distance
    assert sorted(positions) == list(range(code.length))
    assert columns == [code.columns[j] for j in positions]
    if code.max_flips > 1:
        assert [column >> shift & code.length - 1 for column in columns] == list(range(code.length))


def test_three_columns_are_found_by_their_sum():
    code = syndrome_code("bch64_3")
    start = 5 + code.length + 64 * 4 + 2 + 2 * code.length
    num, *_ = (numbers := numbers_on(code, torch.device("cpu"))[start:])[:1].tolist()
    assert numbers.numel() == 1 + num
    table = numbers[1:].view(torch.int32)
    assert table.numel() == 1 << 18
    wanted = [0] * table.numel()
    for i, first in enumerate(code.columns):
        wanted[first >> 1] = i + 1
        for j in range(i + 1, code.length):
            for k in range(j + 1, code.length):
                wanted[(first ^ code.columns[j] ^ code.columns[k]) >> 1] = i + 1 | j + 1 << 8 | k + 1 << 16
    assert table.tolist() == wanted
    assert table.count_nonzero() == 64 + 41664


@pytest.mark.parametrize("name", ["secded", "bch32_4", "bch64_2", "bch128_3", "bch512_6", "parity61"])
def test_other_codes_have_no_table(name):
    code = syndrome_code(name)
    assert numbers_on(code, torch.device("cpu"))[-1] == 0


@needs_compiler
@pytest.mark.slow
def test_the_self_check_passes(emulator):
    assert differences(torch.device("cpu"), None) is None


@pytest.mark.parametrize("architecture", ["sm_89", "sm_90a", "sm_100a", "sm_120a"])
def test_the_file_compiles_for(architecture):
    source = syndromes_device.LIBRARY.program.source
    assert nvrtc.build(source, defines={}, architecture=architecture).code[:4] == b"\x7fELF"

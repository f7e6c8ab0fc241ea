"""Element and block formats against the specification's tables."""

import dataclasses
import math

import pytest
from tests.golden import spec_e2m1, spec_e4m3, spec_e8m0

from tracefp4.formats.block import MXFP4, NVFP4
from tracefp4.formats.element import E2M1, E4M3, E8M0


def test_rnd_5_e2m1_table_has_its_subnormal():
    assert [math.copysign(1, v) * abs(v) for v in E2M1.values()] == spec_e2m1.VALUES
    assert math.copysign(1, E2M1.value(8)) == -1


@pytest.mark.parametrize(("byte", "value"), spec_e4m3.VALUES.items())
def test_e4m3_values(byte, value):
    assert E4M3.value(byte) == value
    assert math.copysign(1, E4M3.value(byte)) == math.copysign(1, value)


def test_e4m3_has_two_nans_and_no_infinity():
    values = E4M3.values()
    assert [code for code, v in enumerate(values) if math.isnan(v)] == [0x7F, 0xFF]
    assert max(v for v in values if not math.isnan(v)) == E4M3.max_value == 448


@pytest.mark.parametrize(("byte", "value"), spec_e8m0.VALUES.items())
def test_ovf_6_e8m0_ends_of_its_range(byte, value):
    assert E8M0.value(byte) == value


def test_ovf_6_e8m0_byte_255_is_nan():
    assert math.isnan(E8M0.value(255)) and len(E8M0.values()) == 256


@pytest.mark.parametrize("element", [E2M1, E4M3, E8M0], ids=lambda e: e.name)
def test_summary_fields_agree_with_the_table(element):
    finite = [v for v in element.values() if not math.isnan(v)]
    assert len(element.values()) == element.num_codes == 2**element.bits
    assert max(finite) == element.max_value
    assert min(v for v in finite if v > 0) == element.smallest_value
    with pytest.raises(IndexError, match="run from 0"):
        element.value(element.num_codes)


def test_block_formats():
    assert (NVFP4.block_size, NVFP4.bits_per_value) == (16, 4.5)
    assert (MXFP4.block_size, MXFP4.bits_per_value) == (32, 4.25)


def test_formats_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        E2M1.bias = 0

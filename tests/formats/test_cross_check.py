"""Byte-for-byte agreement with independent implementations: ml_dtypes and gfloat. Skipped, with a reason,
when absent."""

import numpy
import pytest
import torch
from tests.assertions import assert_bitwise
from tests.formats.test_grid import FINITE_BF16, Z_SAMPLES

from tracefp4.formats.element import E2M1, E4M3, E8M0
from tracefp4.formats.grid import decode_e2m1, decode_e4m3, encode_e4m3, round_e2m1

E4M3_INPUTS = FINITE_BF16[FINITE_BF16.abs() <= 464]  # beyond, ml_dtypes gives NaN and we saturate (OVF-2)


def test_e2m1_rounding_equals_ml_dtypes():
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")
    for z in (FINITE_BF16, Z_SAMPLES):
        theirs = z.numpy().astype(ml_dtypes.float4_e2m1fn).view(numpy.uint8)
        assert_bitwise(round_e2m1(z), torch.from_numpy(theirs))


def test_e4m3_rounding_equals_ml_dtypes():
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")
    theirs = E4M3_INPUTS.numpy().astype(ml_dtypes.float8_e4m3fn).view(numpy.uint8)
    assert_bitwise(encode_e4m3(E4M3_INPUTS), torch.from_numpy(theirs))


def test_tables_equal_ml_dtypes():
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")
    for element, theirs in (
        (E2M1, ml_dtypes.float4_e2m1fn),
        (E4M3, ml_dtypes.float8_e4m3fn),
        (E8M0, ml_dtypes.float8_e8m0fnu),
    ):
        table = numpy.arange(element.num_codes, dtype=numpy.uint8).view(theirs).astype(numpy.float64)
        numpy.testing.assert_array_equal(table, numpy.array(element.values()))


def test_e2m1_and_e4m3_equal_gfloat():
    gfloat = pytest.importorskip("gfloat", reason="gfloat is not installed")
    formats = pytest.importorskip("gfloat.formats", reason="gfloat is not installed")
    z = torch.cat([Z_SAMPLES, FINITE_BF16[::37]])
    for info, code_of, values_of in (
        (formats.format_info_ocp_e2m1, round_e2m1, decode_e2m1),
        (formats.format_info_ocp_e4m3, encode_e4m3, decode_e4m3),
    ):
        theirs = gfloat.round_ndarray(info, z.double().numpy(), gfloat.RoundMode.TiesToEven, True)
        assert_bitwise(values_of(code_of(z), torch.float64), torch.from_numpy(theirs))

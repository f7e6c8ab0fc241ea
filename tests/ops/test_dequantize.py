"""dequantize: every scale byte times every code, in every dtype that it offers."""

from fractions import Fraction

import pytest
import torch
from tests.assertions import assert_bitwise
from tests.formats import rational
from tests.golden import spec_e2m1

from tracefp4.errors import FormatError
from tracefp4.formats.packing import pack_codes
from tracefp4.formats.schemes import NVFP4_KV, NVFP4_ROW_POW2
from tracefp4.formats.tensor import BlockTensor
from tracefp4.ops.backend import Backend
from tracefp4.ops.dequantize import dequantize
from tracefp4.ops.quantize import quantize


def all_products(exponent: int) -> BlockTensor:
    """One row per scale byte 0..255, holding the 16 codes in order."""
    codes = torch.arange(16, dtype=torch.uint8).expand(256, 16).contiguous()
    return BlockTensor(
        packed=pack_codes(codes),
        block_scales=torch.arange(256, dtype=torch.uint8)[:, None],
        outer=torch.full((256,), exponent, dtype=torch.int8),
        scheme=NVFP4_ROW_POW2,
    )


@pytest.mark.parametrize("exponent", [-110, -1, 0, 3, 116])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_all_scale_bytes_times_all_codes_are_exact(exponent, dtype):
    values = dequantize(all_products(exponent), dtype=dtype)
    scales = [*rational.E4M3_GRID, None]
    for byte, row in enumerate(values.double().tolist()):
        scale = scales[byte & 127]
        if scale is None:
            assert all(v != v for v in row)
            continue
        sign = -1 if byte >= 128 else 1
        assert row == [float(Fraction(c) * scale * Fraction(2) ** exponent * sign) for c in spec_e2m1.VALUES]


def test_zero_codes_keep_their_sign():
    values = dequantize(all_products(0))[0x38]
    assert_bitwise(values, torch.tensor(spec_e2m1.VALUES))


def test_static_exponent_is_shared():
    row = all_products(0)
    t = BlockTensor(
        packed=row.packed,
        block_scales=row.block_scales,
        outer=torch.tensor(-4, dtype=torch.int8),
        scheme=NVFP4_KV,
    )
    assert_bitwise(dequantize(t)[:127], dequantize(row)[:127] / 16)


def test_dtypes_that_cannot_hold_the_values_are_refused():
    with pytest.raises(FormatError, match="cannot give torch.float16 exactly. Allowed: float32 and float64"):
        dequantize(all_products(0), dtype=torch.float16)


@pytest.mark.parametrize("backend", [Backend.AUTO, Backend.REFERENCE], ids=lambda b: b.value)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_values_are_written_where_the_caller_wants_them(dtype, backend):
    t = all_products(3)
    out = torch.full(t.shape, 7.0, dtype=dtype)
    address = out.data_ptr()
    got = dequantize(t, dtype=dtype, out=out, backend=backend)
    assert got is out and out.data_ptr() == address
    assert_bitwise(out, dequantize(t, dtype=dtype, backend=Backend.REFERENCE))


@pytest.mark.parametrize(
    "out",
    [
        torch.empty(256, 16),
        torch.empty(256, 64, dtype=torch.bfloat16),
        torch.empty(64, 256).T,
        torch.empty(256, 64, requires_grad=True),
    ],
    ids=["shape", "dtype", "strides", "gradient"],
)
def test_an_out_that_does_not_fit_is_refused(out):
    t = quantize(torch.ones(256, 64), scheme=NVFP4_ROW_POW2)
    with pytest.raises(FormatError, match=r"contiguous torch.float32 tensor of shape \(256, 64\) on cpu"):
        dequantize(t, out=out)

"""dequantize: every scale byte times every code, in every dtype that it offers."""

from fractions import Fraction

import pytest
import torch
from tests.assertions import assert_bitwise
from tests.formats import rational
from tests.golden import spec_e2m1

from tracefp4.errors import FormatError
from tracefp4.formats.packing import pack_codes
from tracefp4.formats.scheme import NVFP4_KV, NVFP4_ROW_POW2
from tracefp4.formats.tensor import BlockTensor
from tracefp4.ops.dequantize import dequantize


def all_products(exponent: int) -> BlockTensor:
    """One row per scale byte 0..255, holding the 16 codes in order."""
    codes = torch.arange(16, dtype=torch.uint8).expand(256, 16).contiguous()
    return BlockTensor(
        packed=pack_codes(codes),
        block_scales=torch.arange(256, dtype=torch.uint8)[:, None],
        exponent=torch.full((256,), exponent, dtype=torch.int8),
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
        exponent=torch.tensor(-4, dtype=torch.int8),
        scheme=NVFP4_KV,
    )
    assert_bitwise(dequantize(t)[:127], dequantize(row)[:127] / 16)


def test_dtypes_that_cannot_hold_the_values_are_refused():
    with pytest.raises(FormatError, match="float32, float64 or bfloat16; got torch.float16"):
        dequantize(all_products(0), dtype=torch.float16)

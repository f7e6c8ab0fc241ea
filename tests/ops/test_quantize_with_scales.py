"""quantize_with_scales: codes against given scales, and the bytes of quantize under its own.

Mutations that must die: scales recomputed from x (`_given_scales_are_kept`), the NaN byte not set
(`_spc_1`), a negative byte accepted (`_refusals`).
"""

import pytest
import torch
from tests.assertions import assert_bitwise, assert_same_values

from tracefp4.errors import BackendError, FormatError
from tracefp4.formats import NVFP4_ROW_POW2, NVFP4_STATIC_POW2, SCHEMES
from tracefp4.formats.encoding import read_operand
from tracefp4.ops.dequantize import dequantize
from tracefp4.ops.quantize import quantize, quantize_with_scales


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=lambda s: s.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_scales_of_quantize_give_its_bytes(scheme, dtype):
    x = (torch.randn(3, 8, 64) * torch.exp2(torch.randint(-9, 9, (3, 8, 1)).float())).to(dtype)
    x[0, 0, :32], x[0, 1, 3], x[1, 2, 40], x[2, 0, 32:] = 0.0, float("nan"), float("inf"), -0.0
    t = quantize(x, scheme=scheme, exponent=-3 if scheme.outer == "static" else None)
    got = quantize_with_scales(x, block_scales=t.block_scales, outer=t.outer, scheme=scheme)
    assert_bitwise(got.packed, t.packed)
    assert_bitwise(got.block_scales, t.block_scales)
    assert_bitwise(got.outer, t.outer)


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=lambda s: s.name)
def test_values_give_themselves_back(scheme):
    """As values: a sign rule that looks at x < 0 takes the sign off the zeros that code 8 stands for."""
    t = quantize(torch.randn(4, 64), scheme=scheme, exponent=-3 if scheme.outer == "static" else None)
    got = quantize_with_scales(dequantize(t), block_scales=t.block_scales, outer=t.outer, scheme=scheme)
    assert_same_values(dequantize(got), dequantize(t))


def test_given_scales_are_kept():
    # 2.6 / 1 -> 3 (code 5); 2.6 / 4 = .65 -> .5 (code 1); 2.6 / 2^-9 saturates (code 7); under 0, zeros.
    x = torch.full((1, 64), 2.6)
    given = torch.tensor([[0x38, 0x48, 0x01, 0x00]], dtype=torch.uint8)
    t = quantize_with_scales(
        x, block_scales=given, outer=torch.tensor(0, dtype=torch.int8), scheme=NVFP4_STATIC_POW2
    )
    assert_bitwise(t.block_scales, given)
    assert t.codes()[0, ::16].tolist() == [5, 1, 7, 0]
    # the outer scale too: under 2^1, 2.6 / 2 = 1.3 -> 1.5 (code 3)
    t = quantize_with_scales(
        x, block_scales=given, outer=torch.tensor(1, dtype=torch.int8), scheme=NVFP4_STATIC_POW2
    )
    assert t.codes()[0, ::16].tolist() == [3, 1, 7, 0]


def test_spc_1_blocks_that_are_not_finite_take_the_nan_byte():
    x = torch.ones(1, 48)
    x[0, 20] = float("-inf")
    given = torch.tensor([[0x38, 0x38, 0x7F]], dtype=torch.uint8)
    before = given.clone()
    t = quantize_with_scales(
        x, block_scales=given, outer=torch.zeros(1, dtype=torch.int8), scheme=NVFP4_ROW_POW2
    )
    assert t.block_scales.tolist() == [[0x38, 0x7F, 0x7F]]
    assert t.codes()[0, 16:].eq(0).all()
    assert_bitwise(given, before)


X, BYTES, OUTER = (
    torch.ones(2, 32),
    torch.full((2, 2), 0x38, dtype=torch.uint8),
    torch.zeros(2, dtype=torch.int8),
)


@pytest.mark.parametrize(
    ("x", "block_scales", "outer", "message"),
    [
        (torch.ones(2, 24), BYTES, OUTER, "multiple of 16"),
        (X.int(), BYTES, OUTER, "needs a float tensor"),
        (X, BYTES[:, :1], OUTER, "block_scales as"),
        (X, BYTES.int(), OUTER, "block_scales as"),
        (X, BYTES, OUTER[:1], "outer as"),
        (X, BYTES, OUTER.float(), "outer as"),
        (X, BYTES + 0x80, OUTER, "a negative scale"),
        (X, BYTES, OUTER - 111, r"outer scales in \[-110, 116\] under NVFP4_ROW_POW2; got others"),
        (X, BYTES, OUTER + 117, r"outer scales in \[-110, 116\]"),
    ],
)
def test_shp_1_refusals(x, block_scales, outer, message):
    with pytest.raises(FormatError, match=message):
        quantize_with_scales(x, block_scales=block_scales, outer=outer, scheme=NVFP4_ROW_POW2)


@pytest.mark.parametrize("outer", [-1.0, float("nan"), float("inf")])
def test_an_outer_scale_that_is_no_scale_is_refused(outer):
    with pytest.raises(FormatError, match=r"outer scales in \[0.0, 3.4.*got others, or NaN, among the 2"):
        given = torch.tensor([1.0, outer])
        quantize_with_scales(X, block_scales=BYTES, outer=given, scheme=SCHEMES["NVFP4_ROW_FP32"])


def test_a_tensor_without_data_is_refused():
    with pytest.raises(BackendError, match="meta"):
        quantize_with_scales(X.to("meta"), block_scales=BYTES, outer=OUTER, scheme=NVFP4_ROW_POW2)


def test_an_operand_shows_what_the_arithmetic_reads():
    x = torch.tensor([[-1.0] * 16 + [float("nan")] + [2.0] * 15], dtype=torch.float64)
    operand = read_operand(x, NVFP4_ROW_POW2)
    assert operand.x.dtype == torch.float32 and operand.amax.tolist() == [[1.0, 0.0]]
    assert operand.finite is not None and operand.finite.tolist() == [[True, False]]
    assert operand.magnitude[0].tolist() == [1.0] * 16 + [0.0] * 16

"""Every scheme, byte for byte: against a second implementation (tests/formats/emulation.py) on hard matrices, on all
bf16 numbers at fixed scales, and on every scale byte times every code."""

from dataclasses import replace

import numpy
import pytest
import torch
from hypothesis import given, settings
from tests.assertions import assert_bitwise
from tests.formats import emulation
from tests.formats.test_grid import ALL_BF16, FINITE_BF16
from tests.golden import mxfp4_blocks, nvfp4_schemes
from tests.ops.scheme_inputs import ALL, SEEDS, by_name, exponent_of, hard_matrices

from tracefp4.formats.grid import magnitude_to_code, round_magnitude_
from tracefp4.formats.order import ErrorSum
from tracefp4.formats.packing import pack_codes
from tracefp4.formats.scheme import Scheme
from tracefp4.formats.schemes import SCHEMES
from tracefp4.formats.selection import scaled
from tracefp4.formats.tensor import BlockTensor
from tracefp4.ops.backend import Backend
from tracefp4.ops.dequantize import dequantize
from tracefp4.ops.quantize import quantize

BACKENDS = [Backend.REFERENCE, Backend.AUTO]
# Outer scales that are no power of two, as every kind stores them; the exponents are of both signs.
OUTER = {
    "exponent": [-7, 0, 3],
    "multiplier": [0.0078125, 1.0, 0.0123456789],
    "divisor": [128.0, 1.0, 77.654321],
    "amax": [2688.0, 21.0, 33.333333],
    "none": [0],
}
# The smallest, a subnormal, 15 (whose reciprocal misses ties), 1, and the largest; for E8M0 the ends and 1.
SCALE_BYTES = {False: [0x01, 0x07, 0x38, 0x57, 0x7E], True: [0, 1, 127, 254]}


def outer_tensor(scheme: Scheme, value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.int8 if scheme.is_exact_in_bf16 else torch.float32)


def assert_equal(t: BlockTensor, expected: emulation.Bytes) -> None:
    assert_bitwise(t.block_scales, torch.from_numpy(expected.block_scales))
    assert_bitwise(t.codes(), torch.from_numpy(expected.codes))
    if t.scheme.outer_kind != "none":
        outer = torch.from_numpy(numpy.asarray(expected.outer, numpy.float32)).to(t.outer.dtype)
        assert_bitwise(t.outer, outer)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.value)
@pytest.mark.parametrize("scheme", ALL, ids=by_name)
def test_hard_matrices_equal_the_second_implementation(scheme, backend):
    for x in hard_matrices():
        t = quantize(x, scheme=scheme, exponent=exponent_of(scheme), backend=backend)
        expected = emulation.quantize(x.numpy(), scheme, exponent_of(scheme))
        assert_equal(t, expected)
        values = torch.from_numpy(emulation.dequantize(expected, scheme))
        got = dequantize(t, backend=backend)
        assert got.isnan().tolist() == values.isnan().tolist()
        assert_bitwise(got[~got.isnan()], values[~values.isnan()])


@pytest.mark.parametrize("scheme", ALL, ids=by_name)
def test_bf16_matrices_give_the_bytes_of_their_float32_values(scheme):
    for x in hard_matrices():
        exponent = exponent_of(scheme)
        expected = emulation.quantize(x.bfloat16().float().numpy(), scheme, exponent)
        assert_equal(quantize(x.bfloat16(), scheme=scheme, exponent=exponent), expected)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.value)
@pytest.mark.parametrize("scheme", ALL, ids=by_name)
@given(SEEDS)
@settings(max_examples=6, deadline=None)
def test_random_bit_patterns_equal_the_second_implementation(scheme, backend, seed):
    """Blocks of random float32 numbers of one random binade each, from subnormals to Inf and NaN."""
    generator = torch.Generator().manual_seed(seed)
    mantissa_and_sign = torch.randint(-(2**31), 2**31, (6, 4, 32), generator=generator) & ~0x7F800000
    binade = torch.randint(0, 256, (6, 4, 1), generator=generator).clamp_(max=254 + (seed % 5 == 0))
    exponent = (binade - torch.randint(0, 5, (6, 4, 32), generator=generator)).clamp_(min=0)
    x = (mantissa_and_sign | exponent << 23).to(torch.int32).view(torch.float32).view(6, 128)
    t = quantize(x, scheme=scheme, exponent=exponent_of(scheme), backend=backend)
    expected = emulation.quantize(x.numpy(), scheme, exponent_of(scheme))
    assert_equal(t, expected)
    values, got = torch.from_numpy(emulation.dequantize(expected, scheme)), dequantize(t, backend=backend)
    assert_bitwise(got[~got.isnan()], values[~values.isnan()])


@pytest.mark.parametrize("scheme", ALL, ids=by_name)
def test_every_bf16_number_at_fixed_scales(scheme):
    size = scheme.block_size
    magnitude = torch.nn.functional.pad(FINITE_BF16.abs(), (0, -len(FINITE_BF16) % size)).view(1, -1)
    is_mx = scheme.outer_kind == "none"
    for value in OUTER[scheme.outer_kind]:
        outer = outer_tensor(scheme, value)
        for byte in SCALE_BYTES[is_mx]:
            block_scales = torch.full((1, magnitude.shape[1] // size), byte, dtype=torch.uint8)
            _, rounded = round_magnitude_(scaled(magnitude, block_scales, outer, scheme), scheme.tie)
            s = emulation.decoded_scales(numpy.full((1, 1), byte), scheme)
            with numpy.errstate(**emulation.SILENT):
                z = emulation.scaled(magnitude.numpy(), s, numpy.full((1, 1), value, numpy.float32), scheme)
            expected = emulation.nearest(z, emulation.E2M1, scheme.tie.value)
            assert_bitwise(magnitude_to_code(rounded), torch.from_numpy(expected.astype(numpy.int8)))


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.value)
@pytest.mark.parametrize("scheme", ALL, ids=by_name)
def test_all_bf16_numbers_in_one_matrix(scheme, backend):
    """Rows of 32 neighbours in bit order: every binade, both zeros, subnormals, and 256 blocks with NaN or Inf."""
    x = ALL_BF16.view(-1, 32)
    exponent = exponent_of(scheme)
    expected = emulation.quantize(x.numpy(), scheme, exponent)
    assert_equal(quantize(x, scheme=scheme, exponent=exponent, backend=backend), expected)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.value)
@pytest.mark.parametrize("scheme", ALL, ids=by_name)
def test_every_scale_byte_times_every_code(scheme, backend):
    repeats = scheme.block_size // 16
    codes = torch.arange(16, dtype=torch.uint8).repeat(256, repeats)
    bytes_ = torch.arange(256, dtype=torch.uint8)[:, None]
    for value in OUTER[scheme.outer_kind]:
        outer = outer_tensor(scheme, value)
        lead = {"row": (256,), "tensor": (), "static": (), "none": ()}[scheme.outer]
        t = BlockTensor(
            packed=pack_codes(codes), block_scales=bytes_, outer=outer.expand(lead).clone(), scheme=scheme
        )
        stored = emulation.Bytes(numpy.float32(value), bytes_.numpy(), codes.numpy())
        expected = torch.from_numpy(emulation.dequantize(stored, scheme))
        got = dequantize(t, backend=backend)
        assert got.isnan().tolist() == expected.isnan().tolist()
        assert_bitwise(got[~got.isnan()], expected[~expected.isnan()])
        assert_bitwise(dequantize(t, dtype=torch.float64, backend=backend)[:127], expected.double()[:127])


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.value)
@pytest.mark.parametrize("case", nvfp4_schemes.CASES, ids=lambda c: f"{c.scheme}-{c.name}")
def test_golden_nvfp4(case, backend):
    rows = [[*block, *[0.0] * (16 - len(block))] for block in case.blocks]
    x = torch.tensor(rows).view(1, -1)
    exponent = case.exponent if SCHEMES[case.scheme].outer == "static" else None
    t = quantize(x, scheme=SCHEMES[case.scheme], exponent=exponent, backend=backend)
    assert t.outer.reshape(-1).tolist() == [case.outer]
    assert [f"{byte:02X}" for byte in t.block_scales[0].tolist()] == case.block_scales.split()
    codes = t.codes().view(-1, 16).tolist()
    for found, expected in zip(codes, case.codes, strict=True):
        assert found[: len(expected)] == expected
        assert {code & 7 for code in found[len(expected) :]} <= {0}


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.value)
@pytest.mark.parametrize("case", mxfp4_blocks.CASES, ids=lambda c: f"{c.scheme}-{c.name}")
def test_ovf_4_and_ovf_6_golden_mxfp4(case, backend):
    x = torch.tensor([[*case.block, *[0.0] * (32 - len(case.block))]])
    t = quantize(x, scheme=SCHEMES[case.scheme], backend=backend)
    assert t.block_scales.tolist() == [[case.byte]]
    assert t.codes()[0, : len(case.codes)].tolist() == case.codes
    assert dequantize(t)[0, : len(case.values)].tolist() == case.values


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.value)
@pytest.mark.parametrize("rule", nvfp4_schemes.ERROR_SUMS)
def test_the_order_in_which_errors_are_added_decides_near_ties(rule, backend):
    rows = [*nvfp4_schemes.ERROR_SUMS[rule], [8 * nvfp4_schemes.ERROR_SUM_MAXIMUM, *[0.0] * 15]]
    x = torch.tensor(rows) / 8.0
    chosen = {}
    for order in ErrorSum:
        scheme = replace(SCHEMES[f"NVFP4_FOUROVERSIX_4OVER6_{rule}"], error_sum=order)
        t = quantize(x, scheme=scheme, backend=backend)
        assert_equal(t, emulation.quantize(x.numpy(), scheme))
        chosen[order] = tuple(t.block_scales[:, 0].tolist())
    assert len(set(chosen.values())) == len(ErrorSum)


def test_every_scheme_has_golden_bytes():
    named = {case.scheme for case in (*nvfp4_schemes.CASES, *mxfp4_blocks.CASES)}
    assert named == set(SCHEMES)

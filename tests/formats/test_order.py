"""Orders of operations: the value of each member is its formula, so the formula itself, read by numpy one float32
operation at a time, is what the tensor code must equal bit for bit."""

import re

import numpy
import pytest
import torch
from tests.assertions import assert_bitwise

from tracefp4.formats.block import MXFP4, NVFP4
from tracefp4.formats.grid import decode_e4m3
from tracefp4.formats.order import Order, ScaleRule
from tracefp4.formats.scaling import decode_scales, element_factor, raw_block_scale
from tracefp4.formats.scheme import Scheme

NVFP4_ORDERS = [order for order in Order if order is not Order.MX]
NUM_SAMPLES = 20000
MAXIMUM = numpy.float32(6 * 448)  # M of the formulas


def read(formula: str, **values: numpy.ndarray) -> torch.Tensor:
    """Evaluate a formula with every literal a float32 and every operation rounded once to float32."""
    if "A" in values:
        values = {**values, "M": MAXIMUM, "G": MAXIMUM / values["A"]}
    python = re.sub(r"(?<![A-Za-z])\d+", lambda literal: f"F({literal.group()})", formula).replace(
        "^-", "**-"
    )
    python = python.replace("^", "**")
    return torch.from_numpy(numpy.asarray(eval(python, {"F": numpy.float32}, values), dtype=numpy.float32))


def outer_of(order: Order) -> tuple[torch.Tensor, dict[str, numpy.ndarray]]:
    """Return outer scales as the order stores them, and the symbol that they have in its formula."""
    if order.outer_kind == "exponent":
        k = torch.randint(-20, 20, (NUM_SAMPLES,), dtype=torch.int8)
        return k, {"k": k.float().numpy()}
    outer = (torch.rand(NUM_SAMPLES) + 0.5) * torch.exp2(torch.randint(-20, 20, (NUM_SAMPLES,)).float())
    return outer, {{"multiplier": "g", "divisor": "G", "amax": "A"}[order.outer_kind]: outer.numpy()}


def scheme_of(order: Order) -> Scheme:
    return Scheme(name="TEST", block_format=NVFP4, outer="row", order=order)


def halves_of(order: Order) -> tuple[str, str]:
    """Return the formulas of the raw block scale and of the number that is rounded to E2M1."""
    *definition, raw, rounded = order.value.split("; ")
    assert definition == (["G=M/A"] if order.outer_kind == "amax" else [])
    return raw, rounded


@pytest.mark.parametrize("order", NVFP4_ORDERS, ids=lambda order: order.name)
def test_the_raw_block_scale_is_the_first_half_of_the_formula(order):
    outer, symbols = outer_of(order)
    amax = torch.rand(NUM_SAMPLES) * 2.0**10
    expected = read(halves_of(order)[0], amax=amax.numpy(), **symbols)
    assert_bitwise(raw_block_scale(amax, outer, scheme_of(order)), expected)


@pytest.mark.parametrize("order", NVFP4_ORDERS, ids=lambda order: order.name)
def test_rnd_3_the_rounded_number_is_the_second_half_of_the_formula(order):
    outer, symbols = outer_of(order)
    block_scales = torch.randint(1, 0x7F, (NUM_SAMPLES, 1), dtype=torch.uint8)
    x = torch.randn(NUM_SAMPLES)
    factor, multiplies = element_factor(block_scales, outer, scheme_of(order))
    z = x * factor.view(-1) if multiplies else x / factor.view(-1)
    s = decode_e4m3(block_scales).view(-1)
    assert_bitwise(z, read(halves_of(order)[1], x=x.numpy(), s=s.numpy(), **symbols))


@pytest.mark.parametrize("order", NVFP4_ORDERS, ids=lambda order: order.name)
def test_the_decode_scale_is_rounded_to_float32_whatever_the_dtype(order):
    outer, symbols = outer_of(order)
    block_scales = torch.randint(0, 0x7F, (NUM_SAMPLES, 1), dtype=torch.uint8)
    formula = {"exponent": "s*2^k", "multiplier": "s*g", "divisor": "s/G", "amax": "(s*A)/M"}[
        order.outer_kind
    ]
    s = decode_e4m3(block_scales).view(-1)
    expected = read(formula, s=s.numpy(), **symbols)
    for dtype in (torch.float32, torch.float64):
        got = decode_scales(block_scales, outer, scheme_of(order), dtype)
        assert_bitwise(got.view(-1), expected.to(dtype))


@pytest.mark.parametrize("order", NVFP4_ORDERS, ids=lambda order: order.name)
def test_scales_of_zero_and_nan_make_every_value_a_zero(order):
    block_scales = torch.tensor([[0x00, 0x7F]], dtype=torch.uint8)
    outer = torch.ones(1, dtype=torch.int8 if order.outer_kind == "exponent" else torch.float32)
    factor, multiplies = element_factor(block_scales, outer, scheme_of(order))
    assert multiplies == order.multiplies
    assert factor.tolist() == [[0.0, 0.0] if multiplies else [float("inf")] * 2]


def test_mx_has_no_outer_scale_and_goes_with_e8m0_only():
    assert Order.MX.outer_kind == "none" and not Order.MX.multiplies
    scheme = Scheme(name="T", block_format=MXFP4, outer="none", order=Order.MX, scale_rule=ScaleRule.FLOOR)
    factor, multiplies = element_factor(
        torch.tensor([[127, 129, 255]], dtype=torch.uint8), torch.tensor(0), scheme
    )
    assert not multiplies and factor.tolist() == [[1.0, 4.0, float("inf")]]

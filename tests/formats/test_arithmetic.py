"""Rounding to bf16 in wider dtypes: every case where one rounding differs from two."""

import math
from fractions import Fraction

import pytest
import torch
import torch._dynamo
from tests.assertions import assert_bitwise
from tests.formats.test_grid import ALL_BF16, FINITE_BF16
from torch._dynamo.utils import counters

from tracefp4.formats.arithmetic import CONTROL, EMULATED, NATIVE, round_bf16, round_bf16_


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_every_bf16_number_is_kept(dtype):
    x = FINITE_BF16.to(dtype)
    assert_bitwise(round_bf16(x), x)
    special = ALL_BF16[~ALL_BF16.isfinite()].to(dtype)
    assert round_bf16(special).isnan().tolist() == special.isnan().tolist()
    assert round_bf16(special[special.isinf()]).tolist() == special[special.isinf()].tolist()


def test_float32_rounds_like_the_cast():
    x = torch.randn(10000) * torch.exp2(torch.randint(-140, 128, (10000,)).float())
    assert_bitwise(round_bf16(x), x.bfloat16().float())


def test_float64_rounds_once():
    # 1 + 2^-8 is the tie between two bf16 numbers. 1 + 2^-8 + 2^-40 lies above it, but its float32 value is
    # the tie.
    x = torch.tensor(
        [1 + 2.0**-8 + 2.0**-40, 1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 3 * 2.0**-8 - 2.0**-40],
        dtype=torch.float64,
    )
    x = torch.cat([x, -x])
    assert round_bf16(x)[:4].tolist() == [1 + 2.0**-7, 1.0, 1 + 2.0**-6, 1 + 2.0**-7]
    assert round_bf16(x)[4:].tolist() == [-v for v in round_bf16(x)[:4].tolist()]
    assert x.float().bfloat16()[0].item() == 1.0  # the double rounding that this avoids


def exact_bf16(value: float) -> float:
    """Return the nearest bf16 number by fractions: 8 significant bits, least exponent -126, ties to even."""
    step = Fraction(2) ** (max(math.frexp(value)[1] - 1, -126) - 7)
    return float(round(Fraction(value) / step) * step)  # Python rounds a fraction half to even


def test_float64_against_exact_arithmetic_subnormals_included():
    bits = torch.randint(0, 2**52, (2000,), dtype=torch.int64)
    exponent = torch.cat([torch.randint(-136, -120, (1000,)), torch.randint(-120, 127, (1000,))]).double()
    x = (1 + bits.double() * 2.0**-52) * torch.exp2(exponent)
    near_ties = (FINITE_BF16[::7].double().abs() * (1 + 2.0**-52)).add(0)
    ties = (FINITE_BF16[20000:40000:11].double() + FINITE_BF16[20001:40001:11].double()) / 2
    x = torch.cat(
        [
            x,
            near_ties[near_ties < 1e38],
            ties,
            torch.nextafter(ties, ties * 2),
            torch.nextafter(ties, ties / 2),
        ]
    )
    assert round_bf16(x).tolist() == [exact_bf16(v) for v in x.tolist()]


def test_overflow_goes_to_infinity_and_signs_stay():
    x = torch.tensor([3.4e38, 1e300, -1e300, float("inf"), -0.0], dtype=torch.float64)
    assert round_bf16(x).tolist()[:4] == [float("inf"), float("inf"), -float("inf"), float("inf")]
    assert torch.signbit(round_bf16(x)[4])


def test_in_place_rounding_passes_the_gradient_through():
    x = torch.tensor([1 + 2.0**-10, 2.0], requires_grad=True)
    y = round_bf16_(x * 1.0)
    assert y.tolist() == [1.0, 2.0]
    y.sum().backward()
    assert x.grad.tolist() == [1.0, 1.0]
    assert round_bf16(x).requires_grad is False and round_bf16(x) is not x


def test_arithmetics():
    assert (EMULATED.torch_dtype, CONTROL.torch_dtype, NATIVE.torch_dtype) == (
        torch.float32,
        torch.float64,
        torch.bfloat16,
    )
    assert EMULATED.rounds_probabilities and not CONTROL.rounds_probabilities and not NATIVE.emulates_bf16


LOWER_HALVES = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)
EVERY_NEIGHBOURHOOD = (
    (torch.arange(-(2**15), 2**15, dtype=torch.int32)[:, None] << 16) + LOWER_HALVES
).view(torch.float32)  # fmt: skip


@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_rounding_is_the_rounding(backend):
    # Mutations: a cast to bf16 and back, which inductor drops; ties away from even; a carry out of a NaN.
    torch._dynamo.reset()
    compiled = torch.compile(round_bf16, backend=backend, fullgraph=True, dynamic=True)
    beyond = torch.tensor([3.4e38, 1e300, -1e300, 2.0**-150, -0.0], dtype=torch.float64)
    for x in (EVERY_NEIGHBOURHOOD, torch.cat([EVERY_NEIGHBOURHOOD.double().flatten(), beyond])):
        found, expected = compiled(x), round_bf16(x)
        is_nan = expected.isnan()
        assert torch.equal(found.isnan(), is_nan)
        assert_bitwise(found[~is_nan], expected[~is_nan])


def test_compiled_rounding_of_float64_asks_no_values():
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(round_bf16, backend="eager")
    x = torch.tensor([1.0, 3.4e38, -1e300], dtype=torch.float64)
    assert_bitwise(compiled(x), round_bf16(x))
    assert not counters["graph_break"], "a question about values breaks the graph"


def test_res_3_compiled_rounding_does_not_compile_again_for_every_shape():
    # Mutation: a question about values or sizes inside the rounding.
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=8, fail_on_recompile_limit_hit=True):
        compiled = torch.compile(round_bf16, backend="eager", fullgraph=True)
        for shape in [*[(n, 64) for n in range(1, 41)], (2, 7, 64), (2, 9, 64), (4, 2, 7, 64), (7,), (9,)]:
            x = torch.randn(shape)
            assert_bitwise(compiled(x), round_bf16(x))

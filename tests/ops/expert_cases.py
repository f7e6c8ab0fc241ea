"""Small expert layers, what they give in float64, and the comparison of every step of the kernels with it."""

from dataclasses import replace
from typing import NamedTuple

import torch

from tracefp4.formats.arithmetic import round_bf16
from tracefp4.formats.precision import LayerPrecision
from tracefp4.formats.schemes import MXFP4_FLOOR, NVFP4_ROW_POW2, NVFP4_STATIC_POW2, NVFP4_TENSOR_POW2
from tracefp4.formats.weight_fragments import from_fragments, to_fragments
from tracefp4.ops.dequantize import dequantize
from tracefp4.ops.expert_layer import Experts, Routing
from tracefp4.ops.expert_layer.device import run_steps
from tracefp4.ops.expert_layer.reference import combine_reference
from tracefp4.ops.quantize import quantize

PRECISIONS = {
    "nvfp4": LayerPrecision(activation=NVFP4_ROW_POW2, weight=NVFP4_TENSOR_POW2, kv=None),
    "mxfp4": LayerPrecision(activation=MXFP4_FLOOR, weight=MXFP4_FLOOR, kv=None),
    "static": LayerPrecision(
        activation=NVFP4_STATIC_POW2, weight=NVFP4_TENSOR_POW2, kv=None, x_exponent=-6, w2_exponent=-4
    ),
    "bf16": LayerPrecision(activation=None, weight=NVFP4_TENSOR_POW2, kv=None),
    "gpt_oss": LayerPrecision(activation=NVFP4_ROW_POW2, weight=MXFP4_FLOOR, kv=None),
}


SUM_ERROR = {"cpu": 2.0**-22, "cuda": 2.0**-20}
"""How far a float32 sum may be from the exact one, as a share of the sum of magnitudes, by where the kernel ran.

At K = 672 the emulation, which adds product after product and rounds each time, comes to 2^-24.7 of the magnitudes. A
matrix unit that aligns 16 products and its accumulator to the largest, cuts them there at 24 bits or a few more, always
toward the same side, and cuts the sum to float32, comes to 2^-23.7. One wrong code is 2^-12 or more.
"""
SILU_ERROR = 2.0**-20
"""Relative error of silu from float32 exponentials."""
LEAST_SILU = -1.2784645427610738
"""Where silu has its minimum; it falls below and rises above."""


class Bounds(NamedTuple):
    """What a bf16 result is when every sum is exact, and the least and greatest it is when sums are off."""

    exact: torch.Tensor
    low: torch.Tensor
    high: torch.Tensor


class Case(NamedTuple):
    """Operands of one call, and the bf16 weights that the experts came from."""

    x: torch.Tensor
    routing: Routing
    experts: Experts
    precision: LayerPrecision
    gate_up: torch.Tensor
    down: torch.Tensor


def case(precision, *, tokens=5, top_k=2, experts=4, hidden=128, inner=64, seed=0):
    """A layer whose last expert has no tokens and whose first has most."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    gate_up, down = (
        (
            normal(experts, *shape) * 2.0 ** torch.randint(-6, -2, (experts, 1, 1), generator=generator)
        ).bfloat16()
        for shape in ((2 * inner, hidden), (hidden, inner))
    )
    x = (normal(tokens, hidden) * 2.0 ** torch.randint(-3, 2, (tokens, 1), generator=generator)).bfloat16()
    skew = torch.tensor([8.0, *(1.0,) * (experts - 2), 0.0])
    ids = torch.multinomial(skew.expand(max(1, tokens), -1), top_k, generator=generator)[:tokens]
    weights = torch.softmax(normal(tokens, top_k), 1).bfloat16()
    pair = (to_fragments(quantize(w, scheme=precision.weight)) for w in (gate_up, down))
    return Case(x, Routing(ids, weights), Experts(*pair), precision, gate_up, down)


def operands(case):
    """The four arguments of the op."""
    return case.x, case.routing, case.experts, case.precision


def moved(given, device):
    """The same case on a device."""

    def fragments(f):
        return replace(
            f, words=f.words.to(device), scales=f.scales.to(device), exponents=f.exponents.to(device)
        )

    return given._replace(
        x=given.x.to(device),
        routing=Routing(*(part.to(device) for part in given.routing)),
        experts=Experts(*map(fragments, given.experts)),
        gate_up=given.gate_up.to(device),
        down=given.down.to(device),
    )


def products64(x, ids, matrices):
    """Sums over dequantized operands of every pair, and the sums of their magnitudes, float64 [P, N]."""
    w, x = dequantize(from_fragments(matrices)).double(), x.double()
    sums, magnitudes = x.new_zeros(2, x.shape[0], w.shape[1])
    for expert in ids.unique().tolist():
        mine = ids == expert
        sums[mine] = x[mine] @ w[expert].T
        magnitudes[mine] = x[mine].abs() @ w[expert].abs().T
    return sums, magnitudes


def rounded_sums(x, ids, matrices):
    """Sums of every pair, rounded to bf16: rounding keeps order, so the ends of an interval bound the result."""
    sums, magnitudes = products64(x, ids, matrices)
    off = magnitudes * SUM_ERROR[x.device.type]
    return Bounds(*map(round_bf16, (sums, sums - off, sums + off)))


def rounded_silu(g):
    """silu of every g of an interval, rounded to bf16."""
    silu = torch.nn.functional.silu
    low = silu(torch.full_like(g.low, LEAST_SILU).clamp(g.low, g.high))
    high = torch.maximum(silu(g.low), silu(g.high))
    parts = silu(g.exact), low - low.abs() * SILU_ERROR, high + high.abs() * SILU_ERROR
    return Bounds(*map(round_bf16, parts))


def rounded_product(a, b):
    """Products of two numbers of two intervals, rounded to bf16."""
    corners = torch.stack([one * other for one in a[1:] for other in b[1:]])
    return Bounds(*map(round_bf16, (a.exact * b.exact, corners.amin(0), corners.amax(0))))


def swiglu64(x, ids, gate_up):
    """h of every pair from float64 sums, with the roundings to bf16 that the op has."""
    sums = torch.stack(rounded_sums(x, ids, gate_up))
    gate, up = (Bounds(*half) for half in sums.chunk(2, -1))
    return rounded_product(rounded_silu(gate), up)


def assert_within(got, bounds):
    """bf16 results lie where sums that are off by SUM_ERROR put them, and fewer than 1 in 100 is not the exact one.

    An interval is a single number unless an exact value is next to the middle of two bf16 numbers, or sums cancel.
    """
    got = got.double()
    both_nan = got.isnan() & bounds.exact.isnan()
    is_exact = (got == bounds.exact) | both_nan
    assert got.numel() == 0 or float((~is_exact).double().mean()) < 0.01
    is_within = (bounds.low <= got) & (got <= bounds.high)
    assert bool((is_within | is_exact).all())


def assert_right(given, tiling, with_codes=True):
    """Every step equals its definition, given what the step before made of it."""
    steps = run_steps(*operands(given), (tiling, with_codes))
    precision, ids = given.precision, given.routing.ids.reshape(-1)
    sites = (("x", given.x, steps.x), ("w2", steps.h, steps.w2))
    read = []
    for part, unrounded, rows in sites:
        if precision.activation is None:
            read.append(unrounded)
        else:
            wanted = quantize(unrounded, scheme=precision.activation, exponent=precision.exponent_of(part))
            for name in ("packed", "block_scales", "outer"):
                assert torch.equal(getattr(rows.block_tensor, name), getattr(wanted, name)), (part, name)
            read.append(dequantize(wanted))
        assert torch.equal(
            rows.values[:, : unrounded.shape[1]].float().nan_to_num(7.0), read[-1].float().nan_to_num(7.0)
        )
        assert not rows.values[:, unrounded.shape[1] :].any()
    pairs = read[0].repeat_interleave(given.routing.ids.shape[1], 0)
    assert_within(steps.h, swiglu64(pairs, ids, given.experts.gate_up))
    assert_within(steps.y_of_pairs, rounded_sums(read[1], ids, given.experts.down))
    wanted = combine_reference(steps.y_of_pairs.float(), given.routing, given.experts)
    assert torch.equal(steps.y.float().nan_to_num(7.0), wanted.nan_to_num(7.0))
    return steps

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


def swiglu64(x, ids, gate_up):
    """h of every pair from float64 sums, with the roundings to bf16 that the op has."""
    sums, _ = products64(x, ids, gate_up)
    gate, up = round_bf16(sums).chunk(2, dim=-1)
    return round_bf16(round_bf16(torch.nn.functional.silu(gate)) * up)


def assert_near(got, wanted, magnitude=None):
    """bf16 results of float32 sums equal the rounded float64 ones, but for those next to a bf16 boundary.

    float32 sums of exact terms are off by some 2^-24 of the sum of magnitudes, where bf16 steps are 2^-8: fewer than
    1 in 100 cross a boundary. Those that do are off by one bf16 step of what was rounded first.
    """
    got, wanted = got.double(), wanted.double()
    both_nan = got.isnan() & wanted.isnan()
    differs = (got != wanted) & ~both_nan
    assert got.numel() == 0 or float(differs.double().mean()) < 0.01
    slack = 0.0 if magnitude is None else magnitude * 2.0**-20
    near = (got - wanted).abs() <= wanted.abs() * 2.0**-5 + slack
    assert bool((near | ~differs).all())


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
    assert_near(steps.h, swiglu64(pairs, ids, given.experts.gate_up))
    sums, magnitudes = products64(read[1], ids, given.experts.down)
    assert_near(steps.y_of_pairs, sums.bfloat16(), magnitudes)
    wanted = combine_reference(steps.y_of_pairs.float(), given.routing, given.experts)
    assert torch.equal(steps.y.float().nan_to_num(7.0), wanted.nan_to_num(7.0))
    return steps

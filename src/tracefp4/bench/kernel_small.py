"""Cases of the small kernels of a decode step: norm, rotary embedding, gate of an MLP, routing.

Each takes microseconds, most of them launch and latency: what counts is how many calls a fused one replaces. Peers are
what a bf16 model runs there in torch, call by call and compiled; they make no FP4 copy.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tracefp4.bench.kernel_jobs import Bench, Case, Job, KernelSizes, contender, same_bytes
from tracefp4.bench.row import Check
from tracefp4.bench.traffic import BF16, NVFP4, Traffic, elementwise
from tracefp4.formats import NVFP4_ROW_POW2
from tracefp4.ops.backend import Backend
from tracefp4.ops.rms_norm import Normed, rms_norm
from tracefp4.ops.rotary import Angles, HeadNorms, rotary
from tracefp4.ops.route import Routed, route
from tracefp4.ops.route.reference import outside as outside_of_route
from tracefp4.ops.swiglu import Gated, swiglu
from tracefp4.ops.swiglu.reference import outside as outside_of_swiglu

EPSILON = 1e-6
RULE = (NVFP4_ROW_POW2, None)
_POSITIONS = 32768


def small_cases(sizes: KernelSizes) -> Iterator[Case]:
    """Return all cases of this module."""
    for model in sizes.models:
        for op, build in (("rms_norm", _rms_norm), ("rotary", _rotary), ("route", _route)):
            yield Case(id=f"kernels.{op}.{model}.{sizes.batch}", op=op, build=_of_model(build, model))
    yield Case(id="kernels.swiglu", op="swiglu", build=_swiglu)


def _of_model(build: Callable[[Bench, str], Job], model: str) -> Callable[[Bench], Job]:
    return lambda bench: build(bench, model)


def _contend(
    bench: Bench,
    traffic: Traffic,
    call: Callable[[int, Backend], Any],
    plain: tuple[Callable[..., Any], list[tuple[Any, ...]]],
    check: Callable[[list[Any]], Check],
) -> Job:
    """A job over numbered sets of operands; `plain` is the peers' function with operands for each set."""
    function, operands = plain
    faster = torch.compile(function, dynamic=False)
    ours = [partial(call, index, bench.backend) for index in range(len(operands))]
    return Job(
        ours=contender(ours, traffic),
        theirs={
            "plain torch": contender([partial(function, *o) for o in operands], traffic),
            "plain torch, compiled": contender([partial(faster, *o) for o in operands], traffic),
        },
        traffic=traffic,
        check=check,
        facts={"rows": bench.sizes.batch},
    )


def _draw(bench: Bench, traffic: Traffic, *shape: int) -> Tensor:
    """Normal bf16 values for every set of operands."""
    size = (bench.sets(traffic.bytes), *shape)
    return torch.randn(size, generator=bench.generator(0), device=bench.device, dtype=torch.bfloat16)


def _rms_norm(bench: Bench, model: str) -> Job:
    """Residual addition, norm, and the FP4 copy that the experts and a record take."""
    batch, hidden = bench.sizes.batch, bench.sizes.models[model].hidden
    traffic = elementwise(batch * hidden, BF16, BF16, BF16, BF16, NVFP4)
    x, residual = _draw(bench, traffic, batch, hidden), _draw(bench, traffic, batch, hidden).flip(1)
    weight = torch.ones(hidden, dtype=torch.bfloat16, device=bench.device)

    def call(index: int, backend: Backend) -> Normed:
        return rms_norm(
            x[index], weight, epsilon=EPSILON, residual=residual[index], rule=RULE, backend=backend
        )

    def check(outputs: list[Normed]) -> Check:
        got, wanted = outputs[0], call(0, Backend.REFERENCE)
        pairs = [(got.values, wanted.values)]
        for a, b in ((got.block_tensor, wanted.block_tensor),):
            assert a is not None and b is not None
            pairs += [(a.packed, b.packed), (a.block_scales, b.block_scales), (a.outer, b.outer)]
        return same_bytes(*pairs)

    operands = [(*pair, weight) for pair in zip(x, residual, strict=True)]
    return _contend(bench, traffic, call, (_plain_norm, operands), check)


def _plain_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return torch.nn.functional.rms_norm(total, weight.shape, weight, EPSILON), total


def _rotary(bench: Bench, model: str) -> Job:
    """Norms of heads and rotation, queries and keys lying in the output of one projection."""
    batch, shape = bench.sizes.batch, bench.sizes.models[model]
    heads, width = shape.q_heads + shape.kv_heads, shape.head_dim
    traffic = elementwise(batch * heads * width, BF16, BF16)
    qkv = _draw(bench, traffic, batch, heads + shape.kv_heads, width)
    ones = torch.ones(width, dtype=torch.bfloat16, device=bench.device)
    norms = HeadNorms(ones, ones, EPSILON)
    turns = torch.rand(_POSITIONS, width, generator=bench.generator(0), device=bench.device)
    angles = Angles(turns.cos().to(torch.bfloat16), turns.sin().to(torch.bfloat16))
    positions = torch.arange(batch, device=bench.device) * 7919 % _POSITIONS

    def parts(index: int) -> tuple[Tensor, Tensor]:
        return qkv[index, :, : shape.q_heads], qkv[index, :, shape.q_heads : heads]

    def call(index: int, backend: Backend) -> tuple[Tensor, Tensor]:
        q, k = parts(index)
        return rotary(q, k, norms=norms, angles=angles, positions=positions, backend=backend)

    def check(outputs: list[tuple[Tensor, Tensor]]) -> Check:
        return same_bytes(*zip(outputs[0], call(0, Backend.REFERENCE), strict=True))

    operands = [(*parts(index), ones, *angles, positions) for index in range(len(qkv))]
    return _contend(bench, traffic, call, (_plain_rotary, operands), check)


def _plain_rotary(
    q: Tensor, k: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, positions: Tensor
) -> list[Tensor]:
    found = []
    for x in (q, k):
        normed = torch.nn.functional.rms_norm(x, weight.shape, weight, EPSILON)
        low, high = normed.chunk(2, dim=-1)
        turned = torch.cat([-high, low], dim=-1)
        found.append(normed * cos[positions, None] + turned * sin[positions, None])
    return found


def _route(bench: Bench, model: str) -> Job:
    batch, shape = bench.sizes.batch, bench.sizes.models[model]
    traffic = Traffic(batch * (BF16 * shape.experts + (8 + BF16) * shape.top_k))
    logits = _draw(bench, traffic, batch, shape.experts)

    def call(index: int, backend: Backend) -> Routed:
        return route(logits[index], top_k=shape.top_k, renormalizes=True, backend=backend)

    def check(outputs: list[Routed]) -> Check:
        got, wanted = outputs[0], call(0, Backend.REFERENCE)
        if not torch.equal(got.ids, wanted.ids):
            return Check(error=torch.inf, allowed=0.0, text="experts that differ from the reference's")
        return _none(outside_of_route(got.weights, logits[0], got.ids, True))

    return _contend(bench, traffic, call, (_plain_route, [(part, shape.top_k) for part in logits]), check)


def _plain_route(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    weights, ids = torch.softmax(logits.float(), dim=-1).topk(top_k, dim=-1)
    return ids, (weights / weights.sum(-1, keepdim=True)).to(torch.bfloat16)


def _swiglu(bench: Bench) -> Job:
    """The gate of a large batch, with its FP4 copy."""
    rows, width = bench.sizes.rows // 4, bench.sizes.width // 2
    traffic = elementwise(rows * width, 2 * BF16, BF16, NVFP4)
    gate_up = _draw(bench, traffic, rows, 2 * width)

    def call(index: int, backend: Backend) -> Gated:
        return swiglu(gate_up[index], rule=RULE, backend=backend)

    def check(outputs: list[Gated]) -> Check:
        return _none(outside_of_swiglu(outputs[0].values, gate_up[0]))

    return _contend(bench, traffic, call, (_plain_swiglu, [(part,) for part in gate_up]), check)


def _plain_swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def _none(is_wrong: Tensor) -> Check:
    return Check(
        error=float(is_wrong.sum()), allowed=0.0, text="values further off than an exponential allows"
    )

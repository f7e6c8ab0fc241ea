"""Cases of the routed experts: a whole layer at every number of tokens, and new weights for all layers of a model.

The layer is W4A4, from hidden states to their weighted sum. Its peers compute the same layer in bf16 by torch's grouped
product, their routing lists given, so that ours alone pays for making them. Weights that are not in use are not read:
every row says how many experts were.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import silu

from tracefp4.bench.kernel_jobs import Bench, Case, Job, KernelSizes, contender, same_bytes
from tracefp4.bench.replay import Call, Contender
from tracefp4.bench.routing import Skew, draw_experts, num_distinct
from tracefp4.bench.row import Check
from tracefp4.bench.traffic import BF16, NVFP4, Traffic, expert_layer, refit
from tracefp4.formats import NVFP4_ROW_POW2, NVFP4_TENSOR_POW2
from tracefp4.formats.precision import LayerPrecision
from tracefp4.formats.tensor import BlockTensor
from tracefp4.formats.weight_fragments import WeightFragments, empty_fragments, to_fragments
from tracefp4.ops.backend import Backend
from tracefp4.ops.expert_layer import Experts, Routing
from tracefp4.ops.expert_layer import expert_layer as run_layer
from tracefp4.ops.expert_layer import refit as run_refit
from tracefp4.ops.expert_layer.reference import (
    combine_reference,
    down_reference,
    gate_up_reference,
    values_of,
)
from tracefp4.ops.quantize import quantize
from tracefp4.patching.shapes import ModelShape

PRECISION = LayerPrecision(activation=NVFP4_ROW_POW2, weight=NVFP4_TENSOR_POW2, kv=None)
CHECKED_TOKENS = 16
"""Tokens whose output is compared with the reference."""
CHECKED_EXPERTS = 4
"""Experts whose bytes are compared after a refit."""
ROUNDED = 2.0**-6
"""Largest error of a weighted sum over the sum of its terms' magnitudes: four roundings to bf16 of 2^-9 each on either
side, and sums in another order."""
CHANGED_CODES = 0.05
"""Largest share of the down-projection's input codes that may differ: its values are bf16 sums in another order."""
REFIT_SETS = 2
"""Layers with weights of their own; the others take them in turn, each far larger than a cache."""


class Weights(NamedTuple):
    """One layer's experts."""

    gate_up: Tensor
    """bfloat16 [E, 2 I, H]."""
    down: Tensor
    """bfloat16 [E, H, I]."""
    copies: tuple[Experts, ...]
    """The same in FP4; more than once if a cache could keep a part of it from one call to the next."""


def expert_cases(sizes: KernelSizes) -> Iterator[Case]:
    """Return all cases of this module."""
    for model in sizes.models:
        for skew, counts in (("uniform", sizes.expert_tokens), ("zipf", sizes.zipf_tokens)):
            for tokens in counts:
                name = f"kernels.experts.{model}.{tokens}.{skew}"
                yield Case(id=name, op="expert_layer", build=_layer(model, tokens, skew))  # type: ignore[arg-type]
    yield Case(id=f"kernels.refit.{sizes.refit_model}", op="expert_layer", build=_refit)


def _layer(model: str, num_tokens: int, skew: Skew) -> Callable[[Bench], Job]:
    def build(bench: Bench) -> Job:
        return _layer_job(bench, model, num_tokens, skew)

    return build


def _layer_job(bench: Bench, model: str, num_tokens: int, skew: Skew) -> Job:
    shape = bench.sizes.models[model]
    weights: Weights = bench.shared(f"experts of {model}", lambda: draw_weights(bench, shape))
    batches = _batches(bench, shape, num_tokens, skew)
    distinct = sum(num_distinct(routing.ids) for _, routing in batches) / len(batches)

    def ours(index: int, *, with_codes: bool = False) -> Any:
        x, routing = batches[index]
        experts = weights.copies[index % len(weights.copies)]
        return run_layer(
            x, routing, experts, precision=PRECISION, with_codes=with_codes, backend=bench.backend
        )

    def traffic(weight_bytes: float) -> Traffic:
        used = round(distinct)
        return expert_layer(shape, num_tokens=num_tokens, distinct=used, weight_bytes=weight_bytes)

    def check(outputs: list[Tensor]) -> Check:
        found = ours(0, with_codes=True)
        if not torch.equal(found.y, outputs[0]):
            return Check(error=torch.inf, allowed=1.0, text="tolerances: another result when codes are kept")
        return check_layer(found.y, (found.x, found.w2), batches[0], weights.copies[0])

    calls: list[Call] = [lambda i=i: ours(i).y for i in range(len(batches))]  # type: ignore[misc]
    return Job(
        ours=contender(calls, traffic(NVFP4)),
        theirs=bf16_layers(weights, batches, traffic(BF16)),
        traffic=traffic(NVFP4),
        check=check,
        facts={"distinct_experts": distinct, "routing": skew, "tokens": num_tokens},
    )


def draw_weights(bench: Bench, shape: ModelShape) -> Weights:
    """Return normal bf16 weights of one layer, and FP4 copies of them that no cache holds."""
    gate_up = _normal(bench, (shape.experts, 2 * shape.moe_inter, shape.hidden), shape.hidden**-0.5)
    down = _normal(bench, (shape.experts, shape.hidden, shape.moe_inter), shape.moe_inter**-0.5)
    pair = [empty_fragments(w.shape, NVFP4_TENSOR_POW2, bench.device) for w in (gate_up, down)]
    for w, fragments in zip((gate_up, down), pair, strict=True):
        run_refit(w, fragments, backend=bench.backend)
    num_copies = bench.sets(sum(part.num_bytes for part in pair))
    others = (Experts(*map(_copied, pair)) for _ in range(num_copies - 1))
    return Weights(gate_up, down, (Experts(*pair), *others))


def _copied(fragments: WeightFragments) -> WeightFragments:
    parts = {name: getattr(fragments, name).clone() for name in ("words", "scales", "exponents")}
    return replace(fragments, **parts)


def _normal(bench: Bench, shape: tuple[int, ...], scale: float) -> Tensor:
    generator = bench.generator(len(shape) + shape[-1])
    values = torch.randn(shape, generator=generator, device=bench.device, dtype=torch.bfloat16)
    return values.mul_(scale)


def _batches(bench: Bench, shape: ModelShape, num_tokens: int, skew: Skew) -> list[tuple[Tensor, Routing]]:
    """Hidden states and routings: as many that the weights of one batch have left the cache before its next turn."""
    used = min(shape.experts, num_tokens * shape.top_k)
    least = expert_layer(shape, num_tokens=num_tokens, distinct=used, weight_bytes=NVFP4)
    found = []
    for seed in range(bench.sets(least.bytes)):
        ids = draw_experts(num_tokens, num_experts=shape.experts, top_k=shape.top_k, skew=skew, seed=seed)
        weights = torch.softmax(_normal(bench, (num_tokens, shape.top_k), 1.0).float(), dim=-1)
        x = _normal(bench, (num_tokens, shape.hidden), 1.0)
        found.append((x, Routing(ids.to(bench.device), weights.to(torch.bfloat16))))
    return found


def bf16_layers(
    weights: Weights, batches: list[tuple[Tensor, Routing]], traffic: Traffic
) -> dict[str, Contender]:
    """Return the bf16 layers that ours is compared with: two layouts of the weights, elementwise parts compiled too.

    Args:
        weights: Of the layer.
        batches: Hidden states and routings.
        traffic: Of a call.
    """
    stored = (weights.gate_up.transpose(1, 2), weights.down.transpose(1, 2))
    swiglu, combine = (torch.compile(part, dynamic=True) for part in (_swiglu, _combine))
    layouts: dict[str, tuple[Any, ...]] = {
        "grouped_mm": (stored, _swiglu, _combine),
        "grouped_mm, compiled": (stored, swiglu, combine),
        "grouped_mm, other layout, compiled": (
            tuple(w.contiguous() for w in stored),
            swiglu,
            combine,
        ),
    }
    lists = [routing_lists(routing, weights.gate_up.shape[0]) for _, routing in batches]
    found = {}
    for name, (matrices, gated, combined) in layouts.items():
        calls: list[Call] = [
            lambda x=x, r=r, ls=ls, m=matrices, g=gated, c=combined: _bf16_layer(x, r, ls, m, (g, c))  # type: ignore[misc]
            for (x, r), ls in zip(batches, lists, strict=True)
        ]
        found[name] = contender(calls, traffic)
    return found


def routing_lists(routing: Routing, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the pairs sorted by expert, each pair's place in that order, and where each expert's pairs end (int32)."""
    ids, order = routing.ids.reshape(-1).sort(stable=True)
    places = torch.empty_like(order)
    places[order] = torch.arange(order.numel(), device=order.device)
    experts = torch.arange(num_experts, device=ids.device)
    return order, places, torch.searchsorted(ids, experts, right=True).to(torch.int32)


def _bf16_layer(
    x: Tensor,
    routing: Routing,
    lists: tuple[Tensor, Tensor, Tensor],
    matrices: tuple[Tensor, Tensor],
    parts: tuple[Callable[..., Tensor], Callable[..., Tensor]],
) -> Tensor:
    order, places, ends = lists
    swiglu, combine = parts
    h = torch._grouped_mm(x[order // routing.ids.shape[1]], matrices[0], offs=ends)
    y = torch._grouped_mm(swiglu(h), matrices[1], offs=ends)
    return combine(y, places, routing.weights)


def _swiglu(h: Tensor) -> Tensor:
    gate, up = h.chunk(2, dim=-1)
    return silu(gate) * up


def _combine(y: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    pairs = y[places].view(*weights.shape, y.shape[1])
    return (pairs * weights.unsqueeze(-1)).sum(1)


def check_layer(
    y: Tensor, sites: tuple[BlockTensor, BlockTensor], batch: tuple[Tensor, Routing], experts: Experts
) -> Check:
    """Compare the first tokens of a layer with the reference, each product under the operands that the kernels had.

    Args:
        y: bfloat16 [T, H], the layer's output.
        sites: Its inputs x and h as it rounded them.
        batch: What it was given.
        experts: Its weights.

    Returns:
        The worst of: bytes of x (none may differ), codes of h, the output; as parts of what is allowed.
    """
    x, routing = batch
    tokens, top_k = min(CHECKED_TOKENS, x.shape[0]), routing.ids.shape[1]
    rows, pairs = slice(tokens), slice(tokens * top_k)
    first = Routing(routing.ids[rows], routing.weights[rows])
    ids = first.ids.reshape(-1)
    own_x, own_h = (_rows_of(site, part) for site, part in zip(sites, (rows, pairs), strict=True))
    wanted_x = quantize(x[rows], scheme=NVFP4_ROW_POW2, backend=Backend.REFERENCE)
    is_same = torch.equal(own_x.packed, wanted_x.packed) and torch.equal(own_x.outer, wanted_x.outer)
    h = gate_up_reference(values_of(own_x).repeat_interleave(top_k, 0), ids, experts.gate_up)
    wanted_h = quantize(h, scheme=NVFP4_ROW_POW2, backend=Backend.REFERENCE)
    changed = float((own_h.codes() != wanted_h.codes()).float().mean())
    terms = down_reference(values_of(own_h), ids, experts.down)
    wanted, unit = (
        combine_reference(part, Routing(first.ids, weights), experts)
        for part, weights in ((terms, first.weights), (terms.abs(), first.weights.abs()))
    )
    error = float(((y[rows].float() - wanted).abs() / (unit * ROUNDED)).max())
    parts = (error, changed / CHANGED_CODES, 0.0 if is_same else torch.inf)
    return Check(error=_worst(parts), allowed=1.0, text="tolerances: bytes of x, codes of h, output")


def _worst(parts: tuple[float, ...]) -> float:
    """The largest, or NaN where there is one."""
    return float(torch.tensor(parts, dtype=torch.float64, device="cpu").max())


def _rows_of(t: BlockTensor, rows: slice) -> BlockTensor:
    return BlockTensor(
        packed=t.packed[rows], block_scales=t.block_scales[rows], outer=t.outer[rows], scheme=t.scheme
    )


def _refit(bench: Bench) -> Job:
    """All experts of a model, layer by layer, in place."""
    shape = bench.sizes.models[bench.sizes.refit_model]
    bench.made.clear()
    layers = [draw_weights(bench, shape) for _ in range(REFIT_SETS)]
    traffic = refit(shape, passes=2)  # the largest value of a matrix is known only after it was read

    def ours(layer: Weights) -> Experts:
        experts = layer.copies[0]
        for w, fragments in zip((layer.gate_up, layer.down), experts, strict=True):
            run_refit(w, fragments, backend=bench.backend)
        return experts

    def copy(layer: Weights) -> tuple[Tensor, Tensor]:
        return layer.gate_up.clone(), layer.down.clone()

    def copy_by_kernels(layer: Weights) -> tuple[Tensor, Tensor]:
        return torch.add(layer.gate_up, 0), torch.add(layer.down, 0)

    def check(outputs: list[Experts]) -> Check:
        pairs = []
        for w, got in zip((layers[0].gate_up, layers[0].down), outputs[0], strict=True):
            first = w[:CHECKED_EXPERTS]
            wanted = to_fragments(quantize(first, scheme=NVFP4_TENSOR_POW2, backend=Backend.REFERENCE))
            for name in ("words", "scales", "exponents"):
                pairs.append((getattr(got, name)[:CHECKED_EXPERTS], getattr(wanted, name)))
        return same_bytes(*pairs)

    return Job(
        ours=contender([lambda layer=layer: ours(layer) for layer in layers], traffic),  # type: ignore[misc]
        theirs={
            name: contender(
                [lambda layer=layer, call=call: call(layer) for layer in layers],  # type: ignore[misc]
                Traffic(2 * BF16 * shape.experts * 3 * shape.hidden * shape.moe_inter),
            )
            for name, call in (
                ("bf16 copy of the weights", copy),
                ("bf16 copy of the weights by kernels", copy_by_kernels),
            )
        },
        traffic=traffic,
        check=check,
        unit="ms",
        count=shape.layers,
        facts={"layers": shape.layers, "what": "routed experts of every layer, scales included"},
    )

"""The definition of expert_layer and refit, in plain torch: products in float32 over dequantized operands, one expert
after the other, R where a bf16 kernel writes its output."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import silu

from tracefp4.formats.arithmetic import round_bf16
from tracefp4.formats.element import E2M1
from tracefp4.formats.encoding import encode, read_operand
from tracefp4.formats.precision import LayerPrecision, Part
from tracefp4.formats.scaling import outer_scale
from tracefp4.formats.scheme import Scheme
from tracefp4.formats.selection import select_block_scales
from tracefp4.formats.tensor import BlockTensor
from tracefp4.formats.weight_fragments import WeightFragments, from_fragments, to_fragments
from tracefp4.ops.expert_layer.operands import ExpertOutput, Experts, Routing


class Rows(NamedTuple):
    """Activations at a rounding site."""

    values: Tensor
    """float32 [N, K], bf16 numbers."""
    block_tensor: BlockTensor | None
    """Their bytes; None where the site is not quantized."""


def expert_layer_reference(
    x: Tensor, routing: Routing, experts: Experts, precision: LayerPrecision, with_codes: bool
) -> ExpertOutput:
    """Compute checked operands; see `expert_layer`."""
    top_k = routing.ids.shape[1]
    ids = routing.ids.reshape(-1)
    x_rows = round_rows(x, precision, "x")
    h = gate_up_reference(x_rows.values.repeat_interleave(top_k, 0), ids, experts.gate_up)
    w2_rows = round_rows(h, precision, "w2")
    y = combine_reference(down_reference(w2_rows.values, ids, experts.down), routing, experts)
    sites = (x_rows.block_tensor, w2_rows.block_tensor) if with_codes else (None, None)
    return ExpertOutput(y.to(torch.bfloat16), *sites)


def round_rows(x: Tensor, precision: LayerPrecision, part: Part) -> Rows:
    """Round activations [N, K] to nearest at a site."""
    scheme = precision.activation
    if scheme is None:
        return Rows(x.to(torch.float32), None)
    block_tensor = _quantized(x, scheme=scheme, exponent=precision.exponent_of(part))
    return Rows(values_of(block_tensor), block_tensor)


def gate_up_reference(x: Tensor, ids: Tensor, gate_up: WeightFragments) -> Tensor:
    """Return R(R(silu(R(W1 x))) R(W3 x)) for pairs: x [P, H] and ids [P] give float32 [P, I]."""
    gate, up = _products(x, ids, gate_up).chunk(2, dim=-1)
    return round_bf16(round_bf16(silu(gate)) * up)


def down_reference(h: Tensor, ids: Tensor, down: WeightFragments) -> Tensor:
    """Return R(W2 h) for pairs: h [P, I] and ids [P] give float32 [P, H]."""
    return _products(h, ids, down)


def combine_reference(y: Tensor, routing: Routing, experts: Experts) -> Tensor:
    """Return R(sum over slots, in their order, of weight * y): y [P, H] gives float32 [T, H]."""
    num_tokens, top_k = routing.ids.shape
    terms = y.view(num_tokens, top_k, y.shape[1]) * routing.weights.to(torch.float32).unsqueeze(-1)
    total = torch.zeros_like(terms[:, 0])
    for slot in range(top_k):
        total = total + terms[:, slot]
    is_routed = ((routing.ids >= 0) & (routing.ids < experts.gate_up.shape[0])).all(1, keepdim=True)
    return round_bf16(total.masked_fill(~is_routed, torch.nan))


def refit_reference(weights: Tensor, fragments: WeightFragments) -> None:
    """Quantize checked matrices into fragments; see `refit`."""
    exponent = int(fragments.exponents[0]) if fragments.scheme.outer == "static" else None
    found = to_fragments(_quantized(weights, scheme=fragments.scheme, exponent=exponent))
    fragments.words.copy_(found.words)
    fragments.scales.copy_(found.scales)
    fragments.exponents.copy_(found.exponents)


def values_of(t: BlockTensor) -> Tensor:
    """Return the values that bytes stand for, float32."""
    table = torch.tensor(E2M1.values(), dtype=torch.float32, device=t.packed.device)
    values = table[t.codes().to(torch.int64)]
    return values * t.scales().repeat_interleave(t.scheme.block_size, -1)


def _quantized(x: Tensor, *, scheme: Scheme, exponent: int | None) -> BlockTensor:
    operand = read_operand(x, scheme)
    outer = outer_scale(operand.amax, scheme, exponent)
    scales = select_block_scales(operand.magnitude, operand.amax, outer, scheme, operand.finite)
    return encode(operand, scales, outer, scheme)


def _products(x: Tensor, ids: Tensor, matrices: WeightFragments) -> Tensor:
    """R(matrix[id] x) of every pair, float32 [P, N]; 0 where the id is no expert's."""
    y = x.new_zeros(x.shape[0], matrices.shape[1])
    for expert in range(matrices.shape[0]):
        (mine,) = torch.where(ids == expert)
        if mine.numel():
            w = values_of(from_fragments(matrices.of_expert(expert)))[0]
            y[mine] = round_bf16(x[mine] @ w.T)
    return y

"""A fused experts module by itself, in the state that patching would give it, and a dense reference of it."""

import torch
from torch import nn
from torch.nn.functional import silu

from tracefp4.formats import BF16_LAYER, NVFP4_KV, NVFP4_ROW_POW2, NVFP4_TENSOR_POW2, LayerPrecision
from tracefp4.formats.arithmetic import Arithmetic
from tracefp4.ops.dequantize import dequantize
from tracefp4.ops.guided_quantize import guided_quantize
from tracefp4.ops.quantize import quantize
from tracefp4.qat.experts import ExpertWeights, experts_forward

EXACT64 = Arithmetic(name="exact", dtype="float64", emulates_bf16=False, rounds_probabilities=False)
FP4 = LayerPrecision(
    activation=NVFP4_ROW_POW2, weight=NVFP4_TENSOR_POW2, kv=NVFP4_KV, k_exponent=0, v_exponent=-3
)


class Experts(nn.Module):
    """E experts of inner width I over width H; the names and layout of transformers' fused experts."""

    def __init__(self, num_experts=4, width=32, inner=16, dtype=torch.float64, **state):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(num_experts, 2 * inner, width, dtype=dtype) / 4)
        self.down_proj = nn.Parameter(torch.randn(num_experts, width, inner, dtype=dtype) / 4)
        fields = {"layer": 0, "precision": FP4, "arithmetic": EXACT64} | state
        self.tracefp4 = ExpertWeights(**fields)

    def forward(self, x, ids, weights):
        return experts_forward(self, x, ids, weights)


def bf16_experts(**options):
    return Experts(precision=BF16_LAYER, **options)


def nearest(x):
    """Rows of x at the values that an FP4 activation has."""
    return guided_quantize(x.detach(), scheme=NVFP4_ROW_POW2).values


def nearest_weight(w):
    return dequantize(quantize(w.detach(), scheme=NVFP4_TENSOR_POW2), dtype=w.dtype)


class Swap(torch.autograd.Function):
    """Matrix product x w^T computed at one pair of operands, differentiated at another."""

    @staticmethod
    def forward(ctx, x, w, x_forward, w_forward, x_backward, w_backward):
        ctx.save_for_backward(x_backward, w_backward)
        return x_forward @ w_forward.T

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        return dy @ w, dy.T @ x, None, None, None, None


def dense_reference(module, x, ids, weights, *, backward):
    """Loop over tokens and slots with the three matrix products of each projection written out."""
    rows = []
    for t in range(x.shape[0]):
        total = torch.zeros_like(x[t])
        for slot in range(ids.shape[1]):
            e = int(ids[t, slot])
            w13, w2 = module.gate_up_proj[e], module.down_proj[e]
            h = _product(x[t : t + 1], w13, nearest_weight(module.gate_up_proj)[e], backward)
            gate, up = h.chunk(2, dim=-1)
            y = _product(silu(gate) * up, w2, nearest_weight(module.down_proj)[e], backward)
            total = total + weights[t, slot] * y[0]
        rows.append(total)
    return torch.stack(rows)


def _product(x, w, w_hat, backward):
    x_hat = nearest(x)
    at = (x.detach(), w.detach()) if backward == "high_precision" else (x_hat, w_hat)
    return Swap.apply(x, w, x_hat, w_hat, *at)

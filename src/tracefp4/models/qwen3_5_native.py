"""A pass of Qwen3.5-MoE by our ops in bf16 storage; what `native_pass.py` says of passes holds here.

Beside its layers of experts and pages it has gated delta layers, whose states are advanced by one op in a decode step
and by plain torch in a chunk of a prompt. Norms multiply by 1 + w in float32. Rotation of a part of each head and the
gates of attention and of the shared expert are plain torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from tracefp4.formats.precision import LayerPrecision
from tracefp4.kvcache.pool import KVPool
from tracefp4.models.batch import TokenBatch
from tracefp4.models.native_pass import Layer, NativePass, attended, routed_of
from tracefp4.models.qwen3_5_moe_config import Qwen35MoeSizes
from tracefp4.models.qwen3_5_moe_weights import Qwen35MoeWeights
from tracefp4.models.qwen3_moe_weights import Qwen3MoeWeights
from tracefp4.models.rotary import RotaryTable, rotate
from tracefp4.models.taps import Taps
from tracefp4.ops.gated_delta import (
    HEAD_DIMS,
    DeltaState,
    DeltaWeights,
    Projected,
    gated_delta_prefill,
    gated_delta_step,
)
from tracefp4.ops.rms_norm import rms_norm
from tracefp4.ops.rotary import HeadNorms
from tracefp4.ops.swiglu import swiglu


class _Shared(NamedTuple):
    """The shared expert of a layer."""

    gate: Tensor
    gate_up: Tensor
    down: Tensor


class Qwen35NativePass(NativePass):
    """The forward, over weights that are replaced in place; arguments as of `NativePass`."""

    ops = ("rms_norm", "kv_append", "kv_attention", "gated_delta", "route", "expert_layer", "swiglu")
    _sizes: Qwen35MoeSizes

    def __init__(
        self,
        sizes: Qwen35MoeSizes,
        weights: Qwen35MoeWeights,
        *,
        precision: Sequence[LayerPrecision],
        table: RotaryTable,
    ) -> None:
        super().__init__(sizes, weights, precision=precision, table=table)
        if not {sizes.delta_key_dim, sizes.delta_value_dim} <= set(HEAD_DIMS):
            self.gaps = ("gated_delta",)
        self._final_norm = weights.norm("model.norm.weight")
        self._delta_weights = {layer: weights.delta(layer) for layer in sizes.delta_layers}
        self._shared = [_shared(weights, layer) for layer in range(sizes.num_layers)]

    def _new_layers(self, weights: Qwen3MoeWeights) -> list[Layer]:
        assert isinstance(weights, Qwen35MoeWeights)
        return [_layer(weights, layer, self._sizes) for layer in range(self._sizes.num_layers)]

    def _attention(self, index: int, n: Tensor, batch: TokenBatch, pool: KVPool, taps: Taps | None) -> Tensor:
        """What the output projection of a layer reads: gated attention, or the gated rows of a delta layer."""
        sizes, layer = self._sizes, self._layers[index]
        projected = linear(n, layer.qkv)
        if index in sizes.delta_layers:
            assert pool.states is not None, "a pool of this model has states"
            values, heads = sizes.delta_value_heads * sizes.delta_value_dim, sizes.delta_value_heads
            parts = projected.split([sizes.delta_width, values, heads, heads], dim=1)
            return advanced(Projected(*parts), self._delta_weights[index], pool.states.layers[index], batch)
        rows = projected.view(len(n), -1, sizes.head_dim)
        both, k, v = rows.split([2 * sizes.num_heads, sizes.num_kv_heads, sizes.num_kv_heads], dim=1)
        q, gate = both[:, ::2], both[:, 1::2]
        norms = layer.norms
        assert norms is not None
        cos, sin = (table.index_select(0, batch.positions)[:, None] for table in self._table.angles)
        q, k = (_turned(_normed(x, w, norms.epsilon), cos, sin) for x, w in ((q, norms.q), (k, norms.k)))
        self._append(index, (k, v), pool.layers[index], batch, taps)
        return attended(q, pool.layers[index], batch) * gate.flatten(1).sigmoid()

    def _mlp(self, index: int, n: Tensor, taps: Taps | None) -> Tensor:
        """Routed experts and the shared one: [T, hidden]."""
        shared = self._shared[index]
        rows = linear(swiglu(linear(n, shared.gate_up)).values, shared.down)
        return super()._mlp(index, n, taps) + linear(n, shared.gate).sigmoid() * rows


def advanced(
    projected: Projected,
    weights: DeltaWeights,
    state: DeltaState,
    batch: TokenBatch,
    *,
    emulates_bf16: bool = False,
) -> Tensor:
    """Return the gated outputs [T, Hv * Dv] of a delta layer, segment by segment; the states move on."""
    parts = []
    for segment in batch.segments:
        slots = segment.state_slots
        assert slots is not None, "a segment of this model says where its states are"
        own = Projected(*map(segment.spread, projected))
        if segment.positions.shape[1] > 1:
            out = gated_delta_prefill(
                own, weights, state, slots=slots, lengths=segment.lengths, emulates_bf16=emulates_bf16
            )
        else:
            newest = Projected(*(part[:, 0] for part in own))
            step = gated_delta_step(newest, weights, state, slots=slots, emulates_bf16=emulates_bf16)
            out = step[:, None]
        parts.append(segment.flatten(out))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _normed(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Norm heads [T, H, D]."""
    return rms_norm(x.reshape(-1, x.shape[-1]), weight, epsilon=epsilon).values.view(x.shape)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first values of heads [T, H, D], as many as the tables are wide."""
    first, rest = x.split([cos.shape[-1], x.shape[-1] - cos.shape[-1]], dim=-1)
    return torch.cat([rotate(first, cos, sin), rest], dim=-1)


def _shared(weights: Qwen35MoeWeights, index: int) -> _Shared:
    name = f"model.layers.{index}.mlp.shared_expert"
    return _Shared(
        weights[f"{name}_gate.weight"],
        weights[f"{name}.gate_up_proj.weight"],
        weights[f"{name}.down_proj.weight"],
    )


def _layer(weights: Qwen35MoeWeights, index: int, sizes: Qwen35MoeSizes) -> Layer:
    name = f"model.layers.{index}"
    if index in sizes.delta_layers:
        read, norms, output = "linear_attn.in_proj", None, "linear_attn.out_proj"
    else:
        q, k = (weights.norm(f"{name}.self_attn.{which}_norm.weight") for which in "qk")
        read, norms, output = "self_attn.qkv_proj", HeadNorms(q, k, sizes.norm_epsilon), "self_attn.o_proj"
    return Layer(
        input_norm=weights.norm(f"{name}.input_layernorm.weight"),
        qkv=weights[f"{name}.{read}.weight"],
        norms=norms,
        output=weights[f"{name}.{output}.weight"],
        mlp_norm=weights.norm(f"{name}.post_attention_layernorm.weight"),
        mlp=routed_of(weights, index),
    )

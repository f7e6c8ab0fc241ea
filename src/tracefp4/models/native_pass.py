"""A pass of Qwen3-MoE or OLMoE by our ops in bf16 storage: kernels on an accelerator, their references on a CPU.

It computes the function of `qwen3_moe.py`, whole layers by kernels: each norm with the addition before it, one matrix
for q, k and v, rounding of K and V on their way to the pages, the experts of a layer from FP4 bytes. Sums run in
another order than there, and RoPE rounds its products, as transformers does in bf16; so values agree up to roundings
to bf16.

A pass asks the host nothing, allocates through torch alone, and has shapes that follow from the batch's shapes. A batch
of one decoding segment can therefore be captured in a CUDA graph and filled up with rows that nobody reads: slot -1
(nothing is stored), token 0, position 0, a page table of the null frame. Sampling is the caller's.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from tracefp4.formats.precision import LayerPrecision, Part
from tracefp4.formats.tensor import BlockTensor
from tracefp4.guidance.record import Site
from tracefp4.kvcache.pool import KVPool
from tracefp4.models.batch import TokenBatch
from tracefp4.models.bf16_experts import Bf16Experts, bf16_experts
from tracefp4.models.qwen3_moe_config import Qwen3MoeSizes
from tracefp4.models.qwen3_moe_weights import EMBEDDING, EXPERT_NAMES, Qwen3MoeWeights
from tracefp4.models.rotary import RotaryTable
from tracefp4.models.taps import Taps
from tracefp4.ops.dequantize import dequantize
from tracefp4.ops.expert_layer import Experts, Routing, expert_layer
from tracefp4.ops.kv_append import kv_append, kv_quantize_append
from tracefp4.ops.kv_attention import kv_attention
from tracefp4.ops.pages import LayerPages
from tracefp4.ops.quantize import quantize
from tracefp4.ops.rms_norm import Normed, rms_norm
from tracefp4.ops.rotary import HeadNorms, rotary
from tracefp4.ops.route import route
from tracefp4.ops.swiglu import swiglu


class NativePass:
    """The forward, over weights that are replaced in place.

    Args:
        sizes: the model's.
        weights: in bf16 storage; where they lie never changes, so every tensor is looked up once, here.
        precision: one entry per decoder layer.
        table: cosines and sines; the pass reads them as they are (`reserve`).
    """

    ops: tuple[str, ...] = ("rms_norm", "rotary", "kv_append", "kv_attention", "route", "expert_layer")
    """What a decode pass is made of, beside plain matrix products."""
    gaps: tuple[str, ...] = ()
    """Those of them whose kernels do not take this model's sizes, on any device."""

    def __init__(
        self,
        sizes: Qwen3MoeSizes,
        weights: Qwen3MoeWeights,
        *,
        precision: Sequence[LayerPrecision],
        table: RotaryTable,
    ) -> None:
        self._sizes = sizes
        self._precision = tuple(precision)
        self._table = table
        self._embedding = weights[EMBEDDING]
        self._final_norm = weights["model.norm.weight"]
        self._layers = self._new_layers(weights)

    def _new_layers(self, weights: Qwen3MoeWeights) -> list[Layer]:
        return [layer_of(weights, index, self._sizes) for index in range(self._sizes.num_layers)]

    def reserve(self, length: int) -> None:
        """Make positions 0 .. length - 1 known.

        Queries and keys at others come out as NaN, so call it before a pass that reaches further. Growing moves the
        tables: call it before a pass is captured in a graph, with the longest length of any replay.
        """
        self._table.reserve(length)

    @torch.no_grad()
    def run(self, batch: TokenBatch, pool: KVPool, taps: Taps | None = None) -> Tensor:
        """Run one pass: append K and V of every token to the pages.

        Args:
            batch: T >= 1 tokens, on the device of the weights; positions must be reserved. A row with slot -1 stores
                nothing.
            pool: pages of every layer.
            taps: takes the bytes of the sites and layers that it names; None records nothing.

        Returns:
            bfloat16 [M, H]: hidden states of `batch.logit_rows` after the last norm, to be multiplied by the head.
        """
        stream = self._embedding.index_select(0, batch.token_ids)
        added: Tensor | None = None
        for index, layer in enumerate(self._layers):
            n, stream = self._normed(stream, added, layer.input_norm)
            attended = self._attention(index, n, batch, pool, taps)
            n, stream = self._normed(stream, linear(attended, layer.output), layer.mlp_norm)
            added = self._mlp(index, n, taps)
        stream = stream.index_select(0, batch.logit_rows)
        added = None if added is None else added.index_select(0, batch.logit_rows)
        return self._normed(stream, added, self._final_norm)[0]

    def _normed(self, stream: Tensor, added: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return the norm of the residual stream after an addition, and the stream."""
        epsilon = self._sizes.norm_epsilon
        if added is None:
            return rms_norm(stream, weight, epsilon=epsilon).values, stream
        found: Normed = rms_norm(added, weight, epsilon=epsilon, residual=stream)
        assert found.residual is not None
        return found.values, found.residual

    def _attention(self, index: int, n: Tensor, batch: TokenBatch, pool: KVPool, taps: Taps | None) -> Tensor:
        """Attention output [T, H * D] of normed rows, whose K and V go to the pages first."""
        sizes, layer, pages = self._sizes, self._layers[index], pool.layers[index]
        heads = [sizes.num_heads, sizes.num_kv_heads, sizes.num_kv_heads]
        qkv = linear(n, layer.qkv)
        norms: HeadNorms | None = layer.norms
        if norms is not None and not sizes.norms_heads:
            qkv, norms = self._normed_projection(qkv, norms), None
        q, k, v = qkv.view(len(n), -1, sizes.head_dim).split(heads, dim=1)
        q, k = rotary(q, k, norms=norms, angles=self._table.angles, positions=batch.positions)
        self._append(index, (k, v), pages, batch, taps)
        return attended(q, pages, batch)

    def _append(
        self, index: int, rows: tuple[Tensor, Tensor], pages: LayerPages, batch: TokenBatch, taps: Taps | None
    ) -> None:
        """Put rows of K and V into the pages of a layer, in FP4 if the layer keeps them so."""
        k, v = rows
        if self._precision[index].kv is None:
            kv_append(pages.keys, k, slots=batch.slots)
            kv_append(pages.values, v, slots=batch.slots)
            return
        found = kv_quantize_append(pages, k, v, slots=batch.slots)
        if taps is not None:
            taps.keep(Site("k", index), found[0])
            taps.keep(Site("v", index), found[1])

    def _normed_projection(self, qkv: Tensor, norms: HeadNorms) -> Tensor:
        """Queries and keys normed over the whole projection and, where the model clips, all three clipped."""
        q, k, v = qkv.split([len(norms.q), len(norms.k), qkv.shape[1] - len(norms.q) - len(norms.k)], dim=1)
        q, k = (rms_norm(x, w, epsilon=norms.epsilon).values for x, w in ((q, norms.q), (k, norms.k)))
        limit = self._sizes.clip_qkv
        joined = torch.cat([q, k, v], dim=1)
        return joined if limit is None else joined.clamp_(-limit, limit)

    def _mlp(self, index: int, n: Tensor, taps: Taps | None) -> Tensor:
        """The MLP of a layer, dense or of routed experts: [T, hidden]."""
        mlp = self._layers[index].mlp
        if isinstance(mlp, _Dense):
            return linear(swiglu(linear(n, mlp.gate_up)).values, mlp.down)
        routed = route(linear(n, mlp.router), top_k=self._sizes.top_k, renormalizes=self._sizes.renormalizes)
        if taps is not None:
            taps.keep_routing(index, routed.ids)
        if isinstance(mlp.experts, Bf16Experts):
            return bf16_experts(n, routed, mlp.experts, rounded=partial(self._rounded, index, taps))
        is_tapped = taps is not None and (Site("x", index) in taps or Site("w2", index) in taps)
        found = expert_layer(
            n, Routing(*routed), mlp.experts, precision=self._precision[index], with_codes=is_tapped
        )
        _keep(taps, index, x=found.x, w2=found.w2)
        return found.y

    def _rounded(self, index: int, taps: Taps | None, part: Part, rows: Tensor) -> Tensor:
        """Round what experts in bf16 read, if the layer does."""
        precision = self._precision[index]
        if precision.activation is None:
            return rows
        found = quantize(rows, scheme=precision.activation, exponent=precision.exponent_of(part))
        _keep(taps, index, **{part: found})
        return dequantize(found, dtype=rows.dtype)


class _Dense(NamedTuple):
    """A dense MLP."""

    gate_up: Tensor
    down: Tensor


class Routed(NamedTuple):
    """Routed experts."""

    router: Tensor
    experts: Experts | Bf16Experts


class Layer(NamedTuple):
    """The weights of a decoder layer as the pass reads them."""

    input_norm: Tensor
    qkv: Tensor
    norms: HeadNorms | None
    output: Tensor
    mlp_norm: Tensor
    mlp: _Dense | Routed


def layer_of(weights: Qwen3MoeWeights, index: int, sizes: Qwen3MoeSizes) -> Layer:
    """Return the weights of a layer that attends."""

    def named(name: str) -> Tensor:
        return weights[f"model.layers.{index}.{name}"]

    mlp: _Dense | Routed
    if index in sizes.dense_layers:
        mlp = _Dense(named("mlp.gate_up_proj.weight"), named("mlp.down_proj.weight"))
    else:
        mlp = routed_of(weights, index)
    return Layer(
        input_norm=named("input_layernorm.weight"),
        qkv=named("self_attn.qkv_proj.weight"),
        norms=HeadNorms(
            named("self_attn.q_norm.weight"), named("self_attn.k_norm.weight"), sizes.norm_epsilon
        ),
        output=named("self_attn.o_proj.weight"),
        mlp_norm=named("post_attention_layernorm.weight"),
        mlp=mlp,
    )


def routed_of(weights: Qwen3MoeWeights, index: int) -> Routed:
    """Return the routed experts of a layer."""
    name = f"model.layers.{index}"
    experts = weights.experts(index) or Bf16Experts(*(weights[f"{name}.{part}"] for part in EXPERT_NAMES))
    return Routed(weights[f"{name}.mlp.gate.weight"], experts)


def attended(q: Tensor, pages: LayerPages, batch: TokenBatch) -> Tensor:
    """Attention output [T, H * D] of rotated queries [T, H, D], segment by segment."""
    parts = [
        segment.flatten(
            kv_attention(
                segment.spread(q),
                pages,
                page_table=segment.page_table,
                positions=segment.positions,
                rounds_probabilities=True,
            )
        )
        for segment in batch.segments
    ]
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).flatten(1)


def _keep(taps: Taps | None, index: int, **rows: BlockTensor | None) -> None:
    """Tap the expert inputs of a layer that have bytes."""
    if taps is None:
        return
    for kind in ("x", "w2"):
        found = rows.get(kind)
        if found is not None:
            taps.keep(Site(kind, index), found)

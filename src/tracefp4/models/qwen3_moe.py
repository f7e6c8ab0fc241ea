"""Qwen3-MoE and OLMoE for the engine: a flat batch of tokens through paged FP4 attention and FP4 experts.

R is rounding to bf16, applied where a bf16 kernel writes its output (and nowhere when the arithmetic does
not emulate bf16). Per layer, with n the normed residual stream h:

    q, k, v = R(n Wq), R(n Wk), R(n Wv);  q, k = R(norm(q)), R(norm(k));  q, k = R(rope(q)), R(rope(k))
    K, V -> FP4 -> pages;   a = R(attention(q, pages));   h = R(h + R(a Wo))
    n = R(norm(h));  ids = top-k of R(n Wg);  w = R(softmax over all experts, at ids, renormalised if asked)
    x^ = Q(n);  g, u = R(x^ W13^);  m = R(R(silu(g)) * u);  m^ = Q(m);  y = R(m^ W2^)
    h = R(h + R(sum_j w_j y_j))

OLMoE norms q and k over the whole projection and may clip q, k and v before heads are rotated.

Attention reads pages only, also inside one prefill chunk. Rounding and routing go through the guidance
session, which records them when one is open. The trainer computes the same function through transformers'
modules.

This is the definition, which runs where bf16 is emulated. In bf16 storage the same function is computed by whole
kernels (`native_pass.py`), and a session is told what they rounded when the pass is over.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from tracefp4.errors import ConfigError
from tracefp4.formats.arithmetic import Arithmetic, round_bf16_
from tracefp4.formats.packing import pack_codes
from tracefp4.formats.precision import PARTS, LayerPrecision
from tracefp4.formats.tensor import BlockTensor
from tracefp4.guidance.record import Site, SiteKind
from tracefp4.guidance.rounding import round_site, route_site
from tracefp4.guidance.session import current
from tracefp4.kvcache.pool import KVPool
from tracefp4.kvcache.states import StatePool
from tracefp4.models.batch import TokenBatch
from tracefp4.models.native_pass import NativePass
from tracefp4.models.qwen3_moe_config import Qwen3MoeSizes, read_sizes
from tracefp4.models.qwen3_moe_weights import Qwen3MoeWeights, device_of
from tracefp4.models.rotary import RotaryTable, rotate
from tracefp4.models.taps import Taps
from tracefp4.ops.grouped_matmul import grouped_matmul
from tracefp4.ops.kv_append import kv_append
from tracefp4.ops.kv_attention import kv_attention
from tracefp4.ops.pages import Pages


class Qwen3MoeEngineModel:
    """Weights and forward pass.

    Args:
        config: transformers Qwen3MoeConfig or OlmoeConfig.
        state: state dict of transformers' model of that config, names as in memory (experts fused); matrices of an
            FP4 checkpoint may be BlockTensors (`Qwen3MoeWeights.load`). The device of its first tensor is the
            model's.
        precision: one LayerPrecision per decoder layer; a dense layer's `activation` and `weight` must be
            None.
        arithmetic: compute dtype and rounding points.

    Raises: ConfigError if the config is not supported, precision or state do not fit it, or the arithmetic's
        storage cannot hold a scheme's values.
    """

    def __init__(
        self,
        config: Any,
        state: Mapping[str, Tensor | BlockTensor],
        *,
        precision: Sequence[LayerPrecision],
        arithmetic: Arithmetic,
    ) -> None:
        self.sizes = self._read_sizes(config)
        self.precision = tuple(precision)
        self.arithmetic = arithmetic
        self._check_precision()
        self.device = device_of(state)
        self._rotary = RotaryTable(
            self.sizes.rotary_dim, theta=self.sizes.rope_theta, arithmetic=arithmetic, device=self.device
        )
        self.weights = self._new_weights()
        self.weights.load(state)
        self.native: NativePass | None = None
        """The pass by kernels, in bf16 storage; None in any other arithmetic."""
        if arithmetic.dtype == "bfloat16":
            self.native = self._native_pass()

    def _read_sizes(self, config: Any) -> Qwen3MoeSizes:
        return read_sizes(config)

    def _new_weights(self) -> Qwen3MoeWeights:
        return Qwen3MoeWeights(
            self.sizes, precision=self.precision, arithmetic=self.arithmetic, device=self.device
        )

    def _native_pass(self) -> NativePass:
        return NativePass(self.sizes, self.weights, precision=self.precision, table=self._rotary)

    def new_states(self, num_slots: int, *, matrices: torch.dtype | None = None) -> StatePool | None:
        """Return what layers without pages keep of so many sequences; None, as all layers have pages."""
        return None

    def taps(self, sites: Collection[Site], *, routed_layers: Sequence[int]) -> Taps:
        """Return empty taps for one native pass. Raises: ConfigError as `Taps`."""
        return Taps(
            sites, precision=self.precision, routed_layers=routed_layers, num_experts=self.sizes.num_experts
        )

    @torch.no_grad()
    def forward(self, batch: TokenBatch, pool: KVPool) -> Tensor:
        """Run one pass: append K and V of every token to the pages, return logits [M, V] of
        `batch.logit_rows`.

        T = 0 is not allowed. Row results do not depend on which other rows are in the batch, up to the order
        of accumulation inside matmuls.

        Raises: ConfigError in bf16 storage for a session that replays: kernels round to nearest alone.
        """
        if self.native is not None:
            return self._native_logits(self.native, batch, pool)
        h = self.weights["model.embed_tokens.weight"].index_select(0, batch.token_ids)
        cos, sin = self._rotary.rows(batch.positions)
        for layer in range(self.sizes.num_layers):
            n = self._norm(h, f"model.layers.{layer}.input_layernorm.weight")
            q, k, v = self._project(layer, n, cos, sin)
            self._append(layer, k, v, batch.slots, pool)
            a = self._attend(layer, q, batch, pool)
            h = self._add(h, self._linear(a, f"model.layers.{layer}.self_attn.o_proj.weight"))
            n = self._norm(h, f"model.layers.{layer}.post_attention_layernorm.weight")
            mlp = self._dense if layer in self.sizes.dense_layers else self._experts
            h = self._add(h, mlp(layer, n))
        wanted = h.index_select(0, batch.logit_rows)
        return self._round(linear(self._norm(wanted, "model.norm.weight"), self.weights.head))

    def _native_logits(self, native: NativePass, batch: TokenBatch, pool: KVPool) -> Tensor:
        """The same by kernels; a recording session is told of every site and layer afterwards."""
        session = current()
        if session is not None and session.sink is None:
            raise ConfigError(
                f"The engine's {self.arithmetic.name} pass follows no records; got one inside replay. It records, or "
                "does neither. Follow records in the trainer, or in an arithmetic that emulates bf16."
            )
        native.reserve(int(batch.positions.max()) + 1)
        if session is None or session.sink is None:
            return linear(native.run(batch, pool), self.weights.head)
        layers = range(self.sizes.num_layers)
        sites = [Site(p, n) for n in layers for p in PARTS if self.precision[n].scheme_of(p) is not None]
        taps = self.taps(sites, routed_layers=[n for n in layers if n not in self.sizes.dense_layers])
        logits = linear(native.run(batch, pool, taps), self.weights.head)
        taps.tell(session.sink)
        return logits

    def _project(self, layer: int, n: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [T, H, D], keys and values [T, C, D]; queries and keys after norm and RoPE."""
        name, head_dim = f"model.layers.{layer}.self_attn", self.sizes.head_dim
        q, k, v = (self._linear(n, f"{name}.{which}_proj.weight") for which in "qkv")
        if self.sizes.norms_heads:
            q, k = (x.view(n.shape[0], -1, head_dim) for x in (q, k))
        q, k = self._norm(q, f"{name}.q_norm.weight"), self._norm(k, f"{name}.k_norm.weight")
        if (limit := self.sizes.clip_qkv) is not None:
            q, k, v = (x.clamp_(-limit, limit) for x in (q, k, v))
        q, k, v = (x.view(n.shape[0], -1, head_dim) for x in (q, k, v))
        return self._round(rotate(q, cos, sin)), self._round(rotate(k, cos, sin)), v

    def _append(self, layer: int, k: Tensor, v: Tensor, slots: Tensor, pool: KVPool) -> None:
        """Quantize K and V, if the layer does, and write them to the pages."""
        pages = pool.layers[layer]
        kv_append(pages.keys, self._stored(layer, "k", k, pages.keys), slots=slots)
        kv_append(pages.values, self._stored(layer, "v", v, pages.values), slots=slots)

    def _stored(self, layer: int, kind: SiteKind, rows: Tensor, pages: Pages) -> BlockTensor | Tensor:
        if isinstance(pages, Tensor):
            return rows
        num_tokens, num_heads, _ = rows.shape
        rounded = round_site(
            rows.reshape(num_tokens, -1),
            site=Site(kind, layer),
            scheme=pages.scheme,
            exponent=self.precision[layer].exponent_of(kind),
        )
        assert rounded.codes is not None
        return BlockTensor(
            packed=pack_codes(rounded.codes).view(num_tokens, num_heads, -1),
            block_scales=rounded.block_scales.view(num_tokens, num_heads, -1),
            outer=pages.outer,
            scheme=pages.scheme,
        )

    def _attend(self, layer: int, q: Tensor, batch: TokenBatch, pool: KVPool) -> Tensor:
        """Attention output [T, H * D] of every row, segment by segment."""
        parts = []
        for segment in batch.segments:
            out = kv_attention(
                segment.spread(q),
                pool.layers[layer],
                page_table=segment.page_table,
                positions=segment.positions,
                rounds_probabilities=self.arithmetic.rounds_probabilities,
            )
            parts.append(segment.flatten(out))
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        return self._round(out.flatten(1))

    def _experts(self, layer: int, n: Tensor) -> Tensor:
        """Routed experts [T, hidden]."""
        name, top_k = f"model.layers.{layer}.mlp", self.sizes.top_k
        logits = self._linear(n, f"{name}.gate.weight")
        ids = route_site(layer, logits, top_k=top_k)
        expert_weights = self._expert_weights(logits, ids)
        # From here on the rows are (token, slot) pairs: token-major at rounding sites, sorted by expert in matmuls.
        sorted_ids, order = torch.sort(ids.reshape(-1), stable=True)
        group_sizes = torch.bincount(sorted_ids, minlength=self.sizes.num_experts)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(order.shape[0], device=order.device)
        x = self._activation("x", layer, n).index_select(0, order // top_k)
        x = self._round(grouped_matmul(x, self.weights[f"{name}.experts.gate_up_proj"], group_sizes))
        gate, up = x.index_select(0, inverse).chunk(2, dim=-1)
        m = self._round(self._round(silu(gate)).mul_(up))
        m = self._activation("w2", layer, m).index_select(0, order)
        y = self._round(grouped_matmul(m, self.weights[f"{name}.experts.down_proj"], group_sizes))
        y = y.index_select(0, inverse).view(n.shape[0], top_k, -1).mul_(expert_weights[..., None])
        return self._round(y.sum(dim=1))

    def _activation(self, kind: SiteKind, layer: int, x: Tensor) -> Tensor:
        """Round x [N, K] at a site, if the layer does."""
        precision = self.precision[layer]
        if precision.activation is None:
            return x
        exponent = precision.exponent_of(kind)
        return round_site(x, site=Site(kind, layer), scheme=precision.activation, exponent=exponent).values

    def _expert_weights(self, logits: Tensor, ids: Tensor) -> Tensor:
        """Combination weights [T, J]: softmax over all experts, in fp32 or wider, at the chosen ids."""
        wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
        chosen = torch.softmax(logits, dim=-1, dtype=wide).gather(1, ids)
        if self.sizes.renormalizes:
            chosen = chosen / chosen.sum(dim=-1, keepdim=True)
        return self._round(chosen.to(logits.dtype))

    def _dense(self, layer: int, n: Tensor, part: str = "mlp") -> Tensor:
        """A dense MLP [T, hidden], or a part of one that is; never quantized."""
        name = f"model.layers.{layer}.{part}"
        gate = self._round(silu(self._linear(n, f"{name}.gate_proj.weight")))
        m = self._round(gate.mul_(self._linear(n, f"{name}.up_proj.weight")))
        return self._linear(m, f"{name}.down_proj.weight")

    def _norm(self, x: Tensor, name: str) -> Tensor:
        """R(w * (x * rsqrt(mean(x^2) + eps))) over the last dimension."""
        mean_square = x.square().mean(dim=-1, keepdim=True)
        normed = x * torch.rsqrt(mean_square + self.sizes.norm_epsilon)
        return self._round(normed.mul_(self.weights[name]))

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return self._round(linear(x, self.weights[name]))

    def _add(self, residual: Tensor, x: Tensor) -> Tensor:
        return self._round(residual + x)

    def _round(self, x: Tensor) -> Tensor:
        """Round in place to bf16 values, if this arithmetic emulates bf16."""
        return round_bf16_(x) if self.arithmetic.emulates_bf16 else x

    def _check_precision(self) -> None:
        if len(self.precision) != self.sizes.num_layers:
            raise ConfigError(
                f"Every layer needs a precision; got {len(self.precision)} for {self.sizes.num_layers} "
                "layers. One LayerPrecision per decoder layer, BF16_LAYER where nothing is quantized. Pass "
                "the plan's tuple."
            )
        for found in self.precision:
            found.check_storage(self.arithmetic)
        for layer in sorted(self.sizes.dense_layers):
            found = self.precision[layer]
            if found.activation is not None or found.weight is not None:
                raise ConfigError(
                    f"Layer {layer} is a dense MLP and has no experts to quantize; got activation and weight "
                    "schemes for it. Only `kv` may be set there. Exclude the layer's experts in the plan."
                )

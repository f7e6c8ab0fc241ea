"""Qwen3.5-MoE for the engine: layers with a state beside layers with pages, routed experts beside a shared one.

R is rounding to bf16 as in `qwen3_moe.py`, n the normed residual stream h; a norm is R(x / rms(x) (1 + w)). Per layer

    delta:      a = gated delta rule (`ops.gated_delta`) of R(n Wqkv), R(n Wz), R(n Wb), R(n Wa)
    attention:  q, g = R(n Wq) per head;  k, v;  q, k normed per head, the first values of each rotated
                a = R(attention(q, pages) R(sigmoid(g)))
    h = R(h + R(a Wo));  n = R(norm(h))
    s = R(shared expert(n));  h = R(h + R(routed experts(n) + R(R(sigmoid(R(n ws))) s)))

A decode step of a delta layer advances the state in `pool.states`; a chunk of a prompt advances it by all of its tokens
at once, in another order of operations.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from tracefp4.errors import ConfigError
from tracefp4.kvcache.pool import KVPool
from tracefp4.kvcache.states import StatePool, StateShape
from tracefp4.models.batch import TokenBatch
from tracefp4.models.native_pass import NativePass
from tracefp4.models.qwen3_5_moe_config import Qwen35MoeSizes, read_sizes
from tracefp4.models.qwen3_5_moe_weights import Qwen35MoeWeights
from tracefp4.models.qwen3_5_native import Qwen35NativePass, advanced
from tracefp4.models.qwen3_moe import Qwen3MoeEngineModel
from tracefp4.models.rotary import rotate
from tracefp4.ops.gated_delta import Projected


class Qwen35MoeEngineModel(Qwen3MoeEngineModel):
    """Weights and forward pass of transformers' Qwen3_5MoeForCausalLM; see `Qwen3MoeEngineModel`.

    Segments of its batches carry `state_slots`, its pools carry `states` (`new_states`). Precisions of delta layers
    have no `kv`.

    Raises: ConfigError as there.
    """

    sizes: Qwen35MoeSizes
    weights: Qwen35MoeWeights

    def new_states(self, num_slots: int, *, matrices: torch.dtype | None = None) -> StatePool:
        """Return states for so many sequences.

        Args:
            num_slots: sequences that run at once.
            matrices: how the matrices are stored; None: as wide as the rule is computed, float32 or float64.
        """
        sizes, dtype = self.sizes, self.arithmetic.torch_dtype
        shape = StateShape(
            layers=tuple(sorted(sizes.delta_layers)),
            num_slots=num_slots,
            num_heads=sizes.delta_value_heads,
            value_dim=sizes.delta_value_dim,
            key_dim=sizes.delta_key_dim,
            width=sizes.delta_width,
            num_taps=sizes.delta_taps,
        )
        matrices = torch.promote_types(dtype, torch.float32) if matrices is None else matrices
        return StatePool(shape, inputs=dtype, matrices=matrices, device=self.device)

    @torch.no_grad()
    def forward(self, batch: TokenBatch, pool: KVPool) -> Tensor:
        """Run one pass: append K and V to the pages, advance the states, return logits [M, V] of `batch.logit_rows`.

        T = 0 is not allowed. A state must be that of the positions before the batch's, K and V likewise.

        Raises: ConfigError in bf16 storage for a session that replays: kernels round to nearest alone.
        """
        if self.native is not None:
            return self._native_logits(self.native, batch, pool)
        h = self.weights["model.embed_tokens.weight"].index_select(0, batch.token_ids)
        cos, sin = self._rotary.rows(batch.positions)
        for layer in range(self.sizes.num_layers):
            n = self._norm(h, f"model.layers.{layer}.input_layernorm.weight")
            if layer in self.sizes.delta_layers:
                a = self._delta(layer, n, batch, pool)
            else:
                a = self._gated_attention(layer, n, (cos, sin), batch, pool)
            h = self._add(h, a)
            n = self._norm(h, f"model.layers.{layer}.post_attention_layernorm.weight")
            h = self._add(h, self._add(self._experts(layer, n), self._shared(layer, n)))
        wanted = h.index_select(0, batch.logit_rows)
        return self._round(linear(self._norm(wanted, "model.norm.weight"), self.weights.head))

    def _gated_attention(
        self, layer: int, n: Tensor, angles: tuple[Tensor, Tensor], batch: TokenBatch, pool: KVPool
    ) -> Tensor:
        """What an attention layer adds to the residual stream, [T, hidden]."""
        q, k, v = self._project(layer, n, *angles)
        q, gate = q.chunk(2, dim=1)
        self._append(layer, k, v, batch.slots, pool)
        a = self._attend(layer, q, batch, pool)
        a = self._round(a * self._round(gate.flatten(1).sigmoid()))
        return self._linear(a, f"model.layers.{layer}.self_attn.o_proj.weight")

    def _project(self, layer: int, n: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and their gates [T, 2 H, D], keys and values [T, C, D]; queries and keys after norm and RoPE."""
        name, head_dim = f"model.layers.{layer}.self_attn", self.sizes.head_dim
        q, k, v = (
            self._linear(n, f"{name}.{which}_proj.weight").view(n.shape[0], -1, head_dim) for which in "qkv"
        )
        q, gate = q[:, ::2], q[:, 1::2]
        q, k = (
            self._rotated(self._norm(x, f"{name}.{which}_norm.weight"), cos, sin)
            for which, x in (("q", q), ("k", k))
        )
        return torch.cat([q, gate], dim=1), k, v

    def _rotated(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Heads [T, H, D] with their first values rotated by the tables' width."""
        turned, rest = x.split([cos.shape[-1], x.shape[-1] - cos.shape[-1]], dim=-1)
        return torch.cat([self._round(rotate(turned, cos, sin)), rest], dim=-1)

    def _delta(self, layer: int, n: Tensor, batch: TokenBatch, pool: KVPool) -> Tensor:
        """What a gated delta layer adds to the residual stream, [T, hidden]; its states move on."""
        assert pool.states is not None, "a pool of this model has states"
        name = f"model.layers.{layer}.linear_attn"
        projected = Projected(
            *(self._linear(n, f"{name}.in_proj_{which}.weight") for which in ("qkv", "z", "b", "a"))
        )
        weights, state = self.weights.delta(layer), pool.states.layers[layer]
        out = advanced(projected, weights, state, batch, emulates_bf16=self.arithmetic.emulates_bf16)
        return self._linear(out, f"{name}.out_proj.weight")

    def _shared(self, layer: int, n: Tensor) -> Tensor:
        """The shared expert behind its gate, [T, hidden]; never quantized."""
        gate = self._round(self._linear(n, f"model.layers.{layer}.mlp.shared_expert_gate.weight").sigmoid())
        return self._round(gate * self._dense(layer, n, "mlp.shared_expert"))

    def _norm(self, x: Tensor, name: str) -> Tensor:
        """R(x * rsqrt(mean(x^2) + eps) * (1 + w)) over the last dimension."""
        mean_square = x.square().mean(dim=-1, keepdim=True)
        return self._round(
            x * torch.rsqrt(mean_square + self.sizes.norm_epsilon) * (1.0 + self.weights[name])
        )

    def _read_sizes(self, config: Any) -> Qwen35MoeSizes:
        return read_sizes(config)

    def _new_weights(self) -> Qwen35MoeWeights:
        return Qwen35MoeWeights(
            self.sizes, precision=self.precision, arithmetic=self.arithmetic, device=self.device
        )

    def _native_pass(self) -> NativePass:
        return Qwen35NativePass(self.sizes, self.weights, precision=self.precision, table=self._rotary)

    def _check_precision(self) -> None:
        super()._check_precision()
        wrong = [layer for layer in sorted(self.sizes.delta_layers) if self.precision[layer].kv is not None]
        if wrong:
            raise ConfigError(
                f"Gated delta layers have no K and V; got a scheme for those of layers {wrong}. Only attention layers "
                "may have one. Make the plan for this model."
            )

"""The engine's weights of Qwen3.5-MoE: those of `qwen3_moe_weights.py`, and what is derived from them at every load.

A norm multiplies by 1 + w, which bf16 does not hold; a delta layer reads its taps token by token and its gates in
float32. These are kept beside the tensors themselves and written in place, so that a captured pass reads those of the
newest version.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tracefp4.formats.arithmetic import Arithmetic
from tracefp4.formats.precision import LayerPrecision
from tracefp4.formats.tensor import BlockTensor
from tracefp4.models.qwen3_5_moe_config import Qwen35MoeSizes
from tracefp4.models.qwen3_moe_weights import Qwen3MoeWeights
from tracefp4.ops.gated_delta import DeltaWeights

_CENTERED = ("layernorm.weight", "q_norm.weight", "k_norm.weight", "model.norm.weight")
"""Ends of the names of norms that multiply by 1 + w; the norm of a delta layer's output multiplies by w."""
_GATES = ("linear_attn.A_log", "linear_attn.dt_bias")


class Qwen35MoeWeights(Qwen3MoeWeights):
    """Tensors by their transformers name; `norm` and `delta` give the derived ones. Arguments and errors as there."""

    def __init__(
        self,
        sizes: Qwen35MoeSizes,
        *,
        precision: Sequence[LayerPrecision],
        arithmetic: Arithmetic,
        device: torch.device,
    ) -> None:
        super().__init__(sizes, precision=precision, arithmetic=arithmetic, device=device)
        wide = torch.promote_types(arithmetic.torch_dtype, torch.float32)
        self._epsilon = sizes.norm_epsilon
        self._derived = {
            name: torch.empty_like(self[name], dtype=wide)
            for name in sizes.shapes()
            if name.endswith(_CENTERED + _GATES)
        }
        taps = [f"model.layers.{layer}.linear_attn.conv1d.weight" for layer in sorted(sizes.delta_layers)]
        self._derived |= {name: torch.empty_like(self[name][:, 0].T.contiguous()) for name in taps}

    def norm(self, name: str) -> Tensor:
        """Return 1 + w of a norm, in float32 or wider."""
        return self._derived[name]

    def delta(self, layer: int) -> DeltaWeights:
        """Return what a delta layer multiplies by beside its projections."""
        name = f"model.layers.{layer}.linear_attn"
        return DeltaWeights(
            taps=self._derived[f"{name}.conv1d.weight"],
            a_log=self._derived[f"{name}.A_log"],
            dt_bias=self._derived[f"{name}.dt_bias"],
            norm=self[f"{name}.norm.weight"],
            epsilon=self._epsilon,
        )

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor | BlockTensor]) -> None:
        """Replace every tensor in place, and what is derived from it; see `Qwen3MoeWeights.load`."""
        super().load(state)
        for name, derived in self._derived.items():
            if name.endswith(_CENTERED):
                torch.add(self[name].to(derived.dtype), 1.0, out=derived)
            else:
                derived.copy_(self[name] if name.endswith(_GATES) else self[name][:, 0].T)

"""The engine's copy of the weights: loaded by name, replaced in place, experts quantized once per version.

Weights are rounded to bf16 (what a bf16 checkpoint holds) and kept in the compute dtype. Expert matrices
that a plan quantizes are kept as their dequantized FP4 values: with power-of-two outer scales a matmul over
them multiplies exactly the numbers that an FP4 kernel would.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tracefp4.errors import ConfigError
from tracefp4.formats.arithmetic import Arithmetic, round_bf16
from tracefp4.formats.precision import LayerPrecision
from tracefp4.models.qwen3_moe_config import Qwen3MoeSizes
from tracefp4.ops.dequantize import dequantize
from tracefp4.ops.quantize import quantize

HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
EXPERT_NAMES = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


class Qwen3MoeWeights:
    """Tensors by their transformers name.

    Args:
        sizes: gives the names and shapes that a state dict must have.
        precision: one entry per layer; `weight` is the scheme of its experts, None for bf16.
        arithmetic: compute dtype, and whether values are rounded to bf16.
    """

    def __init__(
        self, sizes: Qwen3MoeSizes, *, precision: Sequence[LayerPrecision], arithmetic: Arithmetic
    ) -> None:
        self._sizes = sizes
        self._precision = precision
        self._arithmetic = arithmetic
        self._dtype: torch.dtype = arithmetic.torch_dtype
        self._tensors = {
            name: torch.empty(shape, dtype=self._dtype) for name, shape in sizes.shapes().items()
        }
        self.num_quantizations = 0
        """Expert matrices quantized so far; once per version and matrix."""

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    @property
    def head(self) -> Tensor:
        """The output projection [V, hidden]; the embedding itself if tied."""
        return self._tensors[EMBEDDING if self._sizes.ties_embeddings else HEAD]

    def check(self, state: Mapping[str, Tensor]) -> None:
        """Refuse a state dict whose names or shapes are not exactly the model's; changes nothing.

        Raises: ConfigError listing missing and unexpected names, or the first wrong shape.
        """
        given = {name for name in state if not (name == HEAD and self._sizes.ties_embeddings)}
        missing, unexpected = sorted(self._tensors.keys() - given), sorted(given - self._tensors.keys())
        if missing or unexpected:
            raise ConfigError(
                f"The state dict does not fit the model; missing {missing}, unexpected {unexpected}. Names "
                "must be those of transformers' Qwen3MoeForCausalLM.state_dict(), experts fused. Pass the "
                "whole state dict."
            )
        for name, tensor in self._tensors.items():
            if state[name].shape != tensor.shape:
                raise ConfigError(
                    f"The state dict does not fit the model; got {name} of shape {tuple(state[name].shape)}. "
                    f"Expected {tuple(tensor.shape)}. Use the config of the model that the weights come from."
                )
        self._check_tied(state)

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Replace every tensor in place with the rounded (and, for experts, quantized) values of `state`.

        Raises: ConfigError as `check`, before anything has changed.
        """
        self.check(state)
        for name, tensor in self._tensors.items():
            tensor.copy_(self._prepared(name, state[name].detach()))

    def _prepared(self, name: str, given: Tensor) -> Tensor:
        values = given.to(self._dtype)
        if self._arithmetic.emulates_bf16:
            values = round_bf16(values)
        if not name.endswith(EXPERT_NAMES):
            return values
        scheme = self._precision[int(name.split(".")[2])].weight
        if scheme is None:
            return values
        self.num_quantizations += 1
        return dequantize(quantize(values, scheme=scheme), dtype=self._dtype)

    def _check_tied(self, state: Mapping[str, Tensor]) -> None:
        is_tied_copy = self._sizes.ties_embeddings and HEAD in state
        if is_tied_copy and not torch.equal(state[HEAD], state[EMBEDDING]):
            raise ConfigError(
                f"The model ties its head to its embedding; got a {HEAD} that differs from {EMBEDDING}. They "
                "must be equal. Untie them in the config (tie_word_embeddings = false), or tie the weights "
                "again."
            )

"""The engine's copy of the weights: loaded by name, replaced in place, experts quantized once per version.

Weights are rounded to bf16 (what a bf16 checkpoint holds) and kept in the compute dtype. Projections that read the same
rows lie below each other in one matrix (`FUSED`); their own names are views of it.

Expert matrices that a plan quantizes are kept in one of two ways. In bf16 storage (arithmetic dtype bfloat16) as FP4
bytes in fragment order, which kernels read where they lie: a new version is quantized into the same addresses, so a
captured CUDA graph goes on with it, and no bf16 copy exists. Elsewhere as their dequantized FP4 values: with
power-of-two outer scales a matmul over them multiplies exactly the numbers that an FP4 kernel would. Under a float32
outer scale these values are float32 numbers that bf16 cannot hold, and they are the operands as they are.

Matrices of an FP4 checkpoint come as their bytes (BlockTensor). They are moved or decoded and never quantized again, so
an engine built from bytes computes what one that made the same bytes from bf16 weights does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tracefp4.errors import ConfigError, FormatError
from tracefp4.formats.arithmetic import Arithmetic, round_bf16
from tracefp4.formats.precision import LayerPrecision
from tracefp4.formats.scheme import Scheme
from tracefp4.formats.tensor import BlockTensor
from tracefp4.formats.weight_fragments import WeightFragments, empty_fragments, to_fragments
from tracefp4.models.qwen3_moe_config import Qwen3MoeSizes
from tracefp4.ops.dequantize import dequantize
from tracefp4.ops.expert_layer import Experts, refit
from tracefp4.ops.quantize import quantize

HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
EXPERT_NAMES = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
FUSED = {
    "self_attn.qkv_proj.weight": tuple(f"self_attn.{which}_proj.weight" for which in "qkv"),
    "mlp.gate_up_proj.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.shared_expert.gate_up_proj.weight": tuple(
        f"mlp.shared_expert.{half}_proj.weight" for half in ("gate", "up")
    ),
    "linear_attn.in_proj.weight": tuple(
        f"linear_attn.in_proj_{part}.weight" for part in ("qkv", "z", "b", "a")
    ),
}
"""Matrices of a layer that several tensors of a state dict make up, in the order of their rows."""


class Qwen3MoeWeights:
    """Tensors by their transformers name, and by the names of `FUSED`.

    Args:
        sizes: gives the names and shapes that a state dict must have.
        precision: one entry per layer; `weight` is the scheme of its experts, None for bf16.
        arithmetic: compute dtype, and whether values are rounded to bf16.
        device: where they live, whatever device later states are on.

    Raises: ConfigError in bf16 storage, for quantized experts whose shape or scheme has no fragments.
    """

    def __init__(
        self,
        sizes: Qwen3MoeSizes,
        *,
        precision: Sequence[LayerPrecision],
        arithmetic: Arithmetic,
        device: torch.device,
    ) -> None:
        self._sizes = sizes
        self._precision = precision
        self._arithmetic = arithmetic
        self._dtype: torch.dtype = arithmetic.torch_dtype
        self.device = device
        """Device of every tensor."""
        self.num_quantizations = 0
        """Expert matrices quantized so far; once per version and matrix."""
        self._shapes = sizes.shapes()
        self._fragments = self._new_fragments() if arithmetic.dtype == "bfloat16" else {}
        self._tensors = self._new_tensors()

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    @property
    def head(self) -> Tensor:
        """The output projection [V, hidden]; the embedding itself if tied."""
        return self._tensors[EMBEDDING if self._sizes.ties_embeddings else HEAD]

    def experts(self, layer: int) -> Experts | None:
        """The experts of a layer in fragment order; None where they are kept as tensors."""
        found = [self._fragments.get(f"model.layers.{layer}.{name}") for name in EXPERT_NAMES]
        gate_up, down = found
        return None if gate_up is None or down is None else Experts(gate_up, down)

    def _new_fragments(self) -> dict[str, WeightFragments]:
        """Room for the expert matrices that the plan quantizes."""
        made = {}
        for name, shape in self._shapes.items():
            scheme = self._scheme(name)
            if scheme is None:
                continue
            try:
                made[name] = empty_fragments(torch.Size(shape), scheme, self.device)
            except FormatError as problem:
                raise ConfigError(
                    f"{name} cannot be quantized in bf16 storage ({self._arithmetic.name}); got {shape} under "
                    f"{scheme.name}. {problem} Or leave the layer's experts out of the plan."
                ) from problem
        return made

    def _new_tensors(self) -> dict[str, Tensor]:
        """Room for everything else; parts of a fused matrix are views of it."""

        def new(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=self._dtype, device=self.device)

        made = {}
        for layer in range(self._sizes.num_layers):
            for fused, parts in FUSED.items():
                names = [f"model.layers.{layer}.{part}" for part in parts]
                if names[0] in self._shapes:
                    rows = [self._shapes[name][0] for name in names]
                    whole = new(sum(rows), self._sizes.hidden_size)
                    made[f"model.layers.{layer}.{fused}"] = whole
                    made |= dict(zip(names, whole.split(rows), strict=True))
        rest = self._shapes.keys() - made.keys() - self._fragments.keys()
        return made | {name: new(*self._shapes[name]) for name in self._shapes if name in rest}

    def check(self, state: Mapping[str, Tensor | BlockTensor]) -> None:
        """Refuse a state dict whose names, shapes or schemes are not exactly the model's; changes nothing.

        Raises: ConfigError listing missing and unexpected names, the first wrong shape, or expert bytes of another
            scheme than the plan's.
        """
        names = {name for name in state if not (name == HEAD and self._sizes.ties_embeddings)}
        missing, unexpected = sorted(self._shapes.keys() - names), sorted(names - self._shapes.keys())
        if missing or unexpected:
            raise ConfigError(
                f"The state dict does not fit the model; missing {missing}, unexpected {unexpected}. Names "
                "must be those of transformers' model.state_dict(), experts fused. Pass the whole state dict."
            )
        for name, shape in self._shapes.items():
            given = state[name]  # asked for once: a mapping may make its tensors
            if tuple(given.shape) != shape:
                raise ConfigError(
                    f"The state dict does not fit the model; got {name} of shape {tuple(given.shape)}. "
                    f"Expected {shape}. Use the config of the model that the weights come from."
                )
            self._check_scheme(name, given)
        self._check_tied(state)

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor | BlockTensor]) -> None:
        """Replace every tensor in place with the values of `state`, one after the other, from whatever device.

        Tensors are rounded to bf16 and, for experts that the plan quantizes, quantized. BlockTensors are moved or
        decoded: those of experts must have the plan's scheme; other matrices may have any (a checkpoint may hold
        attention projections in FP4 as well).

        Raises: ConfigError as `check`, before anything has changed.
        """
        self.check(state)
        for name in self._shapes:
            if name in self._fragments:
                self._refit(self._fragments[name], state[name])
            else:
                self._tensors[name].copy_(self._prepared(name, state[name]))

    def _refit(self, fragments: WeightFragments, given: Tensor | BlockTensor) -> None:
        """Put a new version of expert matrices where the old one lies."""
        if isinstance(given, BlockTensor):
            parts = {
                part: getattr(given, part).to(self.device) for part in ("packed", "block_scales", "outer")
            }
            moved = to_fragments(replace(given, **parts))
            fragments.words.copy_(moved.words)
            fragments.scales.copy_(moved.scales)
            fragments.exponents.copy_(moved.exponents)
            return
        refit(given.detach().to(self._dtype).to(self.device), fragments)
        self.num_quantizations += 1

    def _prepared(self, name: str, given: Tensor | BlockTensor) -> Tensor:
        if isinstance(given, BlockTensor):
            return dequantize(given, dtype=self._dtype)
        values = given.detach().to(self._dtype)
        if self._arithmetic.emulates_bf16:
            values = round_bf16(values)
        scheme = self._scheme(name)
        if scheme is None:
            return values
        self.num_quantizations += 1
        return dequantize(quantize(values, scheme=scheme), dtype=self._dtype)

    def _scheme(self, name: str) -> Scheme | None:
        """Scheme that the plan has for a tensor; None outside the experts."""
        return self._precision[int(name.split(".")[2])].weight if name.endswith(EXPERT_NAMES) else None

    def _check_scheme(self, name: str, given: Tensor | BlockTensor) -> None:
        planned = self._scheme(name)
        if isinstance(given, Tensor):
            return
        if name.endswith(EXPERT_NAMES) and given.scheme != planned:
            raise ConfigError(
                f"{name} comes as bytes of {given.scheme.name}, the plan has {planned.name if planned else 'bf16'} "
                "there. Both must be equal: bytes are never quantized again. Plan the checkpoint's own scheme."
            )
        if self._arithmetic.dtype == "bfloat16" and not given.scheme.is_exact_in_bf16:
            raise ConfigError(
                f"{name} comes as bytes of {given.scheme.name}, whose values bf16 storage ({self._arithmetic.name}) "
                "cannot hold. Allowed are schemes with a power of two or none. Use an arithmetic that stores float32."
            )

    def _check_tied(self, state: Mapping[str, Tensor | BlockTensor]) -> None:
        is_tied_copy = self._sizes.ties_embeddings and HEAD in state
        if is_tied_copy and not torch.equal(_values(state[HEAD]), _values(state[EMBEDDING])):
            raise ConfigError(
                f"The model ties its head to its embedding; got a {HEAD} that differs from {EMBEDDING}. They "
                "must be equal. Untie them in the config (tie_word_embeddings = false), or tie the weights "
                "again."
            )


def device_of(state: Mapping[str, Tensor | BlockTensor]) -> torch.device:
    """Return the device of a state dict: that of its first tensor, the CPU if it has none."""
    for given in state.values():
        return given.packed.device if isinstance(given, BlockTensor) else given.device
    return torch.device("cpu")


def _values(given: Tensor | BlockTensor) -> Tensor:
    return dequantize(given) if isinstance(given, BlockTensor) else given

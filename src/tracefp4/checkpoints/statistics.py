"""The statistics file: what the inputs of a checkpoint's experts look like, for scales that know what matters.

    x_square[e, j]  = sum over the tokens of expert e of x_j^2 / their number          input of gate and up
    w2_square[e, j] = the same for the input of down, after the activation
    amax            = largest |x| and largest down input of the layer                   static input scales

One safetensors file, float32, with its origin as JSON in the header: the shape of the model that was run, the digest
of the tokens, their number. Means are stored as measured, with the tokens behind them; what to do for an expert that
saw too few is decided by the reader (`importance`). A file of another model is refused. This module runs no model
(`collector.py`).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tracefp4.checkpoints.container import ContainerReader, ContainerWriter
from tracefp4.checkpoints.header import TensorSpec
from tracefp4.checkpoints.names import text_config
from tracefp4.errors import ConfigError, FormatError
from tracefp4.formats import calibrate_exponent

MIN_TOKENS = 64
"""Fewer tokens say too little about an expert: a mean of 64 squares of Gaussian numbers is off by 18%."""

_KEY = "tracefp4.statistics"
_VERSION = 1
# What makes a model another one here; the rest of config.json changes when a library saves it again.
_SHAPE = (
    "model_type", "num_hidden_layers", "hidden_size", "intermediate_size", "moe_intermediate_size", "num_experts",
    "num_local_experts", "n_routed_experts", "num_experts_per_tok", "num_attention_heads", "vocab_size",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerStatistics:
    """What the experts of one layer saw. Letters: E experts, H width of the model, I inner width of an expert."""

    tokens: Tensor
    """int64 [E], tokens routed to each expert."""
    x_square: Tensor
    """float32 [E, H], mean square of every input channel over the expert's tokens; 0 without tokens."""
    x_square_all: Tensor
    """float32 [H], the same over all tokens of the layer, each once."""
    w2_square: Tensor
    """float32 [E, I], mean square of every channel of the down-projection's input; 0 without tokens."""
    amax: Tensor
    """float32 [2], largest magnitude of the experts' input and of the down-projection's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Statistics:
    """Content of a statistics file."""

    model: str
    """`model_digest` of the config.json that was run."""
    source: str
    """Digest of the token ids, in order."""
    num_tokens: int
    """Tokens that were run."""
    layers: dict[int, LayerStatistics]
    """Every layer with routed experts."""
    min_tokens: int = MIN_TOKENS
    """Experts with fewer tokens are not trusted."""

    @property
    def digest(self) -> str:
        """First 16 hexadecimal digits of the SHA-256 of everything in the file."""
        found = hashlib.sha256(self._header().encode("ascii"))
        for name, tensor in self._tensors().items():
            found.update(name.encode("ascii"))
            found.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
        return found.hexdigest()[:16]

    def few(self, layer: int) -> Tensor:
        """Say which experts of a layer saw fewer than `min_tokens` tokens; bool [E]."""
        return self._layer(layer).tokens < self.min_tokens

    def importance(self, layer: int, role: str, *, expert: int, width: int) -> Tensor:
        """Return how much the squared error of each input channel of one expert's matrix counts.

        Args:
            layer: decoder layer.
            role: `gate`, `up` or `down`.
            expert: index of the expert.
            width: input channels of the matrix.

        Returns:
            float32 [width]. Of an expert with fewer than `min_tokens` tokens: for gate and up the mean over all
            tokens, because experts share these channels; for down zeros, because channel j of one expert has
            nothing to do with channel j of another, and zeros leave the scales of `ops.search_scales` as they are.

        Raises:
            ConfigError: a layer or an expert that the file does not hold, or another role.
            FormatError: another width.
        """
        found = self._layer(layer)
        if role not in ("gate", "up", "down") or not 0 <= expert < len(found.tokens):
            raise ConfigError(
                f"Statistics of layer {layer} hold gate, up and down of experts 0..{len(found.tokens) - 1}; got {role} "
                f"of expert {expert}. Calibrate the checkpoint that is quantized."
            )
        is_few = bool(found.tokens[expert] < self.min_tokens)
        measured, instead = (found.x_square[expert], found.x_square_all)
        if role == "down":
            measured, instead = found.w2_square[expert], torch.zeros_like(found.w2_square[expert])
        if len(measured) != width:
            raise FormatError(
                f"Statistics of layer {layer}, {role} of expert {expert}, hold {len(measured)} channels; got a matrix "
                f"with {width}. Calibrate the checkpoint that is quantized."
            )
        return instead if is_few else measured

    def exponents(self) -> dict[int, tuple[int, int]]:
        """Return the static outer exponents of every layer: experts' input, down-projection's input."""
        return {
            i: (calibrate_exponent(layer.amax[0]), calibrate_exponent(layer.amax[1]))
            for i, layer in self.layers.items()
        }

    def check_model(self, config: Mapping[str, Any]) -> None:
        """Refuse a model of another shape.

        Raises:
            ConfigError: the config's digest is not the one of the model that was run.
        """
        found = model_digest(config)
        if found != self.model:
            raise ConfigError(
                f"The statistics were collected on a model of shape {self.model}; got a checkpoint of shape {found} "
                f"({_shape(config)}). Both must be the same model. Run `tracefp4 calibrate` on this checkpoint."
            )

    def write(self, path: str | Path) -> None:
        """Write the file; it appears whole or not at all, and replaces what was there."""
        target, tensors = Path(path), self._tensors()
        temporary = target.with_name(f".{target.name}.tmp")
        temporary.unlink(missing_ok=True)
        specs = [TensorSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
        with ContainerWriter(temporary, specs, metadata={_KEY: self._header()}) as writer:
            for name, tensor in tensors.items():
                writer.write(name, tensor)
        os.replace(temporary, target)

    def _layer(self, layer: int) -> LayerStatistics:
        if layer not in self.layers:
            raise ConfigError(
                f"The statistics hold no layer {layer}; they hold {sorted(self.layers)}. Calibrate the checkpoint that "
                "is quantized."
            )
        return self.layers[layer]

    def _header(self) -> str:
        content = {
            "version": _VERSION,
            "model": self.model,
            "source": self.source,
            "num_tokens": self.num_tokens,
            "min_tokens": self.min_tokens,
            "layers": sorted(self.layers),
        }
        return json.dumps(content, sort_keys=True)

    def _tensors(self) -> dict[str, Tensor]:
        fields = LayerStatistics.__dataclass_fields__
        return {
            f"layers.{i}.{name}": getattr(self.layers[i], name)
            for i in sorted(self.layers)
            for name in fields
        }


def model_digest(config: Mapping[str, Any]) -> str:
    """Return the first 16 hexadecimal digits of the SHA-256 of a model's type and sizes, from its config.json."""
    return hashlib.sha256(_shape(config).encode()).hexdigest()[:16]


def _shape(config: Mapping[str, Any]) -> str:
    found = text_config(config)
    return json.dumps({name: found[name] for name in _SHAPE if found.get(name) is not None})


def read_statistics(path: str | Path) -> Statistics:
    """Read a statistics file.

    Raises:
        ConfigError: no such file, or no statistics file, or one of another version.
        FormatError: damaged: tensors missing, of other shapes, or with numbers that no measurement gives.
    """
    if not Path(path).is_file():
        raise ConfigError(
            f"{path} is not a file. Statistics are one safetensors file. Make one with `tracefp4 calibrate`."
        )
    with ContainerReader(path) as reader:
        content = _content(reader)
        layers = {i: _read_layer(reader, i) for i in content["layers"]}
    return Statistics(
        model=str(content["model"]),
        source=str(content["source"]),
        num_tokens=int(content["num_tokens"]),
        min_tokens=int(content["min_tokens"]),
        layers=layers,
    )


def _content(reader: ContainerReader) -> dict[str, Any]:
    try:
        content = json.loads(reader.metadata[_KEY])
        version = content["version"]
        is_whole = isinstance(content["layers"], list) and {
            "model",
            "source",
            "num_tokens",
            "min_tokens",
        } <= set(content)
    except (KeyError, ValueError, TypeError) as error:
        raise ConfigError(
            f"{reader.path} is a safetensors file without statistics of ours; it holds {len(reader.specs)} tensors. "
            "The file that `tracefp4 calibrate` writes is needed. Name that one."
        ) from error
    if version != _VERSION or not is_whole:
        raise ConfigError(
            f"{reader.path} has version {version!r} of the statistics. Version {_VERSION} is read here. Calibrate "
            "again."
        )
    return dict(content)


def _read_layer(reader: ContainerReader, layer: int) -> LayerStatistics:
    found = LayerStatistics(
        **{name: reader.read(f"layers.{layer}.{name}") for name in LayerStatistics.__dataclass_fields__}
    )
    experts, width = len(found.tokens), found.x_square_all.shape[-1:]
    inner = found.w2_square.shape[-1:]
    expected = {
        "tokens": (torch.int64, (experts,)),
        "x_square": (torch.float32, (experts, *width)),
        "x_square_all": (torch.float32, (*width,)),
        "w2_square": (torch.float32, (experts, *inner)),
        "amax": (torch.float32, (2,)),
    }
    for name, (dtype, shape) in expected.items():
        tensor: Tensor = getattr(found, name)
        is_sound = tensor.dtype == dtype and tuple(tensor.shape) == shape
        if not is_sound or not bool(((tensor >= 0) & tensor.isfinite()).all()):
            raise FormatError(
                f"{reader.path}: {name} of layer {layer} is {tensor.dtype} {tuple(tensor.shape)}, or holds numbers "
                f"below 0 or not finite; expected {dtype} {shape}, finite, >= 0. Calibrate again."
            )
    return found

"""A checkpoint in a packed layout, opened and checked as a whole: which modules are FP4, under which schemes.

It shows the names that a plain checkpoint would have, so that the rest of the room (inventory, grouping) reads both
alike. Checkpoints of other programs open under their own decode rules: NVFP4_COMPRESSED_TENSORS, NVFP4_MODELOPT, or
MXFP4. Never decodes a value.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from tracefp4.checkpoints.grouping import Group, group
from tracefp4.checkpoints.header import TensorSpec
from tracefp4.checkpoints.layouts import HF_QUANT_CONFIG, LAYOUTS, PackedLayout, Precision, Stated
from tracefp4.checkpoints.linears import Inventory, Linear, inventory
from tracefp4.checkpoints.metadata import Metadata, read_metadata
from tracefp4.checkpoints.source import Checkpoint
from tracefp4.errors import ConfigError, FormatError
from tracefp4.formats import MXFP4_RCEIL, NVFP4, BlockTensor, Scheme, scheme_by_name
from tracefp4.formats.schemes import NVFP4_STATIC_VLLM

QUANTIZATION = "quantization_config"
_FOREIGN = {
    "compressed-tensors": "NVFP4_COMPRESSED_TENSORS",
    "modelopt": "NVFP4_MODELOPT",
}
_LEFTOVER = re.compile(
    r"\.(weight_packed|weight_scale|weight_scale_2|weight_global_scale|input_global_scale|input_scale|"
    r"weight_zero_point|weight_shape|pre_quant_scale)$|_proj_(blocks|scales)$"
)


class PackedCheckpoint:
    """An open FP4 checkpoint; close it, or use it in a `with` statement.

    Args:
        path: the directory.

    Warns: when the checkpoint asks for a quantized KV cache, which is neither followed nor carried over.

    Raises:
        ConfigError: not a checkpoint, not quantized, or quantized in a way that is not supported.
        FormatError: parts that are missing, unexpected or of another size; schemes that changed.
    """

    def __init__(self, path: str | Path) -> None:
        self.source = Checkpoint(path)
        """The stored tensors."""
        try:
            self._open()
        except BaseException:
            self.source.close()
            raise

    def _open(self) -> None:
        self.path = self.source.path
        """The directory."""
        self.metadata: Metadata | None = read_metadata(self.path)
        """tracefp4.json; None in checkpoints of other programs."""
        settings = quantization_of(self.source)
        self.layout, self.stated = _recognized(self.path, settings)
        _warn_of_cache(self.path, settings or {})
        self.config: dict[str, Any] = {k: v for k, v in self.source.config.items() if k != QUANTIZATION}
        """config.json without its quantization config."""
        self.ties_embeddings = self.source.ties_embeddings
        self.aliases = self.source.aliases
        weights = self.layout.plain(self.source.specs)
        consumed = {name: plain for plain in weights for name in self.layout.consumed(plain)}
        self.specs = {
            consumed.get(name, name): weights.get(consumed.get(name, name), spec)
            for name, spec in self.source.specs.items()
        }
        """Every tensor that the plain checkpoint would store."""
        self._check_leftovers(consumed)
        self.stock: Inventory = inventory(self)
        """What the checkpoint stores, by plain names."""
        self.linears: tuple[Linear, ...] = tuple(
            linear for linear in self.stock.linears if linear.stored in weights
        )
        """The quantized linears."""
        self.groups: tuple[Group, ...] = group(self.linears)
        """The same, those that engines fuse together."""
        self.precision = self._precision()
        """Schemes of weights and inputs."""
        self._check_stated(weights)

    @property
    def extra_files(self) -> tuple[str, ...]:
        """Files to carry over unchanged."""
        return self.source.extra_files

    def read(self, name: str) -> Tensor:
        """Return a tensor that is not quantized."""
        return self.source.read(name)

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        """Return rows of a tensor that is not quantized."""
        return self.source.read_rows(name, start, stop)

    def read_block(self, linear: Linear) -> BlockTensor:
        """Return the bytes of one quantized linear. Raises: FormatError as `PackedLayout.read`."""
        return self.layout.read(self.source, linear, self.precision.weight)

    def input_outer(self, linear: Linear) -> Tensor | None:
        """Return the outer scale of a linear's input as stored, float32 () of the layout's kind; None without one."""
        return self.layout.input_outer(self.source, linear)

    def close(self) -> None:
        """Close every shard."""
        self.source.close()

    def __enter__(self) -> PackedCheckpoint:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _precision(self) -> Precision:
        if self.metadata is not None:
            weight = self.metadata.precision.weight
            if (
                weight.block_format is not self.stated.block_format
                or self.metadata.layout != self.layout.name
            ):
                self._refuse(
                    f"tracefp4.json says {weight.name} in {self.metadata.layout}, config.json says "
                    f"{self.stated.block_format.name} in {self.layout.name}"
                )
            return self.metadata.precision
        is_nvfp4 = self.stated.block_format is NVFP4
        weight = scheme_by_name(_FOREIGN[self.layout.name]) if is_nvfp4 else MXFP4_RCEIL
        return Precision(weight=weight, activation=self._foreign_activation() if is_nvfp4 else None)

    def _foreign_activation(self) -> Scheme | None:
        return NVFP4_STATIC_VLLM if self.stated.has_static_inputs else None

    def _check_leftovers(self, consumed: Mapping[str, str]) -> None:
        """No part of a quantized module may be left over: nobody would read it."""
        found = [name for name in self.source.specs if _LEFTOVER.search(name) and name not in consumed]
        if found or not consumed:
            self._refuse(
                f"{found[0]} belongs to no quantized module ({len(found)} such tensors)"
                if found
                else f"no module is packed, though the config says {self.layout.name}"
            )

    def _check_stated(self, weights: Mapping[str, TensorSpec]) -> None:
        """Names in config.json and tracefp4.json must be those of the file; input scales all there or none."""
        packed = {linear.module for linear in self.linears}
        unread = sorted(weights.keys() - {linear.stored for linear in self.linears})
        kept_and_packed = sorted(packed & set(self.stated.kept))
        if unread or kept_and_packed:
            self._refuse(
                f"{unread[0]} is packed and no linear of the model"
                if unread
                else f"{kept_and_packed[0]} is packed, though the config excludes it"
            )
        if self.metadata is not None:
            listed = set(self.metadata.modules)
            if listed != packed:
                only = sorted(listed ^ packed)
                self._refuse(
                    f"tracefp4.json lists {len(listed)} modules, {len(packed)} are packed; {only[0]} differs"
                )
        has_input = {linear.module: self.layout.has_input(self.source, linear) for linear in self.linears}
        wanted = self.stated.has_static_inputs
        odd = sorted(module for module, found in has_input.items() if found != wanted)
        if odd:
            fault = (
                "has no input scale, though the config quantizes inputs" if wanted else "has an input scale"
            )
            self._refuse(f"{odd[0]} {fault} ({len(odd)} such modules)")

    def _refuse(self, fault: str) -> None:
        raise FormatError(
            f"{self.path}: {fault}. File, config.json and tracefp4.json must say the same. Download the checkpoint "
            "again, or export it again."
        )


def quantization_of(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """Return a checkpoint's quantization config, from config.json or hf_quant_config.json; None for a plain one."""
    found = checkpoint.config.get(QUANTIZATION)
    path = checkpoint.path / HF_QUANT_CONFIG
    if found is None and path.is_file():
        found = json.loads(path.read_bytes())
    return found if isinstance(found, dict) else None


def _warn_of_cache(path: Path, settings: Mapping[str, Any]) -> None:
    """Other programs may ask engines for a cache of few bits; nothing here writes or follows such a request."""
    nested = settings.get("quantization")
    named = nested.get("kv_cache_quant_algo") if isinstance(nested, Mapping) else None
    found = named or settings.get("kv_cache_scheme") or settings.get("kv_cache_quant_algo")
    if found:
        warnings.warn(
            f"{path} asks engines for a KV cache in {found}. That is not read here: K and V are rounded as they would "
            "be without it, and a checkpoint written from this one does not ask for it. Add it to its config by hand.",
            stacklevel=2,
        )


def _recognized(path: Path, settings: Mapping[str, Any] | None) -> tuple[PackedLayout, Stated]:
    for layout in LAYOUTS.values():
        stated = layout.stated(settings) if settings is not None else None
        if stated is not None:
            return layout, stated
    got = "no quantization config" if settings is None else f"quant_method {settings.get('quant_method')!r}"
    raise ConfigError(
        f"{path} is no FP4 checkpoint; got {got}. Layouts that are read: {', '.join(LAYOUTS)}. Name a checkpoint that "
        "`tracefp4 quantize` or one of these libraries wrote."
    )

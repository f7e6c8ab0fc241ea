"""What a layout is: how the bytes of quantized matrices are named, shaped and described in a checkpoint.

A layout writes one group at a time (the linears that share an outer scale), states its settings in config.json, and
reads both back. It converts how an outer scale is stored only where that is exact (`outer_scales.py`), and never
quantizes, chooses modules or opens a file for writing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NoReturn

import torch
from torch import Tensor

from tracefp4.checkpoints.grouping import Group
from tracefp4.checkpoints.header import TensorSpec
from tracefp4.checkpoints.linears import Linear
from tracefp4.checkpoints.names import Family
from tracefp4.checkpoints.source import Checkpoint
from tracefp4.errors import ConfigError, FormatError
from tracefp4.formats import BlockFormat, BlockTensor, Scheme
from tracefp4.formats.order import OuterKind

FloatKind = Literal["multiplier", "divisor", "none"]
"""How a layout stores an outer scale: float32 g, float32 G = 1 / g, or not at all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    """Which schemes a checkpoint holds."""

    weight: Scheme
    """Scheme of every quantized matrix."""
    activation: Scheme | None = None
    """Static scheme of their inputs; None when inputs stay in high precision (W4A16)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stated:
    """What the quantization config of a checkpoint says."""

    block_format: BlockFormat
    """NVFP4 or MXFP4."""
    has_static_inputs: bool
    """True when every quantized module stores an input scale."""
    kept: tuple[str, ...]
    """Names or patterns of modules in high precision."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Bytes to write: a whole tensor, or one row (an expert) of a fused one."""

    name: str
    """Stored name."""
    tensor: Tensor
    """Its content; of a row without the first dimension."""
    row: int | None = None
    """Index in dimension 0; None for a whole tensor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Content:
    """What one group holds, ready to be stored."""

    blocks: tuple[BlockTensor, ...]
    """One [out, in] per member, all under one outer scale."""
    biases: tuple[Tensor, ...] = ()
    """One [out] per member where routed experts have biases, else empty."""
    inputs: tuple[Tensor, ...] = ()
    """Static outer scale () of every member's input; empty when inputs stay in high precision."""
    input_kind: OuterKind = "exponent"
    """How those are stored: int8 exponents, or float32 as another program found them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    """What the specs of a group depend on besides the group."""

    precision: Precision
    """The schemes."""
    num_experts: int = 0
    """Routed experts of the group's layer; 0 for other groups."""
    bias: torch.dtype | None = None
    """Element type of routed experts' biases; None without."""


class Layout(ABC):
    """One way to store quantized matrices."""

    name: ClassVar[str]
    """As the command line knows it."""
    sidecar: ClassVar[str | None] = None
    """File of its own for what readers of plain checkpoints must not see; None without."""

    @abstractmethod
    def check(self, precision: Precision, *, family: Family, linears: Sequence[Linear]) -> None:
        """Refuse what the layout cannot hold. Raises: ConfigError with the reason."""

    @abstractmethod
    def specs(self, group: Group, frame: Frame) -> tuple[TensorSpec, ...]:
        """Tensors that a group takes part in, in stored order; groups of fused experts share them."""

    def sidecar_specs(self, group: Group, frame: Frame) -> tuple[TensorSpec, ...]:
        """Tensors of a group in the sidecar."""
        return ()

    @abstractmethod
    def parts(self, group: Group, content: Content) -> Iterator[Part]:
        """Bytes of a group. Raises: FormatError where the outer scale cannot be stored exactly."""

    @abstractmethod
    def config(self, precision: Precision, kept: Sequence[str]) -> dict[str, Any] | None:
        """The `quantization_config` of config.json; None without one.

        Args:
            precision: the schemes.
            kept: full names of all linears in high precision.
        """

    def files(self, precision: Precision, kept: Sequence[str]) -> dict[str, bytes]:
        """Further files beside config.json, by name."""
        return {}


class PackedLayout(Layout):
    """A layout that engines read: it can also be read back."""

    kind: ClassVar[FloatKind]
    """How outer scales are stored."""

    @abstractmethod
    def stated(self, config: Mapping[str, Any]) -> Stated | None:
        """Read a quantization config; None when it belongs to another layout.

        Raises: ConfigError for one of this layout that says what is not supported.
        """

    @abstractmethod
    def plain(self, specs: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
        """The tensors that a plain checkpoint would hold in place of the packed ones: name -> spec in bf16."""

    @abstractmethod
    def consumed(self, name: str) -> tuple[str, ...]:
        """Stored names that may stand for a tensor of `plain`."""

    @abstractmethod
    def read(self, checkpoint: Checkpoint, linear: Linear, scheme: Scheme) -> BlockTensor:
        """Return one matrix [out, in]. Raises: FormatError for parts that the scheme cannot have."""

    def has_input(self, checkpoint: Checkpoint, linear: Linear) -> bool:
        """Say whether a static outer scale of a linear's input is stored."""
        return False

    def input_outer(self, checkpoint: Checkpoint, linear: Linear) -> Tensor | None:
        """The static outer scale of a linear's input as stored, of kind `kind`; None when none is."""
        return None


def kept_config(config: Mapping[str, Any], key: str, where: str) -> tuple[str, ...]:
    """Read a list of module names. Raises: ConfigError when it is not one."""
    found = config.get(key)
    names = [] if found is None else found
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(
            f"{where}: {key} is {found!r}. It must be a list of module names. Download the checkpoint again."
        )
    return tuple(names)


def refuse(layout: str, what: str, allowed: str, advice: str) -> NoReturn:
    """Raise the ConfigError of something that a layout cannot hold."""
    raise ConfigError(f"The layout {layout} cannot hold {what}. It holds {allowed}. {advice}")


def check_part(checkpoint: Checkpoint, name: str, spec: TensorSpec) -> None:
    """Refuse a part that is missing or has another element type or shape."""
    found = checkpoint.specs.get(name)
    if found is None or (found.dtype, found.shape) != (spec.dtype, spec.shape):
        got = "nothing" if found is None else f"{found.dtype} {found.shape}"
        raise FormatError(
            f"{checkpoint.path}: {name} must be {spec.dtype} {spec.shape}; got {got}. Every part of a quantized module "
            "must be there. Download the checkpoint again, or export it again."
        )

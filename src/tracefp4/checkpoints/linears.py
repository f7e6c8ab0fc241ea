"""The matrices of a checkpoint as engines know them: one per linear module and expert, whatever they are stored in.

A Linear names a module, the stored tensor that holds its matrix, and the cut that takes the matrix [out, in] out of
it. A fused tensor [E, 2I, H] or [E, H, 2I] is read one expert at a time. Never decides what is quantized.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from tracefp4.checkpoints.header import TensorSpec
from tracefp4.checkpoints.names import Family, Stored, classify, family_of, text_config
from tracefp4.checkpoints.source import HEAD, Source
from tracefp4.errors import ConfigError, FormatError


@dataclass(frozen=True, slots=True)
class Cut:
    """Where a matrix [out, in] lies in a stored tensor."""

    row: int | None = None
    """Index in dimension 0 of a fused 3-D tensor: the expert. None when the stored tensor is the matrix."""
    is_transposed: bool = False
    """True when the stored matrix is [in, out]."""
    start: int = 0
    """First output row, after transposing."""
    stop: int | None = None
    """End of the output rows; None for the last."""
    step: int = 1
    """2 where gate and up alternate."""

    def view(self, stored: Tensor) -> Tensor:
        """The part of one stored matrix (or bias) as a view [out, in] (or [out]), for reading or writing in place."""
        turned = stored.t() if self.is_transposed and stored.ndim == 2 else stored
        return turned[self.start : self.stop : self.step]


@dataclass(frozen=True, kw_only=True, slots=True)
class Linear:
    """One linear module of the model."""

    module: str
    """Name as engines expect it, per expert: `model.layers.3.mlp.experts.17.gate_proj`."""
    stored: str
    """Stored tensor that holds the matrix."""
    cut: Cut
    """How to take the matrix out of it."""
    kind: str
    """`expert`, `shared_expert`, `attention`, `mlp`, `head`, `draft`, `router`, `embedding`, `other`."""
    layer: int | None
    """Decoder layer, None outside the layers."""
    expert: int | None
    """Index of a routed expert, else None."""
    role: str
    """Of an expert: `gate`, `up` or `down`; empty for all other kinds."""
    shape: tuple[int, int]
    """(out, in)."""
    bias: str | None = None
    """Stored tensor of the bias, cut like the matrix; None without one."""

    @property
    def experts(self) -> str | None:
        """Name of the module that holds all experts of the layer, None for other kinds."""
        return self.module.rpartition(f".{self.expert}.")[0] if self.expert is not None else None

    def read(self, checkpoint: Source) -> Tensor:
        """Return the matrix [out, in] in its stored dtype, contiguous."""
        return self._read(checkpoint, self.stored)

    def read_bias(self, checkpoint: Source) -> Tensor | None:
        """Return the bias [out] in its stored dtype, contiguous; None without one."""
        return None if self.bias is None else self._read(checkpoint, self.bias)

    def _read(self, checkpoint: Source, name: str) -> Tensor:
        row = self.cut.row
        stored = checkpoint.read(name) if row is None else checkpoint.read_rows(name, row, row + 1)[0]
        return self.cut.view(stored).contiguous()


@dataclass(frozen=True, kw_only=True, slots=True)
class Inventory:
    """Everything that a checkpoint stores."""

    family: Family
    """Names and layout of its experts."""
    stored: dict[str, Stored]
    """What every stored tensor is, in stored order."""
    linears: tuple[Linear, ...]
    """Every linear module, aliases included: modules that share a stored tensor."""
    ties_embeddings: bool
    """True when output head and embedding are one matrix."""


def inventory(checkpoint: Source) -> Inventory:
    """List what a checkpoint stores, and check that no expert is missing.

    Raises:
        ConfigError: an unsupported model type; a config without layers or experts.
        FormatError: experts missing, or a fused tensor whose shape is not the family's.
    """
    family = family_of(checkpoint.config)
    num_layers = _count(checkpoint, "num_hidden_layers")
    stored = {name: classify(name, family=family, num_layers=num_layers) for name in checkpoint.specs}
    if not any(item.kind == "expert" for item in stored.values()):
        raise ConfigError(
            f"{checkpoint.path} holds no routed experts; got {len(stored)} tensors, {next(iter(stored), 'none')} among "
            f"them. {family.model_type} stores them under *.{family.experts}.*. Name a mixture of experts."
        )
    linears = [linear for item in stored.values() for linear in _linears(item, checkpoint, family)]
    linears += _aliased(checkpoint, family, num_layers)
    _check_experts(checkpoint, linears)
    return Inventory(
        family=family,
        stored=stored,
        linears=tuple(linears),
        ties_embeddings=checkpoint.ties_embeddings,
    )


def _linears(item: Stored, checkpoint: Source, family: Family) -> Iterator[Linear]:
    spec = checkpoint.specs[item.name]
    if item.is_fused:
        if item.kind in ("expert", "draft") and not item.name.endswith("_bias"):
            yield from _fused(item, spec, checkpoint, family)
    elif item.name.endswith(".weight") and len(spec.shape) == 2 and item.kind != "norm":
        yield _whole(item, spec, checkpoint)


def _whole(item: Stored, spec: TensorSpec, checkpoint: Source) -> Linear:
    bias = f"{item.module}.bias"
    return Linear(
        module=item.module,
        stored=spec.name,
        cut=Cut(),
        kind=item.kind,
        layer=item.layer,
        expert=item.expert,
        role=item.role,
        shape=(spec.shape[0], spec.shape[1]),
        bias=bias if bias in checkpoint.specs else None,
    )


def _fused(item: Stored, spec: TensorSpec, checkpoint: Source, family: Family) -> Iterator[Linear]:
    """Cut a 3-D tensor into experts: gate and up share one, down has its own."""
    is_transposed = family.fused == "interleaved"
    _check_fused(item, spec, checkpoint, family)
    num_out, num_in = spec.shape[:0:-1] if is_transposed else spec.shape[1:]
    if item.role == "down":
        parts = [("down", Cut(is_transposed=is_transposed), num_out)]
    elif is_transposed:
        parts = [
            (role, Cut(0, True, first, None, 2), num_out // 2) for first, role in enumerate(("gate", "up"))
        ]
    else:
        half = num_out // 2
        parts = [("gate", Cut(0, False, 0, half), half), ("up", Cut(0, False, half, None), half)]
    bias = f"{item.name}_bias"
    for expert in range(spec.shape[0]):
        for role, cut, rows in parts:
            leaf = family.leaves[("gate", "up", "down").index(role)]
            yield Linear(
                module=f"{item.module}.{expert}.{leaf}",
                stored=item.name,
                cut=Cut(expert, cut.is_transposed, cut.start, cut.stop, cut.step),
                kind=item.kind,
                layer=item.layer,
                expert=expert,
                role=role,
                shape=(rows, num_in),
                bias=bias if bias in checkpoint.specs else None,
            )


def _check_fused(item: Stored, spec: TensorSpec, checkpoint: Source, family: Family) -> None:
    """The layout comes from the family; a shape that contradicts it would be read as noise."""
    hidden = _count(checkpoint, "hidden_size")
    # the dimension that must be the hidden size: `in` of gate and up, `out` of down
    place = 1 if (family.fused == "interleaved") == (item.role == "gate_up") else 2
    is_pair = item.role == "gate_up" and len(spec.shape) == 3 and spec.shape[3 - place] % 2 == 0
    fits = len(spec.shape) == 3 and spec.shape[place] == hidden and (is_pair or item.role == "down")
    if family.fused == "none" or not fits:
        raise FormatError(
            f"{item.name} of shape {spec.shape} is no fused experts of {family.model_type} (hidden size {hidden}); its "
            f"layout is {family.fused}. Check model_type in config.json, or save the checkpoint with transformers."
        )


def _aliased(checkpoint: Source, family: Family, num_layers: int) -> Iterator[Linear]:
    """Modules without bytes of their own: aliases that the files name, and a tied head that is not stored."""
    aliases = dict(checkpoint.aliases)
    if checkpoint.ties_embeddings and HEAD not in checkpoint.specs:
        embedding = next((name for name in checkpoint.specs if name.endswith(".embed_tokens.weight")), None)
        if embedding is not None:
            aliases[HEAD] = embedding
    for alias, kept in aliases.items():
        item = classify(alias, family=family, num_layers=num_layers)
        spec = checkpoint.specs[kept]
        if alias.endswith(".weight") and len(spec.shape) == 2 and item.kind != "norm":
            yield _whole(item, spec, checkpoint)


def _check_experts(checkpoint: Source, linears: list[Linear]) -> None:
    """Every layer with experts must hold all of them, whole: an export must not lose one."""
    keys = ("num_experts", "n_routed_experts", "num_local_experts")
    key = next((key for key in keys if key in text_config(checkpoint.config)), keys[0])
    expected = _count(checkpoint, key)
    found = {(linear.experts, linear.expert, linear.role) for linear in linears if linear.kind == "expert"}
    _check_shapes(checkpoint, linears)
    for experts, count in Counter(experts for experts, _, _ in found).items():
        wanted = {(experts, expert, role) for expert in range(expected) for role in ("gate", "up", "down")}
        if count != len(wanted) or not wanted <= found:
            missing = sorted(wanted - found, key=str)
            raise FormatError(
                f"{checkpoint.path}: {experts} holds {count} matrices; {key} = {expected} needs {len(wanted)}"
                f"{f', missing {missing[0][1:]} among them' if missing else ''}. Every expert must be whole. Download "
                "the checkpoint again, or correct its config."
            )


def _check_shapes(checkpoint: Source, linears: list[Linear]) -> None:
    """Experts of a layer are of one size: gate and up [I, H], down [H, I]."""
    first: dict[str | None, tuple[int, int]] = {}
    for linear in linears:
        if linear.kind == "expert":
            inner = linear.shape[::-1] if linear.role == "down" else linear.shape
            expected = first.setdefault(linear.experts, inner)
            if inner != expected:
                raise FormatError(
                    f"{checkpoint.path}: {linear.module} has the shape {linear.shape}; other experts of its layer have "
                    f"{expected[0]} channels of {expected[1]} inputs. They are of one size. Download the checkpoint "
                    "again."
                )


def _count(checkpoint: Source, key: str) -> int:
    value = text_config(checkpoint.config).get(key)
    if type(value) is not int or value < 1:
        raise ConfigError(
            f"{checkpoint.path}: config.json has {key} = {value!r}. It must be a positive integer. Use the config of "
            "the model that the weights belong to."
        )
    return value

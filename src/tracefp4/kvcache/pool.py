"""The bytes of K and V: per layer FP4 codes with E4M3 block scales, or bf16 values where the plan says so.

Layout of one layer's K (and V): head-first pages, see `ops.kv_append`. K is stored after RoPE. The outer scale is one
static power of two per layer and K/V, so a position's bytes depend on that position alone. One frame more than asked
for exists: the null frame, always zero, which pads page tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tracefp4.errors import ConfigError
from tracefp4.formats.arithmetic import Arithmetic
from tracefp4.formats.precision import LayerPrecision
from tracefp4.formats.scheme import Scheme
from tracefp4.formats.tensor import BlockTensor

Pages = BlockTensor | Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheShape:
    """Sizes of a pool."""

    num_kv_heads: int
    """C, heads of K and V."""
    head_dim: int
    """D; a multiple of the block size where K and V are quantized."""
    num_pages: int
    """Frames that page tables can use."""
    page_size: int = 16
    """S, positions per page."""

    def __post_init__(self) -> None:
        wrong = {n: v for n in self.__slots__ if (v := getattr(self, n)) < 1}
        if wrong:
            raise ConfigError(f"A KV pool has positive sizes; got {wrong}. At least 1 each. Correct the engine's sizes.")


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerPages:
    """Pages of one layer."""

    keys: Pages
    """K after RoPE."""
    values: Pages
    """V."""

    def stores(self) -> list[Tensor]:
        """Every tensor that holds bytes, frames in dimension 1."""
        tensors: list[Tensor] = []
        for pages in (self.keys, self.values):
            tensors += [pages.packed, pages.block_scales] if isinstance(pages, BlockTensor) else [pages]
        return tensors


class KVPool:
    """Pages of all layers.

    Args:
        shape: sizes.
        precision: one entry per decoder layer; `kv` None stores bf16.
        arithmetic: decides how unquantized K and V are stored: bf16 if values are bf16-rounded, else the compute dtype.

    Raises: ConfigError if head_dim is not a multiple of the block size of a quantized layer.
    """

    def __init__(self, shape: CacheShape, *, precision: Sequence[LayerPrecision], arithmetic: Arithmetic) -> None:
        self.shape = shape
        self.null_frame = shape.num_pages
        is_bf16 = arithmetic.emulates_bf16 or arithmetic.dtype == "bfloat16"
        dtype: torch.dtype = torch.bfloat16 if is_bf16 else arithmetic.torch_dtype
        self.layers = [
            LayerPages(
                keys=_new_pages(shape, layer.kv, layer.k_exponent, dtype),
                values=_new_pages(shape, layer.kv, layer.v_exponent, dtype),
            )
            for layer in precision
        ]

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers."""
        return sum(store[:, 0].numel() * store.element_size() for store in self._stores())

    @property
    def num_bytes(self) -> int:
        """Bytes of the pool, null frame included."""
        return self.page_bytes * (self.shape.num_pages + 1)

    def clear(self, frame: int) -> None:
        """Zero a frame: scale byte 0 reads back 0."""
        for store in self._stores():
            store[:, frame] = 0

    def copy(self, source: int, target: int) -> None:
        """Copy one frame's bytes to another frame, all layers."""
        for store in self._stores():
            store[:, target] = store[:, source]

    def save(self, frame: int) -> list[Tensor]:
        """Return the frame's bytes in host memory, all layers."""
        return [store[:, frame].to("cpu", copy=True) for store in self._stores()]

    def load(self, frame: int, saved: list[Tensor]) -> None:
        """Put back what `save` returned, bit for bit."""
        for store, part in zip(self._stores(), saved, strict=True):
            store[:, frame] = part.to(store.device)

    def _stores(self) -> list[Tensor]:
        return [store for layer in self.layers for store in layer.stores()]


def _new_pages(shape: CacheShape, scheme: Scheme | None, exponent: int, dtype: torch.dtype) -> Pages:
    size = (shape.num_kv_heads, shape.num_pages + 1, shape.page_size)
    if scheme is None:
        return torch.zeros(*size, shape.head_dim, dtype=dtype)
    block_size = scheme.block_size
    if shape.head_dim % block_size:
        raise ConfigError(
            f"FP4 keys and values need blocks along the head dimension; got head_dim {shape.head_dim} and block size "
            f"{block_size}. head_dim must be a multiple of {block_size}. Keep the KV cache in bf16 for this model."
        )
    return BlockTensor(
        packed=torch.zeros(*size, shape.head_dim // 2, dtype=torch.uint8),
        block_scales=torch.zeros(*size, shape.head_dim // block_size, dtype=torch.uint8),
        exponent=torch.tensor(exponent, dtype=torch.int8),
        scheme=scheme,
    )

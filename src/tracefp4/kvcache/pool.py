"""The bytes of K and V: per layer FP4 codes with E4M3 block scales, or bf16 values where the plan says so.

Layout of one layer's K (and V): head-first pages, see `ops.kv_append`; where GPU kernels read them, in fragment
order, which has the same sizes, so that whole frames are copied, saved and cleared alike. K is stored after RoPE. The
outer scale is one static power of two per layer and K/V, so a position's bytes depend on that position alone. One
frame more than asked for exists: the null frame, always zero, which pads page tables.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from tracefp4.errors import BackendError, ConfigError
from tracefp4.formats.arithmetic import Arithmetic
from tracefp4.formats.fragments import FragmentPages, from_fragments, has_fragments
from tracefp4.formats.precision import LayerPrecision
from tracefp4.formats.scheme import Scheme
from tracefp4.formats.tensor import BlockTensor
from tracefp4.kvcache.states import StatePool
from tracefp4.ops.backend import Backend, choose
from tracefp4.ops.pages import LayerPages, QuantizedPages

CPU = torch.device("cpu")


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
            raise ConfigError(
                f"A KV pool has positive sizes; got {wrong}. At least 1 each. Correct the engine's sizes."
            )


class _Kind(NamedTuple):
    """Bytes of one kind that layers have per position and head, of K and V each."""

    num_layers: int
    """Layers that have them."""
    width: int
    """How many elements."""
    dtype: torch.dtype
    """Of one element."""


class KVPool:
    """Pages of all layers.

    Args:
        shape: sizes.
        precision: one entry per decoder layer; `kv` None stores bf16.
        arithmetic: decides how unquantized K and V are stored: bf16 if values are bf16-rounded, else the
            compute dtype.
        device: where the pages live; the device of the weights.
        states: of the layers that keep a state instead, which then have no pages; None: every layer has pages.

    Raises: ConfigError if head_dim is not a multiple of the block size of a quantized layer; BackendError as
        `make_again`.
    """

    def __init__(
        self,
        shape: CacheShape,
        *,
        precision: Sequence[LayerPrecision],
        arithmetic: Arithmetic,
        device: torch.device = CPU,
        states: StatePool | None = None,
    ) -> None:
        self.shape = shape
        self.states = states
        self.device = device
        self.null_frame = shape.num_pages
        # On a GPU without a working kernel the reference reads plain pages faster than fragments.
        self._has_kernel = choose("kv_attention", device) is Backend.CUDA
        is_bf16 = arithmetic.emulates_bf16 or arithmetic.dtype == "bfloat16"
        self._precision = tuple(precision)
        self._paged = {
            n: layer for n, layer in enumerate(precision) if states is None or n not in states.layers
        }
        # One store per kind of bytes for all layers that have it, [layers, 2, C, F, S, width]: whole-page
        # operations are then a few copies, however many layers there are.
        num_fp4 = sum(layer.kv is not None for layer in self._paged.values())
        scale_width = shape.head_dim // _block_size(shape, self._paged.values())
        dtype = torch.bfloat16 if is_bf16 else arithmetic.torch_dtype
        self._kinds = (
            _Kind(num_fp4, shape.head_dim // 2, torch.uint8),
            _Kind(num_fp4, scale_width, torch.uint8),
            _Kind(len(self._paged) - num_fp4, shape.head_dim, dtype),
        )
        self._to_clear: list[int] = []
        self.layers: list[LayerPages] = []
        """Pages of every decoder layer; empty ones where it has a state. None at all while the memory is given back."""
        self.has_memory = False
        """False between `give_back` and `make_again`."""
        self.make_again()

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers, K and V."""
        shape = self.shape
        bytes_of_layers = sum(kind.num_layers * kind.width * kind.dtype.itemsize for kind in self._kinds)
        return 2 * shape.num_kv_heads * shape.page_size * bytes_of_layers

    @property
    def num_bytes(self) -> int:
        """Bytes of the pool, null frame included; 0 while they are given back."""
        return self.page_bytes * (self.shape.num_pages + 1) if self.has_memory else 0

    def give_back(self) -> None:
        """Give the memory of pages and states back to torch. Whoever needs the bytes of a page has saved them; states
        that rest save their own, and none may be running."""
        if self.states is not None:
            self.states.give_back()
        self._to_clear.clear()
        self.layers = []
        self._packed = self._block_scales = self._plain = torch.empty(0, device=self.device)
        self.has_memory = False

    def make_again(self) -> None:
        """Have memory of zeros for all pages, at other addresses than before; nothing happens where it is there.

        Raises: BackendError if the device has not enough; then none is taken.
        """
        if self.has_memory:
            return
        try:
            stores = [self._new_store(kind) for kind in self._kinds]
            if self.states is not None:
                self.states.make_again()
        except torch.OutOfMemoryError as error:
            raise BackendError(
                f"There is no room on {self.device} for the KV pool; got {self.shape.num_pages} pages of "
                f"{self.page_bytes} bytes. What is free holds fewer. Lower num_pages, or free memory before the engine "
                f"runs. torch says: {error}"
            ) from error
        self._packed, self._block_scales, self._plain = stores
        self.layers = self._layer_pages()
        self.has_memory = True

    def clear(self, frame: int) -> None:
        """Make a frame read back as zeros (scale byte 0), so that nothing of its last page, NaN least of all, remains;
        at the next `flush`, with all others."""
        self._to_clear.append(frame)

    def flush(self) -> None:
        """Do what `clear` was asked for; before `layers` are read or written."""
        if not self._to_clear:
            return
        is_cuda = self.device.type == "cuda"
        index = torch.tensor(self._to_clear, device="cpu", pin_memory=is_cuda)
        index = index.to(self.device, non_blocking=True)
        self._to_clear.clear()
        for store in (self._block_scales, self._plain):
            if store.numel():
                store.index_fill_(3, index, 0)

    def copy(self, source: int, target: int) -> None:
        """Copy one frame's bytes to another frame, all layers."""
        self.flush()
        for store in self._stores():
            store[:, :, :, target] = store[:, :, :, source]

    def save(self, frame: int) -> list[Tensor]:
        """Return the frame's bytes in host memory, all layers."""
        self.flush()
        return [store[:, :, :, frame].to("cpu", copy=True) for store in self._stores()]

    def load(self, frame: int, saved: list[Tensor]) -> None:
        """Put back what `save` returned, bit for bit."""
        self.flush()
        for store, part in zip(self._stores(), saved, strict=True):
            store[:, :, :, frame] = part.to(store.device)

    def _stores(self) -> list[Tensor]:
        return [self._packed, self._block_scales, self._plain]

    def _new_store(self, kind: _Kind) -> Tensor:
        shape = self.shape
        size = (kind.num_layers, 2, shape.num_kv_heads, shape.num_pages + 1, shape.page_size, kind.width)
        return torch.zeros(size, dtype=kind.dtype, device=self.device)

    def _layer_pages(self) -> list[LayerPages]:
        """Views of the stores, layer by layer."""
        pages = []
        num_fp4 = num_plain = 0
        for index, layer in enumerate(self._precision):
            if index not in self._paged:
                none = self._plain.new_empty(0, 0, 0, 0)
                pages.append(LayerPages(keys=none, values=none))
                continue
            if layer.kv is None:
                keys, values = self._plain[num_plain]
                pages.append(LayerPages(keys=keys, values=values))
                num_plain += 1
                continue
            exponents = (layer.k_exponent, layer.v_exponent)
            parts = [
                self._pages(num_fp4, which, layer.kv, exponent) for which, exponent in enumerate(exponents)
            ]
            pages.append(LayerPages(keys=parts[0], values=parts[1]))
            num_fp4 += 1
        return pages

    def _pages(self, index: int, which: int, scheme: Scheme, exponent: int) -> QuantizedPages:
        """K (0) or V (1) of a quantized layer."""
        plain = BlockTensor(
            packed=self._packed[index, which],
            block_scales=self._block_scales[index, which],
            # on the host: ops read this number in every pass, and must not wait for a device
            outer=torch.tensor(exponent, dtype=torch.int8, device="cpu"),
            scheme=scheme,
        )
        size = self.shape
        if not (self._has_kernel and has_fragments(scheme, head_dim=size.head_dim, page_size=size.page_size)):
            return plain
        return FragmentPages(
            packed=plain.packed,
            block_scales=plain.block_scales,
            outer=plain.outer,
            scheme=scheme,
            kind="v" if which else "k",
        )


def frame_of(pages: QuantizedPages, frame: int) -> BlockTensor:
    """Return one frame of a layer's K or V, [C, S, D], in plain order: the bytes that a record holds.

    Args:
        pages: of a pool.
        frame: which, null frame included.
    """
    if isinstance(pages, FragmentPages):
        packed, block_scales = (part[:, frame : frame + 1] for part in (pages.packed, pages.block_scales))
        plain = from_fragments(replace(pages, packed=packed, block_scales=block_scales))
        return replace(plain, packed=plain.packed[:, 0], block_scales=plain.block_scales[:, 0])
    return replace(pages, packed=pages.packed[:, frame], block_scales=pages.block_scales[:, frame])


def _block_size(shape: CacheShape, precision: Iterable[LayerPrecision]) -> int:
    """Block size of the quantized layers; the whole head if there are none."""
    for layer in precision:
        if layer.kv is None:
            continue
        block_size = layer.kv.block_size
        if layer.kv.outer != "static" or shape.head_dim % block_size:
            raise ConfigError(
                "FP4 keys and values need a static outer scale and blocks along the head dimension; got "
                f"scheme {layer.kv.name} and head_dim {shape.head_dim}. head_dim must be a multiple of "
                f"{block_size}. Use NVFP4_KV, or keep the KV cache in bf16 for this model."
            )
        return block_size
    return shape.head_dim

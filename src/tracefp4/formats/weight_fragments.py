"""FP4 matrices in the order in which matrix units read them, and back: the same bytes, moved, never changed.

A matrix [N, K] is cut into tiles of 16 rows and groups of 64 columns. Lane l = 4g + j of a warp holds, of one tile and
group, rows g and g + 8 at columns 16j .. 16j + 15 (relative to the group): 32 codes in four 32-bit words, and the scale
of each of the two rows. Word t holds columns 16j + 4t .. + 3; as 16-bit halves it is the A operand of mma.m16n8k16 with

    bits 4p .. 4p + 3 of half o  =  code of row g + 8 (p % 2), column 16j + 4t + 2 (p / 2) + o,     p = 0..3, o = 0, 1

so a lane's sixteen columns of a row are one NVFP4 block (half an MXFP4 block). The columns that a product adds up are
thereby permuted within a group; the other operand is read in the same order, eight consecutive values at a time. K is
filled up to a multiple of 64 with codes 0 under scale bytes 0.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from tracefp4.errors import FormatError
from tracefp4.formats.packing import pack_codes, unpack_codes
from tracefp4.formats.scheme import Scheme
from tracefp4.formats.tensor import BlockTensor

TILE_ROWS = 16
"""Rows of a tile."""
GROUP = 64
"""Columns of a group."""
_CODE_DIMS = (8, 4, 4, 2, 2, 2)
"""Codes of a tile and group: row g, block j, word t, half o, pair of columns, row + 8."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightFragments:
    """The bytes of a BlockTensor [E, N, K] in fragment order."""

    words: Tensor
    """uint8 [E, N / 16, ceil(K / 64), 512]: sixteen bytes of each of 32 lanes."""
    scales: Tensor
    """uint8 [E, N / 16, ceil(K / 64), 8, 64 / block size, 2]: scale bytes of row g, block b and rows g, g + 8."""
    exponents: Tensor
    """int8 [E]: k of the outer scale 2^k of every matrix; 0 under a scheme without one."""
    scheme: Scheme
    """The scheme whose rules made the bytes; its dequantized values are bf16 numbers."""
    width: int
    """K, without the filling."""

    def __post_init__(self) -> None:
        """Refuse a scheme or parts that do not fit."""
        check_scheme(self.scheme)
        experts, tiles = self.words.shape[:2]
        groups = -(-self.width // GROUP)
        expected = {
            "words": (torch.uint8, (experts, tiles, groups, 512)),
            "scales": (torch.uint8, (experts, tiles, groups, 8, GROUP // self.scheme.block_size, 2)),
            "exponents": (torch.int8, (experts,)),
        }
        for name, (dtype, shape) in expected.items():
            part = getattr(self, name)
            is_aligned = name == "exponents" or part.data_ptr() % 16 == 0
            if part.dtype != dtype or tuple(part.shape) != shape or not (part.is_contiguous() and is_aligned):
                raise FormatError(
                    f"Fragments of {self.scheme.name} with K = {self.width} need {name} as contiguous {dtype} {shape}, "
                    f"words and scales at a multiple of 16 bytes; got {part.dtype} {tuple(part.shape)}. Make them "
                    "with to_fragments or empty_fragments."
                )

    @property
    def shape(self) -> torch.Size:
        """[E, N, K]."""
        return torch.Size((self.words.shape[0], self.words.shape[1] * TILE_ROWS, self.width))

    @property
    def num_bytes(self) -> int:
        """Bytes held, the filling included."""
        return self.words.numel() + self.scales.numel() + self.exponents.numel()

    def of_expert(self, expert: int) -> "WeightFragments":
        """Return the fragments of one matrix, [1, N, K]; views."""
        words, scales, exponents = (
            part[expert : expert + 1] for part in (self.words, self.scales, self.exponents)
        )
        return replace(self, words=words, scales=scales, exponents=exponents)


def empty_fragments(
    shape: tuple[int, int, int] | torch.Size, scheme: Scheme, device: torch.device
) -> WeightFragments:
    """Return fragments of a shape without values, to be filled in place.

    Args:
        shape: [E, N, K]; E >= 1, N a multiple of 16, K of the block size.
        scheme: One that `WeightFragments` takes.
        device: Where they live.

    Raises:
        FormatError: When shape or scheme do not fit.
    """
    check_scheme(scheme)
    _check_shape(tuple(shape), scheme)
    lead = (shape[0], shape[1] // TILE_ROWS, -(-shape[2] // GROUP))
    scale_shape = (*lead, 8, GROUP // scheme.block_size, 2)
    return WeightFragments(
        words=torch.empty((*lead, 512), dtype=torch.uint8, device=device),
        scales=torch.empty(scale_shape, dtype=torch.uint8, device=device),
        exponents=torch.empty(shape[0], dtype=torch.int8, device=device),
        scheme=scheme,
        width=shape[2],
    )


def to_fragments(matrices: BlockTensor) -> WeightFragments:
    """Move the bytes of quantized matrices into fragment order.

    Args:
        matrices: [E, N, K]; E >= 1, N a multiple of 16. Its outer scale is one power of two per matrix, one for all of
            them (static), or none.

    Returns:
        Fragments on the same device; `from_fragments` gives the same bytes back.

    Raises:
        FormatError: When shape or scheme do not fit.
    """
    scheme, shape = matrices.scheme, tuple(matrices.shape)
    check_scheme(scheme)
    _check_shape(shape, scheme)
    experts, tiles, groups = shape[0], shape[1] // TILE_ROWS, -(-shape[2] // GROUP)
    filling = groups * GROUP - shape[2]
    codes = pad(matrices.codes(), (0, filling)).view(experts, tiles, 2, 8, groups, 4, 4, 2, 2)
    scales = pad(matrices.block_scales, (0, filling // scheme.block_size))
    return WeightFragments(
        words=pack_codes(codes.permute(0, 1, 4, 3, 5, 6, 8, 7, 2).reshape(experts, tiles, groups, 1024)),
        scales=scales.view(experts, tiles, 2, 8, groups, -1).permute(0, 1, 4, 3, 5, 2).contiguous(),
        exponents=matrices.outer.expand(experts).clone(memory_format=torch.contiguous_format),
        scheme=scheme,
        width=shape[2],
    )


def from_fragments(fragments: WeightFragments) -> BlockTensor:
    """Move the bytes back into the standard order: the inverse of `to_fragments`.

    Args:
        fragments: Of matrices [E, N, K].

    Returns:
        The BlockTensor, on the same device.
    """
    experts, rows, width = fragments.shape
    tiles, groups = fragments.words.shape[1:3]
    scheme = fragments.scheme
    codes = unpack_codes(fragments.words).view(experts, tiles, groups, *_CODE_DIMS)
    codes = codes.permute(0, 1, 8, 3, 2, 4, 5, 7, 6).reshape(experts, rows, groups * GROUP)
    scales = fragments.scales.permute(0, 1, 5, 3, 2, 4).reshape(experts, rows, -1)
    outer = fragments.exponents if scheme.outer == "tensor" else fragments.exponents[0]
    return BlockTensor(
        packed=pack_codes(codes[..., :width].contiguous()),
        block_scales=scales[..., : width // scheme.block_size].contiguous(),
        outer=outer.clone(),
        scheme=scheme,
    )


def check_scheme(scheme: Scheme) -> None:
    """Refuse a scheme whose dequantized values are not bf16 numbers, or that has an outer scale per row.

    Raises:
        FormatError: It is one of these.
    """
    if not scheme.is_exact_in_bf16 or scheme.outer == "row":
        raise FormatError(
            f"Fragments hold weights that a matrix unit reads as bf16 under one power of two per matrix; got "
            f"{scheme.name}. Allowed are NVFP4 schemes with order POW2 whose outer scale is 'tensor' or 'static', and "
            "MXFP4. Quantize the weights under one of them, for example NVFP4_TENSOR_POW2."
        )


def _check_shape(shape: tuple[int, ...], scheme: Scheme) -> None:
    if len(shape) != 3 or 0 in shape or shape[1] % TILE_ROWS or shape[2] % scheme.block_size:
        raise FormatError(
            f"Fragments need matrices [E, N, K] with E >= 1, N a positive multiple of {TILE_ROWS} and K of "
            f"{scheme.block_size}; got {shape}. Pad N, or keep these matrices in bf16."
        )

"""Pages of K or V in the order in which matrix units read them: every 32-bit word is what one lane of a warp needs.

A tile is 16 tokens of one head, the A operand of mma.m16n8k16: K with tokens as rows, V with tokens as columns. In a
tile the bytes of the plain order are only moved, the bits of a byte only change places, and each byte still belongs to
one token:

    byte c of a block of 16 values holds its codes c and c + 8, c = 0..7; b block, t token, G = D / 16
    K codes   (((b / 4 * 32 + t % 8 * 4 + c / 2) * 4 + b % 4) * 2 + c % 2) * 2 + t / 8
    V codes   (((b / 4 * 32 + c * 4 + t % 8 / 2) * 4 + b % 4) * 2 + t % 2) * 2 + t / 8
    K scales  (t % 8 * G + b) * 2 + t / 8
    V scales  (t % 8 / 2 * G + b) * 4 + t / 8 * 2 + t % 2
    codes of a byte, l the one in the low nibble and h the other: bits 7..0 are h3 l3 h2 h1 h0 l2 l1 l0

The bits of l lie as fp16 numbers have them (sign, then four bits further the rest), and those of h but for two places
that its last three are moved by; so eight codes become operands in nine instructions instead of fifteen.
A token is appended by whole bytes, and a page takes as many bytes as before. Lane l = 4 g + j finds in word
(b / 4 * 32 + l) * 4 + b % 4 of K the codes of tokens g and g + 8 at columns 2j, 2j + 8 (low half) and one further
(high half); of V those of tokens 2j, 2j + 8 (low half) and one further (high half) at columns g and g + 8. Records
and checkpoints hold the plain order only; this module loses nothing in either direction.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from tracefp4.errors import FormatError
from tracefp4.formats.packing import HalfPacked, pack_codes, pack_halves
from tracefp4.formats.scheme import Scheme
from tracefp4.formats.tensor import BlockTensor

TILE_TOKENS = 16
"""Tokens of a tile."""
HEAD_DIM_STEP = 64
"""Head dims are multiples of this: four blocks are one 16-byte load of a lane."""
BLOCK_SIZE = 16
MAGNITUDE_BITS = 0x3F
"""Of a byte of codes: all but the two signs."""
Kind = Literal["k", "v"]


@dataclass(frozen=True, kw_only=True, slots=True)
class FragmentPages:
    """K or V pages of one layer in fragment order; the sizes are those of plain pages."""

    packed: Tensor
    """uint8 [C, F, S, D / 2]; S a multiple of 16, D of 64. Meaningless row by row."""
    block_scales: Tensor
    """uint8 [C, F, S, D / 16]."""
    outer: Tensor
    """0-dimensional int8, the static exponent."""
    scheme: Scheme
    """The scheme whose rules made the bytes; blocks of 16."""
    kind: Kind
    """Which of the two orders."""

    def __post_init__(self) -> None:
        """Refuse sizes that have no fragment order."""
        size = tuple(self.packed.shape)
        check_sizes(self.scheme, head_dim=size[-1] * 2, page_size=size[-2])
        expected = (*size[:-1], size[-1] * 2 // BLOCK_SIZE)
        if self.kind not in ("k", "v") or tuple(self.block_scales.shape) != expected:
            raise FormatError(
                f"Fragment pages of {self.kind!r} with codes {size} got block scales "
                f"{tuple(self.block_scales.shape)}. Kinds are 'k' and 'v', block scales {expected}. Make them with "
                "to_fragments."
            )


def has_fragments(scheme: Scheme, *, head_dim: int, page_size: int) -> bool:
    """Return whether pages of these sizes have a fragment order.

    Args:
        scheme: Of the pages.
        head_dim: D.
        page_size: S.
    """
    is_static = scheme.block_size == BLOCK_SIZE and scheme.outer == "static" and scheme.is_exact_in_bf16
    return is_static and head_dim % HEAD_DIM_STEP == 0 and page_size % TILE_TOKENS == 0


def check_sizes(scheme: Scheme, *, head_dim: int, page_size: int) -> None:
    """Refuse what `has_fragments` denies.

    Raises:
        FormatError: Naming the sizes and what they must be.
    """
    if not has_fragments(scheme, head_dim=head_dim, page_size=page_size):
        raise FormatError(
            f"Pages have no fragment order; got scheme {scheme.name}, head dim {head_dim}, {page_size} tokens a page. "
            f"Needed are blocks of {BLOCK_SIZE} under a static power of two, a multiple of {HEAD_DIM_STEP} and a "
            f"multiple of {TILE_TOKENS}. Keep the pages in plain order."
        )


def to_fragments(pages: BlockTensor, kind: Kind) -> FragmentPages:
    """Put pages into fragment order.

    Args:
        pages: [C, F, S, D], layout of `ops.kv_append`.
        kind: Whether they hold K or V.

    Returns:
        The same bytes in new tensors.

    Raises:
        FormatError: The sizes have no fragment order.
    """
    head_dim, page_size = pages.shape[-1], pages.shape[-2]
    check_sizes(pages.scheme, head_dim=head_dim, page_size=page_size)
    codes_at, scales_at = byte_places(kind, head_dim, pages.packed.device)
    return FragmentPages(
        packed=_scattered(paired(pages.packed), codes_at),
        block_scales=_scattered(pages.block_scales, scales_at),
        outer=pages.outer,
        scheme=pages.scheme,
        kind=kind,
    )


def from_fragments(pages: FragmentPages) -> BlockTensor:
    """Return pages in plain order: the inverse of `to_fragments`, in new tensors."""
    codes_at, scales_at = byte_places(pages.kind, pages.packed.shape[-1] * 2, pages.packed.device)
    halves = HalfPacked(packed=_gathered(_together(pages.packed), codes_at), block_size=BLOCK_SIZE)
    return BlockTensor(
        packed=pack_codes(halves.codes()),
        block_scales=_gathered(pages.block_scales, scales_at),
        outer=pages.outer,
        scheme=pages.scheme,
    )


def paired(packed: Tensor) -> Tensor:
    """Return rows whose byte c of a block holds its codes c and c + 8, bits in their places, from rows of neighbouring
    pairs.

    Args:
        packed: uint8 [..., D / 2], low nibble first.

    Returns:
        uint8 [..., D / 2].
    """
    codes = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)
    halves = pack_halves(codes, block_size=BLOCK_SIZE).packed
    return halves & 0x87 | halves << 3 & 0x40 | halves >> 1 & 0x38


def _together(packed: Tensor) -> Tensor:
    """Put the bits of every byte back: code c in the low nibble, code c + 8 in the high one."""
    return packed & 0x87 | packed >> 3 & 0x08 | packed << 1 & 0x70


@lru_cache(maxsize=32)
def byte_places(kind: Kind, head_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return where the bytes of a token lie in its tile.

    Args:
        kind: K or V.
        head_dim: D, a multiple of 64.
        device: Of the result.

    Returns:
        int64 [16, D / 2] for the bytes of `paired` rows, and int64 [16, D / 16] for scale bytes: each a permutation
        of the tile's bytes. Shared by all callers, never written.
    """
    num_blocks = head_dim // BLOCK_SIZE
    token = torch.arange(TILE_TOKENS, device="cpu")[:, None, None]
    block = torch.arange(num_blocks, device="cpu")[None, :, None]
    c = torch.arange(BLOCK_SIZE // 2, device="cpu")
    row, upper = token % 8, token // 8
    if kind == "k":
        lane, half = row * 4 + c // 2, c % 2
        scales = (row * num_blocks + block) * 2 + upper
    else:
        lane, half = c * 4 + row // 2, token % 2
        scales = (row // 2 * num_blocks + block) * 4 + upper * 2 + token % 2
    codes = (((block // 4 * 32 + lane) * 4 + block % 4) * 2 + half) * 2 + upper
    return codes.flatten(1).to(device), scales.flatten(1).to(device)


def _scattered(rows: Tensor, places: Tensor) -> Tensor:
    """Move the bytes [..., S, W] of every tile to their places [16, W]."""
    tiles = rows.reshape(*rows.shape[:-2], -1, places.numel())
    moved = torch.empty_like(tiles)
    moved[..., places.flatten()] = tiles
    return moved.view(rows.shape)


def _gathered(moved: Tensor, places: Tensor) -> Tensor:
    """The inverse of `_scattered`."""
    tiles = moved.reshape(*moved.shape[:-2], -1, places.numel())
    return tiles[..., places.flatten()].view(moved.shape)

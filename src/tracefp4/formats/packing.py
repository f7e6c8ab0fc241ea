"""Bit layouts, each stated once: two codes a byte, eight bits a byte, four pairs of bits a byte.

    pairs   packed[j] = code[2j] | code[2j + 1] << 4         even index in the low nibble; ours, safetensors'
    halves  packed[j] = code[j] | code[j + B / 2] << 4        within each block of B; ggml's
    bits    byte[j]   = sum over i of bit[8j + i] << i        bit i of byte j belongs to value 8j + i
    low2    byte[j]   = sum over i of low[4j + i] << 2i       bits 2i and 2i + 1 belong to value 4j + i

All run along the last dimension and keep the others. Everything here is packed in pairs; halves are a type of their
own (`HalfPacked`), because bytes read in the wrong layout decode to plausible numbers. This module knows nothing of
scales; the order in which kernels read those is `swizzle.py`.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tracefp4.errors import FormatError
from tracefp4.formats.constant import Constant

_GATHER_BITS = 0x0102040810204080
"""Multiplying eight 0/1 bytes, read as one little-endian int64, by this collects them in the top byte
without carries."""
_UNPACKED_CODES = Constant(
    torch.tensor([[byte & 15, byte >> 4] for byte in range(256)], dtype=torch.uint8, device="cpu")
    .view(torch.int16)
    .view(-1)
)
_UNPACKED_BITS = Constant(
    torch.tensor([[byte >> i & 1 for i in range(8)] for byte in range(256)], dtype=torch.uint8, device="cpu")
    .view(torch.int64)
    .view(-1)
)


def pack_codes(codes: Tensor) -> Tensor:
    """Pack two 4-bit codes per byte, even index in the low nibble.

    Args:
        codes: uint8 [..., K], values 0..15, K even.

    Returns:
        uint8 [..., K / 2].

    Raises:
        FormatError: When the dtype is not uint8 or K is odd.
    """
    _check_bytes("pack_codes", codes, multiple=2)
    pair = _words(codes, torch.int16)
    return (pair | pair >> 4).bitwise_and_(255).to(torch.uint8)


def unpack_codes(packed: Tensor) -> Tensor:
    """Return the codes of packed bytes: the inverse of `pack_codes`.

    Args:
        packed: uint8 [..., K / 2].

    Returns:
        uint8 [..., K], values 0..15.

    Raises:
        FormatError: When the dtype is not uint8.
    """
    _check_bytes("unpack_codes", packed, multiple=1)
    table = _UNPACKED_CODES.on(packed.device)
    return table[packed.to(torch.int32)].view(torch.uint8)


@dataclass(frozen=True, kw_only=True, slots=True)
class HalfPacked:
    """Codes in ggml's layout: the low nibbles of a block hold its first half, the high nibbles its second."""

    packed: Tensor
    """uint8 [..., K / 2]."""
    block_size: int
    """B, even; 32 in ggml's MXFP4."""

    def codes(self) -> Tensor:
        """Return the codes, uint8 [..., K], values 0..15, in the order of the values."""
        half = self.packed.unflatten(-1, (-1, self.block_size // 2))
        return torch.cat([half & 15, half >> 4], dim=-1).flatten(-2)


def pack_halves(codes: Tensor, *, block_size: int) -> HalfPacked:
    """Pack codes in ggml's layout: byte j of a block holds its codes j and j + block_size / 2.

    Args:
        codes: uint8 [..., K], values 0..15, K a multiple of the block size.
        block_size: An even number; 32 in ggml's MXFP4.

    Returns:
        The bytes, marked as this layout; `unpack_codes` and `BlockTensor` refuse them.

    Raises:
        FormatError: When the dtype is not uint8 or K is not a multiple of the block size.
    """
    _check_bytes("pack_halves", codes, multiple=block_size)
    low, high = codes.unflatten(-1, (-1, block_size)).chunk(2, dim=-1)
    return HalfPacked(packed=(low | high << 4).flatten(-2), block_size=block_size)


def pack_bits(bits: Tensor) -> Tensor:
    """Pack eight 0/1 values per byte: bit i of byte j is value 8j + i.

    Args:
        bits: uint8 [..., K], each 0 or 1, K a multiple of 8.

    Returns:
        uint8 [..., K / 8].

    Raises:
        FormatError: When the dtype is not uint8 or K is not a multiple of 8.
    """
    _check_bytes("pack_bits", bits, multiple=8)
    eight = _words(bits, torch.int64)
    return ((eight * _GATHER_BITS) >> 56).to(torch.uint8)


def unpack_bits(packed: Tensor) -> Tensor:
    """Return the bits of packed bytes: the inverse of `pack_bits`.

    Args:
        packed: uint8 [..., K / 8].

    Returns:
        uint8 [..., K], each 0 or 1.

    Raises:
        FormatError: When the dtype is not uint8.
    """
    _check_bytes("unpack_bits", packed, multiple=1)
    table = _UNPACKED_BITS.on(packed.device)
    return table[packed.to(torch.int32)].view(torch.uint8)


def pack_low_bits(values: Tensor, *, num_bits: Literal[1, 2]) -> Tensor:
    """Keep the one or two low bits of every value, the first value in the lowest bits of a byte.

    Args:
        values: uint8 [..., K]; rows are filled up with zeros to whole bytes.
        num_bits: How many.

    Returns:
        uint8 [..., ceil(K * num_bits / 8)].
    """
    per_byte = 8 // num_bits
    low = values & ((1 << num_bits) - 1)
    missing = -low.shape[-1] % per_byte
    if missing:
        low = torch.nn.functional.pad(low, (0, missing))
    if num_bits == 1:
        return pack_bits(low)
    four = low.unflatten(-1, (low.shape[-1] // 4, 4))
    return four[..., 0] | four[..., 1] << 2 | four[..., 2] << 4 | four[..., 3] << 6


def unpack_low_bits(packed: Tensor, *, num_bits: Literal[1, 2], count: int) -> Tensor:
    """Return the first `count` values of every row, uint8 [..., count]; the inverse of `pack_low_bits`."""
    if num_bits == 1:
        return unpack_bits(packed)[..., :count]
    four = torch.stack([packed & 3, packed >> 2 & 3, packed >> 4 & 3, packed >> 6], dim=-1)
    return four.flatten(-2)[..., :count]


def _words(tensor: Tensor, word: torch.dtype) -> Tensor:
    """Read consecutive bytes of the last dimension as little-endian words."""
    flat = tensor.contiguous().view(
        -1
    )  # flat, because torch checks the strides even of dimensions of size 0 or 1
    flat = flat.clone() if flat.storage_offset() % word.itemsize else flat
    return flat.view(word).view(*tensor.shape[:-1], tensor.shape[-1] // word.itemsize)


def _check_bytes(what: str, tensor: Tensor, *, multiple: int) -> None:
    if isinstance(tensor, HalfPacked):
        raise FormatError(
            f"{what} reads codes packed in pairs; got HalfPacked, ggml's layout, with blocks of {tensor.block_size}. "
            "Take its codes() first."
        )
    if tensor.dtype != torch.uint8:
        raise FormatError(
            f"{what} needs a uint8 tensor; got {tensor.dtype} of shape {tuple(tensor.shape)}. Cast it first."
        )
    if tensor.dim() == 0 or tensor.shape[-1] % multiple:
        raise FormatError(
            f"{what} needs the last dimension divisible by {multiple}; got shape {tuple(tensor.shape)}. "
            "Pad the last dimension."
        )

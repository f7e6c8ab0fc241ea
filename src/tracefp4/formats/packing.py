"""Bit layouts, each stated once: two codes a byte, eight bits a byte.

    packed[j] = code[2j] | code[2j + 1] << 4          even index in the low nibble
    byte[j]   = sum over i of bit[8j + i] << i         bit i of byte j belongs to value 8j + i

Both run along the last dimension and keep the others. This module knows nothing of scales. Alternative not
taken: the swizzled layouts of tensor-core instructions, which belong to the kernels that need them.
"""

import torch
from torch import Tensor

from tracefp4.errors import FormatError

_GATHER_BITS = 0x0102040810204080
"""Multiplying eight 0/1 bytes, read as one little-endian int64, by this collects them in the top byte
without carries."""
_UNPACKED_CODES = torch.tensor([[byte & 15, byte >> 4] for byte in range(256)], dtype=torch.uint8)
_UNPACKED_BITS = torch.tensor([[byte >> i & 1 for i in range(8)] for byte in range(256)], dtype=torch.uint8)


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
    table = _UNPACKED_CODES.to(packed.device).view(torch.int16).view(-1)
    return table[packed.to(torch.int32)].view(torch.uint8)


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
    table = _UNPACKED_BITS.to(packed.device).view(torch.int64).view(-1)
    return table[packed.to(torch.int32)].view(torch.uint8)


def _words(tensor: Tensor, word: torch.dtype) -> Tensor:
    """Read consecutive bytes of the last dimension as little-endian words."""
    flat = tensor.contiguous().view(
        -1
    )  # flat, because torch checks the strides even of dimensions of size 0 or 1
    flat = flat.clone() if flat.storage_offset() % word.itemsize else flat
    return flat.view(word).view(*tensor.shape[:-1], tensor.shape[-1] // word.itemsize)


def _check_bytes(what: str, tensor: Tensor, *, multiple: int) -> None:
    if tensor.dtype != torch.uint8:
        raise FormatError(
            f"{what} needs a uint8 tensor; got {tensor.dtype} of shape {tuple(tensor.shape)}. Cast it first."
        )
    if tensor.dim() == 0 or tensor.shape[-1] % multiple:
        raise FormatError(
            f"{what} needs the last dimension divisible by {multiple}; got shape {tuple(tensor.shape)}. "
            "Pad the last dimension."
        )

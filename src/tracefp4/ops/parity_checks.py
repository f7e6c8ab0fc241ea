"""Syndromes of bits in torch: the parity checks of a binary code as one matrix product, and rows of bits as bytes.

    syndrome bit i of a block = (sum over j of b_j * H_ij) mod 2

with H_ij bit i of column j. A sum of at most 512 ones is exact in float32, on every device and in every order of
addition. The layout of a row is that of `coding.syndrome`. Shared by the ops that encode and decode; this module
never decides which bits differ.
"""

from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache, reduce
from operator import and_, xor
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tracefp4.coding import SyndromeCode

_MEMBERS = 5
"""Numbers of `struct code` in syndromes.h before its columns."""
_MAX_TABLE_BITS = 20
"""Of syndromes whose sets of columns are listed: 2 MiB."""


def syndromes_of_bits(bits_NK: Tensor, code: SyndromeCode) -> Tensor:
    """Return the syndromes of every row as bits.

    Args:
        bits_NK: [N, K], any integer or bool dtype, each 0 or 1.
        code: The code.

    Returns:
        uint8 [N, num_blocks(K), num_bits], each 0 or 1.
    """
    rows, width = bits_NK.shape
    blocks = in_blocks(bits_NK.to(torch.float32), code.length, fill=0.0)
    columns = columns_of(code, bits_NK.device)
    checks = columns[:, None] >> torch.arange(code.num_bits, device=columns.device) & 1
    with _outside_autocast(columns.device.type):  # sums above 256 do not fit into bf16
        sums = blocks.flatten(0, 1) @ checks.to(torch.float32)
    parities = sums.to(torch.int32).bitwise_and_(1).to(torch.uint8)
    return parities.view(rows, code.num_blocks(width), code.num_bits)


def _outside_autocast(device_type: str) -> AbstractContextManager[Any]:
    """Switch autocast off where it is on; a device that has none is left alone."""
    is_on = torch.is_autocast_enabled(device_type)
    return torch.autocast(device_type, enabled=False) if is_on else nullcontext()


def in_blocks(rows_NK: Tensor, length: int, *, fill: float) -> Tensor:
    """Return rows cut into blocks, [N, ceil(K / length), length]; the last block is filled up."""
    rows, width = rows_NK.shape
    num_blocks = -(-width // length)
    padded = functional.pad(rows_NK, (0, num_blocks * length - width), value=fill)
    return padded.reshape(rows, num_blocks, length)


def bytes_of_bits(bits_NB: Tensor) -> Tensor:
    """Pack rows of bits: bit i of a row is bit i % 8 of its byte i // 8; the last byte is padded with zeros.

    Args:
        bits_NB: uint8 [N, B], each 0 or 1.

    Returns:
        uint8 [N, ceil(B / 8)].
    """
    padded = in_blocks(bits_NB, 8, fill=0)
    return (padded << torch.arange(8, dtype=torch.uint8, device=bits_NB.device)).sum(2, dtype=torch.uint8)


def bits_of_bytes(bytes_NR: Tensor, num_bits: int) -> Tensor:
    """Return the first `num_bits` bits of every row, uint8 [N, num_bits]; the inverse of `bytes_of_bits`."""
    bits = bytes_NR[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=bytes_NR.device) & 1
    return bits.flatten(1)[:, :num_bits]


def syndrome_differences(bits_NK: Tensor, recorded_NR: Tensor, code: SyndromeCode) -> Tensor:
    """Return, for every block, the XOR of the recorded syndrome and that of the row's own bits.

    Args:
        bits_NK: [N, K], each 0 or 1.
        recorded_NR: uint8 [N, code.row_bytes(K)].
        code: The code of both.

    Returns:
        int64 [N, num_blocks(K)], num_bits bits each; 0 where both agree.
    """
    own = syndromes_of_bits(bits_NK, code)
    recorded = bits_of_bytes(recorded_NR, own.shape[1] * code.num_bits).view(own.shape)
    return ((own ^ recorded).to(torch.int64) << torch.arange(code.num_bits, device=own.device)).sum(2)


def columns_of(code: SyndromeCode, device: torch.device) -> Tensor:
    """Return the columns of the parity-check matrix, int64 [length]."""
    return code_numbers(code)[_MEMBERS:].to(device)


@lru_cache(maxsize=64)
def code_numbers(code: SyndromeCode) -> Tensor:
    """Return a code as `struct code` of syndromes.h.

    Args:
        code: Any.

    Returns:
        int64 [5 + length] on the CPU: length, num_bits, num_candidates, max_flips, the bits
        that all columns have, then the columns; shared by all callers, never written.
    """
    numbers = (
        code.length,
        code.num_bits,
        code.num_candidates,
        code.max_flips,
        reduce(and_, code.columns),
        *code.columns,
    )
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")


@lru_cache(maxsize=64)
def numbers_on(code: SyndromeCode, device: torch.device) -> Tensor:
    """Return a code as syndromes.cuh reads it.

    Args:
        code: Any.
        device: Where; the first call for a device copies, later ones return the same tensor.

    Returns:
        int64 [5 + length + 64 * ceil(length / 16) + 3 + 2 * length + E]: `code_numbers`; for every four columns (of a
        length filled up with zeros to a multiple of 16) the XOR of those at which four bits have ones, for the 16
        values of these; the distance; how far to shift a column to the right so that its low bits are its tag; and the
        columns and their positions in the order of the tags. Tags are 0 .. length - 1, one for each column; a code
        without any, which flips one bit at most, has its columns in their own order. Then E and `_triples`, E numbers.
    """
    columns = functional.pad(code_numbers(code)[_MEMBERS:], (0, -code.length % 16)).view(-1, 4, 1)
    bits = torch.arange(16, device="cpu") >> torch.arange(4, device="cpu")[:, None] & 1
    sums = reduce(xor, (columns * bits).unbind(1))
    shift, positions = _tags(code)
    numbers = [code.distance, shift, *(code.columns[j] for j in positions), *positions]
    triples = _triples(code).view(torch.int64)
    tagged = torch.tensor([*numbers, triples.numel()], device="cpu")
    return torch.cat([code_numbers(code), sums.flatten(), tagged, triples]).to(device)


def _triples(code: SyndromeCode) -> Tensor:
    """Return which one or three columns add up to a sum of an odd number of them.

    Args:
        code: Any. It has a table if all its columns have bit 0, at most three or four are flipped, any two sets of
            at most three and of at most four differ in their sums, and the table is small enough to stay in a cache.

    Returns:
        int32 [2^(num_bits - 1)] on the CPU, by sum >> 1: positions plus 1, ascending, a byte each from the lowest
        on; 0 for sums of no one or three columns. Empty for a code without a table.
    """
    has_table = code.distance >= 8 and code.max_flips in (3, 4) and reduce(and_, code.columns) == 1
    if not has_table or code.num_bits > _MAX_TABLE_BITS or not 32 < code.length < 255:
        return torch.zeros(0, dtype=torch.int32, device="cpu")
    columns = columns_of(code, torch.device("cpu"))
    places = torch.arange(code.length, device="cpu")
    table = torch.zeros(1 << code.num_bits - 1, dtype=torch.int32, device="cpu")
    table[columns >> 1] = (places + 1).to(torch.int32)
    three = torch.combinations(places, 3)
    first, second, third = columns[three].unbind(1)
    shifts = torch.tensor([0, 8, 16], device="cpu")
    table[(first ^ second ^ third) >> 1] = (three + 1 << shifts).sum(1).to(torch.int32)
    return table


def _tags(code: SyndromeCode) -> tuple[int, list[int]]:
    """Return the shift that leaves every column a tag of its own, and the positions of the columns by tag."""
    for shift in range(code.num_bits):
        tags = [column >> shift & (code.length - 1) for column in code.columns]
        if sorted(tags) == list(range(code.length)):
            return shift, sorted(range(code.length), key=tags.__getitem__)
    assert code.max_flips == 1, f"{code.name}: the search looks columns up by their tags"
    return 0, list(range(code.length))

"""encode_syndromes by the function of kernel.c: the same bytes as `reference.py`, in one sweep over the codes."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from tracefp4.coding import SyndromeCode, syndrome_code
from tracefp4.ops.kernels import Library, empty, first_difference
from tracefp4.ops.parity_checks import code_numbers
from tracefp4.ops.syndromes.reference import encode_syndromes_reference


def encode_syndromes_compiled(codes: Tensor, code: SyndromeCode) -> Tensor:
    """Return the bytes of checked rows; see `encode_syndromes`."""
    codes = codes.contiguous()
    rows, width = codes.shape
    syndromes = empty((rows, code.row_bytes(width)), torch.uint8)
    LIBRARY.call("encode_rows", rows, codes.numel(), code_numbers(code), width, codes, syndromes)
    return syndromes


def _pairs() -> Iterator[tuple[str, Tensor, Tensor]]:
    codes = (torch.arange(7 * 300, device="cpu") * 40503 % 65536 >> 5).to(torch.uint8).view(7, 300)
    for name in ("parity3", "secded", "bch64_3", "bch128_3", "bch512_6"):
        code = syndrome_code(name)
        got, wanted = encode_syndromes_compiled(codes, code), encode_syndromes_reference(codes, code)
        yield f"syndromes of {name}", got, wanted


LIBRARY = Library(
    Path(__file__).with_name("kernel.c"),
    {"encode_rows": "pqpp"},
    check=lambda: first_difference(_pairs()),
    headers=("syndromes.h",),
)
"""The function of kernel.c."""

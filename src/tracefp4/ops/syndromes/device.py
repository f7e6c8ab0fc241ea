"""encode_syndromes by the kernel of kernel.cu: the same bytes as `reference.py`, codes read once."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from tracefp4.coding import SyndromeCode, syndrome_code
from tracefp4.ops.device import DeviceLibrary, Launch, aligned
from tracefp4.ops.kernels import first_difference
from tracefp4.ops.parity_checks import numbers_on
from tracefp4.ops.syndromes.reference import encode_syndromes_reference

_THREADS = 128
_CODES_PER_THREAD = 16
"""One load of 16 bytes."""


def encode_syndromes_on_device(codes: Tensor, code: SyndromeCode) -> Tensor:
    """Return the bytes of checked rows; see `encode_syndromes`."""
    codes = aligned(codes)
    rows, width = codes.shape
    syndromes = torch.empty((rows, code.row_bytes(width)), dtype=torch.uint8, device=codes.device)
    per_block = max(1, _THREADS * _CODES_PER_THREAD // width)
    words = -(-width // 32) + 1 + -(-code.num_blocks(width) * code.num_bits // 32)
    launch = Launch("encode_rows", (-(-rows // per_block),), _THREADS, {}, shared_bytes=4 * per_block * words)
    numbers = numbers_on(code, codes.device)
    sizes = (rows, width, per_block, int(width % 16 == 0))
    LIBRARY.launch(launch, codes, numbers, *sizes, syndromes, device=codes.device)
    return syndromes


def differences(device: torch.device, _case: None) -> str | None:
    """Compare with the reference, for codes of every kind, all by one kernel; return what differs, or None."""
    return first_difference(_pairs(device))


def _pairs(device: torch.device) -> Iterator[tuple[str, Tensor, Tensor]]:
    codes = (torch.arange(7 * 1000, device=device) * 40503 % 65536 >> 5).to(torch.uint8).view(7, 1000)
    for name in ("parity3", "secded", "bch64_3", "bch128_3", "bch512_6"):
        code = syndrome_code(name)
        for width in (1000, 128):
            rows = codes[:, :width]
            got, wanted = encode_syndromes_on_device(rows, code), encode_syndromes_reference(rows, code)
            yield f"syndromes of {name}", got, wanted


LIBRARY = DeviceLibrary(Path(__file__).with_name("kernel.cu"), differences, None)
"""The kernel of kernel.cu."""

"""The definition of encode_syndromes, in plain torch: parity checks as a matrix product, `ops/parity_checks.py`."""

from torch import Tensor

from tracefp4.coding import SyndromeCode
from tracefp4.ops.parity_checks import bytes_of_bits, syndromes_of_bits


def encode_syndromes_reference(codes: Tensor, code: SyndromeCode) -> Tensor:
    """Return the bytes of checked rows; see `encode_syndromes`."""
    return bytes_of_bits(syndromes_of_bits(codes & 1, code).flatten(1))

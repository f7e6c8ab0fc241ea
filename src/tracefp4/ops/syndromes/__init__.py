"""encode_syndromes: rows of codes or scale bytes to the syndromes of their lowest bits.

    syndrome = XOR over j with codes_j odd of h_j           num_bits bits for every block of code.length values

Whoever has values of his own that differ from these in few lowest bits finds those by comparing syndromes;
`guided_quantize` does. The layout of a row's bytes is that of `coding.syndrome`. This op reads lowest bits only: what
the values mean is the caller's business.
"""

import torch
from torch import Tensor

from tracefp4.coding import SyndromeCode
from tracefp4.errors import FormatError
from tracefp4.ops.backend import Backend, choose
from tracefp4.ops.syndromes.compiled import encode_syndromes_compiled
from tracefp4.ops.syndromes.device import encode_syndromes_on_device
from tracefp4.ops.syndromes.reference import encode_syndromes_reference

__all__ = ["encode_syndromes"]

_ENCODE = {
    Backend.CUDA: encode_syndromes_on_device,
    Backend.COMPILED: encode_syndromes_compiled,
    Backend.REFERENCE: encode_syndromes_reference,
}


def encode_syndromes(codes: Tensor, *, code: SyndromeCode, backend: Backend = Backend.AUTO) -> Tensor:
    """Encode the lowest bits of every row.

    Args:
        codes: uint8 [N, K], K of 1 or more; any strides. Only code & 1 is read: E2M1 codes give their mantissa bits.
        code: The binary code; the last block of a row may be shorter than code.length.
        backend: Implementation.

    Returns:
        uint8 [N, code.row_bytes(K)]. Empty N is fine.

    Raises:
        FormatError: codes is no uint8 [N, K].
        BackendError: The backend cannot run here.
    """
    chosen = choose("syndromes", codes.device, backend)
    if codes.dtype != torch.uint8 or codes.dim() != 2 or codes.shape[1] == 0:
        raise FormatError(
            f"encode_syndromes reads uint8 [N, K] with K of 1 or more; got {codes.dtype} {tuple(codes.shape)}. "
            "Unpack the codes, and flatten the leading dimensions."
        )
    return _ENCODE[chosen](codes, code)

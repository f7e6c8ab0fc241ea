"""dequantize: stored bytes become values.

    value = E2M1(code) * (s_block * 2^k)

Every product is exact in float32, and in bfloat16 for the power-of-two schemes (at most six significant
bits), so the result does not depend on the order of the multiplications.
"""

import torch
from torch import Tensor

from tracefp4.errors import FormatError
from tracefp4.formats.tensor import BlockTensor
from tracefp4.ops.backend import Backend, choose
from tracefp4.ops.dequantize.reference import dequantize_reference

_EXACT_DTYPES = (torch.float32, torch.float64, torch.bfloat16)


def dequantize(
    t: BlockTensor, *, dtype: torch.dtype = torch.float32, backend: Backend = Backend.AUTO
) -> Tensor:
    """Return the values of a quantized tensor.

    Args:
        t: The bytes.
        dtype: float32, float64 or bfloat16; all three hold every value exactly.
        backend: Implementation.

    Returns:
        `dtype` [..., K]. A block with scale byte 0x7F gives NaN in all of its elements; code 8 gives -0.0.

    Raises:
        FormatError: When the dtype cannot hold the values exactly.
        BackendError: When the backend cannot run here.
    """
    choose("dequantize", t.packed.device, backend)
    if dtype not in _EXACT_DTYPES:
        raise FormatError(
            f"dequantize gives float32, float64 or bfloat16; got {dtype}. Ask for one of these and cast."
        )
    return dequantize_reference(t, dtype)

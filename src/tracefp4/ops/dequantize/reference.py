"""The definition of dequantize, in plain torch: one gather of value pairs per packed byte, one float32
multiplication."""

import torch
from torch import Tensor

from tracefp4.formats.constant import Constant
from tracefp4.formats.element import E2M1
from tracefp4.formats.tensor import BlockTensor

_VALUES = E2M1.values()
_PAIRS = Constant(
    torch.tensor(
        [[_VALUES[byte & 15], _VALUES[byte >> 4]] for byte in range(256)], dtype=torch.float32, device="cpu"
    )
    .view(torch.float64)
    .view(-1)
)
"""Word b holds the two float32 values of packed byte b, the low nibble first: they move as one."""


def dequantize_reference(t: BlockTensor, dtype: torch.dtype) -> Tensor:
    """Decode checked bytes; see `dequantize`."""
    pairs = _PAIRS.on(t.packed.device)
    values = pairs[t.packed.to(torch.int32)].view(torch.float32)
    values.unflatten(-1, (-1, t.scheme.block_size)).mul_(t.scales().unsqueeze(-1))
    return values.to(dtype)

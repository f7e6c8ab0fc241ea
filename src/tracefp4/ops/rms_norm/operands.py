"""What a norm gives."""

from typing import NamedTuple

from torch import Tensor

from tracefp4.formats.tensor import BlockTensor


class Normed(NamedTuple):
    """Rows after a norm."""

    values: Tensor
    """bfloat16 [T, H]."""
    residual: Tensor | None
    """bfloat16 [T, H], the sum that was normed; None where nothing was added."""
    block_tensor: BlockTensor | None
    """The values in FP4; None where no scheme was given."""

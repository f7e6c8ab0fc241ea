"""What SwiGLU gives."""

from typing import NamedTuple

from torch import Tensor

from tracefp4.formats.tensor import BlockTensor


class Gated(NamedTuple):
    """Rows after SwiGLU."""

    values: Tensor
    """bfloat16 [P, I]."""
    block_tensor: BlockTensor | None
    """The values in FP4; None where no scheme was given."""

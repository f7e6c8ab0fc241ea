"""K and V of one layer as ops take them: pages in one of three kinds of storage. It holds tensors and does nothing."""

from dataclasses import dataclass

from torch import Tensor

from tracefp4.formats.fragments import FragmentPages
from tracefp4.formats.tensor import BlockTensor

QuantizedPages = BlockTensor | FragmentPages
Pages = QuantizedPages | Tensor
"""[C, F, S, D]: FP4 in plain or in fragment order, or floats; see `ops.kv_append`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerPages:
    """Pages of one layer."""

    keys: Pages
    """K after RoPE."""
    values: Pages
    """V, in the same kind of storage."""

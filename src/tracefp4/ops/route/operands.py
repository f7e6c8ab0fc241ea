"""Where tokens go."""

from typing import NamedTuple

from torch import Tensor


class Routed(NamedTuple):
    """Experts of every token, most probable first."""

    ids: Tensor
    """int64 [T, J], distinct in a row."""
    weights: Tensor
    """bfloat16 [T, J]."""

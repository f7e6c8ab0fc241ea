"""Tables of angles, and norms of queries and keys."""

from typing import NamedTuple

from torch import Tensor


class Angles(NamedTuple):
    """Cosines and sines of positions 0 .. L - 1."""

    cos: Tensor
    """bfloat16 [L, D]; the halves of a row need not be equal."""
    sin: Tensor
    """bfloat16 [L, D]."""


class HeadNorms(NamedTuple):
    """The RMS norms of heads before they are turned."""

    q: Tensor
    """bfloat16 [D], weight of queries."""
    k: Tensor
    """bfloat16 [D], weight of keys."""
    epsilon: float
    """Added to the mean square, as float32."""

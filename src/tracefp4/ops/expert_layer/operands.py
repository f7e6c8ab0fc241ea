"""What the expert layer takes and gives, as plain values; nothing is computed here."""

from typing import NamedTuple

from torch import Tensor

from tracefp4.formats.tensor import BlockTensor
from tracefp4.formats.weight_fragments import WeightFragments


class Routing(NamedTuple):
    """Which experts the tokens go to."""

    ids: Tensor
    """int64 [T, k]; experts, 0 .. E - 1, repetitions allowed."""
    weights: Tensor
    """bfloat16 or float32 [T, k]; what an expert's output is multiplied by."""


class Experts(NamedTuple):
    """The FP4 weights of one layer's experts, in fragment order."""

    gate_up: WeightFragments
    """[E, 2 I, H]: the rows of the gate, then those of the up-projection."""
    down: WeightFragments
    """[E, H, I], under the same scheme."""


class ExpertOutput(NamedTuple):
    """The layer's output, and its two rounding sites where they were asked for."""

    y: Tensor
    """bfloat16 [T, H]."""
    x: BlockTensor | None
    """[T, H]: the experts' input as they saw it; None unless asked for and quantized."""
    w2: BlockTensor | None
    """[T k, I]: the down-projection's input of every (token, slot), token-major; None as x."""

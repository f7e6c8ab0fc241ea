"""What gated delta layers read and keep, and the bf16 of an arithmetic that stores something wider."""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from tracefp4.formats.arithmetic import round_bf16


class Projected(NamedTuple):
    """The projections of a layer's input; leading dimensions are sequences, or sequences and tokens."""

    mixed: Tensor
    """[.., W]: queries of all key heads, their keys, and the values of all value heads; W = 2 Hk Dk + Hv Dv."""
    z: Tensor
    """[.., Hv Dv], what gates the output."""
    b: Tensor
    """[.., Hv], logits of how much a token overwrites."""
    a: Tensor
    """[.., Hv], of how much the state decays."""


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class DeltaWeights:
    """Weights of a layer that are no matrix product."""

    taps: Tensor
    """[K, W], the causal convolution, oldest token first; in the dtype of the projections."""
    a_log: Tensor
    """float32 (float64 beside float64 projections) [Hv], log of the decay rates."""
    dt_bias: Tensor
    """The same [Hv], added to `a`."""
    norm: Tensor
    """[Dv], weight of the output's norm; in the dtype of the projections."""
    epsilon: float
    """Added to the mean square of that norm."""


class DeltaState(NamedTuple):
    """What the sequences of a layer remember, by slot."""

    conv: Tensor
    """[S, K - 1, W], the last inputs of the convolution, oldest first; in the dtype of the projections."""
    recurrent: Tensor
    """[S, Hv, Dv, Dk], the matrix of every value head, keys last: bfloat16, float32 or float64."""


class Prepared(NamedTuple):
    """What one step of the delta rule takes; float32, or float64 where the projections are."""

    q: Tensor
    """[B, Hk, Dk], of length Dk^-1/2."""
    k: Tensor
    """[B, Hk, Dk], of length 1."""
    v: Tensor
    """[B, Hv, Dv], in the dtype of the projections."""
    decay: Tensor
    """[B, Hv], in 0 .. 1."""
    beta: Tensor
    """[B, Hv], in 0 .. 1; a bf16 number where bf16 is written."""


@dataclass(frozen=True, slots=True)
class Storage:
    """How a tensor between two kernels is stored."""

    dtype: torch.dtype
    """Of the projections."""
    emulates_bf16: bool
    """Whether values are rounded to bf16 in that dtype."""
    wide: torch.dtype = field(init=False)
    """What sums and functions are computed in."""

    def __post_init__(self) -> None:
        is_double = self.dtype == torch.float64
        object.__setattr__(self, "wide", torch.float64 if is_double else torch.float32)

    def written(self, x: Tensor) -> Tensor:
        """Return x as a kernel writes it and the next one reads it, in the wide dtype."""
        stored = x.to(self.dtype)
        return (round_bf16(stored) if self.emulates_bf16 else stored).to(self.wide)

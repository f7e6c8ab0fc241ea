"""In which arithmetic a forward runs, and rounding to bf16 without bf16 storage.

On a CPU, bf16 matrix products are two orders of magnitude slower than float32 ones, so bf16 is emulated:
tensors are stored as float32 and every module output is rounded to bf16. The control arithmetic does the
same in float64, where differences of summation order are so small (1e-16) that they almost never reach a
bf16 boundary: two implementations of one function then agree bit for bit. This module never decides where a
forward rounds.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

_BF16_MAX = torch.finfo(torch.bfloat16).max


@dataclass(frozen=True, kw_only=True, slots=True)
class Arithmetic:
    """Storage dtype and rounding habits of a forward pass."""

    name: str
    """Name shown in manifests and reports."""
    dtype: str
    """Name of the torch dtype used for storage and computation: "float32", "float64" or "bfloat16"."""
    emulates_bf16: bool
    """True when module outputs are rounded to bf16 values kept in a wider dtype."""
    rounds_probabilities: bool
    """True when attention rounds its (unnormalised or normalised) probabilities to bf16 before multiplying
    V."""

    @property
    def torch_dtype(self) -> torch.dtype:
        """The torch dtype named by `dtype`."""
        return {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}[self.dtype]


EMULATED = Arithmetic(name="emulated", dtype="float32", emulates_bf16=True, rounds_probabilities=True)
"""bf16 emulated in float32: the CPU default."""

CONTROL = Arithmetic(name="control", dtype="float64", emulates_bf16=True, rounds_probabilities=False)
"""bf16 emulated in float64: for tests of equality between rollout and trainer."""

NATIVE = Arithmetic(name="native", dtype="bfloat16", emulates_bf16=False, rounds_probabilities=True)
"""Real bf16 tensors: for accelerators."""


def round_bf16(x: Tensor) -> Tensor:
    """Round to the nearest bf16 value, ties to even, keeping the dtype.

    float64 is rounded once, straight to bf16 (a cast through float32 would round twice). No autograd: a
    detached copy.

    Args:
        x: float32, float64 or bfloat16, any shape; NaN and Inf are kept, values beyond the bf16 range become
            Inf.

    Returns:
        A new tensor of x's dtype and shape, every value exactly representable in bf16.
    """
    x = x.detach()
    if x.dtype == torch.float64:
        return _round_bf16_float64(x)
    if x.dtype == torch.float32 and torch.compiler.is_compiling():
        return _round_bf16_bits(x)
    return x.to(torch.bfloat16).to(x.dtype, copy=x.dtype == torch.bfloat16)


def round_bf16_(x: Tensor) -> Tensor:
    """Round `x.data` to bf16 in place, invisibly to autograd: the gradient passes straight through.

    Args:
        x: float32, float64 or bfloat16, any shape.

    Returns:
        x itself.
    """
    x.data.copy_(round_bf16(x.data))
    return x


def _round_bf16_bits(x: Tensor) -> Tensor:
    # compilers drop a cast to bf16 that is cast back at once, and with it the rounding; integers they must keep.
    # Adding half of the last kept bit, less one where that bit is even, carries into the kept bits: ties to even.
    bits = x.view(torch.int32)
    rounded = (bits + (((bits >> 16) & 1) + 0x7FFF)) & -0x10000
    return torch.where(x == x, rounded.view(torch.float32), x)


def _round_bf16_float64(x: Tensor) -> Tensor:
    # (|x| + A) - A rounds |x| to a multiple of the spacing of A. A = max(|x| * (2^45 - 4), 2^45 * 2^-126)
    # has the spacing of bf16 at |x|, subnormals included; see formats/grid.py for the argument about ties
    # and binades.
    magnitude = x.abs()
    anchor = (magnitude * (2.0**45 - 4.0)).clamp_(max=2.0**175)
    anchor.clamp_(min=2.0 ** (45 - 126))
    rounded = magnitude.add(anchor).sub_(anchor)
    # a graph cannot look at values, so a compiled rounding always asks
    if torch.compiler.is_compiling() or not bool(rounded.amax() <= _BF16_MAX if rounded.numel() else True):
        rounded = torch.where(rounded > _BF16_MAX, torch.full_like(rounded, torch.inf), rounded)
    return rounded.copysign_(x)

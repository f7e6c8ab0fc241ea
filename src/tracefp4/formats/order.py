"""The choices of a scheme that are formulas: in which order the float32 operations run, how a maximum becomes a
block scale, which of two candidate scales a block takes, which way a tie goes, what sign a zero has, what NaN becomes.

Each member's value is the formula itself, so the digest of a scheme covers it. Symbols: amax, the largest
magnitude of the block; s, the stored (rounded) block scale; k, g, G or A, the outer scale as it is stored: a power
of two 2^k, a multiplier g, a divisor G, or the maximum A from which G = M/A with M = 6 * scale_max. Every operation
is one float32 operation, rounded once, in the order of the brackets. Quantizers that agree in real arithmetic
differ in bytes by this order: a bf16 input often lands exactly on a tie. `scaling.py` holds the arithmetic; this
module never touches a tensor.
"""

from enum import StrEnum
from typing import Literal

OuterKind = Literal["exponent", "multiplier", "divisor", "amax", "none"]
"""What is stored of the outer scale: int8 k, float32 g, float32 G, the float32 maximum A itself, or nothing."""


class Order(StrEnum):
    """The raw block scale before it is rounded, and the number that is rounded to E2M1."""

    POW2 = "(amax*2^-k)/6; x/(s*2^k)"
    """Ours: the products with 2^k are exact, so each half holds one rounded operation."""
    MODELOPT = "amax/(6*g); x/(s*g)"
    """ModelOpt, and our schemes with a float32 outer scale."""
    TORCHAO = "(amax/6)/g; x*((1/g)/s)"
    """torchao."""
    COMPRESSED_TENSORS = "G*(amax/6); x/(s/G)"
    """compressed-tensors, on float32 inputs."""
    VLLM = "G*(amax*(1/6)); x*(1/(s*(1/G)))"
    """vLLM's emulation, which follows its kernels."""
    TRANSFORMER_ENGINE = "G=M/A; amax*(G*(1/6)); x*(1/(s*(1/G)))"
    """Transformer Engine."""
    FOUROVERSIX = "G=M/A; (amax/6)*G; x*(1/((1/G)*s))"
    """fouroversix, and Transformer Engine in its four-over-six mode."""
    MX = "x/2^e"
    """MXFP4: the block scale is a power of two found by a ScaleRule; every operation is exact."""

    @property
    def outer_kind(self) -> OuterKind:
        """What is stored of the outer scale under this order."""
        return _OUTER_KINDS[self]

    @property
    def multiplies(self) -> bool:
        """True when x is multiplied by a reciprocal, False when it is divided."""
        return "; x*" in self.value


_OUTER_KINDS: dict[Order, OuterKind] = {
    Order.POW2: "exponent",
    Order.MODELOPT: "multiplier",
    Order.TORCHAO: "multiplier",
    Order.COMPRESSED_TENSORS: "divisor",
    Order.VLLM: "divisor",
    Order.TRANSFORMER_ENGINE: "amax",
    Order.FOUROVERSIX: "amax",
    Order.MX: "none",
}


class ScaleRule(StrEnum):
    """How the number of the order, or amax itself, becomes the byte of the block scale."""

    E4M3 = "e4m3_nearest_even(min(raw,448))"
    """NVFP4."""
    FLOOR = "2^(floor(log2(amax))-2)"
    """OCP Microscaling v1.0, section 6.3; saturates values above 6 * 2^e."""
    EVEN = "2^(floor(log2(round_to_one_mantissa_bit(amax)))-2)"
    """As FLOOR, but a block whose maximum reaches 1.75 * 2^n takes the next power of two."""
    RCEIL = "2^ceil(log2(amax/6))"
    """The smallest power of two under which nothing saturates."""
    CEIL = "2^(ceil(log2(amax))-2)"
    """Never saturates; wastes up to one binade."""


class Candidates(StrEnum):
    """Which scales a block may take: raw alone, or the better of raw and raw * 1.5 (ties to raw), where the block
    maximum becomes 6 and 4."""

    SIX = "raw"
    """The block maximum becomes 6."""
    MSE = "4over6:sum((x-value)^2)"
    """The lower sum of squared errors."""
    MAE = "4over6:sum(|x-value|)"
    """The lower sum of absolute errors."""
    ABSMAX = "4over6:max(|x-value|)"
    """The lower largest error."""


class ErrorSum(StrEnum):
    """In which order the errors of a block are added when two scales compete; near-ties depend on it."""

    TREE = "halves added until one is left"
    """Ours."""
    SEQUENTIAL = "e0+e1+...+e15"
    """Transformer Engine."""
    FOLDED = "h_j=e_j+e_(j+8); h0+h1+...+h7"
    """fouroversix: what torch's sum over 16 neighbours does on a CPU."""


class Tie(StrEnum):
    """Which of two equally near codes a value takes."""

    EVEN = "nearest_even"
    """The code with mantissa bit 0, as hardware does."""
    TOWARD_ZERO = "nearest_toward_zero"
    """The smaller magnitude."""


class Sign(StrEnum):
    """When bit 3 of a code is set."""

    KEPT = "signbit(x)"
    """Also for -0.0."""
    ORDERED = "x<0"
    """Not for -0.0; a negative that rounds to zero still has it."""
    NOT_POSITIVE = "x<=0"
    """Also for +0.0."""


class NonFinite(StrEnum):
    """What NaN and Inf become. One rule for all schemes, in the digest because a reader must know it."""

    BLOCK = "block->nan_byte,codes 0;outer_over_finite_blocks"
    """A block that holds one stores the NaN byte (0x7F in E4M3, 0xFF in E8M0) and reads back NaN; the other blocks are
    unaffected."""

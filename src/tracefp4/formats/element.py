"""Element formats as data: how many bits, which bias, which code means which real number.

    value(code) = (-1)^sign * 2^(exponent - bias) * (1 + mantissa / 2^mantissa_bits)    exponent field > 0
    value(code) = (-1)^sign * 2^(1 - bias) * mantissa / 2^mantissa_bits                 exponent field = 0
    value(code) = 2^(code - bias)                                                       scale-only formats
    (E8M0)

This module never touches a tensor: `values()` is plain Python and is the ground truth that the tensor code
is tested against. Alternative not taken: hand-written tables, which cannot be checked against the layout
that they claim.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class FloatFormat:
    """A small floating-point format, described by its bit layout."""

    name: str
    """Short upper-case name, e.g. "E2M1"."""
    bits: int
    """Width of a code in bits, sign included."""
    exponent_bits: int
    """Width of the exponent field."""
    mantissa_bits: int
    """Width of the mantissa field; 0 for a format that holds only powers of two."""
    bias: int
    """Subtracted from the exponent field."""
    max_value: float
    """Largest finite value."""
    is_signed: bool
    """True when the top bit is a sign."""
    has_nan: bool
    """True when the code with all exponent and mantissa bits set means NaN."""
    source: str
    """Where the layout is specified."""

    @property
    def num_codes(self) -> int:
        """Number of codes, 2^bits."""
        return 2**self.bits

    @property
    def has_subnormals(self) -> bool:
        """True when exponent field 0 means a subnormal number (false only for mantissa-free formats)."""
        return self.mantissa_bits > 0

    @property
    def smallest_value(self) -> float:
        """Smallest positive value, e.g. 0.5 for E2M1 and 2^-9 for E4M3."""
        if self.has_subnormals:
            return 2.0 ** (1 - self.bias - self.mantissa_bits)
        return 2.0**-self.bias

    def value(self, code: int) -> float:
        """Return the real number that one code means.

        Args:
            code: Integer in [0, 2^bits).

        Returns:
            The value as a Python float; -0.0 for the negative zero code, nan for a NaN code.

        Raises:
            IndexError: When the code is outside the format.
        """
        if not 0 <= code < self.num_codes:
            raise IndexError(f"{self.name} codes run from 0 to {self.num_codes - 1}; got {code}.")
        payload = code & (2 ** (self.bits - 1) - 1) if self.is_signed else code
        if self.has_nan and payload == 2 ** (self.exponent_bits + self.mantissa_bits) - 1:
            return float("nan")
        mantissa = payload & (2**self.mantissa_bits - 1)
        exponent = payload >> self.mantissa_bits
        if exponent == 0 and self.has_subnormals:
            magnitude = mantissa * self.smallest_value
        else:
            magnitude = 2.0 ** (exponent - self.bias) * (1.0 + mantissa / 2**self.mantissa_bits)
        return -magnitude if payload != code else magnitude

    def values(self) -> list[float]:
        """Return the value of every code, in code order."""
        return [self.value(code) for code in range(self.num_codes)]


E2M1 = FloatFormat(
    name="E2M1",
    bits=4,
    exponent_bits=2,
    mantissa_bits=1,
    bias=1,
    max_value=6.0,
    is_signed=True,
    has_nan=False,
    source="OCP Microscaling Formats v1.0, section 5.3.3",
)
"""The FP4 element: 0, .5, 1, 1.5, 2, 3, 4, 6 and their negatives; 0x8 is -0; no NaN and no Inf."""

E4M3 = FloatFormat(
    name="E4M3",
    bits=8,
    exponent_bits=4,
    mantissa_bits=3,
    bias=7,
    max_value=448.0,
    is_signed=True,
    has_nan=True,
    source="OCP 8-bit Floating Point Specification v1.0, section 3 (E4M3, finite with NaN)",
)
"""The NVFP4 block scale: largest 448, smallest 2^-9, NaN at 0x7F and 0xFF, no Inf."""

E8M0 = FloatFormat(
    name="E8M0",
    bits=8,
    exponent_bits=8,
    mantissa_bits=0,
    bias=127,
    max_value=2.0**127,
    is_signed=False,
    has_nan=True,
    source="OCP Microscaling Formats v1.0, section 5.4.1",
)
"""The MXFP4 block scale: 2^(byte - 127); byte 0 is 2^-127 (not zero), byte 255 is NaN."""

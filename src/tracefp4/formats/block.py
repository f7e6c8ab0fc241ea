"""Block formats as data: an element format, how many elements share a scale, and the format of that scale.

A block format says which numbers exist. It does not say how a scale is chosen from data: that is a scheme
(`scheme.py`). Blocks always run along the last dimension. This module never touches a tensor.
"""

from dataclasses import dataclass

from tracefp4.formats.element import E2M1, E4M3, E8M0, FloatFormat


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockFormat:
    """An element format with one scale per block of consecutive elements."""

    name: str
    """Short upper-case name, e.g. "NVFP4"."""
    element: FloatFormat
    """Format of each element."""
    block_size: int
    """Number of consecutive elements along the last dimension that share one scale."""
    scale_format: FloatFormat
    """Format of the shared scale."""

    @property
    def bits_per_value(self) -> float:
        """Storage per element in bits, block scale included and outer scale not."""
        return self.element.bits + self.scale_format.bits / self.block_size


NVFP4 = BlockFormat(name="NVFP4", element=E2M1, block_size=16, scale_format=E4M3)
"""E2M1 elements, one E4M3 scale per 16: 4.5 bits per value."""

MXFP4 = BlockFormat(name="MXFP4", element=E2M1, block_size=32, scale_format=E8M0)
"""E2M1 elements, one E8M0 scale per 32: 4.25 bits per value."""

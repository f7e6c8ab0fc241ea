"""An independent reference for NVFP4 with a power-of-two outer scale, in exact rational arithmetic. It
shares no code with tracefp4: the grids are written from the format definitions and every decision is made
on fractions."""

from bisect import bisect_left
from fractions import Fraction

E2M1_GRID = [Fraction(n, 2) for n in (0, 1, 2, 3, 4, 6, 8, 12)]
E4M3_GRID = [Fraction(m, 512) for m in range(8)] + [
    Fraction(8 + m, 8) * Fraction(2) ** (e - 7) for e in range(1, 16) for m in range(8) if (e, m) != (15, 7)
]


def nearest_even(magnitude: Fraction, grid: list[Fraction]) -> int:
    """Return the index of the nearest grid value, ties to the even index, saturating."""
    if magnitude >= grid[-1]:
        return len(grid) - 1
    upper = bisect_left(grid, magnitude)
    if grid[upper] == magnitude:
        return upper
    lower = upper - 1
    to_lower, to_upper = magnitude - grid[lower], grid[upper] - magnitude
    if to_lower == to_upper:
        return lower if lower % 2 == 0 else upper
    return lower if to_lower < to_upper else upper


def outer_exponent(row: list[float]) -> int:
    """Return the smallest k in [-110, 116] with amax <= 2688 * 2^k; 0 for a row of zeros."""
    amax = max((abs(Fraction(v)) for v in row), default=Fraction(0))
    if amax == 0:
        return 0
    k = -110
    while k < 116 and amax > 2688 * Fraction(2) ** k:
        k += 1
    return k


def block_scale_byte(block: list[float], k: int) -> int:
    """Return the E4M3 byte of one block."""
    amax = max(abs(Fraction(v)) for v in block)
    if amax == 0:
        return 0
    return max(1, nearest_even(amax / 6 / Fraction(2) ** k, E4M3_GRID))


def quantize_row(row: list[float], k: int | None = None) -> tuple[int, list[int], list[int]]:
    """Return (k, block scale bytes, codes) of one row of finite values whose length is a multiple of 16."""
    k = outer_exponent(row) if k is None else k
    block_scales, codes = [], []
    for start in range(0, len(row), 16):
        block = row[start : start + 16]
        byte = block_scale_byte(block, k)
        decode_scale = E4M3_GRID[byte] * Fraction(2) ** k
        block_scales.append(byte)
        for value in block:
            is_negative = str(float(value)).startswith("-")
            code = nearest_even(abs(Fraction(value)) / decode_scale, E2M1_GRID) if byte else 0
            codes.append(code + 8 * is_negative)
    return k, block_scales, codes


def bracket(magnitude: Fraction) -> tuple[int, int]:
    """Return the magnitude codes around min(magnitude, 6); equal when it is itself a codeword."""
    magnitude = min(magnitude, Fraction(6))
    upper = bisect_left(E2M1_GRID, magnitude)
    return (upper, upper) if E2M1_GRID[upper] == magnitude else (upper - 1, upper)


def cell(ordinal: int) -> tuple[Fraction, Fraction]:
    """Return the rounding cell of the signed codeword `ordinal` in [-7, 7]: between the midpoints to its
    neighbours."""
    far = Fraction(10**6)

    def value(o: int) -> Fraction:
        return E2M1_GRID[abs(o)] * (1 if o >= 0 else -1)

    low = -far if ordinal == -7 else (value(ordinal - 1) + value(ordinal)) / 2
    high = far if ordinal == 7 else (value(ordinal + 1) + value(ordinal)) / 2
    return low, high


def nearest_cell(z: Fraction, is_negative: bool, bit: int) -> int:
    """Return the signed ordinal with parity `bit` whose rounding cell is nearest to clip(z), searched among
    all 15.

    A value that lies in the rounding cell of a codeword with that parity keeps nearest even (z). Ties go to
    the smaller magnitude, and between +-0.5 at z = 0 to the side of z's sign.
    """
    z = max(min(z, Fraction(6)), Fraction(-6))
    nearest = nearest_even(abs(z), E2M1_GRID)
    if nearest % 2 == bit:
        return -nearest if is_negative else nearest
    candidates = [o for o in range(-7, 8) if abs(o) % 2 == bit]

    def cost(o: int) -> tuple[Fraction, int, bool]:
        low, high = cell(o)
        return max(Fraction(0), low - z, z - high), abs(o), (o < 0) != is_negative

    return min(candidates, key=cost)

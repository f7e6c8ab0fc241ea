"""A second decoder of guides, written from their definition for single rows in plain Python.

Every codeword, byte and set of flips is tried. Only numbers are shared with the product: the columns of a code."""

from fractions import Fraction
from itertools import combinations, pairwise

import numpy

from tracefp4.coding import SyndromeCode

MAGNITUDES = [Fraction(n, 2) for n in (0, 1, 2, 3, 4, 6, 8, 12)]
EDGES = [(a + b) / 2 for a, b in pairwise(MAGNITUDES)]
CELLS = [(low, high) for low, high in zip([None, *EDGES], [*EDGES, None], strict=True)]


def e4m3(byte: int) -> Fraction:
    exponent, fraction = byte >> 3, byte & 7
    if exponent == 0:
        return Fraction(fraction, 512)
    return Fraction(8 + fraction, 8) * Fraction(2) ** (exponent - 7)


def signed_cells() -> list[tuple[int, Fraction | None, Fraction | None]]:
    """(ordinal, lower end, upper end) of the 15 codewords -7 .. 7."""
    cells = [(0, -EDGES[0], EDGES[0])]
    for m in range(1, 8):
        low, high = CELLS[m]
        cells.append((m, low, high))
        cells.append((-m, None if high is None else -high, -low))
    return cells


def distance_to_cell(z: Fraction, ordinal: int) -> Fraction:
    low, high = next((low, high) for m, low, high in signed_cells() if m == ordinal)
    if low is not None and z < low:
        return low - z
    if high is not None and z > high:
        return z - high
    return Fraction(0)


def nearest_with(z: Fraction, is_negative: bool, allowed: set[int]) -> int:
    """The ordinal among the allowed whose cell is nearest to z: ties to the smaller magnitude, then to z's side."""
    side = -1 if is_negative else 1
    return min(allowed, key=lambda m: (distance_to_cell(z, m), abs(m), m * side < 0))


def alternative(z: Fraction, is_negative: bool, nearest: int) -> int:
    """The codeword of the other mantissa parity whose cell is nearest."""
    return nearest_with(z, is_negative, {m for m in range(-7, 8) if (abs(m) ^ abs(nearest)) & 1})


def with_low_bits(z: Fraction, is_negative: bool, low: int) -> int:
    return nearest_with(z, is_negative, {m for m in range(-7, 8) if abs(m) & 3 == low})


def units(distance: float, per_one: int) -> int:
    """floor(distance * per_one) of a float32 distance, exact."""
    return int(Fraction(float(distance)) * per_one)


def cheapest_set(difference: int, distances: dict[int, int], code: SyndromeCode) -> tuple[int, ...] | None:
    """The positions to flip; `distances` holds the candidates' integer distances by position in the block."""
    ranked = sorted(distances, key=lambda j: (distances[j], j))[: code.num_candidates]
    best: tuple[int, int, tuple[int, ...]] | None = None
    for size in range(1, code.max_flips + 1):
        for ranks in combinations(range(len(ranked)), size):
            explained = 0
            for rank in ranks:
                explained ^= code.columns[ranked[rank]]
            if explained == difference:
                cost = sum(distances[ranked[rank]] ** 2 for rank in ranks)
                best = min(best or (cost, size, ranks), (cost, size, ranks))
    return None if best is None else tuple(ranked[rank] for rank in best[2])


def syndromes(bits: list[int], code: SyndromeCode) -> list[int]:
    """The syndromes of a row of bits, bit by bit."""
    found = [0] * -(-len(bits) // code.length)
    for position, bit in enumerate(bits):
        if bit & 1:
            found[position // code.length] ^= code.columns[position % code.length]
    return found


def packed(numbers: list[int], num_bits: int) -> list[int]:
    """Bytes of a row of numbers of num_bits bits each."""
    string = sum(number << num_bits * index for index, number in enumerate(numbers))
    return list(string.to_bytes(-(-len(numbers) * num_bits // 8), "little"))


def unpacked(row: list[int], num_bits: int, count: int) -> list[int]:
    string = int.from_bytes(bytes(row), "little")
    return [string >> num_bits * index & (1 << num_bits) - 1 for index in range(count)]


def flips_of_row(
    own_bits: list[int], recorded: list[int], distances: dict[int, int], code: SyndromeCode
) -> tuple[set[int], int]:
    """Positions of a row to flip, and how many blocks nothing explains; `recorded` are the bytes of the row."""
    own = syndromes(own_bits, code)
    flips: set[int] = set()
    undecoded = 0
    for block, (mine, theirs) in enumerate(
        zip(own, unpacked(recorded, code.num_bits, len(own)), strict=True)
    ):
        if mine == theirs:
            continue
        first = block * code.length
        inside = {j - first: c for j, c in distances.items() if first <= j < first + code.length}
        found = cheapest_set(mine ^ theirs, inside, code)
        if found is None:
            undecoded += 1
        else:
            flips |= {first + j for j in found}
    return flips, undecoded


def float32_distance(z: numpy.float32, nearest: int, other: int) -> numpy.float32:
    """One float32 subtraction between |z| and the end of the nearest cell."""
    edge = numpy.float32(EDGES[min(abs(nearest), abs(other))])
    return numpy.float32(abs(edge - abs(z)))


def nearest_byte(target: Fraction, allowed: list[int]) -> int:
    """The byte of E4M3 whose value is nearest to the target; the lower one at a tie."""
    return min(allowed, key=lambda byte: (abs(e4m3(byte) - target), byte))


def nearest_even(z: Fraction) -> int:
    """The magnitude code nearest to z in [0, 6]; a tie goes to the even code."""
    return min(range(8), key=lambda m: (abs(MAGNITUDES[m] - z), m & 1))


class Row:
    """One row of x under NVFP4 with a power of two outside, as float32 arithmetic has it."""

    def __init__(self, x: numpy.ndarray, exponent: int) -> None:
        self.blocks = x.reshape(-1, 16)
        self.outer = numpy.float32(2.0**exponent)
        amax = numpy.abs(self.blocks).max(1)
        self.raw = [numpy.float32(numpy.float32(a / self.outer) / numpy.float32(6)) for a in amax]
        self.is_zero = [a == 0 for a in amax]
        self.own = [
            0 if zero else max(1, min(range(127), key=lambda b: (abs(e4m3(b) - Fraction(float(u))), b & 1)))
            for u, zero in zip(self.raw, self.is_zero, strict=True)
        ]
        # A tiny block stores 2^-9 whatever its scale is, and a large one 448.
        self.targets = [
            Fraction(0)
            if zero
            else e4m3(own)
            if own == 1 and u <= 2.0**-10
            else min(Fraction(float(u)), Fraction(448))
            for u, zero, own in zip(self.raw, self.is_zero, self.own, strict=True)
        ]

    def scales_of_cosets(self, low: list[int], step: int) -> list[int]:
        return [
            nearest_byte(target, list(range(r, 127, step)))
            for r, target in zip(low, self.targets, strict=True)
        ]

    def scales_of_syndromes(
        self, recorded: list[int], code: SyndromeCode, limit: float
    ) -> tuple[list[int], int]:
        others, distances = list(self.own), {}
        for g, (own, target) in enumerate(zip(self.own, self.targets, strict=True)):
            if self.is_zero[g]:
                continue
            ends = {
                b: (e4m3(min(own, b)) + e4m3(max(own, b))) / 2 for b in (own - 1, own + 1) if 0 <= b < 127
            }
            others[g] = min(ends, key=lambda b: (abs(ends[b] - target), b))
            u = numpy.float32(float(target))
            share = numpy.float32(abs(numpy.float32(float(ends[others[g]])) - u)) / u
            if share <= numpy.float32(limit):
                distances[g] = units(share, 65536)
        flips, undecoded = flips_of_row([own & 1 for own in self.own], recorded, distances, code)
        return [others[g] if g in flips else own for g, own in enumerate(self.own)], undecoded

    def positions(self, scales: list[int]) -> list[numpy.float32]:
        """z of every value, with its sign; 0 under a scale of 0."""
        found = []
        for block, byte in zip(self.blocks, scales, strict=True):
            scale = numpy.float32(float(e4m3(byte))) * self.outer
            z = numpy.abs(block) / scale if scale > 0 else numpy.zeros(16, numpy.float32)
            found += list(numpy.copysign(numpy.minimum(z, numpy.float32(6)), block))
        return found

    def codes_of_syndromes(
        self, scales: list[int], recorded: list[int], code: SyndromeCode, limits: tuple[float, float]
    ) -> tuple[list[int], int, int]:
        """Ordinals, values within the second limit (inf: all), and blocks that nothing explains; flips lie within the
        first one."""
        nearest, others, distances, num_near = [], [], {}, 0
        for i, z in enumerate(self.positions(scales)):
            side = -1 if numpy.signbit(z) else 1
            nearest.append(side * nearest_even(abs(Fraction(float(z)))))
            others.append(alternative(Fraction(float(z)), side < 0, nearest[-1]))
            distance = float32_distance(z, nearest[-1], others[-1])
            if scales[i // 16] == 0:
                continue
            num_near += int(distance <= numpy.float32(limits[1]))
            if distance <= numpy.float32(limits[0]):
                distances[i] = units(distance, 4096)
        flips, undecoded = flips_of_row([abs(m) & 1 for m in nearest], recorded, distances, code)
        return [others[i] if i in flips else m for i, m in enumerate(nearest)], num_near, undecoded

"""A second implementation of every scheme, in numpy: one float32 operation at a time, rounding by counting midpoints.

It shares no code with tracefp4 and no method either: grids come from `rational.py`, rounding is a binary search among
exact midpoints (float64 holds every midpoint and every float32 number), exponents come from fractions, and each order
of operations is written out below as its library writes it. It reads the fields of a scheme as data.
Shapes: x [N, K]; G = K / block size blocks; outer scales [N, 1] (row) or [1, 1] (all others) so that they broadcast.
"""

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy
from tests.formats import rational

F = numpy.float32
E2M1 = numpy.array([float(v) for v in rational.E2M1_GRID])
E4M3 = numpy.array([float(v) for v in rational.E4M3_GRID])
SIXTH = F(1) / F(6)
LIMIT = F(2.0**116)
SILENT = {"divide": "ignore", "invalid": "ignore", "over": "ignore", "under": "ignore"}


@dataclass(frozen=True)
class Bytes:
    """What a scheme stores for [N, K]; `outer` as it is stored, without the broadcasting dimensions."""

    outer: numpy.ndarray
    block_scales: numpy.ndarray
    codes: numpy.ndarray


def nearest(magnitude: numpy.ndarray, grid: numpy.ndarray, tie: str = "nearest_even") -> numpy.ndarray:
    """Index of the nearest grid number; a tie goes to the even index, or down."""
    midpoints = (grid[1:] + grid[:-1]) / 2
    z = magnitude.astype(numpy.float64)
    index = numpy.searchsorted(midpoints, z, side="left")  # midpoints below z: a tie goes down
    if tie == "nearest_even":
        is_tie = midpoints[numpy.minimum(index, len(midpoints) - 1)] == z
        index = index + (is_tie & (index % 2 == 1))
    return index


def outer_exponent(amax: float, limit: float) -> int:
    """The smallest k in [-110, 116] with amax <= limit * 2^k; 0 for 0."""
    if amax == 0:
        return 0
    k = math.frexp(amax)[1] - math.frexp(limit)[1] - 1  # limit * 2^k is below amax
    while Fraction(amax) > Fraction(limit) * Fraction(2) ** k:
        k += 1
    return max(-110, min(116, k))


def stored_outer(amax: numpy.ndarray, scheme, exponent: int | None) -> numpy.ndarray:
    """The outer scale as stored, from the maxima [N, G] of finite blocks."""
    kind, limit = scheme.outer_kind, F(6 * scheme.scale_max)
    if kind == "none":
        return numpy.zeros((1, 1), F)
    if scheme.outer == "static":
        power = F(2.0**exponent)
        given = {"exponent": F(exponent), "multiplier": power, "divisor": F(1) / power, "amax": limit * power}
        return numpy.full((1, 1), given[kind])
    largest = amax.max(axis=1 if scheme.outer == "row" else (0, 1), keepdims=True)
    if kind == "exponent":
        return numpy.vectorize(lambda a: F(outer_exponent(float(a), float(limit))))(largest)
    if kind == "multiplier":
        found, neutral = numpy.maximum(largest / limit, F(1) / LIMIT), F(1)
    elif kind == "divisor":
        found, neutral = numpy.minimum((F(1) / largest) * limit, LIMIT), F(1)
    else:
        found, neutral = numpy.maximum(largest, limit / LIMIT), F(0)
    return numpy.where(largest == 0, neutral, found).astype(F)


def divisor(outer: numpy.ndarray, scheme) -> numpy.ndarray:
    """G: stored, or M / A."""
    if scheme.outer_kind == "divisor":
        return outer
    return numpy.where(outer == 0, F(1), F(6 * scheme.scale_max) / outer).astype(F)


def raw_scale(amax: numpy.ndarray, outer: numpy.ndarray, scheme) -> numpy.ndarray:
    """The number that is rounded to E4M3."""
    order = scheme.order.name
    if order == "POW2":
        return (amax * numpy.exp2(-outer)) / F(6)
    if order == "MODELOPT":
        return amax / (F(6) * outer)
    if order == "TORCHAO":
        return (amax / F(6)) / outer
    large = divisor(outer, scheme)
    return {
        "COMPRESSED_TENSORS": lambda: large * (amax / F(6)),
        "VLLM": lambda: large * (amax * SIXTH),
        "TRANSFORMER_ENGINE": lambda: amax * (large * SIXTH),
        "FOUROVERSIX": lambda: (amax / F(6)) * large,
    }[order]()


def scaled(x: numpy.ndarray, s: numpy.ndarray, outer: numpy.ndarray, scheme) -> numpy.ndarray:
    """z, the number that is rounded to E2M1; 0 under a scale of 0."""
    order = scheme.order.name
    large = F(1)
    if order in ("COMPRESSED_TENSORS", "VLLM", "TRANSFORMER_ENGINE", "FOUROVERSIX"):
        large = divisor(outer, scheme)
    z = {
        "POW2": lambda: x / (s * numpy.exp2(outer)),
        "MODELOPT": lambda: x / (s * outer),
        "TORCHAO": lambda: x * ((F(1) / outer) / s),
        "COMPRESSED_TENSORS": lambda: x / (s / large),
        "VLLM": lambda: x * (F(1) / (s * (F(1) / large))),
        "TRANSFORMER_ENGINE": lambda: x * (F(1) / (s * (F(1) / large))),
        "FOUROVERSIX": lambda: x * (F(1) / ((F(1) / large) * s)),
        "MX": lambda: x / s,
    }[order]()
    assert z.dtype == F
    return numpy.where(s > 0, z, F(0))


def decode_scale(s: numpy.ndarray, outer: numpy.ndarray, scheme) -> numpy.ndarray:
    """What multiplies a decoded code."""
    return {
        "exponent": lambda: s * numpy.exp2(outer),
        "multiplier": lambda: s * outer,
        "divisor": lambda: s / outer,
        "amax": lambda: (s * outer) / F(6 * scheme.scale_max),
        "none": lambda: s,
    }[scheme.outer_kind]()


def mx_byte(amax: float, rule: str) -> int:
    """The E8M0 byte of a block maximum by the definition of the rule, on fractions."""
    if amax == 0:
        return 0
    value, e = Fraction(amax), math.frexp(amax)[1] - 1  # 2^e <= amax < 2^(e + 1)
    up = {
        "FLOOR": False,
        "EVEN": value >= Fraction(7, 4) * Fraction(2) ** e,
        "RCEIL": value > Fraction(3, 2) * Fraction(2) ** e,
        "CEIL": value > Fraction(2) ** e,
    }[rule]
    return max(0, min(254, e - 2 + up + 127))


def decoded_scales(block_scales: numpy.ndarray, scheme) -> numpy.ndarray:
    """s_block as float32; NaN for NaN bytes."""
    if scheme.outer_kind == "none":
        return numpy.array([*(2.0 ** (b - 127) for b in range(255)), numpy.nan]).astype(F)[block_scales]
    half = numpy.append(E4M3, numpy.nan)
    return numpy.concatenate([half, -half]).astype(F)[block_scales]


def floored_bytes(raw: numpy.ndarray, amax: numpy.ndarray, scheme) -> numpy.ndarray:
    """E4M3 bytes with the scheme's rules for zero, tiny and small blocks."""
    byte = nearest(numpy.minimum(raw, F(448)), E4M3)
    byte = numpy.where(byte == 0, scheme.underflow_byte, byte)
    return numpy.where(amax == 0, scheme.zero_byte, numpy.maximum(byte, scheme.least_byte))


def block_error(blocks: numpy.ndarray, byte: numpy.ndarray, outer: numpy.ndarray, scheme) -> numpy.ndarray:
    """The error of every block under a scale byte, float32, added in the scheme's order."""
    s = decoded_scales(byte, scheme)[..., None]
    code = nearest(scaled(blocks, s, outer[..., None], scheme), E2M1, scheme.tie.value)
    v = E2M1[code].astype(F)
    if scheme.outer_kind == "amax":
        value = ((v * s) * outer[..., None]) / F(6 * scheme.scale_max)
    else:
        value = v * decode_scale(s, outer[..., None], scheme)
    gap = value - blocks
    assert gap.dtype == F
    if scheme.candidates.name == "ABSMAX":
        return numpy.abs(gap).max(-1)
    terms = gap * gap if scheme.candidates.name == "MSE" else numpy.abs(gap)
    return added([terms[..., i] for i in range(terms.shape[-1])], scheme.error_sum.name)


def added(terms: list[numpy.ndarray], order: str) -> numpy.ndarray:
    """Sum terms in a named order: "TREE" adds halves until one is left, "FOLDED" halves once, then from the left."""
    while len(terms) > {"TREE": 1, "FOLDED": 8, "SEQUENTIAL": len(terms)}[order]:
        half = len(terms) // 2
        terms = [terms[i] + terms[i + half] for i in range(half)]
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def quantize(x: numpy.ndarray, scheme, exponent: int | None = None) -> Bytes:
    """All bytes of float32 [N, K]."""
    with numpy.errstate(**SILENT):
        blocks = numpy.abs(x).reshape(x.shape[0], -1, scheme.block_size)
        is_finite = numpy.isfinite(blocks).all(-1)
        blocks = numpy.where(is_finite[..., None], blocks, F(0))
        amax = blocks.max(-1)
        outer = stored_outer(amax, scheme, exponent)
        if scheme.outer_kind == "none":
            byte = numpy.vectorize(lambda a: mx_byte(float(a), scheme.scale_rule.name))(amax)
        else:
            raw = raw_scale(amax, outer, scheme)
            assert raw.dtype == F
            byte = floored_bytes(raw, amax, scheme)
            if scheme.candidates.name != "SIX":
                four = floored_bytes(raw * F(1.5), amax, scheme)
                better = block_error(blocks, four, outer, scheme) < block_error(blocks, byte, outer, scheme)
                byte = numpy.where(better, four, byte)
        z = scaled(blocks, decoded_scales(byte, scheme)[..., None], outer[..., None], scheme)
        code = nearest(z, E2M1, scheme.tie.value).reshape(x.shape) + 8 * sign_bits(x, scheme)
    code = numpy.where(numpy.repeat(is_finite, scheme.block_size, axis=1), code, 0)
    nan_byte = 0xFF if scheme.outer_kind == "none" else 0x7F
    outer = outer[:, 0] if scheme.outer == "row" else outer[0, 0]
    return Bytes(outer, numpy.where(is_finite, byte, nan_byte).astype(numpy.uint8), code.astype(numpy.uint8))


def sign_bits(x: numpy.ndarray, scheme) -> numpy.ndarray:
    """When bit 3 is set."""
    return {"KEPT": numpy.signbit(x), "ORDERED": x < 0, "NOT_POSITIVE": x <= 0}[scheme.sign.name]


def dequantize(stored: Bytes, scheme) -> numpy.ndarray:
    """Values, float32 [N, K]."""
    rows = stored.codes.shape[0]
    outer = numpy.asarray(stored.outer, F).reshape(-1, 1)
    with numpy.errstate(**SILENT):
        scale = decode_scale(decoded_scales(stored.block_scales, scheme), outer, scheme)[..., None]
        codes = stored.codes.reshape(rows, -1, scheme.block_size)
        values = E2M1[codes & 7].astype(F) * scale
    return numpy.where(codes > 7, -values, values).reshape(rows, -1)

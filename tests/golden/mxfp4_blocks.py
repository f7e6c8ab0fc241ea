"""MXFP4 bytes of every scheme by hand: one block of 32 each, given as its leading values.

Sources: OCP Microscaling Formats v1.0, sections 5.3.3 (E2M1), 5.4.1 (E8M0) and 6.3 (floor); the other rules and
the signs as read in torchao 0.18, compressed-tensors 0.20.1, nvidia-modelopt 0.47, fouroversix 1.0.5. Byte 127 is 1.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Golden:
    """One block and its bytes under one scheme."""

    scheme: str
    name: str
    block: list[float]
    byte: int
    codes: list[int]
    values: list[float]


_RULES = ("FLOOR", "EVEN", "RCEIL", "CEIL")
_LIKE = {"COMPRESSED_TENSORS": "EVEN", "FOUROVERSIX": "RCEIL", "MODELOPT": "RCEIL"}
# maximum -> (byte, code) under FLOOR, EVEN, RCEIL, CEIL
_MAXIMA = {
    3.0: ((126, 7), (126, 7), (126, 7), (127, 5)),  # 3 / 6 = 1/2; log2 3 = 1.58: ceil 2, less 2
    4.0: ((127, 6), (127, 6), (127, 6), (127, 6)),
    6.0: ((127, 7), (127, 7), (127, 7), (128, 5)),
    6.5: ((127, 7), (127, 7), (128, 5), (128, 5)),  # 6.5 saturates; 3.25 is nearer to 3
    7.0: ((127, 7), (128, 6), (128, 6), (128, 6)),  # 7 saturates; 3.5 is a tie: 4
    24.0: ((129, 7), (129, 7), (129, 7), (130, 5)),
}
_E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
_TIES = [6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5.0, -0.1]
_EVEN = [7, 0, 2, 2, 4, 4, 6, 6, 8, 10, 10, 12, 12, 14, 14, 8]
_DOWN = [7, 0, 1, 2, 3, 4, 5, 6, 8, 9, 10, 11, 12, 13, 14, 8]
_HALVED = [
    5,
    0,
    1,
    1,
    2,
    2,
    4,
    4,
    8,
    9,
    9,
    10,
    10,
    12,
    12,
    8,
]  # CEIL divides by 2: 3, .125, .375, .625, .875, 1.25 ...


def _value(code: int, byte: int) -> float:
    value = (-1) ** (code >> 3) * _E2M1[code & 7] * 2.0 ** (byte - 127)
    return value if value < 2.0**128 else float("inf")  # no float32 number


def _golden(scheme: str, name: str, block: list[float], byte: int, codes: list[int]) -> Golden:
    return Golden(
        scheme=scheme, name=name, block=block, byte=byte, codes=codes, values=[_value(c, byte) for c in codes]
    )


def _maximum(scheme: str, rule: str, maximum: float) -> Golden:
    byte, code = _MAXIMA[maximum][_RULES.index(rule)]
    if scheme == "MXFP4_MODELOPT" and maximum == 7.0:
        code = 5  # its ties go down: 3.5 to 3
    return _golden(scheme, f"maximum_{maximum}", [maximum], byte, [code])


def _of_scheme(scheme: str, rule: str) -> list[Golden]:
    ties = {"MXFP4_MODELOPT": _DOWN, "MXFP4_CEIL": _HALVED}.get(scheme, _EVEN)
    keeps = scheme in {f"MXFP4_{r}" for r in _RULES}
    plus, minus = (8, 8) if scheme == "MXFP4_MODELOPT" else (0, 8 if keeps else 0)
    return [
        *(_maximum(scheme, rule, maximum) for maximum in _MAXIMA),
        _golden(scheme, "ties", _TIES, 128 if rule == "CEIL" else 127, ties),
        _golden(scheme, "zeros", [0.0, -0.0], 0, [plus, minus]),
        _golden(scheme, "signs", [6.0, 0.0, -0.0, -0.1], 128 if rule == "CEIL" else 127,
                [5 if rule == "CEIL" else 7, plus, minus, 8]),
        _golden(scheme, "amax_2^-126", [2.0**-126], 0, [4]),  # 2^-128 is clamped to 2^-127: 2
        _golden(scheme, "amax_2^-130", [2.0**-130], 0, [0]),  # 0.125 rounds to 0
        _golden(scheme, "largest_float", [3.4028234663852886e38], 252 if rule == "FLOOR" else 253,
                [7 if rule == "FLOOR" else 6]),  # 2^128 / 2^125 = 8 saturates; / 2^126 = 4, read back as 2^128
    ]  # fmt: skip


CASES = [
    case
    for scheme, rule in [*((rule, rule) for rule in _RULES), *_LIKE.items()]
    for case in _of_scheme(f"MXFP4_{scheme}", rule)
]

"""Binary linear codes whose syndromes stand for many recorded bits: the parity checks, and how syndromes are laid out.

A row of K bits is cut into blocks of `length` bits; the last one may be shorter and then uses the first columns only.
With b_j the bits and h_j the columns of the parity-check matrix (integers, bit i of h_j is row i of the matrix),

    syndrome = XOR over j with b_j = 1 of h_j                    num_bits bits a block

A reader who has bits of his own that differ in few places finds those places: the XOR of both syndromes is the XOR of
the columns at which the bits differ (Slepian-Wolf coding with a decoder that has side information). Block c of a row
takes the bits c * num_bits .. (c + 1) * num_bits - 1 of the row's bit string; bit i of the string is bit i % 8 of byte
i // 8, and the last byte is padded with zeros.

    parity<g>     one parity bit for g bits: finds one difference if the reader knows where it must be
    secded        extended Hamming code, 16 bits to 5: one difference found, two noticed
    bch<n>_<t>    extended binary BCH code of length n = 2^p: p * t + 1 bits find up to t differences anywhere. Column j
                  holds 1 and the field elements a^j, a^3j .. a^(2t-1)j; the last column holds the 1 alone

Nothing here touches a tensor or decides which differences are likely: `ops/syndromes` encodes, `ops/guided_quantize`
searches. Source of the codes: Lin and
Costello, Error Control Coding, chapters 4 and 6.
"""

import re
from dataclasses import dataclass
from functools import cache
from math import comb

from tracefp4.errors import FormatError

PRIMITIVE_POLYNOMIALS = {5: 0x25, 6: 0x43, 7: 0x89, 8: 0x11D, 9: 0x211}
"""Field degree -> primitive polynomial over GF(2), bit i is the coefficient of x^i."""
MAX_SYNDROME_BITS = 63
"""A syndrome and every column fit into a signed 64-bit integer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SyndromeCode:
    """One binary linear code and the effort that its decoder spends."""

    name: str
    """Name in records and recipes."""
    num_bits: int
    """m, bits of a syndrome; 1 .. 63."""
    columns: tuple[int, ...]
    """h_0 .. h_(n-1), the columns of the parity-check matrix, each in 1 .. 2^m - 1."""
    num_candidates: int
    """The decoder looks at this many least reliable bits of a block, at most."""
    max_flips: int
    """The decoder changes at most this many bits of a block."""
    distance: int
    """d: fewer than d of the columns, at least one, never XOR to 0. Two different sets of fewer than d columns together
    never have the same XOR."""

    @property
    def length(self) -> int:
        """n, bits of a whole block."""
        return len(self.columns)

    @property
    def bits_per_value(self) -> float:
        """m / n."""
        return self.num_bits / self.length

    def num_blocks(self, width: int) -> int:
        """Blocks of a row of `width` bits; the last one may be shorter."""
        return -(-width // self.length)

    def row_bytes(self, width: int) -> int:
        """Bytes of the syndromes of a row of `width` bits."""
        return -(-self.num_blocks(width) * self.num_bits // 8)


@cache
def syndrome_code(name: str) -> SyndromeCode:
    """Return the code of this name; see the module's table.

    Raises:
        FormatError: no such code: parity<g> with g in 2..64, secded, bch<n>_<t> with n = 32 .. 512 a power of two.
    """
    if name == "secded":
        columns = tuple(j | 16 for j in range(16))
        return SyndromeCode(name=name, num_bits=5, columns=columns, num_candidates=8, max_flips=3, distance=4)
    found = re.fullmatch(r"parity(\d+)", name)
    if found and 2 <= int(found[1]) <= 64:
        length = int(found[1])
        columns = (1,) * length
        return SyndromeCode(
            name=name, num_bits=1, columns=columns, num_candidates=length, max_flips=1, distance=2
        )
    found = re.fullmatch(r"bch(\d+)_([1-9])", name)
    if found:
        length, num_errors = int(found[1]), int(found[2])
        degree = length.bit_length() - 1
        num_bits = degree * num_errors + 1
        if length == 1 << degree and degree in PRIMITIVE_POLYNOMIALS and num_bits <= MAX_SYNDROME_BITS:
            num_candidates, max_flips = _effort(num_bits, num_errors)
            return SyndromeCode(
                name=name,
                num_bits=num_bits,
                columns=_bch_columns(degree, num_errors),
                num_candidates=num_candidates,
                max_flips=max_flips,
                distance=2 * num_errors + 2,
            )
    raise FormatError(
        f"Unknown syndrome code {name!r}. There are parity<g> for g in 2..64, secded, and bch<n>_<t> for n in "
        f"{[1 << degree for degree in PRIMITIVE_POLYNOMIALS]} with at most {MAX_SYNDROME_BITS} syndrome bits. "
        "Use one of these."
    )


def _effort(num_bits: int, num_errors: int) -> tuple[int, int]:
    """Return how many candidates and flips the decoder of a BCH code considers.

    A code finds t differences wherever they are. Among the nearest candidates more can be told apart: t + 1 always, and
    t + 2 where the sets of that size are few beside the syndromes (one bit of these only says whether the size is odd),
    so that a wrong set rarely explains a difference. Codes of many differences keep the number of sets bounded.
    """
    num_candidates = 24 if num_errors <= 4 else 16
    is_telling = 16 * comb(num_candidates, num_errors + 2) <= 1 << num_bits - 1
    return num_candidates, num_errors + (2 if is_telling and num_errors <= 4 else 1)


def _bch_columns(degree: int, num_errors: int) -> tuple[int, ...]:
    """Columns (1, a^j, a^3j, ...) for j = 0 .. 2^degree - 2, then (1, 0, ...)."""
    order = (1 << degree) - 1
    powers = [1]
    for _ in range(order - 1):
        following = powers[-1] << 1
        powers.append(following ^ PRIMITIVE_POLYNOMIALS[degree] if following > order else following)
    columns = []
    for j in range(order):
        column = 1
        for i in range(num_errors):
            column |= powers[(2 * i + 1) * j % order] << (1 + degree * i)
        columns.append(column)
    return (*columns, 1)

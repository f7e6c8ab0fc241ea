"""Guides for tests, inputs on every decision boundary, and the expected decisions by brute force."""

from fractions import Fraction
from typing import Any

import torch
from tests.formats import rational

from tracefp4.coding import Payload, ScaleCoding, codec_by_name
from tracefp4.formats.order import Candidates, ScaleRule
from tracefp4.formats.scheme import Scheme
from tracefp4.ops.backend import Backend
from tracefp4.ops.guided_quantize import Guide, Rounded
from tracefp4.ops.syndromes import encode_syndromes

CODECS = ("full", "bracket", "nearest_cell")
ONE = 0x38  # the E4M3 byte of 1.0
EVERY_CODEC = (
    "full",
    "low2",
    "low2+coset1",
    "mantissa",
    "mantissa_lean",
    "secded",
    "secded+raw",
    "secded+coset1",
    "parity3",
    "parity8+secded",
    "bch32_2",
    "bch128_3",
    "bch64_2+bch32_2",
)

# z on every boundary the decoders know, its float32 neighbours, and beyond the range
_CENTRES = torch.tensor(
    [0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.125, 2.5, 3, 3.5, 4, 4.25, 5, 6, 7, 1e30]
)
Z = torch.cat(
    [_CENTRES, torch.nextafter(_CENTRES, _CENTRES + 1), torch.nextafter(_CENTRES, _CENTRES - 1).abs()]
)
Z = torch.cat([Z, -Z, torch.tensor([1e-45, -1e-45])])


def as_rows(z: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(z, (0, -len(z) % 16)).view(-1, 16)


def unit_guide(z: torch.Tensor, decision: torch.Tensor, codec: str) -> Guide:
    """A guide with scale 1 for rows of z, so that z reaches the grid untouched."""
    rows = z.shape[0]
    decision = decision.to(torch.uint8)
    return Guide(
        valid=torch.ones(rows, dtype=torch.bool),
        outer=torch.zeros(rows, dtype=torch.int8),
        block_scales=torch.full((rows, 1), ONE, dtype=torch.uint8),
        codes=decision if codec == "full" else None,
        bits=None if codec == "full" else decision,
        decoder="bracket" if codec == "full" else codec,
    )


def guide_from(rounded: Rounded, codec: str, valid: torch.Tensor | None = None) -> Guide:
    """What a rollout that produced `rounded` would send."""
    assert rounded.codes is not None
    rows = rounded.codes.shape[0]
    return Guide(
        valid=torch.ones(rows, dtype=torch.bool) if valid is None else valid,
        outer=rounded.outer if rounded.outer.dim() else None,
        block_scales=rounded.block_scales,
        codes=rounded.codes if codec == "full" else None,
        bits=None if codec == "full" else rounded.codes & 1,
        decoder="bracket" if codec == "full" else codec,
    )


def signed_ordinal(codes: torch.Tensor) -> torch.Tensor:
    magnitude = (codes & 7).to(torch.int64)
    return torch.where(codes >= 8, -magnitude, magnitude)


def expected_full(z: float, recorded: int) -> int:
    """The bracket end nearer to the recorded codeword, by distance between real numbers."""
    low, high = rational.bracket(abs(Fraction(z)))
    sign = -1 if str(z).startswith("-") else 1
    target = rational.E2M1_GRID[recorded & 7] * (-1 if recorded >= 8 else 1)
    return sign * min((low, high), key=lambda m: abs(sign * rational.E2M1_GRID[m] - target))


def expected_bracket(z: float, bit: int) -> int:
    low, high = rational.bracket(abs(Fraction(z)))
    sign = -1 if str(z).startswith("-") else 1
    return sign * (high if high % 2 == bit else low)


def is_decodable(name: str, scheme: Scheme) -> bool:
    """Whether a codec's scales can be decoded under a scheme."""
    codec = codec_by_name(name)
    if scheme.candidates is not Candidates.SIX:
        return codec.scale_coding is ScaleCoding.RAW
    return codec.scale_coding is not ScaleCoding.SYNDROME or scheme.scale_rule is ScaleRule.E4M3


def coded_guide(rounded: Rounded, name: str, **changes: object) -> Guide:
    """What a rollout that produced `rounded` would send under a codec; `changes` go to Guide."""
    assert rounded.codes is not None
    codec = codec_by_name(name)
    low_bits = {"raw": 0xFF, "coset2": 3, "coset1": 1}
    if codec.scale_code is None:
        scales = rounded.block_scales & low_bits[codec.scale_coding.value]
    else:
        scales = encode_syndromes(rounded.block_scales, code=codec.scale_code, backend=Backend.REFERENCE)
    parts: dict[str, object] = {
        Payload.FULL: {"codes": rounded.codes},
        Payload.LOW2: {"bits": rounded.codes & 3, "num_bits": 2},
        Payload.MANTISSA: {"bits": rounded.codes & 1},
        Payload.SYNDROME: {},
    }[codec.payload]
    if codec.code is not None:
        syndromes = encode_syndromes(rounded.codes, code=codec.code, backend=Backend.REFERENCE)
        parts = {"syndromes": syndromes, "code": codec.code}
    held = {
        "valid": torch.ones(len(rounded.codes), dtype=torch.bool),
        "outer": rounded.outer if rounded.outer.dim() else None,
        "block_scales": scales,
        "scale_coding": codec.scale_coding,
        "scale_code": codec.scale_code,
    }
    return Guide(**{**held, **parts, **changes})  # type: ignore[arg-type]


def tied_flips() -> tuple[torch.Tensor, Guide, list[list[int]]]:
    """Rows whose differing syndrome two sets of flips explain at exactly one cost, and which bits are flipped.

    The code secded, columns 16 + j. Values lie c / 64 below the boundary 0.25, all others farther away. Row 0: columns
    0 ^ 3 = 1 ^ 2 and 1^2 + 8^2 = 4^2 + 7^2, so the set with the nearest value wins; row 1 is row 0 mirrored. Row 2:
    column 0 = 1 ^ 2 ^ 3 and 7^2 = 2^2 + 3^2 + 6^2, so the smaller set wins; a nearer value that explains nothing keeps
    the larger one in the race. No set is dismissed before its last flip.
    """
    distances = {0: [1, 4, 7, 8], 1: [8, 7, 4, 1], 2: [7, 2, 3, 6, 1]}
    wanted = [[0, 3], [0, 3], [0]]
    code = codec_by_name("secded").code
    assert code is not None
    x, differs = torch.zeros(3, 16), torch.zeros(3, 16, dtype=torch.uint8)
    for row, c in distances.items():
        x[row, : len(c)] = 0.25 - torch.tensor(c) / 64
        differs[row, wanted[row]] = 1
    guide = Guide(
        valid=torch.ones(3, dtype=torch.bool),
        outer=torch.zeros(3, dtype=torch.int8),
        block_scales=torch.full((3, 1), ONE, dtype=torch.uint8),
        syndromes=encode_syndromes(differs, code=code, backend=Backend.REFERENCE),
        code=code,
    )
    return x, guide, wanted


def held(guide: Guide) -> dict[str, Any]:
    """The fields of a guide by name, to build another one."""
    return {name: getattr(guide, name) for name in guide.__slots__}

"""The tables of docs/schemes.md, made from SCHEMES: `python -m tests.rules.schemes_table` writes them."""

import re
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path

from tracefp4.formats.order import Candidates, ErrorSum, Order, ScaleRule, Sign, Tie
from tracefp4.formats.scheme import Scheme
from tracefp4.formats.schemes import SCHEMES

DOCUMENT = Path(__file__).parents[2] / "docs" / "schemes.md"
SLOT = re.compile(r"(?<=<!-- schemes:begin -->\n).*?(?=<!-- schemes:end -->)", flags=re.S)
STORED = {
    "exponent": "int8 k",
    "multiplier": "float32 g",
    "divisor": "float32 G",
    "amax": "float32 A",
    "none": "nothing",
}


def _table(header: list[str], rows: Iterable[list[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows)]


def _bytes(*values: int) -> str:
    return ", ".join(f"{value:02X}" for value in values)


def _rounding(scheme: Scheme) -> list[str]:
    return [
        scheme.tie.name,
        scheme.sign.name,
        "yes" if scheme.is_exact_in_bf16 else "no",
        f"`{scheme.digest}`",
    ]


def _nvfp4(scheme: Scheme) -> list[str]:
    competing = scheme.candidates is not Candidates.SIX
    return [
        f"`{scheme.name}`",
        f"{scheme.outer}: {STORED[scheme.outer_kind]}",
        scheme.order.name,
        f"{scheme.scale_max:g}",
        f"{scheme.candidates.name}, {scheme.error_sum.name}" if competing else scheme.candidates.name,
        _bytes(scheme.zero_byte, scheme.underflow_byte, scheme.least_byte),
        *_rounding(scheme),
    ]


def _legend(title: str, members: type[StrEnum]) -> list[str]:
    width = max(len(member.name) for member in members)
    return [
        f"{title}:",
        "",
        "```",
        *(f"{member.name:{width}}  {member.value}" for member in members),
        "```",
        "",
    ]


def tables() -> str:
    """Return the generated part of the document."""
    nvfp4 = [scheme for scheme in SCHEMES.values() if scheme.outer_kind != "none"]
    mxfp4 = [scheme for scheme in SCHEMES.values() if scheme.outer_kind == "none"]
    (nonfinite,) = {scheme.nonfinite_rule for scheme in SCHEMES.values()}
    last = ["tie", "sign", "bf16", "digest"]
    header = ["scheme", "outer scale: stored", "order", "max", "candidates", "zero, tiny, least byte", *last]
    lines = ["### NVFP4: E2M1 in blocks of 16 under E4M3 scales and an outer scale", ""]
    lines += _table(header, map(_nvfp4, nvfp4))
    lines += [
        "",
        "### MXFP4: E2M1 in blocks of 32 under E8M0 scales; no outer scale, a zero block stores byte 00",
        "",
    ]
    header = ["scheme", "rule", *last]
    lines += _table(header, ([f"`{s.name}`", s.scale_rule.name, *_rounding(s)] for s in mxfp4))
    lines += ["", f"Non-finite rule of all: `{nonfinite}`.", "", "### What the names stand for", ""]
    legends = {
        "order": Order,
        "rule": ScaleRule,
        "candidates": Candidates,
        "their errors are added": ErrorSum,
    }
    legends |= {"tie": Tie, "sign: bit 3 of a code is set for": Sign}
    for title, members in legends.items():
        lines += _legend(title, members)
    return "\n".join(lines)


def write() -> None:
    """Put the tables between their markers."""
    text = DOCUMENT.read_text(encoding="utf-8")
    DOCUMENT.write_text(SLOT.sub(lambda _: tables(), text), encoding="utf-8")


if __name__ == "__main__":
    write()

"""Which codec does a site need? What each would leave wrong, measured, and the cheapest that leaves little enough.

The residual of a codec at a site is the share of values that do not get back the rollout's codeword under the
rollout's scale when the trainer decodes the record:

    wrong = code after guidance differs from the recorded one, or is not zero under another scale byte

It is not modelled: a whole record of calibration rows is recoded, its guide is followed by `guided_quantize` on the
trainer's own values, and the codes are compared. Exact for the x that it was given: x carries the noise that the
guidance in force lets through. What a codec leaves wrong is more noise for the sites after it, so a residual measured
while whole codes are followed (`ReplayBatch.candidates`) is a lower bound. After a choice, follow it, measure again and
choose again until nothing changes. This file decides by site and never looks at what a residual costs in
log-probability; whoever sets `allowed` does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from tracefp4.coding import codec_by_name
from tracefp4.errors import ConfigError
from tracefp4.formats.scheme import Scheme
from tracefp4.guidance.counters import Counters, is_mismatched
from tracefp4.guidance.record import Site, SiteKind
from tracefp4.guidance.site_record import SiteRecord
from tracefp4.ops.guided_quantize import Guide, guided_quantize

Residuals = Mapping[Site, Mapping[str, float]]
"""Share of values left wrong, by site and codec."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """How a site rounds and how records are followed there."""

    scheme: Scheme
    """The site's scheme."""
    exponent: int | None = None
    """Power of two of a static outer scale; None for other schemes."""
    decoder: Literal["bracket", "nearest_cell"] = "nearest_cell"
    """How low bits are decoded."""
    band: float | None = None
    """The noise gate's band; None without a gate."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ResidualCounts:
    """Wrong values by site and codec, over any number of batches."""

    wrong: Mapping[Site, Mapping[str, int]] = field(default_factory=dict)
    """Values that the codec leaves wrong."""
    compared: Mapping[Site, int] = field(default_factory=dict)
    """Values compared."""

    def __add__(self, other: ResidualCounts) -> ResidualCounts:
        """Add two counts; sites and codecs may be absent from either."""
        wrong = {site: dict(found) for site, found in self.wrong.items()}
        for site, found in other.wrong.items():
            held = wrong.setdefault(site, {})
            for name, count in found.items():
                held[name] = held.get(name, 0) + count
        compared = dict(self.compared)
        for site, count in other.compared.items():
            compared[site] = compared.get(site, 0) + count
        return ResidualCounts(wrong=wrong, compared=compared)

    def shares(self) -> dict[Site, dict[str, float]]:
        """Return the residuals; sites where nothing was compared are left out."""
        return {
            site: {name: count / self.compared[site] for name, count in found.items()}
            for site, found in self.wrong.items()
            if self.compared.get(site, 0) > 0
        }


def num_wrong(
    x: Tensor, part: SiteRecord, *, codecs: Iterable[str], rule: Rule, valid: Tensor | None = None
) -> dict[str, Tensor]:
    """Count the values that each codec would leave wrong.

    Args:
        x: Float [n, K], the trainer's values of the rows of `part`.
        part: A whole site record.
        codecs: Names of the codecs to try.
        rule: Scheme, decoder and gate.
        valid: bool [n], rows to count; None counts all.

    Returns:
        int64, 0-dimensional, per codec.

    Raises:
        RecordError: the record is not whole.
    """
    codes = part.codes()
    if valid is None:
        valid = torch.ones(codes.shape[0], dtype=torch.bool, device=codes.device)
    found = {}
    for name in codecs:
        guide = Guide(
            valid=valid,
            outer=part.exponent,
            decoder=rule.decoder,
            band=rule.band,
            **part.recode(name).guide_parts(),
        )
        rounded = guided_quantize(x, scheme=rule.scheme, guide=guide, exponent=rule.exponent)
        assert rounded.codes is not None
        other_scale = rounded.block_scales != part.block_scales
        is_wrong = other_scale.repeat_interleave(part.block_size, dim=1) & ((codes & 7) != 0)
        is_wrong |= is_mismatched(rounded.codes, codes)
        found[name] = (is_wrong & valid[:, None]).sum()
    return found


def residual_counts(counters: Counters) -> ResidualCounts:
    """Read what a replayed batch with candidates counted, after its last pass."""
    return ResidualCounts(
        wrong={
            site: {name: int(count) for name, count in found.items()}
            for site, found in counters.residuals.items()
        },
        compared={site: int(counters.sites[site].values_compared or 0) for site in counters.residuals},
    )


def choose_codecs(
    residuals: Residuals,
    *,
    row_bytes: Mapping[Site, Mapping[str, int]],
    allowed: Mapping[SiteKind, float] | float,
) -> dict[Site, str]:
    """Choose the cheapest codec of every site whose residual is allowed.

    Args:
        residuals: Share of values left wrong, by site and codec.
        row_bytes: Bytes per token of every codec in `residuals`, by site (`codec_row_bytes`).
        allowed: Largest residual, one for all sites or one per kind of site.

    Returns:
        A codec per site, good for residuals as they were measured. Among equally cheap ones the smaller residual
        wins, then the name. A site where no codec is good enough gets the one with the smallest residual, the cheapest
        of those.

    Raises:
        ConfigError: a site without any codec or without bytes, or a kind without an allowance.
    """
    chosen = {}
    for site, found in residuals.items():
        limit = _allowed_at(site, allowed)
        if not found or set(found) - set(row_bytes.get(site, {})):
            raise ConfigError(
                f"No codec can be chosen at {site}; got residuals of {sorted(found)} and bytes of "
                f"{sorted(row_bytes.get(site, {}))}. Every measured codec needs its bytes, and there is at least one. "
                "Use codec_row_bytes for the codecs that were measured."
            )
        prices = row_bytes[site]
        good = [name for name, share in found.items() if share <= limit]
        if good:
            chosen[site] = min(good, key=lambda name: (prices[name], found[name], name))
        else:
            chosen[site] = min(found, key=lambda name: (found[name], prices[name], name))
    return chosen


def codec_row_bytes(parts: Mapping[Site, SiteRecord], *, codecs: Sequence[str]) -> dict[Site, dict[str, int]]:
    """Return the bytes per token of every codec at the sites of a record: payload and scales, no row exponents."""
    return {
        site: {
            name: part.rows_per_token * codec_by_name(name).row_bytes(part.width, block_size=part.block_size)
            for name in codecs
        }
        for site, part in parts.items()
    }


def _allowed_at(site: Site, allowed: Mapping[SiteKind, float] | float) -> float:
    if isinstance(allowed, Mapping):
        if site.kind not in allowed:
            raise ConfigError(
                f"No residual is allowed or forbidden at {site}; got allowances for {sorted(allowed)}. Every kind of "
                f"site needs one. Name one for {site.kind!r}, or give one number for all."
            )
        return allowed[site.kind]
    return allowed

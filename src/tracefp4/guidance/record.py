"""One trajectory's decisions: whose they are, at which positions, of which sites, and the experts that were chosen.

Alignment, stated once: row i of every array describes the computation *on input token* start + i. A prompt of
P tokens and a completion of C tokens give rows for positions 0 .. P+C-2; the last sampled token was never an
input and has no row, which is not the same as a row of zeros. Records are immutable, live on the CPU, and know
nothing of disks. What a site keeps of its rows is `site_record.py`'s.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Literal, cast

import torch
from torch import Tensor

from tracefp4.coding import codec_by_name
from tracefp4.errors import RecordError
from tracefp4.formats.scheme import MAX_EXPONENT, MIN_EXPONENT
from tracefp4.guidance.site_record import FULL, MAX_SCALE_BYTE, SiteRecord

SiteKind = Literal["x", "k", "v", "w2"]
SITE_KINDS: tuple[SiteKind, ...] = ("x", "k", "v", "w2")


@dataclass(frozen=True, order=True, slots=True)
class Site:
    """A place in the model where values are rounded; the same name in trainer and engine."""

    kind: SiteKind
    """What is rounded: "x" expert input, "k" and "v" cached keys and values, "w2" down-projection input."""
    layer: int
    """Decoder layer, from 0."""

    def __str__(self) -> str:
        return f"layers.{self.layer}.{self.kind}"


def site_by_name(name: str) -> Site:
    """Return the site that `str(site)` names. Raises: RecordError for a text that is no such name."""
    found = re.fullmatch(r"layers\.(\d+)\.(x|k|v|w2)", name)
    if found is None:
        raise RecordError(
            f"No site is called {name!r}. Names are layers.<layer>.<kind> with kind one of {', '.join(SITE_KINDS)}. "
            "Read the state with the tracefp4 that wrote it."
        )
    return Site(cast(SiteKind, found[2]), int(found[1]))


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class RecordIdentity:
    """Whose decisions these are, and under which rules they were made."""

    trajectory: str
    """Name of the trajectory; unique within a run."""
    weight_versions: Tensor | int
    """Version of the weights that computed each position: int32 [n], or one int when all are equal."""
    scheme_digest: str
    """Digest of the quantization schemes in force."""
    plan_digest: str
    """Digest of the plan (which modules, which schemes)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordBytes:
    """Bytes of a record, by what they hold."""

    codes: int
    """Payload bytes: what codecs keep of the codes."""
    block_scales: int
    """What they keep of the block scales."""
    exponents: int
    """Row exponent bytes, one per row and site."""
    routed: int
    """Routed expert id bytes."""

    @property
    def codec(self) -> int:
        """Codes plus block scales: what a codec is responsible for."""
        return self.codes + self.block_scales

    @property
    def total(self) -> int:
        """All of it."""
        return self.codes + self.block_scales + self.exponents + self.routed


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Record:
    """Decisions of one trajectory over the positions start .. start+length-1."""

    identity: RecordIdentity
    """Trajectory, weight versions, scheme and plan digests."""
    start: int
    """First position described."""
    length: int
    """Positions described; 0 is allowed."""
    sites: Mapping[Site, SiteRecord]
    """Decisions by site; every site has length * rows_per_token rows."""
    routed: Tensor | None
    """[length, L, top_k], routed expert ids: uint8 for up to 256 experts, else int16; None when routing was not
    recorded."""
    valid: Tensor
    """bool [length]: False where the decisions must not be followed (nearest rounding, counted)."""
    routed_layers: tuple[int, ...] | None = None
    """Decoder layer of each of the L entries of `routed`; None means layers 0 .. L-1."""

    def __post_init__(self) -> None:
        versions = self.identity.weight_versions
        lengths = {"valid": self.valid.shape[0]}
        lengths |= {
            str(site): part.block_scales.shape[0] // part.rows_per_token for site, part in self.sites.items()
        }
        if isinstance(versions, Tensor):
            lengths["weight_versions"] = versions.shape[0]
        if self.routed is not None:
            lengths["routed"] = self.routed.shape[0]
        wrong = {name: found for name, found in lengths.items() if found != self.length}
        if wrong or self.start < 0:
            raise RecordError(
                f"Record of trajectory {self.identity.trajectory!r} has arrays of unequal length; got "
                f"{wrong} and start {self.start}. Every array needs length {self.length} and start is at "
                "least 0. Cut records only with truncate and join them only with concat."
            )

    @property
    def layers_routed(self) -> tuple[int, ...]:
        """Decoder layers whose routing is recorded."""
        if self.routed is None:
            return ()
        return tuple(range(self.routed.shape[1])) if self.routed_layers is None else self.routed_layers

    def versions(self) -> Tensor:
        """Weight version of every position, int32 [length]."""
        held, size = self.identity.weight_versions, (self.length,)
        return held if isinstance(held, Tensor) else torch.full(size, held, dtype=torch.int32, device="cpu")

    def version_lag(self, weight_version: int) -> int:
        """How far the oldest position is behind `weight_version`; 0 for an empty record."""
        return 0 if self.length == 0 else weight_version - int(self.versions().min())

    def rows(self, begin: int, end: int) -> Record:
        """The part for the rows begin .. end-1 (not positions). Views, no copy."""
        versions = self.identity.weight_versions
        kept = versions[begin:end] if isinstance(versions, Tensor) else versions
        return replace(
            self,
            identity=replace(self.identity, weight_versions=kept),
            start=self.start + begin,
            length=end - begin,
            sites={site: part.rows(begin, end) for site, part in self.sites.items()},
            routed=None if self.routed is None else self.routed[begin:end],
            valid=self.valid[begin:end],
        )

    def compact(self) -> Record:
        """The same record in memory of its own.

        Records of one log, and parts of a record, are views of shared arrays, which live as long as any of them. What
        is kept alone is compacted.
        """
        versions = self.identity.weight_versions
        own_versions = versions.clone() if isinstance(versions, Tensor) else versions
        return replace(
            self,
            identity=replace(self.identity, weight_versions=own_versions),
            sites={site: part.compact() for site, part in self.sites.items()},
            routed=None if self.routed is None else self.routed.clone(),
            valid=self.valid.clone(),
        )

    def without_routing(self) -> Record:
        """The same record without expert ids, for a trainer that routes live."""
        return replace(self, routed=None, routed_layers=None)

    def truncate(self, num_tokens: int) -> Record:
        """Keep the positions below `num_tokens`: the record of a sequence cut to that many tokens.

        A sequence of 11 tokens with 10 rows cut to 8 tokens keeps rows 0..7, all real. A longer `num_tokens`
        changes nothing. Raises: RecordError if num_tokens is negative.
        """
        if num_tokens < 0:
            raise RecordError(
                f"A record cannot be cut to a negative length; got {num_tokens}. "
                "Lengths from 0 are allowed. Give the number of tokens that the sequence keeps."
            )
        return self.rows(0, min(self.length, max(0, num_tokens - self.start)))

    def concat(self, completion: Record) -> Record:
        """Join this (a prompt's) record and the one that continues it; see guidance.joining.concat."""
        # Imported here because joining works on whole records and therefore imports this file.
        from tracefp4.guidance.joining import concat

        return concat(self, completion)

    def check_tokens(self, num_tokens: int) -> None:
        """Refuse a record that does not belong to a sequence of `num_tokens` tokens.

        The one length check of tokens, log-probabilities and records: rows for all inputs (num_tokens - 1),
        or num_tokens rows after a cut. Raises: RecordError with both lengths.
        """
        end = self.start + self.length
        if end not in (num_tokens - 1, num_tokens):
            raise RecordError(
                f"Record of trajectory {self.identity.trajectory!r} does not fit its tokens; got positions "
                f"{self.start} to {end - 1} for {num_tokens} tokens. The last position must be "
                f"{num_tokens - 2} (or {num_tokens - 1} after a cut). Cut tokens and record together with "
                "truncate."
            )

    def check(self, *, scheme_digest: str, plan_digest: str) -> None:
        """Refuse a record made under other rules than the caller's.

        Raises: RecordError showing the record's and the caller's digest.
        """
        for name, found, expected in (
            ("scheme", self.identity.scheme_digest, scheme_digest),
            ("plan", self.identity.plan_digest, plan_digest),
        ):
            if found != expected:
                raise RecordError(
                    f"Record of trajectory {self.identity.trajectory!r} refused: its {name} digest is "
                    f"{found!r}, this side's is {expected!r}. Both must be equal. Run rollout and training "
                    f"from the same {name}, or record again."
                )

    def check_routing(self, num_experts: int) -> None:
        """Refuse recorded expert ids that cannot be a router's choice.

        Looks at valid rows: every id in 0 .. num_experts-1, no id twice in a row (top-k ids are distinct).
        Raises: RecordError naming position, layer and ids.
        """
        if self.routed is None or self.routed.numel() == 0:
            return
        bad = has_impossible_experts(self.routed, num_experts=num_experts) & self.valid[:, None]
        if bool(bad.any()):
            row, slot = (int(i) for i in bad.nonzero()[0])
            raise RecordError(
                f"Record of trajectory {self.identity.trajectory!r} has impossible expert ids at position "
                f"{self.start + row}, layer {self.layers_routed[slot]}; got "
                f"{self.routed[row, slot].tolist()}. Ids must be distinct and lie in 0..{num_experts - 1}. "
                "Check that the recorder ran and left shared experts out."
            )

    def check_scales(self, *, kinds: Collection[SiteKind] = SITE_KINDS, only_valid: bool = True) -> None:
        """Refuse recorded scales that no scheme stores (`SiteRecord.damaged_rows`).

        Bytes that a store lost are not valid and round to nearest; these came whole and were wrong before.

        Args:
            kinds: kinds of sites to look at.
            only_valid: False looks also at positions whose decisions are not followed.

        Raises: RecordError naming position and site, with the row's power of two and largest scale byte.
        """
        for site, part in sorted(self.sites.items()):
            damaged = part.damaged_rows() if site.kind in kinds else part.block_scales.new_zeros(0)
            if only_valid and damaged.numel():
                damaged &= self.valid.repeat_interleave(part.rows_per_token)
            if bool(damaged.any()):
                row = int(damaged.nonzero()[0])
                exponent = part.static_exponent if part.exponent is None else int(part.exponent[row])
                raise RecordError(
                    f"Record of trajectory {self.identity.trajectory!r} has impossible scales at position "
                    f"{self.start + row // part.rows_per_token}, {site}; got exponent {exponent} and scale bytes up "
                    f"to 0x{int(part.block_scales[row].max()):02X}. Exponents lie in {MIN_EXPONENT}..{MAX_EXPONENT}, "
                    f"whole E4M3 bytes in 0x00..0x{MAX_SCALE_BYTE:02X}. The record is damaged: drop it (its positions "
                    "round to nearest), and look for what wrote it."
                )

    def recode(self, codec: str | Mapping[Site, str]) -> Record:
        """The same record under codecs that keep less: `full` to any other; equal codecs return self.

        Args: codec: one for all sites, or one per site; sites that the mapping lacks keep theirs.
        Raises: RecordError for a site that is not `full`, because dropped bits cannot be restored.
        """
        asked = dict.fromkeys(self.sites, codec) if isinstance(codec, str) else codec
        for name in {codec} if isinstance(codec, str) else set(asked.values()):
            codec_by_name(name)
        targets = {site: asked.get(site, part.codec) for site, part in self.sites.items()}
        if all(part.codec == targets[site] for site, part in self.sites.items()):
            return self
        for site, part in self.sites.items():
            if part.codec != targets[site] and not part.is_whole:
                raise RecordError(
                    f"Codec {part.codec!r} of {site} cannot become {targets[site]!r}: its other bits were not kept. "
                    f"Only {FULL!r} records can be recoded. Ask the engine for full records."
                )
        return replace(self, sites={site: part.recode(targets[site]) for site, part in self.sites.items()})

    def num_bytes(self, *, kinds: Collection[SiteKind] | None = None) -> RecordBytes:
        """Bytes held, by what they hold (without identity and container).

        Args: kinds: count sites of these kinds only, and no routed ids; None counts everything.
        """
        parts = [part for site, part in self.sites.items() if kinds is None or site.kind in kinds]
        return RecordBytes(
            codes=sum(part.payload.numel() for part in parts),
            block_scales=sum(part.block_scales.numel() for part in parts),
            exponents=sum(0 if part.exponent is None else part.exponent.numel() for part in parts),
            routed=0
            if self.routed is None or kinds is not None
            else self.routed.numel() * self.routed.element_size(),
        )


def has_impossible_experts(expert_ids: Tensor, *, num_experts: int) -> Tensor:
    """Rows that no router can have chosen: an id outside 0 .. num_experts-1, or one id twice.

    Args: expert_ids integer [..., top_k]; num_experts, also more than the dtype can name.
    Returns: bool [...].
    """
    last = min(num_experts - 1, torch.iinfo(expert_ids.dtype).max)
    return (expert_ids.amin(-1) < 0) | (expert_ids.amax(-1) > last) | has_repeats(expert_ids)


def has_repeats(expert_ids: Tensor) -> Tensor:
    """Rows with one id twice: bool [...] of ids [..., top_k]."""
    found = torch.zeros(expert_ids.shape[:-1], dtype=torch.bool, device=expert_ids.device)
    slots = expert_ids.movedim(
        -1, 0
    ).contiguous()  # comparing slots is a tenth of the time that sorting rows takes
    for one, other in combinations(slots, 2):
        found |= one == other
    return found

"""One trajectory's rounding decisions: the code of every recorded value, its scales, and its position.

Alignment, stated once: row i of every array describes the computation *on input token* start + i. A prompt of
P tokens and a completion of C tokens give rows for positions 0 .. P+C-2; the last sampled token was never an
input and has no row, which is not the same as a row of zeros. A site whose tensor has several rows a token
(the down-projection input has top_k) keeps them together, token-major. Records are immutable, live on the
CPU, and know nothing of disks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from tracefp4.errors import RecordError
from tracefp4.guidance.payload import BLOCK_SIZE, FULL, codec_by_name

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


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class SiteRecord:
    """The decisions of one site for n rows of K values."""

    codec: str
    """Name of the payload codec, a key of CODECS."""
    payload: Tensor
    """uint8 [n, bytes]: what the codec keeps of the codes."""
    block_scales: Tensor
    """uint8 [n, K/16]: E4M3 byte of every block, as the rollout stored it."""
    exponent: Tensor | None
    """int8 [n], power of two of every row; None for schemes with a static outer scale."""
    width: int
    """K, values per row."""
    rows_per_token: int = 1
    """Rows that one position has: 1, or top_k at the down-projection input."""
    static_exponent: int | None = None
    """Power of two of a static outer scale; None for row schemes."""

    def __post_init__(self) -> None:
        rows = self.block_scales.shape[0]
        payload_width = codec_by_name(self.codec).payload_width(self.width)
        found = (tuple(self.payload.shape), tuple(self.block_scales.shape))
        expected = ((rows, payload_width), (rows, self.width // BLOCK_SIZE))
        exponent_rows = rows if self.exponent is None else self.exponent.shape[0]
        if found != expected or exponent_rows != rows or self.width % BLOCK_SIZE or self.rows_per_token < 1:
            raise RecordError(
                f"Site record arrays disagree; got payload and block_scales of shape {found}, "
                f"{exponent_rows} exponents, rows_per_token {self.rows_per_token}. Codec {self.codec!r} with "
                f"width {self.width} needs {expected} and a width divisible by {BLOCK_SIZE}. Build records "
                "with StepLog."
            )
        if (self.exponent is None) == (self.static_exponent is None):
            raise RecordError(
                f"A site record has either row exponents or one static exponent; got exponent "
                f"{'None' if self.exponent is None else 'of shape ' + str(tuple(self.exponent.shape))} and "
                f"static_exponent {self.static_exponent}. Exactly one may be None. Give the one that the "
                "scheme uses."
            )

    def rows(self, begin: int, end: int) -> SiteRecord:
        """The part for begin .. end-1, counted from this record's first position. Views, no copy."""
        low, high = begin * self.rows_per_token, end * self.rows_per_token
        return replace(
            self,
            payload=self.payload[low:high],
            block_scales=self.block_scales[low:high],
            exponent=None if self.exponent is None else self.exponent[low:high],
        )


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
    """Payload bytes."""
    block_scales: int
    """Block scale bytes."""
    exponents: int
    """Row exponent bytes, one per row and site."""
    routed: int
    """Routed expert id bytes."""

    @property
    def codec(self) -> int:
        """Codes plus block scales: what a codec's bits per value count."""
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
    """int16 [length, L, top_k], routed expert ids; None when routing was not recorded."""
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
        found = self.identity.weight_versions
        return found if isinstance(found, Tensor) else torch.full((self.length,), found, dtype=torch.int32)

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

    def recode(self, codec: str) -> Record:
        """The same record under a codec that keeps less: `full` to `mantissa`; equal codecs return self.

        Raises: RecordError for the reverse, because dropped bits cannot be restored.
        """
        target = codec_by_name(codec)
        if all(part.codec == codec for part in self.sites.values()):
            return self
        sites = {}
        for site, part in self.sites.items():
            codes = codec_by_name(part.codec).guide_codes(part.payload)
            if codes is None and part.codec != codec:
                raise RecordError(
                    f"Codec {part.codec!r} of {site} cannot become {codec!r}: its other bits were not kept. "
                    f"Only {FULL.name!r} records can be recoded. Ask the engine for full records."
                )
            payload = part.payload if codes is None else target.encode(codes)
            sites[site] = replace(part, codec=codec, payload=payload)
        return replace(self, sites=sites)

    def num_bytes(self) -> RecordBytes:
        """Bytes held, by kind (without identity and container)."""
        parts = self.sites.values()
        return RecordBytes(
            codes=sum(part.payload.numel() for part in parts),
            block_scales=sum(part.block_scales.numel() for part in parts),
            exponents=sum(0 if part.exponent is None else part.exponent.numel() for part in parts),
            routed=0 if self.routed is None else 2 * self.routed.numel(),
        )


def has_impossible_experts(expert_ids: Tensor, *, num_experts: int) -> Tensor:
    """Rows that no router can have chosen: an id outside 0 .. num_experts-1, or one id twice.

    Args: expert_ids integer [..., top_k]; num_experts at most the dtype's maximum plus one.
    Returns: bool [...].
    """
    ordered = expert_ids.sort(dim=-1).values
    bad = (ordered[..., 0] < 0) | (ordered[..., -1] > num_experts - 1)
    return bad | (ordered[..., 1:] == ordered[..., :-1]).any(-1)

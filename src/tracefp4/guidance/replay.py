"""The decisions that one training batch follows, addressed by (row, position).

A ReplayBatch is built per micro-batch from its position ids and its trajectories' records, entered with
`with replay(batch)`, and asked by every site. Flat order is row-major: place b*T + t is column t of row b.
Nothing is consumed: asking twice gives the same answer, which is what makes activation recomputation,
micro-batch order, left and right padding and packing harmless. Records stay packed; a site's rows are
gathered once and unpacked per call.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from tracefp4.coding import codec_by_name
from tracefp4.errors import ConfigError, RecordError
from tracefp4.guidance.counters import Counters, Reference
from tracefp4.guidance.gather import GatheredSite, RecordRows, check_same_rules
from tracefp4.guidance.record import Record, Site
from tracefp4.guidance.site_record import FULL
from tracefp4.ops.guided_quantize import Guide
from tracefp4.ops.upload import upload

Decoder = Literal["bracket", "nearest_cell"]
_ORDER = ("k", "v", "x", "w2")
"""Of the sites in a layer."""


@dataclass(kw_only=True, eq=False)
class ReplayBatch:
    """Records for one batch of B rows and T columns."""

    positions: Tensor
    """int64 [B, T]: position in the trajectory of every token; -1 for padding. In host memory nothing waits for it."""
    records: Sequence[Record | None]
    """Records to follow: one per row, or as many as record_index addresses; None: no record (nearest)."""
    decoder: Decoder = "nearest_cell"
    """How recorded low bits become a codeword; of no effect on full codes and syndromes."""
    bands: Mapping[Site, float] | None = None
    """Noise gate per site, in units of the block's decode scale: a record is followed only where z lies at most this
    far from another codeword's rounding cell. Sites that the mapping lacks, and all without it, have no gate."""
    sites: Collection[Site] | None = None
    """Sites to guide; None means every site that was recorded."""
    replay_routing: bool = True
    """Whether routers take the recorded experts."""
    references: Sequence[Record | None] | None = None
    """Full records, addressed like `records` and of the same rules, only for counting agreement; None means do not
    measure."""
    candidates: Sequence[str] = ()
    """Codecs to try beside the one that is followed, at every site with a reference: what each would have left wrong
    of this pass's values goes into `Counters.residuals`. Needs references."""
    record_index: Tensor | None = None
    """int64 [B, T]: record that a token belongs to (packed rows), -1 for none; None: row b has record b. Where
    `positions` are."""
    device: torch.device | None = None
    """Where the sites compute; None: where `positions` are."""
    counts_saturation: bool = True
    """Whether sites count what their rounding could not represent (`formats.saturation`), which a GPU's host waits
    for; False leaves those counts and their wholes 0."""
    counters: Counters = field(default_factory=Counters, init=False)
    """What the last pass of every site and router did."""

    def __post_init__(self) -> None:
        rows, columns = self.positions.shape
        flat = self.positions.reshape(-1).to(torch.int64)
        if self.record_index is None:
            owners = torch.arange(rows, device=flat.device).repeat_interleave(columns)
        else:
            owners = self.record_index.reshape(-1).to(torch.int64)
        for name, given in (("records", self.records), ("references", self.references)):
            self._check_count(name, given, owners)
        check_same_rules(self.records, references=self.references or ())
        real = flat >= 0
        self.num_real = int(real.sum())
        self.real = real if self.device is None else upload(real, self.device)
        self._rows = RecordRows(records=self.records, owners=owners, positions=flat, device=self.device)
        self._references = None
        if self.references is not None:
            self._references = RecordRows(
                records=self.references, owners=owners, positions=flat, device=self.device
            )
        for name in self.candidates:
            codec_by_name(name)
        if self.candidates and self.references is None:
            raise ConfigError(
                f"Codecs are tried against whole records; got candidates {list(self.candidates)} and no references. "
                "Pass the engine's full records as references, or no candidates."
            )
        if not self.replay_routing and any(
            site.kind == "w2" and self._is_guided(site) for site in self._rows.sites()
        ):
            raise ConfigError(
                "Guiding the down-projection input needs the recorded experts; got replay_routing False with "
                'site kind "w2". Its rows belong to (token, slot). Turn routing replay on or drop "w2".'
            )

    @property
    def num_places(self) -> int:
        """B * T."""
        return self.positions.numel()

    def gather(self) -> None:
        """Look up the rows of all guided sites and routers now, layer by layer, and begin to copy them to the device;
        without this each is looked up when it is first asked for.

        Raises: RecordError as the questions do.
        """
        for site in sorted(self._rows.sites(), key=lambda site: (site.layer, _ORDER.index(site.kind))):
            if self._is_guided(site):
                self._rows.site(site)
        if self.replay_routing:
            self._rows.routing()

    def guide(self, site: Site) -> Guide | None:
        """Decisions for one site, one row per row of its tensor; None when there is nothing to follow."""
        if not self._is_guided(site):
            return None
        found = self._rows.site(site)
        if found is None:
            return None
        return Guide(
            valid=found.valid,
            outer=found.part.exponent,
            decoder=self.decoder,
            band=self.band(site),
            **found.part.guide_parts(),
        )

    def band(self, site: Site) -> float | None:
        """Noise gate of one site; None: no gate there."""
        return None if self.bands is None else self.bands.get(site)

    def static_exponent(self, site: Site) -> int | None:
        """Exponent of a site recorded under a static outer scale; None if there is none."""
        found = self._rows.site(site)
        return None if found is None else found.part.static_exponent

    def num_guided(self, site: Site) -> int:
        """Positions with a decision to follow at one site; 0 where guide gives None."""
        found = self._rows.site(site) if self._is_guided(site) else None
        return 0 if found is None else found.num_places

    def syndrome_blocks(self, site: Site) -> int:
        """Blocks of syndromes, of codes and of scales, in the rows that have a decision to follow at one site."""
        found = self._rows.site(site) if self._is_guided(site) else None
        if found is None:
            return 0
        part = found.part
        codec = codec_by_name(part.codec)
        blocks = 0 if codec.code is None else codec.code.num_blocks(part.width)
        blocks += 0 if codec.scale_code is None else codec.scale_code.num_blocks(part.num_blocks)
        return found.num_places * part.rows_per_token * blocks

    def reference(self, site: Site) -> Reference | None:
        """Full codes of one site to measure against; None when not measured there.

        Raises: RecordError if the reference records are not full.
        """
        found: GatheredSite | None = None if self._references is None else self._references.site(site)
        if found is None:
            return None
        if not found.part.is_whole:
            raise RecordError(
                f"Agreement is counted against whole codes; got a reference of codec {found.part.codec!r} at "
                f"{site}. References must have codec {FULL!r}. Keep the engine's records before "
                "recoding them."
            )
        return Reference(
            codes=found.part.codes(),
            block_scales=found.part.block_scales,
            exponent=found.part.exponent,
            valid=found.valid,
            part=found.part,
        )

    def routing(self, layer: int, *, num_experts: int | None = None) -> tuple[Tensor, Tensor] | None:
        """Recorded experts of one layer: ids int64 [B*T, top_k] and valid bool [B*T]; None when not replayed.

        Ids of invalid places are arbitrary. Raises: RecordError for ids that repeat within a row or, when
        num_experts is given, lie outside 0 .. num_experts-1.
        """
        found = self._rows.routing() if self.replay_routing else None
        if found is None or layer not in found.layers:
            return None
        limit = torch.iinfo(found.expert_ids.dtype).max + 1 if num_experts is None else num_experts
        if found.has_repeats or found.id_range[0] < 0 or found.id_range[1] >= limit:
            for record in self.records:
                if record is not None:
                    record.check_routing(limit)
        return found.expert_ids[:, found.layers.index(layer)].to(torch.int64), found.valid

    def _is_guided(self, site: Site) -> bool:
        return self.sites is None or site in self.sites

    def _check_count(self, name: str, given: Sequence[Record | None] | None, owners: Tensor) -> None:
        if given is None:
            return
        addressed = int(owners.max()) + 1 if owners.numel() else 0
        if (
            owners.numel() != self.num_places
            or addressed > len(given)
            or (self.record_index is None and len(given) != self.positions.shape[0])
        ):
            raise RecordError(
                f"{name} do not fit the batch; got {len(given)} {name} for positions of shape "
                f"{tuple(self.positions.shape)}, {owners.numel()} places that address {addressed}. Give one "
                "per row, or record_index of the positions' shape with values below their number."
            )

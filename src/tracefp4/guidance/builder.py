"""From engine steps to records: keep each step's batch as it is, cut it by sequence once, at the end.

A step rounds N flat tokens of many sequences at every site. StepLog is the Sink of `with record(...)`: it
keeps the step's whole tensors, and the engine keeps, per sequence, the flat row (`first row of the step` +
place in the batch) of every position it accepts. Rejected drafts, preempted passes and shared prompts are
then only a matter of which rows a sequence lists. `build` does one concatenation and one gather per site for all
sequences asked for. Rows are encoded as they are observed, each on its own, so gathering afterwards gives the bytes
that recoding a whole record would give; a log holds no more than its records' bytes (`num_bytes`), serves one batch of
requests and is dropped after.

    log = StepLog(sites=..., codecs=plan.codecs, routed_layers=..., num_experts=E)
    first = log.begin_step(num_tokens=N)
    with record(log): model(...)
    log.end_step()                      # raises if a site was never observed
    rows[seq].append(first + place)     # for accepted tokens
    records = log.build([SequenceRows(...), ...])

Where kernels have written the bytes of a whole step already, `add_step` takes them as they are, a few tensors for all
layers, in place of the three calls in the middle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tracefp4.coding import codec_by_name, expert_id_bytes
from tracefp4.errors import ConfigError, RecordError
from tracefp4.guidance.payload import encode_block_scales, encode_codes
from tracefp4.guidance.record import Record, RecordIdentity, Site, SiteKind, has_impossible_experts
from tracefp4.guidance.site_record import FULL
from tracefp4.guidance.site_steps import SiteSteps, gathered
from tracefp4.guidance.stacked import BLOCK_TOKENS, StackedBlock, StackedRows, layout_of

if TYPE_CHECKING:
    from tracefp4.ops.guided_quantize import Rounded


_ID_DTYPES = {1: torch.uint8, 2: torch.int16}


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class SequenceRows:
    """Which flat rows of a log make up one sequence's record."""

    identity: RecordIdentity
    """Identity of the record to build; weight_versions has one entry per row, or is one int."""
    rows: Sequence[int] | Tensor
    """Flat row of every position, in position order: the pass whose logits were sampled from."""
    start: int = 0
    """Position of the first row."""
    cache_rows: Sequence[int] | Tensor | None = None
    """Flat rows for K and V where they were cached by another pass than `rows`; None means the same rows."""
    valid: Tensor | None = None
    """bool per row, False where the decisions must not be followed; None means all True."""


class StepLog:
    """Sink that keeps the roundings of engine steps and builds records.

    Args:
        sites: every site that each step must observe; others are not kept.
        codecs: codec of each site; sites that it lacks are kept whole (`full`), and so are all without it.
        routed_layers: layers whose routing each step must observe; empty means routing is not recorded.
        num_experts: sets the bytes of an id (`coding.expert_id_bytes`); other ids than 0 .. num_experts-1 are refused,
            when their step ends if that many bytes cannot hold them, else when records are built.

    Raises: ConfigError for more experts than an id can name, an unknown codec, or a codec for a site not listed.
    """

    def __init__(
        self,
        *,
        sites: Sequence[Site],
        codecs: Mapping[Site, str] | None = None,
        routed_layers: Sequence[int] = (),
        num_experts: int = 0,
    ) -> None:
        names = codecs or {}
        if unlisted := sorted(set(names) - set(sites)):
            raise ConfigError(
                "A step log was given codecs for sites that it does not record; got "
                f"{[str(site) for site in unlisted]}. Its sites are {[str(site) for site in sorted(sites)]}. "
                "Pass sites and codecs of one plan."
            )
        self._steps = {site: SiteSteps(codec=codec_by_name(names.get(site, FULL))) for site in sites}
        self._routed: dict[int, list[Tensor]] = {layer: [] for layer in routed_layers}
        self._num_experts = num_experts
        self._id_dtype = _ID_DTYPES[expert_id_bytes(num_experts)]
        self._lost_ids: dict[int, Tensor] = {}
        self._blocks: list[StackedBlock] = []
        self._layers: dict[SiteKind, tuple[int, ...]] = {}
        for site in sorted(sites):
            self._layers[site.kind] = (*self._layers.get(site.kind, ()), site.layer)
        self._num_rows = 0
        self._num_steps = 0
        self._open_tokens: int | None = None

    @property
    def num_rows(self) -> int:
        """Flat rows of the closed steps."""
        return self._num_rows

    @property
    def num_bytes(self) -> int:
        """Bytes of codes, scales and exponents that the log holds, without routed ids."""
        self._cut_blocks()
        kept = (steps.payload + steps.block_scales + steps.exponent for steps in self._steps.values())
        return sum(array.numel() * array.element_size() for arrays in kept for array in arrays)

    def begin_step(self, *, num_tokens: int) -> int:
        """Open a step of `num_tokens` flat tokens; returns the flat row of its first token."""
        assert self._open_tokens is None, "end_step was not called"
        assert not self._blocks, "this log is given whole steps"
        self._open_tokens = num_tokens
        return self._num_rows

    def observe(self, site: Site, rounded: Rounded) -> None:
        """Encode and keep one site's codes, block scales and exponent (not its values). Called by round_site."""
        steps = self._steps.get(site)
        if steps is None:
            return
        assert rounded.codes is not None, "a recorded site is rounded with codes"
        rows, width = rounded.codes.shape
        tokens = self._tokens_of_open_step()
        if (tokens and rows % tokens) or (not tokens and rows):
            raise RecordError(
                f"Site {site} rounded {rows} rows in a step of {tokens} tokens. The rows must be a multiple "
                "of the tokens. Call begin_step with the flat batch size."
            )
        steps.hold(site, (width, rounded.block_scales.shape[1], rows // tokens if tokens else 0))
        steps.payload.append(encode_codes(rounded.codes, codec=steps.codec))
        steps.block_scales.append(encode_block_scales(rounded.block_scales, codec=steps.codec))
        steps.exponent.append(rounded.outer)

    def observe_routing(self, layer: int, expert_ids: Tensor) -> None:
        """Keep the routed expert ids [N, top_k] of one layer. Called by route_site."""
        steps = self._routed.get(layer)
        if steps is not None:
            steps.append(expert_ids.to(self._id_dtype))
            # Looked at when the step ends: asking here would wait for the device in every layer.
            self._lost_ids[layer] = (steps[-1] != expert_ids).any()

    def end_step(self) -> None:
        """Close the step.

        Raises: RecordError naming the sites and layers that recorded nothing, or twice, or ids that cannot be kept.
        """
        tokens = self._tokens_of_open_step()
        num_steps = self._num_steps + 1
        counts = {str(site): len(steps.payload) for site, steps in self._steps.items()}
        counts |= {f"layers.{layer}.routing": len(steps) for layer, steps in self._routed.items()}
        wrong = {name: count for name, count in counts.items() if count != num_steps}
        if wrong:
            raise RecordError(
                f"A step was not recorded exactly once everywhere; after step {num_steps} these have "
                f"another number of observations: {wrong} (fewer: the site recorded nothing). Every planned "
                "site is observed once per step. Check that the model calls round_site and route_site there, "
                "under record(log)."
            )
        self._check_ids()
        self._num_steps = num_steps
        self._num_rows += tokens
        self._open_tokens = None

    def add_step(self, sites: Mapping[SiteKind, StackedRows], *, ids: Tensor | None, num_tokens: int) -> int:
        """Copy a whole step that is in stored form already; the same as observing it, without looking at a value.

        A log is given whole steps or observes them, not both. Tensors are in host memory, and free once this returns.

        Args:
            sites: by kind, every site of the log and no other. Codecs of the log are `full`.
            ids: [routed layers, N, top_k], expert ids in the log's bytes, layers in its order; None without routing.
            num_tokens: N, flat tokens, at least 1.

        Returns: the flat row of the first token.
        Raises: RecordError for a site that is missing or not the log's, and for rows, layouts or ids that do not fit;
            nothing is kept then.
        """
        assert self._open_tokens is None and not self._num_steps, "this log observes its steps"
        self._check_stacked(sites, ids, num_tokens)
        if not self._blocks or not self._blocks[-1].fits(sites, num_tokens=num_tokens):
            capacity = max(num_tokens, BLOCK_TOKENS)
            self._blocks.append(StackedBlock(sites, ids, num_tokens=num_tokens, capacity=capacity))
        self._blocks[-1].copy(sites, ids, num_tokens=num_tokens)
        self._num_rows += num_tokens
        return self._num_rows - num_tokens

    def abandon_step(self) -> None:
        """Forget the open step after an error inside it; the closed ones stay as they are."""
        self._tokens_of_open_step()
        for steps in self._steps.values():
            for kept in (steps.payload, steps.block_scales, steps.exponent):
                del kept[self._num_steps :]
            if not self._num_steps:
                steps.width = steps.num_blocks = steps.rows_per_token = 0
        for ids in self._routed.values():
            del ids[self._num_steps :]
        self._lost_ids.clear()
        self._open_tokens = None

    def build(self, sequences: Sequence[SequenceRows]) -> list[Record]:
        """Records of several sequences, in the order given.

        Returns: one Record per entry, in the codecs of the log; arrays are views of memory that they share.
        Raises: RecordError for rows outside the log, impossible expert ids, or static exponents that changed.
        """
        self._cut_blocks()
        rows = [_indices(entry.rows) for entry in sequences]
        cache_rows = [
            own if entry.cache_rows is None else _indices(entry.cache_rows)
            for own, entry in zip(rows, sequences, strict=True)
        ]
        lengths = [int(own.shape[0]) for own in rows]
        flat, flat_cache = _joined_rows(rows), _joined_rows(cache_rows)
        self._check_rows(flat)
        self._check_rows(flat_cache)
        parts = {
            site: steps.records(site, flat_cache if site.kind in ("k", "v") else flat, lengths)
            for site, steps in self._steps.items()
        }
        routed = self._routed_rows(flat, lengths)
        records = [
            Record(
                identity=entry.identity,
                start=entry.start,
                length=length,
                sites={site: split[i] for site, split in parts.items()},
                routed=None if routed is None else routed[i],
                valid=_all_valid(length) if entry.valid is None else entry.valid,
                routed_layers=tuple(self._routed) if self._routed else None,
            )
            for i, (entry, length) in enumerate(zip(sequences, lengths, strict=True))
        ]
        if self._routed:
            _check_routing(records, num_experts=self._num_experts)
        return records

    def _tokens_of_open_step(self) -> int:
        assert self._open_tokens is not None, "begin_step was not called"
        return self._open_tokens

    def _check_stacked(
        self, sites: Mapping[SiteKind, StackedRows], ids: Tensor | None, num_tokens: int
    ) -> None:
        """Refuse a whole step that is not one of this log; one look per kind, whatever the number of layers."""
        given = {kind: rows.layers for kind, rows in sites.items()}
        routed = None if ids is None else (ids.dtype, *ids.shape[:2])
        expected = (self._id_dtype, len(self._routed), num_tokens) if self._routed else None
        if given != self._layers or routed != expected:
            raise RecordError(
                f"A step was not recorded exactly once everywhere; got bytes of layers {given} and ids {routed}. The "
                f"log records layers {self._layers} and ids {expected} (dtype, routed layers, tokens). Tap what the "
                "log records."
            )
        layouts = {kind: layout_of(kind, rows, num_tokens=num_tokens) for kind, rows in sites.items()}
        if self._blocks and layouts != self._blocks[-1].layouts:
            raise RecordError(
                f"A step changed its layout within a log; got {layouts} after {self._blocks[-1].layouts}. All must be "
                "equal. Use one StepLog per model."
            )

    def _cut_blocks(self) -> None:
        """Cut the blocks of whole steps by site and layer, into what observed steps would have left."""
        if not self._blocks:
            return
        for steps in self._steps.values():
            steps.payload, steps.block_scales, steps.exponent = [], [], []
        self._routed = {layer: [] for layer in self._routed}
        for block in self._blocks:
            found, ids = block.filled()
            for kind, parts in found.items():
                self._cut_kind(kind, block, parts)
            if ids is not None:
                for kept, layer_ids in zip(self._routed.values(), ids, strict=True):
                    kept.append(layer_ids)

    def _cut_kind(self, kind: SiteKind, block: StackedBlock, parts: tuple[Tensor, ...]) -> None:
        layout, static = block.layouts[kind], block.static_exponents[kind]
        for index, layer in enumerate(layout.layers):
            steps = self._steps[Site(kind, layer)]
            steps.hold(Site(kind, layer), (layout.width, layout.num_blocks, layout.rows_per_token))
            steps.payload.append(parts[0][index])
            steps.block_scales.append(parts[1][index])
            steps.exponent.append(
                parts[2][index]
                if static is None
                else torch.tensor(static[index], dtype=torch.int8, device="cpu")
            )

    def _check_ids(self) -> None:
        """Refuse a step whose expert ids were cut to fit their bytes; one wait for the device."""
        if self._lost_ids and bool(torch.stack(list(self._lost_ids.values())).any()):
            layers = [layer for layer, is_lost in self._lost_ids.items() if bool(is_lost)]
            raise RecordError(
                f"Routers of layers {layers} chose experts that this log cannot name; got ids outside "
                f"0..{torch.iinfo(self._id_dtype).max} in a log for {self._num_experts} experts. Ids lie in "
                f"0..{self._num_experts - 1}. Give the log the model's number of experts and leave shared experts out."
            )
        self._lost_ids.clear()

    def _check_rows(self, rows: Tensor) -> None:
        if rows.numel() and (int(rows.min()) < 0 or int(rows.max()) >= self._num_rows):
            raise RecordError(
                f"Rows outside the step log; got {int(rows.min())} to {int(rows.max())}. Rows lie in "
                f"0..{self._num_rows - 1}. Use begin_step's return value plus the place in the batch."
            )

    def _routed_rows(self, rows: Tensor, lengths: list[int]) -> tuple[Tensor, ...] | None:
        if not self._routed:
            return None
        by_layer = [gathered(steps, rows) for steps in self._routed.values()]
        return torch.stack(by_layer, dim=1).split(lengths)


def _check_routing(records: list[Record], *, num_experts: int) -> None:
    """One look at all rows; the records are asked one by one only to name what is wrong."""
    routed = [record.routed for record in records if record.routed is not None]
    if routed and has_impossible_experts(torch.cat(routed), num_experts=num_experts).any():
        for record in records:
            record.check_routing(num_experts)


def _indices(rows: Sequence[int] | Tensor) -> Tensor:
    return torch.as_tensor(rows, dtype=torch.int64, device="cpu")


def _all_valid(length: int) -> Tensor:
    return torch.ones(length, dtype=torch.bool, device="cpu")


def _joined_rows(rows: list[Tensor]) -> Tensor:
    return torch.cat(rows) if rows else torch.zeros(0, dtype=torch.int64, device="cpu")

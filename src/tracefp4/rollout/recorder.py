"""What the engine keeps of its roundings: which sites, which rows of the step log, and a record per sequence.

The log keeps every pass whole; a sequence keeps the log row of each of its positions, so a prompt shared by
n samples is logged once, and a sequence that rested needs nothing. K and V need no second look: their codes
in the log are the bytes that went to the pages, and pages never change. Whole codes are also enough to write a page
again; `keeps_cache` tells whether every layer's K and V are among the recorded sites.

A pass of the definition is observed site by site (`step`). A native pass taps its bytes (`new_taps`) and hands them
over (`take`); they reach the log through a ring (`ring.py`), and whatever reads the log waits for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from tracefp4.errors import ConfigError, RecordError
from tracefp4.formats.precision import PARTS, LayerPrecision, scheme_digest
from tracefp4.guidance.builder import SequenceRows, StepLog
from tracefp4.guidance.record import Record, RecordIdentity, Site, SiteKind
from tracefp4.guidance.session import record
from tracefp4.guidance.site_record import FULL
from tracefp4.models.qwen3_moe import Qwen3MoeEngineModel
from tracefp4.models.qwen3_moe_config import Qwen3MoeSizes
from tracefp4.models.taps import StackedTaps, Taps
from tracefp4.rollout import sequence as rollout_sequence
from tracefp4.rollout.history import joined
from tracefp4.rollout.prefixes import Entry, PrefixCache
from tracefp4.rollout.ring import RecordRing

CACHED: tuple[SiteKind, ...] = ("k", "v")


def recordable_sites(precision: Sequence[LayerPrecision]) -> tuple[Site, ...]:
    """Sites that the engine rounds and a record can hold: x and w2 where activations are quantized, k and v where
    the cache is. A record has no room for float32 outer scales."""
    sites = []
    for layer, found in enumerate(precision):
        for part in PARTS:
            scheme = found.scheme_of(part)
            sites += [Site(part, layer)] if scheme is not None and scheme.is_exact_in_bf16 else []
    return tuple(sorted(sites))


def default_sites(precision: Sequence[LayerPrecision]) -> tuple[Site, ...]:
    """All recordable sites but the down-projection input, which needs no guidance once the others have it."""
    return tuple(site for site in recordable_sites(precision) if site.kind != "w2")


class Recorder:
    """Logs passes and builds records.

    Args:
        sites: what to record; every one must be one of `recordable_sites`.
        sizes: the model's; routing of every layer with experts is recorded.
        precision: the engine's, one entry per layer.
        plan_digest: goes into every record.
        ring: takes the bytes of native passes to the log.

    Raises: ConfigError naming sites that the engine does not round, or that a record cannot hold.
    """

    def __init__(
        self,
        sites: Sequence[Site],
        *,
        sizes: Qwen3MoeSizes,
        precision: Sequence[LayerPrecision],
        plan_digest: str,
        ring: RecordRing,
    ) -> None:
        unknown = sorted(set(sites) - set(recordable_sites(precision)))
        if unknown:
            raise ConfigError(
                "The engine cannot record sites that it does not round, or rounds under a float32 outer scale; got "
                f"{[str(site) for site in unknown]}. Allowed are "
                f"{[str(site) for site in recordable_sites(precision)]}. Give it the sites of the plan it "
                "runs."
            )
        self.sites = tuple(sites)
        self._sizes = sizes
        self._scheme_digest = scheme_digest(precision)
        self._plan_digest = plan_digest
        self._routed_layers = tuple(
            layer for layer in range(sizes.num_layers) if layer not in sizes.dense_layers
        )
        paged = [layer for layer in range(sizes.num_layers) if layer not in sizes.state_layers]
        self.keeps_cache = {Site(kind, layer) for kind in CACHED for layer in paged} <= set(sites)
        """True if K and V of every layer that has them are recorded, so that pages can be written from records."""
        self.ring = ring
        """On its way to the log."""
        self._log = self._new_log()
        self._num_rows = 0

    @property
    def rules(self) -> tuple[str, str]:
        """Digests of plan and schemes."""
        return self._plan_digest, self._scheme_digest

    @contextmanager
    def step(self, num_tokens: int) -> Iterator[int]:
        """Record one pass of `num_tokens` flat tokens; gives the log row of the first. After an error nothing of
        the pass is left."""
        first = self._log.begin_step(num_tokens=num_tokens)
        try:
            with record(self._log):
                yield first
            self._log.end_step()
        except BaseException:
            self._log.abandon_step()
            raise
        self._num_rows = self._log.num_rows

    def new_taps(self, model: Qwen3MoeEngineModel) -> Taps:
        """Return taps for one native pass."""
        return model.taps(self.sites, routed_layers=self._routed_layers)

    def take(self, taps: StackedTaps, *, num_tokens: int, num_rows: int | None = None) -> int:
        """Keep what a native pass tapped; returns the log row of its first token. The bytes may arrive later.

        Args:
            taps: of the pass, on its device.
            num_tokens: tokens of the pass; they come first.
            num_rows: the same with padding; None: there is none.

        Raises: RecordError if an earlier pass did not reach the log.
        """
        log, first = self._log, self._num_rows

        def add(kept: StackedTaps, count: int) -> None:
            log.add_step(kept.sites, ids=kept.ids, num_tokens=count)

        self.ring.push(taps, num_tokens=num_tokens, num_rows=num_rows or num_tokens, sink=add)
        self._num_rows += num_tokens
        return first

    @property
    def num_rows(self) -> int:
        """Log rows held, or on their way."""
        return self._num_rows

    def build(self, sequences: Sequence[rollout_sequence.Sequence]) -> list[Record | None]:
        """Records of sequences, in order, of the positions that are inputs of their tokens; None for one of which
        nothing was computed."""
        self.ring.drain()
        started = [sequence for sequence in sequences if sequence.history.num_positions]
        wanted: list[SequenceRows] = []
        for sequence in started:
            wanted += self._wanted(sequence)
        built = iter(self._log.build(wanted) if wanted else [])
        records = iter([self._composed(sequence, built) for sequence in started])
        return [next(records) if sequence.history.num_positions else None for sequence in sequences]

    def rebuilt_differently(self, sequence: rollout_sequence.Sequence) -> int:
        """Count the positions of a finished rebuild whose recorded K or V came out as other codes or scales."""
        rebuild = sequence.rebuild
        assert rebuild is not None
        if not rebuild.rows:
            return 0
        (old,) = self.build([sequence])
        assert old is not None
        end = rebuild.begin + len(rebuild.rows)
        (new,) = self._log.build([self._rows_of(rebuild.rows, start=rebuild.begin, versions=0)])
        return int(_cache_differs(old.rows(rebuild.begin, end), new).sum())

    def seal(self, sequences: Sequence[rollout_sequence.Sequence], prefixes: PrefixCache | None) -> None:
        """Turn everything that names log rows into records and drop the log.

        Args:
            sequences: all that the engine knows; none may be in the middle of a rebuild.
            prefixes: the prefix cache, if there is one.
        """
        records = self.build(sequences)
        if prefixes is not None:
            prefixes.seal(self.build_entries)
        for sequence, built in zip(sequences, records, strict=True):
            sequence.history.seal(built)
        self._log, self._num_rows = self._new_log(), 0

    def check_earlier(self, record: Record, *, num_tokens: int) -> None:
        """Refuse the record of a trajectory of `num_tokens` tokens that this engine cannot go on from.

        Raises: RecordError for other digests, sites, codecs or routed layers than this engine records, for more
            positions than the trajectory has, or for impossible scales of K or V, which would be written into pages.
        """
        record.check(scheme_digest=self._scheme_digest, plan_digest=self._plan_digest)
        found = {str(site): part.codec for site, part in sorted(record.sites.items())}
        expected = {str(site): FULL for site in sorted(self.sites)}
        if found != expected or record.layers_routed != self._routed_layers or record.start:
            raise RecordError(
                f"The record of trajectory {record.identity.trajectory!r} cannot go on in this engine; got sites and "
                f"codecs {found}, routed layers {record.layers_routed}, first position {record.start}. This engine "
                f"records {expected}, layers {self._routed_layers}, from position 0. Keep the engine's own record "
                "until the trajectory has ended, and recode it then."
            )
        if record.length > num_tokens:
            raise RecordError(
                f"The record of trajectory {record.identity.trajectory!r} is longer than the trajectory; got "
                f"{record.length} positions for {num_tokens} tokens. At most one for each is allowed. Cut tokens and "
                "record together, with Record.truncate."
            )
        record.check_scales(kinds=("k", "v"), only_valid=False)

    def forget(self, prefixes: PrefixCache | None) -> None:
        """Drop everything logged; called when no sequence refers to it any more. Cached prefixes get records, or go if
        their rows never arrived."""
        if self.ring.reset() and prefixes is not None:
            prefixes.forget_unsealed()
        self.seal([], prefixes)

    def _new_log(self) -> StepLog:
        return StepLog(
            sites=self.sites, routed_layers=self._routed_layers, num_experts=self._sizes.num_experts
        )

    def _wanted(self, sequence: rollout_sequence.Sequence) -> list[SequenceRows]:
        """What the log must give for a sequence's record: K and V that replace those of the past, then its rows."""
        history, past = sequence.history, sequence.history.num_past
        wanted = []
        if past and history.cache_rows:
            wanted.append(self._rows_of(history.cache_rows[:past], start=0, versions=0))
        if history.rows:
            rows = self._rows_of(history.rows, start=past, versions=_compact(sequence.versions[past:]))
            cache_rows = history.cache_rows_of_log() if history.cache_rows else None
            wanted.append(
                replace(rows, cache_rows=cache_rows, valid=torch.tensor(history.valid, device="cpu"))
            )
        return wanted

    def _composed(self, sequence: rollout_sequence.Sequence, built: Iterator[Record]) -> Record:
        """The record of a sequence, from its past and the records that the log gave for `_wanted`."""
        history = sequence.history
        parts = [joined(history.past)] if history.past else []
        if parts and history.cache_rows:
            parts = [_with_cache(parts[0], next(built))]
        if history.rows:
            parts.append(next(built))
        record = joined(parts)
        name = f"{sequence.request.request_id}.{sequence.sample_index}"
        record = replace(record, identity=replace(record.identity, trajectory=name))
        return record.truncate(len(sequence.ids) - 1)

    def build_entries(self, entries: Sequence[Entry]) -> list[Record]:
        """Records of cached pages that name log rows, in order."""
        self.ring.drain()
        return self._log.build(
            [
                self._rows_of(entry.rows, start=entry.start, versions=_compact(entry.versions))
                for entry in entries
            ]
        )

    def _rows_of(self, rows: Sequence[int], *, start: int, versions: Tensor | int) -> SequenceRows:
        identity = RecordIdentity(
            trajectory="",
            weight_versions=versions,
            scheme_digest=self._scheme_digest,
            plan_digest=self._plan_digest,
        )
        return SequenceRows(identity=identity, rows=rows, start=start)


def _compact(versions: Sequence[int]) -> Tensor | int:
    """Versions as a record keeps them: one number if all are equal."""
    is_constant = min(versions) == max(versions)
    return versions[0] if is_constant else torch.tensor(versions, dtype=torch.int32, device="cpu")


def _with_cache(record: Record, cached: Record) -> Record:
    """A record with K and V of another one of the same positions."""
    sites = {site: cached.sites[site] if site.kind in CACHED else part for site, part in record.sites.items()}
    return replace(record, sites=sites)


def _cache_differs(old: Record, new: Record) -> Tensor:
    """bool [positions]: K or V of any recorded layer differ in codes, scales or exponents."""
    differs = torch.zeros(old.length, dtype=torch.bool, device="cpu")
    for site, part in old.sites.items():
        if site.kind in CACHED:
            other = new.sites[site]
            differs |= (part.payload != other.payload).any(-1)
            differs |= (part.block_scales != other.block_scales).any(-1)
    return differs


def build_recorder(
    records: bool | tuple[Site, ...],
    *,
    sizes: Qwen3MoeSizes,
    precision: Sequence[LayerPrecision],
    plan_digest: str,
    ring: RecordRing,
) -> Recorder | None:
    """Return the recorder that an engine's `records` option asks for: True means the default sites."""
    if records is False:
        return None
    sites = default_sites(precision) if records is True else records
    return Recorder(sites, sizes=sizes, precision=precision, plan_digest=plan_digest, ring=ring)

"""What the engine keeps of its roundings: which sites, which rows of the step log, and a record per sequence.

The log keeps every pass whole; a sequence keeps the log row of each of its positions, so a prompt shared by
n samples is logged once, and a sequence that rested needs nothing. K and V need no second look: their codes
in the log are the bytes that went to the pages, and pages never change.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from tracefp4.errors import ConfigError
from tracefp4.formats.precision import BF16_LAYER, LayerPrecision
from tracefp4.guidance.builder import SequenceRows, StepLog
from tracefp4.guidance.record import Record, RecordIdentity, Site
from tracefp4.guidance.session import record
from tracefp4.models.qwen3_moe_config import Qwen3MoeSizes
from tracefp4.rollout import sequence as rollout_sequence


def recordable_sites(precision: Sequence[LayerPrecision]) -> tuple[Site, ...]:
    """Sites that the engine rounds: x and w2 where activations are quantized, k and v where the cache is."""
    sites = []
    for layer, found in enumerate(precision):
        sites += [Site("x", layer), Site("w2", layer)] if found.activation is not None else []
        sites += [Site("k", layer), Site("v", layer)] if found.kv is not None else []
    return tuple(sorted(sites))


def default_sites(precision: Sequence[LayerPrecision]) -> tuple[Site, ...]:
    """All recordable sites but the down-projection input, which needs no guidance once the others have it."""
    return tuple(site for site in recordable_sites(precision) if site.kind != "w2")


def scheme_digest(precision: Sequence[LayerPrecision]) -> str:
    """Digest of the schemes in force, joined in the order activation, weight, kv; equal to a plan's for its
    layers."""
    layer = next((found for found in precision if found != BF16_LAYER), BF16_LAYER)
    schemes = (layer.activation, layer.weight, layer.kv)
    return "-".join("bf16" if scheme is None else scheme.digest for scheme in schemes)


class Recorder:
    """Logs passes and builds records.

    Args:
        sites: what to record; every one must be a site that the engine rounds.
        sizes: the model's; routing of every layer with experts is recorded.
        precision: the engine's, one entry per layer.
        plan_digest: goes into every record.

    Raises: ConfigError naming sites that the engine does not round.
    """

    def __init__(
        self,
        sites: Sequence[Site],
        *,
        sizes: Qwen3MoeSizes,
        precision: Sequence[LayerPrecision],
        plan_digest: str,
    ) -> None:
        unknown = sorted(set(sites) - set(recordable_sites(precision)))
        if unknown:
            raise ConfigError(
                "The engine cannot record sites that it does not round; got "
                f"{[str(site) for site in unknown]}. Allowed are "
                f"{[str(site) for site in recordable_sites(precision)]}. Give it the sites of the plan it "
                "runs."
            )
        self.sites = tuple(sites)
        self._sizes = sizes
        self._scheme_digest = scheme_digest(precision)
        self._plan_digest = plan_digest
        self._log = self._new_log()

    @contextmanager
    def step(self, num_tokens: int) -> Iterator[int]:
        """Record one pass of `num_tokens` flat tokens; gives the log row of the first."""
        first = self._log.begin_step(num_tokens=num_tokens)
        with record(self._log):
            yield first
        self._log.end_step()

    def build(self, sequences: Sequence[rollout_sequence.Sequence]) -> list[Record | None]:
        """Records of finished sequences, in order; None for one of which nothing was computed."""
        started = [sequence for sequence in sequences if sequence.log_rows]
        records = iter(self._log.build([self._rows(sequence) for sequence in started]) if started else [])
        return [next(records) if sequence.log_rows else None for sequence in sequences]

    def forget(self) -> None:
        """Drop everything logged; called when no sequence refers to it any more."""
        self._log = self._new_log()

    def _new_log(self) -> StepLog:
        sizes = self._sizes
        routed = [layer for layer in range(sizes.num_layers) if layer not in sizes.dense_layers]
        return StepLog(sites=self.sites, routed_layers=routed, num_experts=sizes.num_experts)

    def _rows(self, sequence: rollout_sequence.Sequence) -> SequenceRows:
        versions = sequence.versions
        constant = versions[0] == versions[-1]  # versions only increase
        return SequenceRows(
            identity=RecordIdentity(
                trajectory=f"{sequence.request.request_id}.{sequence.sample_index}",
                weight_versions=versions[0] if constant else torch.tensor(versions, dtype=torch.int32),
                scheme_digest=self._scheme_digest,
                plan_digest=self._plan_digest,
            ),
            rows=sequence.log_rows,
        )


def build_recorder(
    records: bool | tuple[Site, ...],
    *,
    sizes: Qwen3MoeSizes,
    precision: Sequence[LayerPrecision],
    plan_digest: str,
) -> Recorder | None:
    """Return the recorder that an engine's `records` option asks for: True means the default sites."""
    if records is False:
        return None
    sites = default_sites(precision) if records is True else records
    return Recorder(sites, sizes=sizes, precision=precision, plan_digest=plan_digest)

"""What an engine is made of, each part once: the model, its pages and states, who runs next, and what is recorded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tracefp4.formats.precision import scheme_digest
from tracefp4.formats.tensor import BlockTensor
from tracefp4.kvcache import KVPool, PageAllocator
from tracefp4.models import Qwen3MoeEngineModel, build_engine_model
from tracefp4.rollout.graphs import DecodeGraphs, why_eager
from tracefp4.rollout.ledger import Ledger
from tracefp4.rollout.options import EngineOptions
from tracefp4.rollout.prefixes import PrefixCache, build_prefixes
from tracefp4.rollout.recorder import Recorder, build_recorder
from tracefp4.rollout.residence import Residence, build_residence
from tracefp4.rollout.ring import NUM_SLOTS, RecordRing
from tracefp4.rollout.rows import build_rows
from tracefp4.rollout.runner import Runner
from tracefp4.rollout.scheduler import Scheduler
from tracefp4.rollout.sizing import cache_shape, states_of


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class EngineParts:
    """The parts of one engine."""

    model: Qwen3MoeEngineModel
    """Weights and passes."""
    recorder: Recorder | None
    """None: nothing is recorded."""
    pool: KVPool
    """K and V, and states where the model has them."""
    allocator: PageAllocator
    """The pool's pages."""
    prefixes: PrefixCache | None
    """None: no prefix is kept."""
    graphs: DecodeGraphs | None
    """Captured decode passes; None: every pass runs eagerly."""
    why_eager: str
    """Why; empty if there are graphs."""
    runner: Runner
    """Runs passes."""
    residence: Residence
    """What sequences have on the device."""
    scheduler: Scheduler
    """Who runs next."""
    ledger: Ledger
    """What has finished."""
    max_length: int
    """Most positions of a sequence."""


def build_parts(
    options: EngineOptions, config: Any, state: Mapping[str, Tensor | BlockTensor], *, weight_version: int
) -> EngineParts:
    """Make an engine's parts; arguments and errors as of `LocalEngine`, options checked."""
    model = build_engine_model(config, state, precision=options.precision, arithmetic=options.arithmetic)
    device = model.device
    recorder = build_recorder(
        options.records,
        sizes=model.sizes,
        precision=options.precision,
        plan_digest=options.plan_digest,
        ring=RecordRing(device, num_slots=NUM_SLOTS, slot_tokens=options.max_batch),
    )
    states = states_of(options, model)
    most = config.max_position_embeddings
    shape, length = cache_shape(options, model, states=states, recorder=recorder, max_positions=most)
    pool = KVPool(
        shape, precision=options.precision, arithmetic=options.arithmetic, device=device, states=states
    )
    allocator = PageAllocator(
        shape.num_pages, save=pool.save, load=pool.load, max_saved=options.max_swapped_pages
    )
    prefixes = build_prefixes(
        options.prefix_cache,
        allocator,
        shape=shape,
        rules=(options.plan_digest, scheme_digest(options.precision)),
        weight_version=weight_version,
    )
    rows = build_rows(shape, max_batch=options.max_batch, max_length=length, device=device)
    why_not = why_eager(model, is_wanted=options.graphs)
    graphs = None if why_not else DecodeGraphs(model, pool, rows, recorder)
    residence = build_residence(allocator, pool=pool, recorder=recorder, prefixes=prefixes)
    scheduler = Scheduler(
        residence, rows=rows, max_tokens_per_step=options.max_tokens_per_step, decode=options.decode
    )
    return EngineParts(
        model=model,
        recorder=recorder,
        pool=pool,
        allocator=allocator,
        prefixes=prefixes,
        graphs=graphs,
        why_eager=why_not,
        runner=Runner(model, pool, rows=rows, recorder=recorder, graphs=graphs),
        residence=residence,
        scheduler=scheduler,
        ledger=Ledger(scheduler, recorder=recorder, prefixes=prefixes, max_log_rows=options.max_log_rows),
        max_length=length,
    )

"""How many pages and states a pool gets, and how many pages one sequence may have.

Where nobody gives a number, a GPU is filled: the largest passes are run once over padding, which stores nothing, and
what they needed beside the weights is left free. Nothing here runs again once the engine is made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from tracefp4.errors import ConfigError
from tracefp4.kvcache import CacheShape, KVPool
from tracefp4.kvcache.states import StatePool
from tracefp4.models.batch import Segment, TokenBatch
from tracefp4.models.qwen3_moe import Qwen3MoeEngineModel
from tracefp4.models.taps import StackedTaps
from tracefp4.ops.sample import Draws, sample
from tracefp4.rollout.graphs import buckets
from tracefp4.rollout.options import EngineOptions
from tracefp4.rollout.recorder import Recorder
from tracefp4.rollout.rows import NUM_COLUMNS, DecodeRows, batch_of, draws_of


class Room(NamedTuple):
    """Bytes of a GPU's memory."""

    total: int
    """All of it."""
    used: int
    """In use now, by anybody."""
    workspace: int
    """What passes will take beside the pages."""


def states_of(options: EngineOptions, model: Qwen3MoeEngineModel) -> StatePool | None:
    """Return the states of an engine, one for every sequence that runs; None where all layers have pages.

    Raises: ConfigError for a prefix cache where there are states, or a `state_dtype` where there are none.
    """
    matrices = None if options.state_dtype == "auto" else getattr(torch, options.state_dtype)
    states = model.new_states(options.max_batch, matrices=matrices)
    if states is None and matrices is not None:
        raise ConfigError(
            f"This model has no layers that keep a state; got state_dtype {options.state_dtype!r}. Only 'auto' is "
            "allowed. Leave state_dtype out."
        )
    if states is not None and options.prefix_cache:
        raise ConfigError(
            "Prompts cannot be cached page by page in a model whose layers keep a state of all positions so far; got "
            "prefix_cache True. Only False is allowed. Samples of one prompt share it all the same; leave it out."
        )
    return states


def cache_shape(
    options: EngineOptions,
    model: Qwen3MoeEngineModel,
    *,
    states: StatePool | None,
    recorder: Recorder | None,
    max_positions: int,
) -> tuple[CacheShape, int]:
    """Return the sizes of an engine's pool, and the most positions of a sequence.

    Args:
        options: of the engine.
        model: with its weights in place.
        states: of the engine, in place likewise.
        recorder: of the engine; what passes record takes memory, too.
        max_positions: limit of the model.

    Raises: ConfigError where num_pages is None on another device than a GPU, or not even one sequence fits.
    """
    sizes, length = model.sizes, options.max_length or max_positions
    shape = CacheShape(
        num_kv_heads=sizes.num_kv_heads, head_dim=sizes.head_dim, num_pages=1, page_size=options.page_size
    )
    if options.num_pages is not None:
        return replace(shape, num_pages=options.num_pages), length
    if model.device.type != "cuda" or model.native is None:
        raise ConfigError(
            f"The engine cannot size its pool on {model.device.type} in {model.arithmetic.name} arithmetic; got "
            "num_pages None. It measures passes of bf16 storage on a GPU alone. Give num_pages."
        )
    pool = KVPool(
        shape,
        precision=options.precision,
        arithmetic=options.arithmetic,
        device=model.device,
        states=states,
    )
    room = _measured(options, model, pool, recorder=recorder, length=length)
    needed = -(-length // options.page_size) if options.max_length else 1
    return replace(shape, num_pages=pages_in(room, pool.page_bytes, options=options, needed=needed)), length


def pages_in(room: Room, page_bytes: int, *, options: EngineOptions, needed: int) -> int:
    """Return how many pages fit, the null frame's left out.

    Raises: ConfigError for fewer than `needed`.
    """
    free = int(room.total * options.memory_share) - room.used - room.workspace
    count = free // page_bytes - 1
    if count < needed:
        raise ConfigError(
            f"Not even one sequence fits into the GPU's memory; got room for {max(count, 0)} pages of {page_bytes} "
            f"bytes in {options.memory_share:.0%} of {room.total} bytes, of which {room.used} are in use and passes "
            f"take {room.workspace}. At least {needed} pages are needed. Raise memory_share, or lower "
            "max_tokens_per_step, max_batch or max_length."
        )
    return count


def _measured(
    options: EngineOptions,
    model: Qwen3MoeEngineModel,
    pool: KVPool,
    *,
    recorder: Recorder | None,
    length: int,
) -> Room:
    """Run the largest decode pass and the largest chunks over padding, and see what they take."""
    device, pages = model.device, -(-length // options.page_size)
    rows = DecodeRows(max_rows=options.max_batch, max_pages=pages, shape=pool.shape, is_pinned=False)
    native, head = model.native, model.weights.head
    assert native is not None
    native.reserve(length)

    def run(batch: TokenBatch, draws: Draws | None) -> StackedTaps | None:
        taps = None if recorder is None else recorder.new_taps(model)
        hidden = native.run(batch, pool, taps)
        if draws is not None:
            sample(hidden, head, draws)
        return None if taps is None else taps.stacked()

    buffer = rows.buffer.to(device)
    columns = buffer[:, :NUM_COLUMNS].t().contiguous()
    decoding = batch_of(columns, buffer[:, NUM_COLUMNS:].contiguous())
    chunks = _padded_chunks(options, length, pool)
    taken = [
        _taken(device, partial(run, decoding, draws_of(columns))),
        _taken(device, partial(run, chunks, None)),
    ]
    # every captured size keeps what it records; their passes share the rest
    outputs = taken[0].kept * sum(buckets(options.max_batch)) // options.max_batch
    # and what is on its way to the log lies aside
    aside = 0 if recorder is None else taken[0].kept * recorder.ring.num_slots
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return Room(total=total, used=total - free, workspace=sum(one.peak for one in taken) + outputs + aside)


class _Taken(NamedTuple):
    """Bytes that a pass took beyond what there was."""

    peak: int
    """At most."""
    kept: int
    """For its result."""


def _taken(device: torch.device, run: Callable[[], object]) -> _Taken:
    run()  # compiles and chooses, which takes memory of its own
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    result = run()
    kept = torch.cuda.memory_allocated(device) - before
    del result
    return _Taken(peak=torch.cuda.max_memory_allocated(device) - before, kept=kept)


def _padded_chunks(options: EngineOptions, length: int, pool: KVPool) -> TokenBatch:
    """As many tokens as a pass may have, none of which stores anything."""
    device, width = pool.device, min(length, options.max_tokens_per_step)
    count = -(-options.max_tokens_per_step // width)
    positions = torch.arange(width, device=device).expand(count, width).contiguous()
    pages = -(-length // options.page_size)
    table = torch.full((count, pages), pool.null_frame, dtype=torch.int64, device=device)
    state_slots = None  # those of nobody, while no sequence runs
    if pool.states is not None:
        state_slots = torch.arange(count, device=device) % pool.states.shape.num_slots
    segment = Segment(
        begin=0,
        end=count * width,
        page_table=table,
        positions=positions,
        places=None,
        state_slots=state_slots,
    )
    return TokenBatch(
        token_ids=torch.zeros(count * width, dtype=torch.int64, device=device),
        positions=positions.flatten(),
        slots=torch.full((count * width,), -1, dtype=torch.int64, device=device),
        segments=[segment],
        logit_rows=torch.arange(count, device=device),
    )

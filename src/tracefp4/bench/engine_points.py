"""What the suite `engine` measures: points (a context, who decodes there, how tokens are routed) and their arithmetic.

Three accountings of a batch that fills the pool of pages, for completions that end at context C:

    full       all sequences are at C:  batch = pages / pages of C
    together   all begin at C0 and grow to C, the pool sized for C:  rate = batch (C - C0) / integral of step time
    steady     ages spread evenly over C0 .. C:  batch = what fits at these ages

C0 is 1,024, or C / 8 where C is no longer than that. Contexts are those of the last timed step. This is arithmetic:
nothing is measured here.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from tracefp4.bench.routing import Skew
from tracefp4.bench.traffic import BF16
from tracefp4.errors import ConfigError
from tracefp4.formats.precision import LayerPrecision
from tracefp4.models.qwen3_5_moe_config import Qwen35MoeSizes
from tracefp4.models.qwen3_moe_config import Qwen3MoeSizes

Accounting = Literal["full", "together", "steady", "batch"]
GROUPS = ("full", "together", "steady", "batch", "zipf", "recording")
"""What `--only` selects by; recording is a row of its own, from an engine that records nothing."""
FIRST_CONTEXT = 1024
BATCHES = (64, 8)
"""Fixed batches that are measured at every context."""
LEAST_PEER_SHARE = 0.60
"""Of its byte floor: below it our BF16 mode is no peer, and ratios to it are void."""
MAX_BATCH = 1024
"""No batch is larger, whatever fits."""


@dataclass(frozen=True, slots=True)
class Point:
    """One rate to measure."""

    context: int
    """C, at which completions end."""
    accounting: Accounting
    """How the batch follows from the memory; "batch" for a fixed one."""
    batch: int | None = None
    """Sequences; None for as many as fit."""
    routing: Skew = "uniform"
    """How tokens choose experts."""

    @property
    def name(self) -> str:
        """Its part of a row's id, e.g. `8k`, `8k.steady`, `8k.batch64`, `8k.zipf`."""
        parts = [shown_context(self.context)]
        if self.batch is not None:
            parts.append(f"batch{self.batch}")
        elif self.accounting != "full":
            parts.append(self.accounting)
        return ".".join(parts if self.routing == "uniform" else [*parts, self.routing])

    @property
    def group(self) -> str:
        """What `--only` selects by."""
        return self.accounting if self.routing == "uniform" else self.routing


class Load(NamedTuple):
    """What is put on an engine at once: the context of every sequence in the last timed step."""

    contexts: tuple[int, ...]
    """Tokens that the last step's queries see."""
    routing: Skew
    """How tokens choose experts."""


def all_points(contexts: Sequence[int]) -> list[Point]:
    """Return the points of completions of these lengths, uniform routing first."""
    found = [
        Point(context, accounting) for context in contexts for accounting in ("full", "together", "steady")
    ]
    found += [Point(context, "batch", batch) for context in contexts for batch in BATCHES]
    found.append(Point(min(FIRST_CONTEXT, *contexts), "batch", 1))
    found += [Point(context, "full", routing="zipf") for context in contexts]
    return list(dict.fromkeys(found))


def chosen_points(only: Sequence[str], contexts: Sequence[int]) -> list[Point]:
    """Return the points of some groups; without groups all of them.

    Raises:
        ConfigError: A group that does not exist.
    """
    unknown = [name for name in only if name not in GROUPS]
    if unknown:
        raise ConfigError(
            f"bench engine: there is no group {unknown[0]!r}; groups: {', '.join(GROUPS)}. Name some of them, with "
            "commas, or leave --only out."
        )
    return [point for point in all_points(contexts) if not only or point.group in only]


def loads_of(point: Point, *, num_pages: int, page_size: int, state_pages: float = 0.0) -> list[Load]:
    """Return what must be timed for a point, shortest contexts first.

    Args:
        point: What is measured.
        num_pages: Pages of a pool that takes all of the memory.
        page_size: Positions per page.
        state_pages: Pages whose memory the states of one sequence take; 0 where all layers have pages.

    Raises:
        ConfigError: Its sequences do not fit into the pool.
    """

    def pages(context: int) -> int:
        return -(-context // page_size)

    def needed(batch: int) -> int:
        # a scheduler that lets sequences in keeps a page for every page_size of those that run
        contexts = spread(point.context, batch) if point.accounting == "steady" else [point.context] * batch
        kept = batch // page_size if point.batch is None else 0
        return sum(map(pages, contexts)) + kept + math.ceil(batch * state_pages)

    if point.batch is None:
        batch = _largest(needed, num_pages)
    else:
        batch = point.batch if needed(point.batch) <= num_pages else 0
    if not batch:
        raise ConfigError(
            f"bench engine: {point.batch or 1} sequences of {point.context} tokens need the memory of "
            f"{needed(point.batch or 1)} pages; there is room for {num_pages} of {page_size} positions. At most as "
            "many as there is room for are allowed. Give the engine more memory, or a shorter --context."
        )
    if point.accounting == "steady":
        return [Load(spread(point.context, batch), point.routing)]
    contexts = grid(point.context) if point.accounting == "together" else (point.context,)
    return [Load((context,) * batch, point.routing) for context in contexts]


def side_by_side(loads: Mapping[Point, list[Load]], *, has_states: bool) -> list[dict[Point, list[Load]]]:
    """Return points by engine: all on one, unless there are states.

    An engine has a state for every sequence that it may run, whose memory a smaller batch cannot use for pages. So with
    states every batch size has an engine of its own, the largest first.
    """
    if not has_states:
        return [dict(loads)] if loads else []
    batches = {point: max(len(load.contexts) for load in found) for point, found in loads.items()}
    sizes = sorted(set(batches.values()), reverse=True)
    return [{point: loads[point] for point in loads if batches[point] == size} for size in sizes]


def _largest(needed: Callable[[int], int], available: int) -> int:
    """The largest batch up to MAX_BATCH whose pages are there; 0 if there is none."""
    low, high = 0, MAX_BATCH
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if needed(middle) <= available else (low, middle - 1)
    return low


def first_context(context: int) -> int:
    """Return C0, where completions that end at C begin."""
    return FIRST_CONTEXT if context > FIRST_CONTEXT else max(1, context // 8)


def grid(context: int) -> tuple[int, ...]:
    """Return the contexts at which a batch that starts together is timed: C0 and quarters of C."""
    first = first_context(context)
    return (first, *(c for c in (context * part // 4 for part in (1, 2, 3, 4)) if c > first))


def spread(context: int, batch: int) -> tuple[int, ...]:
    """Return contexts spread evenly over C0 .. C."""
    first = first_context(context)
    return tuple(first + round((i + 0.5) / batch * (context - first)) for i in range(batch))


def mean_over(contexts: Sequence[int], values: Sequence[float]) -> float:
    """Return the mean over a range of contexts of what was measured at some, linear in between (trapezoids).

    Args:
        contexts: Increasing; one alone is the whole range.
        values: One each.
    """
    if len(contexts) == 1:
        return values[0]
    steps = list(zip(contexts, contexts[1:], values, values[1:], strict=False))
    area = sum((b - a) * (x + y) / 2 for a, b, x, y in steps)
    return area / (contexts[-1] - contexts[0])


@dataclass(frozen=True, kw_only=True, slots=True)
class StepBytes:
    """The fewest bytes of one decode step: weights in use once, K and V of every context once."""

    dense: float
    """All matrices but the experts, in bf16: projections, routers, head; and one row of the embedding each."""
    experts: float
    """Weights of the experts in use, summed over the layers."""
    kv: float
    """K and V that are read, and those of the new tokens that are written."""
    states: float = 0.0
    """States of layers without K and V, read and written."""

    @property
    def total(self) -> float:
        """All of them."""
        return self.dense + self.experts + self.kv + self.states


def value_bytes(block_size: int | None) -> float:
    """Return the bytes of one stored value: half a byte and its share of a scale byte; 2 in bf16 (None)."""
    return BF16 if block_size is None else 0.5 + 1 / block_size


def step_bytes(
    sizes: Qwen3MoeSizes,
    precision: Sequence[LayerPrecision],
    *,
    contexts: Sequence[float],
    distinct: Sequence[float],
    matrix_bytes: float = 4.0,
) -> StepBytes:
    """Return what a decode step must move.

    Args:
        sizes: The model.
        precision: One entry per layer.
        contexts: Of all sequences.
        distinct: Experts in use, by layer.
        matrix_bytes: Of one value of a state's matrices.
    """
    batch = len(contexts)
    dense, expert_values = batch * sizes.hidden_size * BF16, 3 * sizes.hidden_size * sizes.expert_size
    for name, shape in sizes.shapes().items():
        if ".experts." not in name and (name != "model.embed_tokens.weight" or sizes.ties_embeddings):
            dense += BF16 * math.prod(shape)
    experts = sum(
        count * expert_values * value_bytes(None if layer.weight is None else layer.weight.block_size)
        for count, layer in zip(distinct, precision, strict=True)
    )
    tokens = sum(contexts) + batch
    states = 2.0 * batch * state_bytes(sizes, matrix_bytes)
    return StepBytes(dense=dense, experts=experts, kv=tokens * token_bytes(sizes, precision), states=states)


def token_bytes(sizes: Qwen3MoeSizes, precision: Sequence[LayerPrecision]) -> float:
    """Return the bytes of K and V of one position over all layers."""
    values = 2 * sizes.num_kv_heads * sizes.head_dim
    return sum(
        values * value_bytes(None if found.kv is None else found.kv.block_size)
        for layer, found in enumerate(precision)
        if layer not in sizes.state_layers
    )


def state_bytes(sizes: Qwen3MoeSizes, matrix_bytes: float) -> float:
    """Return the bytes of one sequence's states over all layers: matrices, and the last inputs of convolutions."""
    if not isinstance(sizes, Qwen35MoeSizes):
        return 0.0
    matrices = sizes.delta_value_heads * sizes.delta_value_dim * sizes.delta_key_dim * matrix_bytes
    return len(sizes.state_layers) * (matrices + BF16 * (sizes.delta_taps - 1) * sizes.delta_width)


def weight_bytes(sizes: Qwen3MoeSizes, precision: Sequence[LayerPrecision]) -> float:
    """Return the bytes of all weights under a plan."""
    everything = [float(sizes.num_experts)] * sizes.num_layers
    embedding = 0 if sizes.ties_embeddings else BF16 * sizes.vocab_size * sizes.hidden_size
    return step_bytes(sizes, precision, contexts=(), distinct=everything).total + embedding


def shown_context(context: int) -> str:
    """Return a context as ids name it: 8192 is `8k`."""
    return f"{context // 1024}k" if context % 1024 == 0 else str(context)


def read_context(text: str) -> int:
    """Read a context: `8k` or `8192`.

    Raises:
        ConfigError: Neither, or too short to begin and end anywhere.
    """
    lowered = text.strip().lower()
    digits, unit = (lowered[:-1], 1024) if lowered.endswith("k") else (lowered, 1)
    if not digits.isdigit() or int(digits) * unit < 16:
        raise ConfigError(
            f"bench engine: a context is a number of tokens, at least 16; got {text!r}. Allowed are numbers such as "
            "8192, or with k for 1,024, such as 8k. Correct --context."
        )
    return int(digits) * unit

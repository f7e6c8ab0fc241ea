"""What an engine can be told when it is made, and the sizes that follow from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from tracefp4.errors import ConfigError
from tracefp4.formats.arithmetic import Arithmetic
from tracefp4.formats.precision import LayerPrecision
from tracefp4.guidance.record import Site
from tracefp4.rollout.stopping import Decode

StateDtype = Literal["auto", "float32", "bfloat16"]
"""How an engine stores what layers without pages remember."""


@dataclass(kw_only=True, eq=False)
class EngineOptions:
    """Options of `LocalEngine`."""

    precision: tuple[LayerPrecision, ...]
    """One entry per decoder layer."""
    arithmetic: Arithmetic
    """Compute dtype and rounding points."""
    plan_digest: str
    """Digest of the plan that `precision` and `records` come from; part of every record."""
    max_batch: int
    """Most sequences that run at once."""
    max_tokens_per_step: int
    """Most tokens of one pass; longer prompts are computed in chunks. At least max_batch."""
    num_pages: int | None = None
    """KV pages; may be fewer than all sequences at full length need. None: as many as `memory_share` leaves room for,
    on a GPU; the engine then says here how many they are."""
    memory_share: float = 0.90
    """Part of the GPU's memory that may be in use once the pages are there, by anybody; in (0, 1]. Read only where
    num_pages is None."""
    max_length: int | None = None
    """Most positions of a sequence; captured passes move a page table of so many for every row. None: the model's
    max_position_embeddings."""
    page_size: int = 16
    """Positions per page."""
    state_dtype: StateDtype = "auto"
    """How matrices of gated delta layers are stored: "bfloat16" halves the bytes that a decode step moves, "auto" is as
    wide as the layer is computed (float32, or float64 in float64 arithmetic). Only for models that have such layers."""
    records: bool | tuple[Site, ...] = True
    """Sites to record, beside the routing of every layer; True: x, k and v wherever they are quantized;
    False: nothing."""
    graphs: bool = True
    """Capture decode passes as CUDA graphs where that is possible; `EngineStats.why_eager` says where it is not."""
    captures_at_start: bool = False
    """Capture all of them when the engine is made, instead of each when it is first needed."""
    prefix_cache: bool = False
    """Keep full pages of finished sequences for requests that begin with the same tokens. Off: a training loop flushes
    it with every update and shares the prompts of a group anyway, and kept pages and records take memory."""
    max_swapped_pages: int | None = None
    """Most KV pages in host memory; pages beyond come back from recorded codes or are computed again. None: no
    limit."""
    max_log_rows: int = 1 << 18
    """Positions that the running log may hold before it is turned into records."""
    decode: Decode | None = None
    """Token ids to text, needed for stop texts alone."""

    def check_limits(self) -> None:
        """Refuse numbers out of range.

        Raises: ConfigError naming the option.
        """
        if not 1 <= self.max_batch <= self.max_tokens_per_step:
            raise ConfigError(
                f"Engine limits out of range; got max_batch {self.max_batch} and max_tokens_per_step "
                f"{self.max_tokens_per_step}. max_batch is at least 1 and at most max_tokens_per_step. Raise "
                "max_tokens_per_step."
            )
        if self.state_dtype not in get_args(StateDtype):
            raise ConfigError(
                f"States cannot be stored like that; got state_dtype {self.state_dtype!r}. Allowed are "
                f"{', '.join(get_args(StateDtype))}. Correct state_dtype."
            )
        if not 0 < self.memory_share <= 1:
            raise ConfigError(
                f"An engine cannot use {self.memory_share} of a GPU's memory; got memory_share {self.memory_share}. "
                "Above 0 and at most 1. Correct memory_share."
            )
        if self.max_length is not None and self.max_length < 1:
            raise ConfigError(
                f"Sequences cannot have {self.max_length} positions at most; got max_length {self.max_length}. At "
                "least 1, or None for the model's own limit. Correct max_length."
            )

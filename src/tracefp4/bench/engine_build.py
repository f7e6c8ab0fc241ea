"""Engines of random weights that take a share of a card: how many pages that leaves, and one engine after the other.

Two engines do not fit beside each other, so one gives all of its memory back before the next is built.
"""

import gc
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from tracefp4.bench.engine_decoding import DecodingEngine
from tracefp4.bench.engine_points import MAX_BATCH, state_bytes, token_bytes, weight_bytes
from tracefp4.bench.engine_shapes import PLANS, TINY, TINY_HYBRID, config_of, is_hybrid, plan_of
from tracefp4.bench.engine_weights import RandomState
from tracefp4.bench.routing import Skew
from tracefp4.errors import ConfigError
from tracefp4.formats.arithmetic import NATIVE
from tracefp4.models import qwen3_5_moe_config
from tracefp4.models.qwen3_moe_config import Qwen3MoeSizes, read_sizes
from tracefp4.patching.plan import Plan
from tracefp4.patching.shapes import ModelShape
from tracefp4.rollout.options import StateDtype

GIB = 1 << 30
RESERVE_BYTES = int(2.7 * GIB)
"""Of a card, for activations, workspaces and graphs."""
CPU_CARD_BYTES = 1 << 20
"""What stands for a card on a processor, where only the tiny shapes run; nothing of it is reserved."""


def engine_device(shape: ModelShape) -> torch.device:
    """Return where a shape is measured: the GPU; for a tiny one the processor where there is none.

    Raises:
        ConfigError: Another shape, and no GPU.
    """
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    if shape in (TINY, TINY_HYBRID):
        return torch.device("cpu")
    raise ConfigError(
        f"bench engine: {shape.name} is measured on an NVIDIA GPU; this torch ({torch.__version__}) sees none. Without "
        "one only the shapes tiny and tiny-hybrid run. Run it on a GPU, or try the suite with --random-weights tiny."
    )


@dataclass(frozen=True, kw_only=True)
class Workshop:
    """Builds the engines of one run."""

    shape: ModelShape
    """The model."""
    device: torch.device
    """Where."""
    memory: float
    """Share of the card for weights, pages and reserve."""
    page_size: int
    """Positions per page."""
    longest: int
    """Tokens of the longest sequence."""
    state_dtype: StateDtype = "auto"
    """How states are stored, where the model has them."""
    config: Any = field(init=False)
    """What transformers would have read."""
    sizes: Qwen3MoeSizes = field(init=False)
    """The same as the engine reads it."""
    plans: dict[str, Plan] = field(init=False)
    """FP4 and BF16, by name."""

    def __post_init__(self) -> None:
        config = config_of(self.shape, max_positions=self.longest)
        object.__setattr__(self, "config", config)
        read = qwen3_5_moe_config.read_sizes if is_hybrid(self.shape) else read_sizes
        object.__setattr__(self, "sizes", read(config))
        object.__setattr__(self, "plans", {name: plan_of(config, rules) for name, rules in PLANS.items()})

    @property
    def card_bytes(self) -> int:
        """Memory of the card."""
        if self.device.type != "cuda":
            return CPU_CARD_BYTES
        return int(torch.cuda.get_device_properties(self.device).total_memory)

    def num_pages(self, plan: str) -> int:
        """Return the pages that the weights of a plan leave, if states take none of the memory.

        Raises:
            ConfigError: They leave none.
        """
        reserve = RESERVE_BYTES if self.device.type == "cuda" else 0
        precision = self.plans[plan].layers
        weights = weight_bytes(self.sizes, precision)
        free = self.memory * self.card_bytes - reserve - weights
        pages = int(free / (self.page_size * token_bytes(self.sizes, precision))) - 1  # the null frame
        if pages < 1:
            raise ConfigError(
                f"bench engine: the {plan} weights of {self.shape.name} leave no memory for K and V; got "
                f"{weights / GIB:.3g} GiB of weights for {self.memory:g} of a card of {self.card_bytes / GIB:.3g} GiB, "
                f"{reserve / GIB:.3g} GiB reserved. Allowed are models that leave room for pages. Raise --memory, cut "
                "the model with --layers, or measure a smaller one."
            )
        return pages

    def state_pages(self, plan: str) -> float:
        """Return the pages that the states of one sequence take the memory of."""
        matrix_bytes = 2.0 if self.state_dtype == "bfloat16" else 4.0
        page_bytes = self.page_size * token_bytes(self.sizes, self.plans[plan].layers)
        return state_bytes(self.sizes, matrix_bytes) / page_bytes

    def state(self, plan: str, routing: Skew) -> RandomState:
        """Return weights of a plan under which tokens are routed so."""
        return RandomState(self.sizes, self.plans[plan].layers, device=self.device, routing=routing)

    def use(
        self,
        work: Callable[[DecodingEngine], None],
        plan: str,
        *,
        routing: Skew,
        max_batch: int,
        records: bool,
    ) -> None:
        """Build an engine with all the pages that fit beside its states, and no more than the largest batch can use,
        work with it, and give its memory back.

        Args:
            work: Called once with the engine, of which it keeps nothing.
            plan: `fp4` or `bf16`.
            routing: Of the engine's first weights.
            max_batch: Most sequences at once.
            records: Whether it records what it rounds and routes.
        """
        found = self.plans[plan]
        pages = self.num_pages(plan) - math.ceil(max_batch * self.state_pages(plan))
        engine = DecodingEngine(
            self.config,
            self.state(plan, routing),
            precision=found.layers,
            arithmetic=NATIVE,
            plan_digest=found.digest,
            num_pages=min(pages, MAX_BATCH * (-(-self.longest // self.page_size) + 1)),
            state_dtype=self.state_dtype,
            page_size=self.page_size,
            max_batch=max_batch,
            max_tokens_per_step=max_batch,
            records=records,
        )
        work(engine)
        del engine
        self._free()

    def peak_share(self) -> float | None:
        """Return the largest share of the card in use since the last engine was given back; None on a processor."""
        if self.device.type != "cuda":
            return None
        return torch.cuda.max_memory_reserved(self.device) / self.card_bytes

    def _free(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)

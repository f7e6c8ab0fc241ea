"""Engines of random weights that take a share of a card: how many pages that leaves, and one engine after the other.

Two engines do not fit beside each other, so one gives all of its memory back before the next is built.
"""

import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from tracefp4.bench.engine_decoding import DecodingEngine
from tracefp4.bench.engine_points import MAX_BATCH, token_bytes, weight_bytes
from tracefp4.bench.engine_shapes import PLANS, config_of, plan_of
from tracefp4.bench.engine_weights import RandomState
from tracefp4.bench.routing import Skew
from tracefp4.errors import ConfigError
from tracefp4.formats.arithmetic import NATIVE
from tracefp4.models.qwen3_moe_config import Qwen3MoeSizes, read_sizes
from tracefp4.patching.plan import Plan
from tracefp4.patching.shapes import ModelShape

GIB = 1 << 30
RESERVE_BYTES = int(2.7 * GIB)
"""Of a card, for activations, workspaces and graphs."""
CPU_CARD_BYTES = 1 << 20
"""What stands for a card on a processor, where only the tiny shape runs; nothing of it is reserved."""


def engine_device(shape: ModelShape) -> torch.device:
    """Return where a shape is measured: the GPU; for the tiny one the processor where there is none.

    Raises:
        ConfigError: Another shape, and no GPU.
    """
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    if shape.name == "tiny":
        return torch.device("cpu")
    raise ConfigError(
        f"bench engine: {shape.name} is measured on an NVIDIA GPU; this torch ({torch.__version__}) sees none. Without "
        "one only the shape tiny runs. Run it on a GPU, or try the suite with --random-weights tiny."
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
    config: Any = field(init=False)
    """What transformers would have read."""
    sizes: Qwen3MoeSizes = field(init=False)
    """The same as the engine reads it."""
    plans: dict[str, Plan] = field(init=False)
    """FP4 and BF16, by name."""

    def __post_init__(self) -> None:
        config = config_of(self.shape, max_positions=self.longest)
        object.__setattr__(self, "config", config)
        object.__setattr__(self, "sizes", read_sizes(config))
        object.__setattr__(self, "plans", {name: plan_of(config, rules) for name, rules in PLANS.items()})

    @property
    def card_bytes(self) -> int:
        """Memory of the card."""
        if self.device.type != "cuda":
            return CPU_CARD_BYTES
        return int(torch.cuda.get_device_properties(self.device).total_memory)

    def num_pages(self, plan: str) -> int:
        """Return the pages that the weights of a plan leave, and no more than the largest batch can use.

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
        return min(pages, MAX_BATCH * (-(-self.longest // self.page_size) + 1))

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
        """Build an engine with all the pages that fit, work with it, and give its memory back.

        Args:
            work: Called once with the engine, of which it keeps nothing.
            plan: `fp4` or `bf16`.
            routing: Of the engine's first weights.
            max_batch: Most sequences at once.
            records: Whether it records what it rounds and routes.
        """
        found = self.plans[plan]
        engine = DecodingEngine(
            self.config,
            self.state(plan, routing),
            precision=found.layers,
            arithmetic=NATIVE,
            plan_digest=found.digest,
            num_pages=self.num_pages(plan),
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

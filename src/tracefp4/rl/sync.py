"""Build the rollout engine of a policy, and publish the trainer's weights to it under a new version."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tracefp4.formats import BlockTensor
from tracefp4.formats.arithmetic import Arithmetic
from tracefp4.guidance import Site
from tracefp4.patching import Plan
from tracefp4.rl.config import RolloutConfig
from tracefp4.rollout import Engine, LocalEngine
from tracefp4.rollout.stopping import Decode


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineOptions:
    """What an engine may be given beyond weights, plan and sizes."""

    weight_version: int = 0
    """Version of the weights."""
    decode: Decode | None = None
    """Token ids to text, for requests with stop texts; None: there are none."""


NO_OPTIONS = EngineOptions()


def build_engine(
    model: Any,
    plan: Plan,
    *,
    arithmetic: Arithmetic,
    rollout: RolloutConfig,
    records: bool | tuple[Site, ...],
    options: EngineOptions = NO_OPTIONS,
) -> LocalEngine:
    """Build our engine on the model's weights, under the same plan as the trainer.

    Args:
        model: the transformers model (bf16-valued parameters, see `patching.apply`), or anything else with its
            config and state_dict: a `stored.StoredPolicy` gives bytes.
        plan: decides the precision of every layer; its digests go into every record.
        arithmetic: the same as the trainer's.
        rollout: sizes of the pool and the batch.
        records: sites to record beside the routing: the plan's guided sites for training (an empty tuple records
            routing only), True for every quantized site, False for nothing (evaluation).
        options: version of these weights, and how to read text.
    """
    return LocalEngine(
        model.config,
        weights_of(model),
        precision=plan.layers,
        arithmetic=arithmetic,
        plan_digest=plan.digest,
        num_pages=rollout.num_pages,
        page_size=rollout.page_size,
        max_batch=rollout.max_batch,
        max_tokens_per_step=rollout.max_tokens_per_step,
        records=records,
        prefix_cache=rollout.prefix_cache,
        state_dtype=rollout.state_dtype,
        max_swapped_pages=rollout.max_swapped_pages,
        weight_version=options.weight_version,
        decode=options.decode,
    )


def reader(tokenizer: Any) -> Decode:
    """Return the function that an engine reads stop texts with: all tokens as text, nothing stripped or cleaned up."""

    def decode(token_ids: list[int]) -> str:
        text: str = tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    return decode


def weights_of(model: Any) -> Mapping[str, Tensor | BlockTensor]:
    """Return the model's parameters by name, detached, without copies."""
    state: Mapping[str, Tensor | BlockTensor] = model.state_dict()
    return {name: t.detach() if isinstance(t, Tensor) else t for name, t in state.items()}


def publish(model: Any, engine: Engine, *, version: int) -> None:
    """Give the engine the trainer's current weights; the engine checks that the two name sets are equal."""
    engine.update_weights(weights_of(model), version=version)

"""Build the rollout engine of a policy, and publish the trainer's weights to it under a new version."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from tracefp4.formats.arithmetic import Arithmetic
from tracefp4.guidance import Site
from tracefp4.patching import Plan
from tracefp4.rl.config import RolloutConfig
from tracefp4.rollout import Engine, LocalEngine


def build_engine(
    model: Any,
    plan: Plan,
    *,
    arithmetic: Arithmetic,
    rollout: RolloutConfig,
    records: bool | tuple[Site, ...],
    weight_version: int = 0,
) -> LocalEngine:
    """Build our engine on the model's weights, under the same plan as the trainer.

    Args:
        model: the transformers model (bf16-valued parameters, see `patching.apply`).
        plan: decides the precision of every layer; its digests go into every record.
        arithmetic: the same as the trainer's.
        rollout: sizes of the pool and the batch.
        records: sites to record beside the routing: the plan's guided sites for training (an empty tuple records
            routing only), True for every quantized site, False for nothing (evaluation).
        weight_version: version of these weights.
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
        weight_version=weight_version,
    )


def weights_of(model: Any) -> Mapping[str, Tensor]:
    """Return the model's parameters by name, detached, without copies."""
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


def publish(model: Any, engine: Engine, *, version: int) -> None:
    """Give the engine the trainer's current weights; the engine checks that the two name sets are equal."""
    engine.update_weights(weights_of(model), version=version)

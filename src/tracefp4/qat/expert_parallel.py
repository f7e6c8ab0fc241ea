"""Experts of a patched model on several ranks, each rank with some of them.

Rank r of n holds experts r * E/n .. (r + 1) * E/n - 1 of every layer as DTensor parameters, Shard(0) on the given mesh:
names, optimizers, gradient clipping and distributed checkpoints see whole parameters. Matrices stay whole, so every
code and scale byte is the one of the unsharded model. Routers keep global expert ids, which is what records hold. This
module never moves rows (`dispatch`) and never shards anything but routed experts.

With tokens "same" (every rank has the same batch) outputs and gradients of a pass are the unsharded ones on every rank.
With tokens "own" every rank has its own batch; all ranks run the same number of passes, and the gradient of an expert
is the sum over the batches of all ranks, where data parallelism often takes a mean: set FSDP's
`set_gradient_divide_factor(1.0)` and divide the loss by the count of all ranks.
"""

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from tracefp4.errors import ConfigError
from tracefp4.qat.dispatch import ExpertShard
from tracefp4.qat.experts import SITE_KINDS, ExpertWeights

Tokens = Literal["same", "own"]
"""Whether the ranks have one batch, or each its own."""
TOKENS: tuple[Tokens, ...] = ("same", "own")


def shard_experts(model: nn.Module, mesh: DeviceMesh, *, tokens: Tokens) -> list[nn.Parameter]:
    """Keep this rank's experts of every layer, and reach the others through the mesh.

    Args:
        model: patched by `patching.apply`, all of its experts on this rank; or loaded by transformers with
            `enable_expert_parallel`, which leaves the same shards here and whose exchange is replaced.
        mesh: one-dimensional, of all ranks that share the experts; its order is the order of the experts.
        tokens: "same" or "own" (see above).

    Returns:
        The new parameters. Give them to `fully_shard(..., ignored_params=set(...))`, which must not shard them again.

    Raises:
        ConfigError: the model is not patched, or sharded or wrapped by FSDP already, the mesh has several dimensions,
            the experts do not divide evenly or are sharded in another way, or `tokens` is unknown.
    """
    if tokens not in TOKENS or mesh.ndim != 1:
        raise ConfigError(
            f"shard_experts needs a mesh of one dimension and tokens {' or '.join(map(repr, TOKENS))}; got {mesh.ndim} "
            f'dimensions and {tokens!r}. Pass mesh["ep"] of a larger mesh.'
        )
    layers = list(expert_layers(model))
    is_wrapped = any(isinstance(module, FSDPModule) for module in model.modules())
    if not layers or is_wrapped:
        raise ConfigError(
            f"shard_experts needs a patched model that FSDP has not wrapped; got {len(layers)} patched experts "
            f"modules, wrapped: {is_wrapped}. Call patching.apply, then shard_experts, then fully_shard with "
            "ignored_params."
        )
    return [parameter for module, state in layers for parameter in _shard(module, state, mesh, tokens)]


def expert_layers(model: nn.Module) -> Iterator[tuple[nn.Module, ExpertWeights]]:
    """Yield the patched experts modules and their state, in model order."""
    for module in model.modules():
        state = getattr(module, "tracefp4", None)
        if isinstance(state, ExpertWeights):
            yield module, state


def _shard(module: nn.Module, state: ExpertWeights, mesh: DeviceMesh, tokens: Tokens) -> list[nn.Parameter]:
    found: list[nn.Parameter] = []
    for name in SITE_KINDS:
        weight: Tensor = getattr(module, name)
        _check(weight, name, state, mesh)
        if not isinstance(weight, DTensor):
            mine = weight.detach().chunk(mesh.size())[mesh.get_local_rank()].clone()
            whole = DTensor.from_local(mine, mesh, [Shard(0)], run_check=False)
            setattr(module, name, nn.Parameter(whole, requires_grad=weight.requires_grad))
        found.append(getattr(module, name))
    state.shard = ExpertShard(
        group=mesh.get_group(),
        rank=mesh.get_local_rank(),
        num_ranks=mesh.size(),
        num_experts=found[0].shape[0],
        tokens_differ=tokens == "own",
    )
    vars(module).pop("forward", None)  # transformers' exchange, which expects its own router
    return found


def _check(weight: Tensor, name: str, state: ExpertWeights, mesh: DeviceMesh) -> None:
    fits = not isinstance(weight, DTensor) or (
        weight.placements == (Shard(0),) and weight.device_mesh == mesh
    )
    if state.shard is not None or not fits or weight.shape[0] % mesh.size():
        raise ConfigError(
            f"shard_experts: {name} of layer {state.layer} cannot be split over {mesh.size()} ranks; got "
            f"{tuple(weight.shape)}, placements {getattr(weight, 'placements', 'none')}, sharded before: "
            f"{state.shard is not None}. Whole matrices are needed: all experts here, or Shard(0) on this mesh, a "
            "multiple of the ranks. Shard experts once, before FSDP, over a divisor of the number of experts."
        )


def whole_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return all parameters and buffers by name, gathered from their ranks, detached: what an engine is given.

    Every rank must call it, and every rank gets everything: the memory of the unsharded model.
    """
    with torch.no_grad():
        return {
            name: (value.full_tensor() if isinstance(value, DTensor) else value).detach()
            for name, value in model.state_dict().items()
        }

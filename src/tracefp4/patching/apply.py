"""Carry out a Plan on a transformers model, and undo it: the trainer's side of the shared plan.

Nothing is swapped in the module tree: experts and attention go through transformers' own interfaces, and
the arithmetic through hooks, so names and state dict stay those of the checkpoint. `apply` counts what it
patched and refuses to patch nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from tracefp4.errors import ConfigError
from tracefp4.formats.arithmetic import Arithmetic, round_bf16_
from tracefp4.patching.plan import Plan, check_adapters
from tracefp4.qat import (
    ATTENTION_NAME,
    EXPERTS_NAME,
    ExpertWeights,
    SiteSettings,
    carry_session,
    emulate_bf16,
    register_attention,
    register_experts,
)


@dataclass(kw_only=True)
class Applied:
    """A patched model: what was patched, and how to put everything back."""

    model: nn.Module
    """The model, patched in place."""
    plan: Plan
    """The plan that was carried out."""
    patched: tuple[str, ...]
    """Names of the modules whose forward is ours, in model order."""
    _undo: list[Callable[[], None]] = field(default_factory=list)

    def undo(self) -> None:
        """Restore the model's own forward everywhere; the weights keep their present values and dtype."""
        while self._undo:
            self._undo.pop()()


def apply(model: nn.Module, plan: Plan, *, arithmetic: Arithmetic) -> Applied:
    """Patch `model` in place so that it computes what the plan says.

    The parameters are cast to the arithmetic's storage dtype and, when bf16 is emulated, rounded to bf16
    values: they are the bf16 copies of the optimizer's master weights.

    Args:
        model: the transformers model the plan was made for.
        plan: from `plan(model, rules)`.
        arithmetic: EMULATED (CPU), CONTROL (comparisons), NATIVE (GPU).

    Raises:
        ConfigError: the model is patched already or carries adapters, the plan is of another architecture or depth
            or lists modules that the model lacks, the model has no decoder layers, the arithmetic cannot hold a
            scheme's values, or parameters are sharded in another way than experts over ranks, in the arithmetic's
            dtype; nothing was changed then.
    """
    modules = _patchable(model)
    _check(model, plan, modules)
    _check_sharding(model, modules, arithmetic)
    for layer in plan.layers:
        layer.check_storage(arithmetic)
    undo = carry_session(model)
    register_experts()
    register_attention()
    _cast(model, arithmetic)
    config: Any = model.config
    before = (config._attn_implementation, config._experts_implementation)
    undo.append(lambda: _set_implementations(model, *before))
    _set_implementations(model, ATTENTION_NAME, EXPERTS_NAME)
    for name, module in modules.items():
        module.tracefp4 = _settings(name, module, plan, arithmetic)  # type: ignore[assignment]
        undo.append(lambda m=module: delattr(m, "tracefp4"))  # type: ignore[misc]
    undo += emulate_bf16(model, arithmetic=arithmetic)
    model.tracefp4_applied = True  # type: ignore[assignment]
    undo.append(lambda: delattr(model, "tracefp4_applied"))
    return Applied(model=model, plan=plan, patched=tuple(modules), _undo=undo)


def _patchable(model: nn.Module) -> dict[str, nn.Module]:
    """Return the attention and fused experts modules by name, in model order."""
    return {
        name: module
        for name, module in model.named_modules()
        if type(module).__name__.endswith(("Experts", "Attention"))
    }


def _check(model: nn.Module, plan: Plan, modules: dict[str, nn.Module]) -> None:
    if getattr(model, "tracefp4_applied", False):
        raise ConfigError(
            "apply: the model is patched already; a model carries one plan. Call Applied.undo() first."
        )
    if type(model).__name__ != plan.architecture:
        raise ConfigError(
            f"apply: the plan is for {plan.architecture}, the model is {type(model).__name__}. "
            "Make a plan for this model."
        )
    check_adapters(model)
    planned = {decision.name for decision in plan.decisions if decision.kind == "experts"}
    found = {name for name in modules if name.endswith("experts")}
    num_layers = int(model.config.num_hidden_layers)  # type: ignore[union-attr,arg-type]
    if planned != found or num_layers != len(plan.layers):
        raise ConfigError(
            f"apply: the plan has {len(plan.layers)} layers and experts {sorted(planned)}, the model "
            f"{num_layers} layers and {sorted(found)}. Both must be equal. Make a plan for this model."
        )


def _check_sharding(model: nn.Module, modules: dict[str, nn.Module], arithmetic: Arithmetic) -> None:
    """Refuse sharded parameters; whole experts over ranks may come from the loader, and are left in their dtype."""
    experts = {id(p) for module in modules.values() for p in module.parameters(recurse=False)}
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor):
            continue
        is_expert_shard = id(parameter) in experts and parameter.placements == (Shard(0),)
        if not is_expert_shard or parameter.dtype != arithmetic.torch_dtype:
            raise ConfigError(
                f"apply: {name} is sharded; got placements {parameter.placements} of {parameter.dtype}. Whole "
                f"parameters are needed, or experts as Shard(0) in {arithmetic.torch_dtype}, as transformers' "
                "enable_expert_parallel loads them. Patch first and call fully_shard afterwards; do not use a tensor "
                "parallel plan."
            )


def _settings(
    name: str, module: nn.Module, plan: Plan, arithmetic: Arithmetic
) -> ExpertWeights | SiteSettings:
    layer = next(int(part) for part in name.split(".") if part.isdigit())
    precision = plan.layers[layer]
    if type(module).__name__.endswith("Experts"):
        rules = plan.rules
        shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters(recurse=False)}
        return ExpertWeights(
            layer, precision, arithmetic, backward=rules.backward, ste=rules.ste, shapes=shapes
        )
    return SiteSettings(layer, precision, arithmetic)


def _set_implementations(model: nn.Module, attention: str, experts: str) -> None:
    model.set_attn_implementation(attention)  # type: ignore[operator]
    model.set_experts_implementation(experts)  # type: ignore[operator]


@torch.no_grad()
def _cast(model: nn.Module, arithmetic: Arithmetic) -> None:
    dtype = arithmetic.torch_dtype
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
        if arithmetic.emulates_bf16:
            round_bf16_(parameter)

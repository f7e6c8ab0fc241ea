"""Make a policy's plan, with its static outer scales: calibrated on real tokens, or as they were before.

Calibration belongs to a run's start. A resumed run and a deployed checkpoint take the exponents that the run
wrote down: other ones would be another plan, whose records the trainer refuses.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import nn

from tracefp4.errors import ConfigError
from tracefp4.formats.arithmetic import Arithmetic
from tracefp4.patching import Plan, PlanRules, apply, calibrate, plan
from tracefp4.rl.policy import Policy


def calibrated_plan(
    policy: Policy, rules: PlanRules, *, prompts: Sequence[Sequence[int]], arithmetic: Arithmetic
) -> Plan:
    """Return the plan of a policy, static exponents (K, V, static activations) calibrated on these prompts.

    Args:
        policy: not patched; its parameters are rounded to bf16 values, as in `patching.apply`.
        rules: the options of the plan.
        prompts: token ids, none empty.
        arithmetic: of the calibrating pass.
    """
    made = plan(policy.model, rules)
    if not made.static_exponents:
        return made
    longest = max(map(len, prompts))
    input_ids = torch.tensor(
        [[*ids, *[policy.pad_id] * (longest - len(ids))] for ids in prompts], device="cpu"
    )
    mask = torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids in prompts], device="cpu")
    applied = apply(policy.model, made, arithmetic=arithmetic)
    device = next(policy.model.parameters()).device
    try:
        return calibrate(policy.model, made, input_ids=input_ids.to(device), attention_mask=mask.to(device))
    finally:
        applied.undo()


def rules_of(summary: Mapping[str, Any]) -> PlanRules:
    """Return the rules that a plan was made from.

    Args:
        summary: `Plan.summary()`, also after a round trip through JSON.

    Raises:
        ConfigError: there are no rules in it, or they have an option or value that is unknown here.
    """
    written = summary.get("rules", {})
    known = {option.name for option in fields(PlanRules)}
    unknown = sorted(set(written) - known)
    if not written or unknown:
        raise ConfigError(
            f"The plan that was written down has {f'unknown rules {unknown}' if unknown else 'no rules'}; known are "
            f"{sorted(known)}. Read it with the version of tracefp4 that wrote it."
        )
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in written.items()}
    return PlanRules(**values)


def remembered_plan(model: nn.Module, rules: PlanRules, *, summary: Mapping[str, Any]) -> Plan:
    """Return the plan of a model with the static exponents of an earlier plan of it.

    Args:
        model: the policy's; its weights are not looked at.
        rules: the options of the plan. Those that decide what is FP4 must agree with the earlier plan's: its
            exponents say nothing about a layer that was bf16 there. Guidance may differ.
        summary: `Plan.summary()` of the earlier plan.

    Raises:
        ConfigError: the earlier plan has another number of layers, other schemes, or other FP4 layers.
    """
    made = plan(model, rules)
    num_layers = summary.get("num_layers")
    if num_layers != len(made.layers):
        raise ConfigError(
            f"The plan that was written down has {num_layers} layers, the model has {len(made.layers)}. "
            "Continue with the model that the run was started with."
        )
    earlier = plan(model, rules_of(summary))
    if _fp4_parts(made) != _fp4_parts(earlier):
        raise ConfigError(
            f"The plan that was written down has FP4 in {_fp4_parts(earlier)}, these rules have it in "
            f"{_fp4_parts(made)}. Use the quantization rules of the run (last_layers_bf16, exclude, kv)."
        )
    if made.scheme_digest != summary["scheme_digest"]:
        raise ConfigError(
            f"The plan that was written down has schemes {summary['scheme_digest']}, these rules have "
            f"{made.scheme_digest} (activation-weight-kv). Use the quantization rules of the run."
        )
    written = summary["static_exponents"]
    made = made.with_exponents(
        {site: int(written[f"{site.layer}.{site.kind}"]) for site in made.static_exponents}
    )
    if not made.needs_calibration:
        return made
    chosen = summary.get("codecs") or {}
    missing = [str(site) for site in made.guided_sites if f"{site.layer}.{site.kind}" not in chosen]
    if missing:
        raise ConfigError(
            f'The plan that was written down has no codec for {missing[:3]}, which guidance = "auto" needs. Continue '
            "with the guidance that the run was started with, or start a new run, which chooses codecs."
        )
    return made.with_codecs({site: chosen[f"{site.layer}.{site.kind}"] for site in made.guided_sites})


def _fp4_parts(made: Plan) -> list[str]:
    """Names of what is FP4, e.g. `0.experts` and `0.kv`."""
    parts = []
    for index, layer in enumerate(made.layers):
        parts += [f"{index}.experts"] if layer.activation or layer.weight else []
        parts += [f"{index}.kv"] if layer.kv else []
    return parts

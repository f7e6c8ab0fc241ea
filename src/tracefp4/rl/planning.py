"""Make a policy's plan, with the static outer scales of K and V: calibrated on real tokens, or as they were before.

Calibration belongs to a run's start. A resumed run and a deployed checkpoint take the exponents that the run
wrote down: other ones would be another plan, whose records the trainer refuses.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tracefp4.errors import ConfigError
from tracefp4.formats.arithmetic import Arithmetic
from tracefp4.patching import Plan, PlanRules, apply, calibrate_kv, plan
from tracefp4.rl.policy import Policy


def calibrated_plan(
    policy: Policy, rules: PlanRules, *, prompts: Sequence[Sequence[int]], arithmetic: Arithmetic
) -> Plan:
    """Return the plan of a policy, KV exponents calibrated on these prompts (unused when K and V stay bf16).

    Args:
        policy: not patched; its parameters are rounded to bf16 values, as in `patching.apply`.
        rules: the options of the plan.
        prompts: token ids, none empty.
        arithmetic: of the calibrating pass.
    """
    made = plan(policy.model, rules)
    if all(layer.kv is None for layer in made.layers):
        return made
    longest = max(map(len, prompts))
    input_ids = torch.tensor([[*ids, *[policy.pad_id] * (longest - len(ids))] for ids in prompts])
    mask = torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids in prompts])
    applied = apply(policy.model, made, arithmetic=arithmetic)
    try:
        return calibrate_kv(policy.model, made, input_ids=input_ids, attention_mask=mask)
    finally:
        applied.undo()


def remembered_plan(policy: Policy, rules: PlanRules, *, summary: Mapping[str, Any]) -> Plan:
    """Return the plan of a policy with the KV exponents of an earlier plan of the same model.

    Args:
        policy: the model.
        rules: the options of the plan.
        summary: `Plan.summary()` of the earlier plan.

    Raises:
        ConfigError: the earlier plan has another number of layers.
    """
    made = plan(policy.model, rules)
    pairs = summary["kv_exponents"]
    if len(pairs) != len(made.layers):
        raise ConfigError(
            f"The plan that was written down has {len(pairs)} layers, the model has {len(made.layers)}. "
            "Continue with the model that the run was started with."
        )
    return made.with_kv_exponents({layer: (int(k), int(v)) for layer, (k, v) in enumerate(pairs)})

"""Find the static power-of-two outer scales of a plan, per layer and site, from a batch of real tokens.

A static scheme has no outer scale of its own (a row's bytes must not depend on other rows), so each layer gets one
exponent for K, one for V and, where activations are static, one for the experts' input and one for the
down-projection's, such that the largest block scale of the batch stays well inside E4M3 and small values do not fall
into its subnormals; the rule is `formats.calibration.calibrate_exponent`. Sites that wait for their exponent pass
their values on unrounded, so no layer is calibrated behind another one's missing exponent.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from tracefp4.errors import ConfigError
from tracefp4.formats.calibration import calibrate_exponent
from tracefp4.guidance import Site
from tracefp4.patching.plan import Plan
from tracefp4.qat import ExpertWeights, SiteSettings


@torch.no_grad()
def calibrate(model: nn.Module, plan: Plan, *, input_ids: Tensor, attention_mask: Tensor) -> Plan:
    """Return the plan with its static exponents calibrated on one batch.

    Args:
        model: the model, patched by `apply` (any precision; the observed values are unrounded).
        plan: the plan to complete.
        input_ids: int64 [B, T], real tokens.
        attention_mask: [B, T], 1 at real tokens; padded positions do not take part.

    Raises:
        ConfigError: the model is not patched.
    """
    found: dict[Site, int] = {}
    valid, wanted = attention_mask.reshape(-1).bool(), plan.static_exponents

    def observe(site: Site, values: Tensor) -> None:
        if site in wanted:
            rows_per_token = values.shape[0] // valid.shape[0]
            found[site] = calibrate_exponent(values[valid.repeat_interleave(rows_per_token)])

    modules: list[Any] = [
        m for m in model.modules() if isinstance(getattr(m, "tracefp4", None), SiteSettings | ExpertWeights)
    ]
    if not modules:
        raise ConfigError("calibrate: the model is not patched. Call patching.apply first.")
    settings = [m.tracefp4 for m in modules]
    try:
        for module in modules:
            module.tracefp4 = replace(module.tracefp4, observer=observe)
        positions = (attention_mask.cumsum(-1) - 1).clamp(min=0)
        model(input_ids=input_ids, attention_mask=attention_mask, position_ids=positions, use_cache=False)
    finally:
        for module, own in zip(modules, settings, strict=True):
            module.tracefp4 = own
    return plan.with_exponents(found)

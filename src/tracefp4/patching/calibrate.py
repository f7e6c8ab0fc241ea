"""Find the static power-of-two outer scale of K and V, per layer, from a batch of real tokens.

The KV scheme has no dynamic outer scale (a row's bytes must not depend on other rows), so each layer gets one
exponent for K and one for V such that the largest block scale of the batch stays well inside E4M3 and small
values do not fall into its subnormals; the rule is `formats.scaling.calibrate_exponent`.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from tracefp4.errors import ConfigError
from tracefp4.formats.scaling import calibrate_exponent
from tracefp4.guidance import Site
from tracefp4.patching.plan import Plan
from tracefp4.qat import SiteSettings


@torch.no_grad()
def calibrate_kv(model: nn.Module, plan: Plan, *, input_ids: Tensor, attention_mask: Tensor) -> Plan:
    """Return the plan with KV exponents calibrated on one batch.

    Args:
        model: the model, patched by `apply` (any precision; the observed K and V are unrounded).
        plan: the plan to complete.
        input_ids: int64 [B, T], real tokens.
        attention_mask: [B, T], 1 at real tokens; padded positions do not take part.

    Raises:
        ConfigError: the model is not patched.
    """
    seen: dict[Site, Tensor] = {}
    valid = attention_mask.reshape(-1).bool()

    def observe(site: Site, values: Tensor) -> None:
        seen[site] = values[valid]

    modules: list[Any] = [
        m for m in model.modules() if isinstance(getattr(m, "tracefp4", None), SiteSettings)
    ]
    if not modules:
        raise ConfigError("calibrate_kv: the model is not patched. Call patching.apply first.")
    settings = [m.tracefp4 for m in modules]
    try:
        for module in modules:
            module.tracefp4 = replace(module.tracefp4, observer=observe)
        positions = (attention_mask.cumsum(-1) - 1).clamp(min=0)
        model(input_ids=input_ids, attention_mask=attention_mask, position_ids=positions, use_cache=False)
    finally:
        for module, own in zip(modules, settings, strict=True):
            module.tracefp4 = own
    layers = {site.layer for site in seen}
    exponents = {
        i: (
            calibrate_exponent(seen[Site(kind="k", layer=i)]),
            calibrate_exponent(seen[Site(kind="v", layer=i)]),
        )
        for i in layers
    }
    return plan.with_kv_exponents(exponents)

"""Modules of the trainer whose forward is FP4: experts, attention, and the bf16 arithmetic around them.

This room owns forward and backward of quantized modules. It never selects which modules are quantized
(that is `patching`) and never decides how a value is rounded (that is `guidance.rounding`).
"""

from tracefp4.qat.attention import ATTENTION_NAME, SiteSettings, register_attention
from tracefp4.qat.emulation import emulate_bf16
from tracefp4.qat.experts import EXPERTS_NAME, ExpertWeights, register_experts
from tracefp4.qat.recomputation import carry_session
from tracefp4.qat.ste import clip_mask, round_bf16_through, straight_through

__all__ = [
    "ATTENTION_NAME",
    "EXPERTS_NAME",
    "ExpertWeights",
    "SiteSettings",
    "carry_session",
    "clip_mask",
    "emulate_bf16",
    "register_attention",
    "register_experts",
    "round_bf16_through",
    "straight_through",
]

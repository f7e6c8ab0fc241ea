"""bf16 arithmetic on a machine without it: fp32 (or fp64) storage, rounded wherever bf16 would be written.

Hooks round, in place, the outputs of linears and norms, the residual stream after each addition, and the
rotary tables; the router is replaced so that ties go to the lowest expert id and a recorded routing can be
followed. Rounding in place through `.data` is itself straight-through: the producing operations (matmul,
multiply, add) do not save their outputs, and everything downstream saves the rounded value, as real bf16
would. The alternative, native bf16 tensors, is about 100 times slower on CPUs without bf16 units. In native
arithmetic only the router is replaced, and gated delta layers (`hybrid.py`).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tracefp4.formats.arithmetic import Arithmetic, round_bf16_
from tracefp4.guidance import route_site
from tracefp4.qat.hybrid import DELTA, EMULATED_FORWARDS, delta_forward
from tracefp4.qat.opaque import opaque

Undo = Callable[[], None]


def _round_output(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return round_bf16_(output)


def _round_input(module: nn.Module, args: tuple[Tensor, ...]) -> None:
    round_bf16_(args[0])  # the residual stream: the same storage is added again below the norm


def _round_tables(module: nn.Module, args: Any, output: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return round_bf16_(output[0]), round_bf16_(output[1])


def rms_norm_forward(self: Any, hidden_states: Tensor) -> Tensor:
    """RMSNorm in the storage dtype: w * x * rsqrt(mean(x^2) + eps), one rounding at the output."""
    variance = hidden_states.pow(2).mean(-1, keepdim=True)
    normed = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
    return self.weight * normed


def router_forward(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Route: stable top-k of softmax(logits), or the recorded experts with today's weights.

    The combination weight of expert e is softmax(logits)_e, divided by the sum over the chosen experts when
    the model says so (`norm_topk_prob`), so gradients reach the router also under replay.
    """
    layer, arithmetic = self.tracefp4
    x = hidden_states.reshape(-1, self.hidden_dim)
    logits = nn.functional.linear(x, self.weight)
    if arithmetic.emulates_bf16:
        logits = round_bf16_(logits)
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    ids = route_site(layer, logits.detach(), top_k=self.top_k)
    weights = torch.softmax(logits, dim=-1, dtype=wide).gather(1, ids)
    if getattr(self, "norm_topk_prob", True):  # Qwen3.5's router has no such switch, and divides
        weights = weights / weights.sum(dim=-1, keepdim=True)
    weights = weights.to(logits.dtype)
    if arithmetic.emulates_bf16:
        weights = round_bf16_(weights)
    return logits, weights, ids


def _replace_forward(module: nn.Module, forward: Callable[..., Any]) -> Undo:
    module.forward = forward.__get__(module)
    return lambda: delattr(module, "forward")


def emulate_bf16(model: nn.Module, *, arithmetic: Arithmetic) -> list[Undo]:
    """Install the router and, if `arithmetic` emulates bf16, every rounding hook; return what undoes it.

    Args:
        model: a transformers Qwen3-MoE, OLMoE or Qwen3.5-MoE causal LM.
        arithmetic: EMULATED or CONTROL round at module outputs; NATIVE leaves everything but the router and gated
            delta layers.

    Returns:
        Callables; calling each restores the module's own forward and removes the hooks.
    """
    undo: list[Undo] = []
    for name, module in model.named_modules():
        kind = type(module).__name__
        if kind.endswith("TopKRouter"):
            module.tracefp4 = (_layer_index(name), arithmetic)
            undo.append(lambda m=module: delattr(m, "tracefp4"))  # type: ignore[misc]
            undo.append(_replace_forward(module, opaque(router_forward)))
        if kind == DELTA:
            module.tracefp4 = arithmetic
            undo.append(lambda m=module: delattr(m, "tracefp4"))  # type: ignore[misc]
            undo.append(_replace_forward(module, delta_forward))
        if not arithmetic.emulates_bf16:
            continue
        if kind in EMULATED_FORWARDS:
            undo.append(_replace_forward(module, EMULATED_FORWARDS[kind]))
        elif kind.endswith("RMSNorm"):
            undo.append(_replace_forward(module, rms_norm_forward))
        if isinstance(module, nn.Linear) or kind.endswith("RMSNorm"):
            undo.append(module.register_forward_hook(_round_output).remove)
        if name.endswith("post_attention_layernorm"):
            undo.append(module.register_forward_pre_hook(_round_input).remove)
        if kind.endswith("DecoderLayer"):
            undo.append(module.register_forward_hook(_round_output).remove)
        if kind.endswith("RotaryEmbedding"):
            undo.append(module.register_forward_hook(_round_tables).remove)
        if kind.endswith("MLP"):
            undo.append(_replace_forward(module, mlp_forward))
    return undo


def mlp_forward(self: Any, x: Tensor) -> Tensor:
    """Dense SwiGLU with the roundings that bf16 kernels have: after silu and after the product."""
    gate = round_bf16_(nn.functional.silu(self.gate_proj(x)))
    return self.down_proj(round_bf16_(gate * self.up_proj(x)))


def _layer_index(name: str) -> int:
    return next(int(part) for part in name.split(".") if part.isdigit())

"""Tiny random Qwen3-MoE and OLMoE models and the precisions that tests run them in."""

import torch
from transformers import OlmoeConfig, OlmoeForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from tracefp4.formats.arithmetic import Arithmetic
from tracefp4.formats.precision import BF16_LAYER, LayerPrecision
from tracefp4.formats.schemes import NVFP4_KV, NVFP4_ROW_POW2, NVFP4_TENSOR_POW2

EXACT = Arithmetic(name="exact", dtype="float32", emulates_bf16=False, rounds_probabilities=False)
FP4_LAYER = LayerPrecision(
    activation=NVFP4_ROW_POW2, weight=NVFP4_TENSOR_POW2, kv=NVFP4_KV, k_exponent=0, v_exponent=-3
)


def tiny_config(**changes):
    sizes = {
        "vocab_size": 40,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "intermediate_size": 96,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
    }
    return Qwen3MoeConfig(**(sizes | changes))


def tiny_model(seed=0, **changes):
    """A random model whose weights are large enough for routing, attention and sampling to vary."""
    torch.manual_seed(seed)
    return _enlarged(Qwen3MoeForCausalLM(tiny_config(**changes)))


def _enlarged(model):
    model.eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def tiny_olmoe(seed=0, **changes):
    """As `tiny_model`, of the other architecture: norms over whole projections, weights not renormalised."""
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": 40,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "intermediate_size": 32,
        "eos_token_id": 1,
    }
    return _enlarged(OlmoeForCausalLM(OlmoeConfig(**(sizes | changes))))


def fp4(num_layers=2):
    return (FP4_LAYER,) * num_layers


def bf16(num_layers=2):
    return (BF16_LAYER,) * num_layers

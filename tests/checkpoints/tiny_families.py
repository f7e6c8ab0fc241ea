"""A tiny random model of every supported family, saved the way transformers saves it."""

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

NUM_EXPERTS = 4
WIDTHS = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
QWEN = {"moe_intermediate_size": 16, "num_experts": NUM_EXPERTS, "num_experts_per_tok": 2}
HYBRID = dict(
    **QWEN, shared_expert_intermediate_size=16, head_dim=8, layer_types=["linear_attention", "full_attention"],
    linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
)  # fmt: skip
DEEP = {
    "moe_intermediate_size": 16, "n_routed_experts": NUM_EXPERTS, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
OPTIONS = {
    "qwen2_moe": dict(**QWEN, shared_expert_intermediate_size=16),
    "qwen3_moe": dict(**QWEN, head_dim=8),
    "qwen3_5_moe_text": HYBRID,
    "qwen3_next": HYBRID,
    "olmoe": {"num_experts": NUM_EXPERTS, "num_experts_per_tok": 2},
    "mixtral": {"num_local_experts": NUM_EXPERTS, "num_experts_per_tok": 2},
    "deepseek_v3": dict(
        **DEEP, q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
        num_key_value_heads=4,
    ),
    "glm4_moe": dict(**DEEP, head_dim=8),
    "gpt_oss": {"num_local_experts": NUM_EXPERTS, "num_experts_per_tok": 2, "head_dim": 8},
}  # fmt: skip
FAMILIES = tuple(OPTIONS)


def tiny_model(family: str, **options):
    """A random model in bf16; `options` go to its config."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**WIDTHS, **OPTIONS[family], **options})
    return AutoModelForCausalLM.from_config(config).to(torch.bfloat16)


def save_tiny(family: str, directory: Path, **options):
    """Save a tiny model and return it."""
    model = tiny_model(family, **options)
    model.save_pretrained(directory)
    return model

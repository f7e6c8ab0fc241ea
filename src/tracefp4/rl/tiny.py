"""A tiny Qwen3-MoE and its tokenizer, made here: a real Hugging Face checkpoint without a download.

The tokenizer is a byte-level BPE trained on the task's own text, with digits kept apart (as Qwen's does) and
words free to merge, so the question's fixed phrase is a few tokens; two chat markers, two answer tags. The
model is transformers' own class and config.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
END, PAD = "<|end|>", "<|pad|>"
MARKERS = (PAD, END, "<|user|>", "<|assistant|>")
ANSWER_TAGS = ("<answer>", "</answer>")


@dataclass(frozen=True, kw_only=True, slots=True)
class TinyShape:
    """Shape of the demo's model: six layers, 16 experts, 4 of them per token."""

    num_layers: int = 6
    """Decoder layers."""
    hidden_size: int = 128
    """Width of the residual stream; a multiple of 16."""
    num_heads: int = 4
    """Query heads."""
    num_kv_heads: int = 2
    """Key and value heads."""
    head_dim: int = 32
    """Width of a head; a multiple of 16."""
    num_experts: int = 16
    """Routed experts per layer."""
    top_k: int = 4
    """Experts per token."""
    expert_size: int = 64
    """Inner width of an expert; a multiple of 16."""
    max_positions: int = 512
    """Longest sequence."""
    init_std: float = 0.04
    """Standard deviation of the initial weights; twice the usual .02, because the model is narrow."""


def build_tokenizer(texts: Iterable[str], *, vocab_size: int = 320) -> Any:
    """Train a byte-level BPE tokenizer on `texts` and wrap it for transformers.

    Args:
        texts: sample text of the task.
        vocab_size: upper bound, the 256 bytes and the markers included.

    Returns:
        A `PreTrainedTokenizerFast` with chat template, `<|end|>` as EOS and `<|pad|>` as padding.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(MARKERS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens(list(ANSWER_TAGS))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=PAD)
    fast.chat_template = CHAT_TEMPLATE
    return fast


def build_model(shape: TinyShape, *, tokenizer: Any, seed: int = 0) -> Any:
    """Build a random Qwen3-MoE of this shape for this tokenizer; the same seed gives the same weights."""
    import torch
    from transformers import GenerationConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden_size,
        intermediate_size=2 * shape.hidden_size,
        moe_intermediate_size=shape.expert_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        num_experts=shape.num_experts,
        num_experts_per_tok=shape.top_k,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        max_position_embeddings=shape.max_positions,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        router_aux_loss_coef=0.0,
        initializer_range=shape.init_std,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3MoeForCausalLM(config)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        temperature=1.0,
        do_sample=True,
    )
    return model

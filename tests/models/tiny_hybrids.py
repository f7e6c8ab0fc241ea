"""Tiny random Qwen3.5-MoE models, and passes over them."""

import torch
from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig

from tracefp4.formats.precision import BF16_LAYER, LayerPrecision
from tracefp4.formats.schemes import NVFP4_KV, NVFP4_ROW_POW2, NVFP4_TENSOR_POW2
from tracefp4.kvcache import CacheShape, KVPool
from tracefp4.models import Qwen35MoeEngineModel, Segment, TokenBatch

EXPERTS = {"activation": NVFP4_ROW_POW2, "weight": NVFP4_TENSOR_POW2}
DELTA_LAYER = LayerPrecision(**EXPERTS, kv=None)
ATTENTION_LAYER = LayerPrecision(**EXPERTS, kv=NVFP4_KV, k_exponent=0, v_exponent=-3)


def tiny_config(**changes):
    sizes = {
        "vocab_size": 40,
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
        "tie_word_embeddings": False,
    }
    return Qwen3_5MoeTextConfig(**(sizes | changes))


def tiny_model(seed=0, **changes):
    """A random model whose weights are large enough for routing, attention and states to vary."""
    torch.manual_seed(seed)
    model = Qwen3_5MoeForCausalLM(tiny_config(**changes)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.mul_(6 if "conv1d" not in name else 1)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def fp4(model):
    kinds = model.config.layer_types
    return tuple(DELTA_LAYER if kind == "linear_attention" else ATTENTION_LAYER for kind in kinds)


def bf16(model):
    return (BF16_LAYER,) * model.config.num_hidden_layers


def make(model, precision, arithmetic):
    return Qwen35MoeEngineModel(model.config, model.state_dict(), precision=precision, arithmetic=arithmetic)


class Rows:
    """Sequences under way in a pool of their own: each has its pages and its state."""

    page = 4

    def __init__(self, engine_model, num_sequences, length, *, matrices=None):
        self.model, self.num_pages = engine_model, -(-length // self.page)
        sizes = engine_model.sizes
        shape = CacheShape(
            num_kv_heads=sizes.num_kv_heads,
            head_dim=sizes.head_dim,
            num_pages=self.num_pages * num_sequences,
            page_size=self.page,
        )
        states = engine_model.new_states(num_sequences + 1, matrices=matrices)
        self.pool = KVPool(
            shape,
            precision=engine_model.precision,
            arithmetic=engine_model.arithmetic,
            device=engine_model.device,
            states=states,
        )
        self.table = torch.arange(self.num_pages * num_sequences).flip(0).view(num_sequences, -1)
        self.states = [states.begin() for _ in range(num_sequences)]
        self.lengths = [0] * num_sequences

    def segment(self, begin, work):
        """A segment of works (sequence, tokens), and its positions and slots, flat."""
        width = max(len(tokens) for _, tokens in work)
        index = torch.tensor([sequence for sequence, _ in work])
        counts = torch.tensor([len(tokens) for _, tokens in work])
        is_real = torch.arange(width) < counts[:, None]
        starts = torch.tensor([self.lengths[sequence] for sequence, _ in work])
        positions = (starts[:, None] + torch.arange(width)) * is_real
        table = self.table[index]
        slots = table.gather(1, positions // self.page) * self.page + positions % self.page
        segment = Segment(
            begin=begin,
            end=begin + int(counts.sum()),
            page_table=table,
            positions=positions,
            places=None if bool(is_real.all()) else is_real.flatten().nonzero()[:, 0],
            state_slots=torch.tensor([self.states[sequence].slot for sequence, _ in work]),
        )
        return segment, positions[is_real], slots[is_real]

    def batch(self, *works):
        """Segments of works (sequence, tokens) side by side."""
        segments, positions, slots = zip(
            *(
                self.segment(sum(len(t) for w in works[:i] for _, t in w), work)
                for i, work in enumerate(works)
            ),
            strict=True,
        )
        flat = [token for work in works for _, tokens in work for token in tokens]
        return TokenBatch(
            token_ids=torch.tensor(flat),
            positions=torch.cat(positions),
            slots=torch.cat(slots),
            segments=list(segments),
            logit_rows=torch.arange(len(flat)),
        )

    def forward(self, *works):
        """One pass; logits [tokens, V] by sequence."""
        logits = self.model.forward(self.batch(*works), self.pool)
        found, begin = {}, 0
        for work in works:
            for sequence, tokens in work:
                found[sequence] = logits[begin : begin + len(tokens)]
                begin += len(tokens)
                self.lengths[sequence] += len(tokens)
        return found


def run_in_chunks(engine_model, tokens, chunk, *, num_sequences=1, matrices=None):
    """Logits [num_sequences, T, V] of equal sequences computed `chunk` tokens at a time."""
    rows, parts = Rows(engine_model, num_sequences, len(tokens), matrices=matrices), []
    for begin in range(0, len(tokens), chunk):
        part = tokens[begin : begin + chunk]
        found = rows.forward([(sequence, part) for sequence in range(num_sequences)])
        parts.append(torch.stack([found[sequence] for sequence in range(num_sequences)]))
    return torch.cat(parts, dim=1)

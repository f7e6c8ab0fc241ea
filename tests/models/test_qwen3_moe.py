"""The engine's model: equal to transformers where nothing is rounded, equal to itself however tokens are
batched."""

import dataclasses

import pytest
import torch
from tests.assertions import assert_bitwise
from tests.models.tiny_models import EXACT, FP4_LAYER, bf16, fp4, tiny_config, tiny_model

from tracefp4.errors import ConfigError
from tracefp4.formats.arithmetic import CONTROL, EMULATED
from tracefp4.formats.precision import BF16_LAYER
from tracefp4.guidance.session import record
from tracefp4.kvcache import CacheShape, KVPool
from tracefp4.models import Qwen3MoeEngineModel, Segment, TokenBatch

PAGE = 4
# float32 sums of 64 terms in another order, through two layers
CLOSE = 1e-4


class Observer:
    """A sink that keeps codes, scale bytes and routing by site, row by row."""

    def __init__(self):
        self.seen = {}

    def observe(self, site, rounded):
        self.seen.setdefault(site, []).append((rounded.codes, rounded.block_scales))

    def observe_routing(self, layer, expert_ids):
        self.seen.setdefault(layer, []).append((expert_ids,))

    def rows(self):
        return {key: tuple(map(torch.cat, zip(*parts, strict=True))) for key, parts in self.seen.items()}


def make(model, precision, arithmetic):
    return Qwen3MoeEngineModel(model.config, model.state_dict(), precision=precision, arithmetic=arithmetic)


def run_in_chunks(engine_model, tokens, chunks, *, num_sequences=1):
    """Logits [num_sequences, T, V] and decisions of equal sequences computed `chunks` tokens at a time."""
    sizes, length = engine_model.sizes, len(tokens)
    num_pages = -(-length // PAGE)
    shape = CacheShape(
        num_kv_heads=sizes.num_kv_heads,
        head_dim=sizes.head_dim,
        num_pages=num_pages * num_sequences,
        page_size=PAGE,
    )
    pool = KVPool(shape, precision=engine_model.precision, arithmetic=engine_model.arithmetic)
    table = torch.arange(num_pages * num_sequences).flip(0).view(num_sequences, num_pages)
    observer, logits = Observer(), []
    for begin in range(0, length, chunks):
        positions = torch.arange(begin, min(begin + chunks, length)).expand(num_sequences, -1)
        slots = table.gather(1, positions // PAGE) * PAGE + positions % PAGE
        flat = positions.reshape(-1)
        segment = Segment(begin=0, end=len(flat), page_table=table, positions=positions, places=None)
        batch = TokenBatch(
            token_ids=torch.tensor(tokens)[flat],
            positions=flat,
            slots=slots.reshape(-1),
            segments=[segment],
            logit_rows=torch.arange(len(flat)),
        )
        with record(observer):
            logits.append(engine_model.forward(batch, pool).view(num_sequences, -1, sizes.vocab_size))
    return torch.cat(logits, dim=1), observer.rows()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"norm_topk_prob": False},
        {"tie_word_embeddings": True},
        {"mlp_only_layers": [0]},
        {"num_key_value_heads": 4, "head_dim": 16},
        {"num_hidden_layers": 3, "decoder_sparse_step": 2},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    ],
    ids=lambda changes: "-".join(changes) or "default",
)
def test_equals_transformers_when_nothing_is_rounded(changes):
    model = tiny_model(**changes)
    tokens = torch.randint(0, 40, (13,))
    with torch.no_grad():
        expected = model(input_ids=tokens[None]).logits[0]
    engine_model = make(model, bf16(model.config.num_hidden_layers), EXACT)
    for chunks in (13, 5, 1):
        found, _ = run_in_chunks(engine_model, tokens.tolist(), chunks)
        assert (found[0] - expected).abs().max() < CLOSE * expected.abs().max()


@pytest.mark.parametrize("is_fp4", [True, False], ids=["fp4", "bf16"])
def test_control_mode_is_equal_bit_for_bit_in_any_chunks(is_fp4):
    # KVQ-3: codes of all layers and logits of prefill, chunked prefill and decode.
    model = tiny_model(num_hidden_layers=3)
    engine_model = make(model, fp4(3) if is_fp4 else bf16(3), CONTROL)
    tokens = torch.randint(0, 40, (19,)).tolist()
    expected_logits, expected_rows = run_in_chunks(engine_model, tokens, 19)
    assert len(expected_rows) == (3 * 5 if is_fp4 else 3)
    for chunks in (1, 3, 4, 8):
        logits, rows = run_in_chunks(engine_model, tokens, chunks)
        assert_bitwise(logits, expected_logits)
        for key, parts in expected_rows.items():
            for part, expected in zip(rows[key], parts, strict=True):
                assert_bitwise(part, expected)


@pytest.mark.parametrize("num_sequences", [3, 33])
def test_control_mode_does_not_depend_on_the_batch(num_sequences):
    engine_model = make(tiny_model(), fp4(), CONTROL)
    tokens = torch.randint(0, 40, (9,)).tolist()
    expected, _ = run_in_chunks(engine_model, tokens, 4)
    logits, _ = run_in_chunks(engine_model, tokens, 4, num_sequences=num_sequences)
    assert_bitwise(logits, expected.expand(num_sequences, -1, -1).contiguous())


def test_logits_are_bf16_values_and_fp4_changes_them():
    model, tokens = tiny_model(), torch.randint(0, 40, (9,)).tolist()
    plain, _ = run_in_chunks(make(model, bf16(), EMULATED), tokens, 9)
    rounded, rows = run_in_chunks(make(model, fp4(), EMULATED), tokens, 9)
    assert_bitwise(rounded.bfloat16().float(), rounded)
    assert (plain - rounded).abs().max() > 0.05
    assert {str(key) for key in rows} == {
        f"layers.{n}.{k}" for n in (0, 1) for k in ("x", "w2", "k", "v")
    } | {"0", "1"}


def test_layers_follow_their_own_precision():
    model, tokens = tiny_model(), torch.randint(0, 40, (9,)).tolist()
    kv_only = dataclasses.replace(FP4_LAYER, activation=None, weight=None)
    _, rows = run_in_chunks(make(model, (BF16_LAYER, kv_only), EMULATED), tokens, 9)
    assert {str(key) for key in rows} == {"layers.1.k", "layers.1.v", "0", "1"}


def test_experts_are_quantized_once_per_version():
    model = tiny_model()
    engine_model = make(model, fp4(), EMULATED)
    run_in_chunks(engine_model, [1, 2, 3], 1)
    assert engine_model.weights.num_quantizations == 4
    engine_model.weights.load(model.state_dict())
    assert engine_model.weights.num_quantizations == 8


def test_exp_7_published_weights_replace_every_byte_of_the_last_merge():
    # Base, merge A, unmerge, merge B. Mutation: an engine that keeps the FP4 copy of matrices it knows by name.
    model = tiny_model()
    engine_model, base = make(model, fp4(), EMULATED), {k: t.clone() for k, t in model.state_dict().items()}
    before = {name: engine_model.weights[name].clone() for name in base}
    for factor in (0.5, 0.0, 0.25):
        merged = {name: t + factor * t.flip(-1) if ".experts." in name else t for name, t in base.items()}
        engine_model.weights.load(merged)
        fresh = Qwen3MoeEngineModel(model.config, merged, precision=fp4(), arithmetic=EMULATED)
        for name, first in before.items():
            assert_bitwise(engine_model.weights[name], fresh.weights[name])
            assert torch.equal(engine_model.weights[name], first) == (factor == 0 or ".experts." not in name)


def test_names_must_be_equal_and_nothing_changes_before_they_are():
    model = tiny_model()
    engine_model = make(model, fp4(), EMULATED)
    state = dict(model.state_dict())
    state["model.layers.0.mlp.extra"] = state.pop("model.norm.weight")
    before = engine_model.weights["model.embed_tokens.weight"].clone()
    state["model.embed_tokens.weight"] = torch.zeros_like(before)
    with pytest.raises(
        ConfigError, match=r"missing \['model.norm.weight'\], unexpected \['model.layers.0.mlp.extra'\]"
    ):
        engine_model.weights.load(state)
    assert_bitwise(engine_model.weights["model.embed_tokens.weight"], before)


def test_a_tied_head_may_be_absent_but_not_different():
    model = tiny_model(tie_word_embeddings=True)
    state = dict(model.state_dict())
    engine_model = make(model, fp4(), EMULATED)
    engine_model.weights.load({name: tensor for name, tensor in state.items() if name != "lm_head.weight"})
    with pytest.raises(ConfigError, match="ties its head"):
        engine_model.weights.load(state | {"lm_head.weight": state["lm_head.weight"] + 1})


def test_shapes_must_fit():
    model = tiny_model()
    state = model.state_dict() | {"model.norm.weight": torch.ones(63)}
    with pytest.raises(ConfigError, match=r"model.norm.weight of shape \(63,\)"):
        make(model, fp4(), EMULATED).weights.load(state)


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
        {"attention_bias": True},
        {"hidden_act": "gelu"},
        {"use_sliding_window": True, "sliding_window": 8},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_unsupported_configs_are_refused(changes):
    with pytest.raises(ConfigError, match=next(iter(changes)).removeprefix("use_")):
        Qwen3MoeEngineModel(tiny_config(**changes), {}, precision=fp4(), arithmetic=EMULATED)


def test_precision_must_fit_the_layers():
    model = tiny_model(mlp_only_layers=[1])
    with pytest.raises(ConfigError, match="got 3 for 2 layers"):
        make(model, fp4(3), EMULATED)
    with pytest.raises(ConfigError, match="Layer 1 is a dense MLP"):
        make(model, fp4(), EMULATED)

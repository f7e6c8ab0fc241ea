"""The engine's Qwen3.5-MoE: equal to transformers where nothing is rounded, equal to itself however tokens are
batched, with states that are carried along, copied and moved out."""

import dataclasses

import pytest
import torch
from tests.assertions import assert_bitwise
from tests.models.test_qwen3_moe import Observer
from tests.models.tiny_hybrids import Rows, bf16, fp4, make, run_in_chunks, tiny_config, tiny_model
from tests.models.tiny_models import EXACT

from tracefp4.errors import ConfigError
from tracefp4.formats.arithmetic import CONTROL, EMULATED
from tracefp4.guidance.session import record
from tracefp4.models import Qwen35MoeEngineModel

# float32 sums of 64 terms in another order, through four layers
CLOSE = 2e-4


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True},
        {"layer_types": ["full_attention", "linear_attention"], "num_hidden_layers": 2},
        {"linear_num_key_heads": 4, "linear_num_value_heads": 4, "linear_conv_kernel_dim": 2},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}},
    ],
    ids=lambda changes: "-".join(changes) or "default",
)
def test_equals_transformers_when_nothing_is_rounded(changes):
    model = tiny_model(**changes)
    tokens = torch.randint(0, 40, (77,))
    with torch.no_grad():
        expected = model(input_ids=tokens[None]).logits[0]
    engine_model = make(model, bf16(model), EXACT)
    for chunk in (77, 30):
        found = run_in_chunks(engine_model, tokens.tolist(), chunk)
        assert (found[0] - expected).abs().max() < CLOSE * expected.abs().max(), chunk


def test_decoding_equals_transformers_with_its_cache():
    model = tiny_model()
    tokens = torch.randint(0, 40, (20,)).tolist()
    rows, cache = Rows(make(model, bf16(model), EXACT), 1, 20), None
    for part in ([*tokens[:12]], *([token] for token in tokens[12:])):
        with torch.no_grad():
            found = model(input_ids=torch.tensor([part]), past_key_values=cache, use_cache=True)
        cache, expected = found.past_key_values, found.logits[0]
        got = rows.forward([(0, part)])[0]
        assert (got - expected).abs().max() < CLOSE * expected.abs().max()
    states = rows.pool.states.layers[0].recurrent[rows.states[0].slot]
    theirs = cache.layers[0].recurrent_states[0][0]
    assert (states.mT - theirs).abs().max() < CLOSE * theirs.abs().max()


@pytest.mark.parametrize("is_fp4", [True, False], ids=["fp4", "bf16"])
def test_control_mode_is_equal_bit_for_bit_in_any_chunks(is_fp4):
    model = tiny_model()
    engine_model = make(model, fp4(model) if is_fp4 else bf16(model), CONTROL)
    tokens = torch.randint(0, 40, (21,)).tolist()
    expected = run_in_chunks(engine_model, tokens, 21)
    assert_bitwise(expected.bfloat16().double(), expected)
    for chunk in (1, 3, 16):
        assert_bitwise(run_in_chunks(engine_model, tokens, chunk), expected)


def test_sequences_of_any_length_share_a_pass():
    engine_model = make(tiny_model(), fp4(tiny_model()), CONTROL)
    torch.manual_seed(5)
    tokens = [torch.randint(0, 40, (n,)).tolist() for n in (9, 23, 14)]
    alone = [run_in_chunks(engine_model, found, len(found))[0] for found in tokens]
    rows = Rows(engine_model, 3, 23)
    # a padded chunk; then a decoding segment beside one of chunks; then one sequence alone
    steps = [
        [[(0, 8), (1, 3), (2, 5)]],
        [[(0, 1)], [(2, 4), (1, 9)]],
        [[(1, 11)]],
        [[(2, 5)]],
    ]
    found = {sequence: [] for sequence in range(3)}
    for step in steps:
        works = [
            [(s, tokens[s][rows.lengths[s] : rows.lengths[s] + count]) for s, count in work] for work in step
        ]
        for sequence, logits in rows.forward(*works).items():
            found[sequence].append(logits)
    for sequence in range(3):
        assert_bitwise(torch.cat(found[sequence]), alone[sequence])


def test_a_sibling_goes_on_from_a_copy_and_both_from_what_was_moved_out():
    model = tiny_model()
    engine_model = make(model, fp4(model), CONTROL)
    torch.manual_seed(6)
    prompt, one, more, other = (torch.randint(0, 40, (n,)).tolist() for n in (10, 3, 2, 5))
    rows = Rows(engine_model, 2, 16)
    states = rows.pool.states
    rows.forward([(0, prompt)])
    states.release(rows.states[1])
    (rows.states[1],) = states.fork(rows.states[0], 1)
    for source, target in rows.table.T.tolist():
        rows.pool.copy(source, target)
    rows.lengths[1] = rows.lengths[0]
    rows.forward([(0, one)])
    states.rest(rows.states[0])
    strangers = [states.begin() for _ in range(3)]
    assert [state.slot for state in rows.states] == [None, None] and states.num_swapped_out == 2
    for stranger in strangers:
        states.layers[0].recurrent[stranger.slot] = torch.nan
        states.release(stranger)
    for state in reversed(rows.states):
        states.resume(state)
    found = rows.forward([(1, other)], [(0, more)])
    assert_bitwise(found[1], run_in_chunks(engine_model, prompt + other, 15)[0, 10:])
    assert_bitwise(found[0], run_in_chunks(engine_model, prompt + one + more, 15)[0, 13:])


def test_states_in_bf16_stay_near():
    model = tiny_model()
    engine_model = make(model, bf16(model), EXACT)
    tokens = torch.randint(0, 40, (20,)).tolist()
    expected = run_in_chunks(engine_model, tokens, 1)
    found = run_in_chunks(engine_model, tokens, 1, matrices=torch.bfloat16)
    error = (found - expected).norm() / expected.norm()
    assert 1e-4 < error < 0.1


def test_sites_are_recorded_as_in_every_engine_model():
    model = tiny_model()
    rows, observer = Rows(make(model, fp4(model), EMULATED), 1, 9), Observer()
    with record(observer):
        logits = rows.forward([(0, list(range(9)))])[0]
    assert_bitwise(logits.bfloat16().float(), logits)
    sites = {f"layers.{n}.{kind}" for n in range(4) for kind in ("x", "w2")} | {"layers.1.k", "layers.1.v"}
    assert {str(key) for key in observer.rows()} == sites | {"0", "1", "2", "3"}


def test_what_the_engine_does_not_compute_is_refused():
    model = tiny_model()
    for changes, named in (
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}, "rope_type"),
    ):
        with pytest.raises(ConfigError, match=named):
            Qwen35MoeEngineModel(tiny_config(**changes), {}, precision=bf16(model), arithmetic=EMULATED)
    wrong = [dataclasses.replace(layer, kv=fp4(model)[1].kv) for layer in fp4(model)]
    with pytest.raises(ConfigError, match=r"no K and V; got a scheme for those of layers \[0, 2, 3\]"):
        make(model, wrong, EMULATED)
    state = dict(model.state_dict())
    del state["model.layers.0.linear_attn.A_log"]
    with pytest.raises(ConfigError, match=r"missing \['model.layers.0.linear_attn.A_log'\]"):
        Qwen35MoeEngineModel(model.config, state, precision=bf16(model), arithmetic=EMULATED)

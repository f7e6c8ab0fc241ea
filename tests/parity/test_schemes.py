"""Trainer and engine are one function under every kind of scheme, and MXFP4 and static decisions can be followed."""

from dataclasses import replace

import pytest
import torch
from tests.assertions import assert_bitwise
from tests.models.test_qwen3_moe import run_in_chunks
from tests.parity.chains import make_chain, make_samples, mismatch
from tests.parity.test_chain import GUIDES, assert_same_pass

from tracefp4.errors import ConfigError
from tracefp4.formats.arithmetic import CONTROL, EMULATED
from tracefp4.guidance import Site
from tracefp4.guidance.codec import record_from_bytes, record_to_bytes
from tracefp4.models import Qwen3MoeEngineModel
from tracefp4.ops.quantize import quantize
from tracefp4.patching import PlanRules
from tracefp4.rollout.recorder import default_sites

GUIDED = {
    "mxfp4": {"activation": "MXFP4_RCEIL", "weight": "MXFP4_RCEIL"},
    "mxfp4 floor": {"activation": "MXFP4_FLOOR"},
    "modelopt mxfp4": {"activation": "MXFP4_MODELOPT", "weight": "MXFP4_MODELOPT"},
    "static": {"activation": "NVFP4_STATIC_POW2"},
    "4over6": {"activation": "NVFP4_ROW_POW2_4OVER6_MSE", "weight": "NVFP4_TENSOR_POW2_4OVER6_MAE"},
}
UNGUIDED = {
    "float32": {"activation": "NVFP4_ROW_FP32", "weight": "NVFP4_TENSOR_FP32"},
    "vllm": {"activation": "NVFP4_STATIC_VLLM", "weight": "NVFP4_VLLM"},
    "weights alone": {"weight": "NVFP4_MODELOPT", "activation": "MXFP4_EVEN"},
}
RULES = {name: PlanRules(guidance="mantissa", **options) for name, options in GUIDED.items()} | {
    name: PlanRules(guidance="none", **options) for name, options in UNGUIDED.items()
}


def chain_of(name, **options):
    found = make_chain(rules=RULES[name], **options)
    assert found.plan.layers[0].activation.name == RULES[name].activation
    return found


@pytest.mark.parametrize("name", RULES)
def test_trainer_equals_engine(name):
    # Mutations: one side without the exponent of x or w2; one side's weights in another scheme; blocks of 16 on one.
    chain = chain_of(name)
    exponents = {site: k for site, k in chain.plan.static_exponents.items() if site.kind in ("x", "w2")}
    assert bool(exponents) == ("STATIC" in RULES[name].activation)
    assert not exponents or len(set(exponents.values())) > 1
    (sample,) = make_samples([24])
    (found,) = chain.trainer_pass(chain.batch([sample]))
    assert_same_pass(found, chain.engine_pass(list(sample.input_ids), 24))
    assert_same_pass(found, chain.engine_pass(list(sample.input_ids), 5))


@pytest.mark.parametrize("name", RULES)
def test_an_engine_of_bytes_is_the_engine_of_the_weights(name):
    # Mutations: bytes decoded and quantized again; float32 values rounded to bf16 where they are decoded.
    chain = chain_of(name)
    scheme = chain.plan.layers[0].weight
    state = dict(chain.model.state_dict())
    for key in state:
        if ".experts." in key:
            state[key] = quantize(state[key], scheme=scheme)
    for arithmetic in (CONTROL, EMULATED):
        engines = [
            Qwen3MoeEngineModel(chain.model.config, found, precision=chain.plan.layers, arithmetic=arithmetic)
            for found in (chain.model.state_dict(), state)
        ]
        for key in state:
            assert_bitwise(engines[0].weights[key], engines[1].weights[key])
        assert engines[0].weights.num_quantizations == 4 and engines[1].weights.num_quantizations == 0
        tokens = list(make_samples([9])[0].input_ids)
        assert_bitwise(run_in_chunks(engines[0], tokens, 4)[0], run_in_chunks(engines[1], tokens, 4)[0])


@pytest.mark.parametrize(("codec", "decoder"), GUIDES, ids=lambda value: str(value))
@pytest.mark.parametrize("name", GUIDED)
def test_record_then_replay_is_a_no_op(name, codec, decoder):
    # Mutations: scale bytes of 32 read as those of 16; the exponent of another site; a record cut by its codec.
    chain = chain_of(name)
    every = tuple(Site(kind, layer) for kind in ("x", "w2", "k", "v") for layer in (0, 1))
    engine = chain.engine
    chain.engine = lambda: engine(records=every)
    rollouts = chain.rollouts(max_tokens=5)
    batch = chain.batch(rollouts)
    with torch.no_grad():
        unguided = chain.logits(batch)
    records = [record_from_bytes(record_to_bytes(record.recode(codec))) for record in batch.records]
    scheme = chain.plan.layers[0].activation
    part = records[0].sites[every[0]]
    assert part.block_scales.shape[1] == 64 // scheme.block_size
    logits, counters = chain.replayed(batch, records, decoder=decoder, references=batch.records)
    real = batch.attention_mask
    assert_bitwise(logits[real], unguided[real])
    total = counters.total()
    assert len(counters.sites) == 8 and total.positions_guided > 0
    assert total.values_changed == total.mismatched_before == total.mismatched_after == 0
    assert total.blocks_mismatched == 0 and total.values_compared > 0


@pytest.mark.parametrize("name", ["mxfp4", "static"])
def test_guidance_lowers_the_mismatch(name):
    # Mutation: a guide of these schemes is dropped, or read at other blocks.
    chain = chain_of(name, arithmetic=EMULATED)
    samples = chain.rollouts(num_prompts=4, max_tokens=24)
    batch = chain.batch(samples)
    unguided, _ = chain.replayed(batch, batch.records, sites=())
    guided, counters = chain.replayed(
        batch, [r.recode("mantissa") for r in batch.records], references=batch.records
    )
    assert 0 < mismatch(batch, guided) < 0.7 * mismatch(batch, unguided)
    total = counters.total()
    assert total.values_changed > 0 and total.mismatched_after < total.mismatched_before


def test_exp_8_one_plan_gives_trainer_and_engine_the_same_set():
    # Three layers, the last kept bf16 and the first excluded. Mutation: a scope that is configured on both sides.
    rules = PlanRules(exclude=("model.layers.0.mlp.experts",), last_layers_bf16=1)
    chain = make_chain(rules=rules, num_hidden_layers=3)
    planned = {d.name for d in chain.plan.decisions if d.is_quantized and d.kind == "experts"}
    trained = {
        name
        for name, module in chain.model.named_modules()
        if name.endswith("experts") and module.tracefp4.precision.weight is not None
    }
    state = chain.model.state_dict()
    engine = Qwen3MoeEngineModel(chain.model.config, state, precision=chain.plan.layers, arithmetic=CONTROL)
    packed = {
        name.rpartition(".")[0]
        for name, given in state.items()
        if not torch.equal(engine.weights[name], given)
    }
    assert planned == trained == packed == {"model.layers.1.mlp.experts"}
    with pytest.raises(ConfigError, match="matches no module"):
        make_chain(rules=replace(rules, exclude=("model.layers.0.mlp.expert",)), num_hidden_layers=3)


def test_dty_1_trainer_and_engine_quantize_the_same_bf16_weights():
    # 1.2539 is 1.25 in bf16, a tie that goes to 1.0; quantized from float32 it would be 1.5.
    chain = make_chain(arithmetic=EMULATED)
    experts = chain.model.model.layers[0].mlp.experts
    with torch.no_grad():
        master = experts.gate_up_proj.clone()
        master[0, :, :16] = 6.0  # every block scale of these rows' first block is 1
        master[0, :, 1] = 1.2539
        experts.gate_up_proj.copy_(master.bfloat16())  # as the optimizer publishes its masters
    trained = experts.tracefp4.quantized("gate_up_proj", experts.gate_up_proj)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    state = {
        **chain.model.state_dict(),
        name: master,
    }  # an engine that is sent float32 rounds it to bf16 first
    for sent in (state, chain.model.state_dict()):
        engine = Qwen3MoeEngineModel(
            chain.model.config, sent, precision=chain.plan.layers, arithmetic=EMULATED
        )
        assert_bitwise(engine.weights[name], trained)
    assert trained[0, 0, :2].tolist() == [6.0, 1.0]


def test_float32_outer_scales_are_recorded_nowhere():
    found = chain_of("float32")
    assert {site.kind for site in default_sites(found.plan.layers)} == {"k", "v"}
    with pytest.raises(ConfigError, match=r"cannot record sites.*float32 outer scale.*layers\.0\.x"):
        found.engine(records=(Site("x", 0),))

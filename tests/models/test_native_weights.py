"""Weights in bf16 storage: quantized experts as bytes that stay where they are, projections side by side."""

import pytest
import torch
from tests.assertions import assert_bitwise
from tests.models.test_qwen3_moe import make, run_in_chunks
from tests.models.tiny_models import bf16, fp4, tiny_model

from tracefp4.errors import ConfigError
from tracefp4.formats.arithmetic import NATIVE
from tracefp4.formats.schemes import NVFP4_TENSOR_POW2
from tracefp4.formats.weight_fragments import from_fragments
from tracefp4.models.qwen3_moe_weights import EXPERT_NAMES
from tracefp4.ops.quantize import quantize

EXPERTS = [f"model.layers.{layer}.{name}" for layer in range(2) for name in EXPERT_NAMES]


def fragments(weights):
    return [part for layer in range(2) for part in weights.experts(layer)]


def quantized(state):
    return [quantize(state[name].bfloat16(), scheme=NVFP4_TENSOR_POW2) for name in EXPERTS]


def assert_holds(weights, wanted):
    for found, right in zip(fragments(weights), wanted, strict=True):
        bytes_ = from_fragments(found)
        assert_bitwise(bytes_.packed, right.packed)
        assert_bitwise(bytes_.block_scales, right.block_scales)
        assert_bitwise(bytes_.outer, right.outer)


def test_a_new_version_is_quantized_into_the_same_addresses():
    model = tiny_model()
    weights = make(model, fp4(), NATIVE).weights
    places = [part.words.data_ptr() for part in fragments(weights)]
    assert_holds(weights, quantized(model.state_dict()))
    assert weights.num_quantizations == 4
    newer = {name: tensor.flip(-1) * 2 for name, tensor in model.state_dict().items()}
    weights.load(newer)
    assert_holds(weights, quantized(newer))
    assert [part.words.data_ptr() for part in fragments(weights)] == places
    assert weights.num_quantizations == 8


def test_no_copy_of_quantized_experts_is_kept():
    weights = make(tiny_model(), fp4(), NATIVE).weights
    for name in EXPERTS:
        with pytest.raises(KeyError):
            weights[name]
    assert make(tiny_model(), bf16(), NATIVE).weights.experts(0) is None


def test_bytes_of_a_checkpoint_are_moved_and_never_quantized_again():
    # other codes than those before, under scale bytes that no quantization makes: one binade up
    model = tiny_model()
    state = dict(model.state_dict())
    given = quantized({name: tensor.flip(-1) for name, tensor in state.items()})
    for part in given:
        part.block_scales.add_(8)
    weights = make(model, fp4(), NATIVE).weights
    weights.load(state | dict(zip(EXPERTS, given, strict=True)))
    assert_holds(weights, given)
    assert weights.num_quantizations == 4  # those of the first version


def test_projections_are_views_of_one_matrix():
    model = tiny_model(mlp_only_layers=[0])
    weights = make(model, bf16(), NATIVE).weights
    for fused, parts in (
        (
            "model.layers.1.self_attn.qkv_proj.weight",
            [f"model.layers.1.self_attn.{p}_proj.weight" for p in "qkv"],
        ),
        (
            "model.layers.0.mlp.gate_up_proj.weight",
            [f"model.layers.0.mlp.{p}_proj.weight" for p in ("gate", "up")],
        ),
    ):
        expected = torch.cat([model.state_dict()[name].bfloat16() for name in parts])
        assert_bitwise(weights[fused], expected)
        weights.load({name: -tensor for name, tensor in model.state_dict().items()})
        assert_bitwise(weights[fused], -expected)
        weights.load(model.state_dict())


def test_a_pass_reads_the_new_version():
    model, tokens = tiny_model(), [1, 2, 3, 4]
    engine_model = make(model, fp4(), NATIVE)
    first, _ = run_in_chunks(engine_model, tokens, 4)
    newer = {name: tensor.flip(0) for name, tensor in model.state_dict().items()}
    engine_model.weights.load(newer)
    second, _ = run_in_chunks(engine_model, tokens, 4)
    model.load_state_dict(newer)
    fresh, _ = run_in_chunks(make(model, fp4(), NATIVE), tokens, 4)
    assert_bitwise(second, fresh)
    assert not torch.equal(first, second)


def test_experts_without_fragments_are_refused_before_anything_is_loaded():
    model = tiny_model(moe_intermediate_size=40)
    with pytest.raises(
        ConfigError, match=r"down_proj cannot be quantized in bf16 storage \(native\); got \(8, 64, 40\)"
    ):
        make(model, fp4(), NATIVE)

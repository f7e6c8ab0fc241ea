"""Patching a model and putting it back: exact module lists, names, bits, and what is refused."""

import pytest
import torch
from tests.assertions import assert_bitwise, assert_names_equal
from tests.models.tiny_models import tiny_model

from tracefp4.errors import ConfigError
from tracefp4.formats.arithmetic import CONTROL, EMULATED, NATIVE, round_bf16_
from tracefp4.patching import PlanRules, apply, plan

TOKENS = torch.arange(14).view(2, 7)


def bf16_valued(**changes):
    model = tiny_model(**changes)
    for parameter in model.parameters():
        round_bf16_(parameter)
    return model


@torch.no_grad()
def logits(model):
    return model(input_ids=TOKENS, use_cache=False).logits


def test_exactly_attention_and_experts_are_patched():
    model = tiny_model(num_hidden_layers=3, mlp_only_layers=[1])
    applied = apply(model, plan(model, PlanRules()), arithmetic=EMULATED)
    names = [f"model.layers.{n}.{part}" for n in range(3) for part in ("self_attn", "mlp.experts")]
    assert_names_equal(applied.patched, [name for name in names if name != "model.layers.1.mlp.experts"])
    layers = [model.get_submodule(name).tracefp4.layer for name in applied.patched]
    assert layers == [0, 0, 1, 2, 2]
    assert model.model.layers[2].mlp.experts.tracefp4.precision == applied.plan.layers[2]


def test_module_names_and_state_dict_keys_do_not_change():
    model = tiny_model()
    modules = [(name, type(module)) for name, module in model.named_modules()]
    keys, parameters = list(model.state_dict()), list(model.parameters())
    applied = apply(model, plan(model, PlanRules()), arithmetic=EMULATED)
    for _ in range(2):
        assert [(name, type(module)) for name, module in model.named_modules()] == modules
        assert_names_equal(model.state_dict(), keys)
        assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
        applied.undo()


def test_undo_restores_the_outputs_bit_for_bit():
    # Mutation: an undo that forgets a hook, a forward or an implementation name.
    model = bf16_valued(mlp_only_layers=[1])
    before, attributes = logits(model), [sorted(vars(module)) for module in model.modules()]
    implementations = (model.config._attn_implementation, model.config._experts_implementation)
    applied = apply(model, plan(model, PlanRules()), arithmetic=EMULATED)
    patched = logits(model)
    assert (patched - before).abs().max() > 0.05
    applied.undo()
    assert_bitwise(logits(model), before)
    assert [sorted(vars(module)) for module in model.modules()] == attributes
    assert (model.config._attn_implementation, model.config._experts_implementation) == implementations
    again = apply(model, plan(model, PlanRules()), arithmetic=EMULATED)
    assert_bitwise(logits(model), patched)
    again.undo()
    again.undo()  # nothing is left to undo
    assert_bitwise(logits(model), before)


def test_parameters_become_bf16_values_in_the_storage_dtype():
    for arithmetic, dtype in ((EMULATED, torch.float32), (CONTROL, torch.float64), (NATIVE, torch.bfloat16)):
        model = tiny_model()
        expected = [p.detach().bfloat16() for p in model.parameters()]
        apply(model, plan(model, PlanRules()), arithmetic=arithmetic)
        for parameter, values in zip(model.parameters(), expected, strict=True):
            assert_bitwise(parameter.detach(), values.to(dtype))


def test_a_patched_model_is_refused():
    model = tiny_model()
    made = plan(model, PlanRules())
    applied = apply(model, made, arithmetic=EMULATED)
    with pytest.raises(ConfigError, match=r"patched already.*undo"):
        apply(model, made, arithmetic=EMULATED)
    applied.undo()
    apply(model, made, arithmetic=EMULATED)


@pytest.mark.parametrize(
    "changes", [{"num_hidden_layers": 3}, {"mlp_only_layers": [1]}], ids=lambda changes: next(iter(changes))
)
def test_the_plan_of_another_model_is_refused_before_anything_changes(changes):
    model = tiny_model()
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ConfigError, match="Make a plan for this model"):
        apply(model, plan(tiny_model(**changes), PlanRules()), arithmetic=CONTROL)
    for name, tensor in model.state_dict().items():
        assert_bitwise(tensor, weights[name])
    assert model.config._experts_implementation != "tracefp4"


def test_another_architecture_is_refused():
    model = tiny_model()
    with pytest.raises(ConfigError, match="plan is for Qwen3MoeForCausalLM, the model is Qwen3MoeModel"):
        apply(model.model, plan(model, PlanRules()), arithmetic=EMULATED)


def test_options_reach_the_experts():
    model = tiny_model()
    apply(model, plan(model, PlanRules(backward="high_precision", ste="clip")), arithmetic=EMULATED)
    state = model.model.layers[0].mlp.experts.tracefp4
    assert (state.backward, state.ste) == ("high_precision", "clip")


def test_weights_are_quantized_once_for_all_forwards_of_a_version():
    model = tiny_model()
    apply(model, plan(model, PlanRules()), arithmetic=EMULATED)
    for _ in range(3):
        model(input_ids=TOKENS, use_cache=False).logits.sum().backward()
    states = [layer.mlp.experts.tracefp4 for layer in model.model.layers]
    assert [state.num_quantizations for state in states] == [2, 2]
    torch.optim.SGD(model.parameters(), lr=1e-3).step()
    logits(model)
    assert [state.num_quantizations for state in states] == [4, 4]

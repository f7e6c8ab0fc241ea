"""Static exponents of K and V from a batch: real tokens only, unrounded values, nothing left behind."""

import pytest
import torch
from tests.models.tiny_models import tiny_model

from tracefp4.errors import ConfigError
from tracefp4.formats.arithmetic import EMULATED
from tracefp4.formats.scaling import calibrate_exponent
from tracefp4.patching import PlanRules, apply, calibrate_kv, plan

LOUD = 39


def loud_model():
    """A model whose token LOUD has values 64 times as large as any other token's."""
    model = tiny_model()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.v_proj.weight.zero_()
            layer.self_attn.v_proj.weight[:, 0] = 1.0
        model.model.embed_tokens.weight[:, 0] = 0.05 * model.model.embed_tokens.weight[:, 1:].norm(dim=-1) / 8
        model.model.embed_tokens.weight[LOUD, 0] = 64 * model.model.embed_tokens.weight[LOUD, 1:].abs().max()
    return model


def exponents(model, tokens, mask):
    made = plan(model, PlanRules())
    applied = apply(model, made, arithmetic=EMULATED)
    found = calibrate_kv(model, made, input_ids=tokens, attention_mask=mask)
    applied.undo()
    return [(layer.k_exponent, layer.v_exponent) for layer in found.layers]


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_does_not_take_part(side):
    # Mutations: padded rows among the observed; positions counted from the padding (K depends on them).
    model = loud_model()
    tokens = torch.randint(0, LOUD, (2, 9))
    expected = exponents(model, tokens, torch.ones_like(tokens))
    filler, zeros = torch.full((2, 3), LOUD), torch.zeros(2, 3, dtype=torch.int64)
    parts = (filler, tokens) if side == "left" else (tokens, filler)
    masks = (zeros, torch.ones_like(tokens)) if side == "left" else (torch.ones_like(tokens), zeros)
    padded, mask = torch.cat(parts, dim=1), torch.cat(masks, dim=1)
    assert exponents(model, padded, mask) == expected
    assert exponents(model, padded, torch.ones_like(mask)) != expected


def test_the_exponent_is_that_of_the_unrounded_values_of_each_layer():
    model = tiny_model()
    tokens = torch.randint(0, 40, (2, 9))
    made = plan(model, PlanRules())
    apply(model, made, arithmetic=EMULATED)
    seen = {}
    for n, layer in enumerate(model.model.layers):
        layer.self_attn.v_proj.register_forward_hook(lambda m, a, out, n=n: seen.__setitem__(n, out.detach()))
    found = calibrate_kv(model, made, input_ids=tokens, attention_mask=torch.ones_like(tokens))
    assert [layer.v_exponent for layer in found.layers] == [calibrate_exponent(seen[n]) for n in (0, 1)]
    assert found.digest != made.digest and found.rules == made.rules
    assert all(layer.self_attn.tracefp4.observer is None for layer in model.model.layers)


def test_layers_with_a_bf16_cache_stay_as_they_are():
    model = tiny_model()
    tokens = torch.randint(0, 40, (1, 5))
    made = plan(model, PlanRules(exclude=("*.0.self_attn.kv_cache",)))
    apply(model, made, arithmetic=EMULATED)
    found = calibrate_kv(model, made, input_ids=tokens, attention_mask=torch.ones_like(tokens))
    assert found.layers[0] == made.layers[0] and found.layers[1] != made.layers[1]


def test_an_unpatched_model_is_refused():
    model, tokens = tiny_model(), torch.zeros(1, 3, dtype=torch.int64)
    with pytest.raises(ConfigError, match="not patched.*apply first"):
        calibrate_kv(
            model, plan(model, PlanRules()), input_ids=tokens, attention_mask=torch.ones_like(tokens)
        )


def test_observers_are_removed_after_an_error():
    model, tokens = tiny_model(), torch.full((1, 3), 4000)
    made = plan(model, PlanRules())
    apply(model, made, arithmetic=EMULATED)
    with pytest.raises(IndexError):
        calibrate_kv(model, made, input_ids=tokens, attention_mask=torch.ones_like(tokens))
    assert all(layer.self_attn.tracefp4.observer is None for layer in model.model.layers)

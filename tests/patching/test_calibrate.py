"""Static exponents from a batch: real tokens only, unrounded values, nothing left behind."""

import sys

import pytest
import torch
from tests.models.tiny_models import tiny_model

from tracefp4.errors import ConfigError
from tracefp4.formats.arithmetic import CONTROL, EMULATED
from tracefp4.formats.calibration import calibrate_exponent
from tracefp4.guidance import Site
from tracefp4.patching import PlanRules, apply, calibrate, plan
from tracefp4.qat import ExpertWeights

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
    found = calibrate(model, made, input_ids=tokens, attention_mask=mask)
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
    found = calibrate(model, made, input_ids=tokens, attention_mask=torch.ones_like(tokens))
    assert [layer.v_exponent for layer in found.layers] == [calibrate_exponent(seen[n]) for n in (0, 1)]
    assert found.digest != made.digest and found.rules == made.rules
    assert all(layer.self_attn.tracefp4.observer is None for layer in model.model.layers)


def test_static_activations_get_the_exponents_of_their_own_unrounded_values(monkeypatch):
    # Mutations: w2 rows masked as if there was one per token; x calibrated behind a layer that k = 0 has flushed.
    model = tiny_model()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.experts.gate_up_proj.mul_(2.0**-12)  # so that w2 under k = 0 would be flushed to zeros
            layer.mlp.experts.down_proj.mul_(2.0**24)
    tokens, mask = torch.randint(0, 40, (2, 9)), torch.ones(2, 9, dtype=torch.int64)
    mask[1, 6:] = 0
    # what the sites hold in a pass whose activations nothing rounds
    seen, original = {}, ExpertWeights.project

    def project(self, x, way, module, name):
        seen[Site("x" if name == "gate_up_proj" else "w2", self.layer)] = x.detach()
        return original(self, x, way, module, name)

    monkeypatch.setattr(ExpertWeights, "project", project)
    exact = plan(model, PlanRules(activation="none", weight="MXFP4_RCEIL", sites=("k",)))
    applied = apply(model, exact, arithmetic=EMULATED)
    calibrate(model, exact, input_ids=tokens, attention_mask=mask)
    applied.undo()
    expected = dict(seen)
    made = plan(model, PlanRules(activation="NVFP4_STATIC_POW2", weight="MXFP4_RCEIL"))
    apply(model, made, arithmetic=EMULATED)
    found = calibrate(model, made, input_ids=tokens, attention_mask=mask).static_exponents
    assert set(found) == {Site(kind, n) for kind in ("x", "w2", "k", "v") for n in (0, 1)}
    valid = mask.reshape(-1).bool()
    assert len(expected) == 4
    for site, x in expected.items():
        assert torch.equal(seen[site], x), site
        rows = x[valid.repeat_interleave(2 if site.kind == "w2" else 1)]
        assert found[site] == calibrate_exponent(rows), site
    assert found[Site("w2", 1)] < -20 < found[Site("x", 1)]
    assert all(layer.mlp.experts.tracefp4.observer is None for layer in model.model.layers)


def test_padding_is_no_activation(monkeypatch):
    # Mutations: padded rows among the observed; rows of (token, slot) pairs masked in another order.
    model, seen = tiny_model(), []
    file = sys.modules[calibrate.__module__]  # its name is hidden by the function's
    monkeypatch.setattr(file, "calibrate_exponent", lambda x: seen.append(x) or 0)
    tokens, mask = torch.randint(0, LOUD, (2, 9)), torch.ones(2, 9, dtype=torch.int64)
    mask[1, 3:] = 0
    made = plan(model, PlanRules(activation="NVFP4_STATIC_POW2", kv="none", sites=("x",)))
    apply(model, made, arithmetic=CONTROL)
    calibrate(model, made, input_ids=tokens, attention_mask=mask)
    for row, length in ((0, 9), (1, 3)):
        ids = tokens[row : row + 1, :length]
        calibrate(model, made, input_ids=ids, attention_mask=torch.ones_like(ids))
    together, first, second = seen[:4], seen[4:8], seen[8:]
    assert [len(x) for x in together] == [12, 24, 12, 24]
    for both, *alone in zip(together, first, second, strict=True):
        assert torch.equal(both, torch.cat(alone))


def test_layers_with_a_bf16_cache_stay_as_they_are():
    model = tiny_model()
    tokens = torch.randint(0, 40, (1, 5))
    made = plan(model, PlanRules(exclude=("*.0.self_attn.kv_cache",)))
    apply(model, made, arithmetic=EMULATED)
    found = calibrate(model, made, input_ids=tokens, attention_mask=torch.ones_like(tokens))
    assert found.layers[0] == made.layers[0] and found.layers[1] != made.layers[1]


def test_an_unpatched_model_is_refused():
    model, tokens = tiny_model(), torch.zeros(1, 3, dtype=torch.int64)
    with pytest.raises(ConfigError, match="not patched.*apply first"):
        calibrate(model, plan(model, PlanRules()), input_ids=tokens, attention_mask=torch.ones_like(tokens))


def test_observers_are_removed_after_an_error():
    model, tokens = tiny_model(), torch.full((1, 3), 4000)
    made = plan(model, PlanRules())
    apply(model, made, arithmetic=EMULATED)
    with pytest.raises(IndexError):
        calibrate(model, made, input_ids=tokens, attention_mask=torch.ones_like(tokens))
    assert all(layer.self_attn.tracefp4.observer is None for layer in model.model.layers)

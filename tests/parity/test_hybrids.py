"""Qwen3.5-MoE on both sides: the patched trainer computes what the engine's model does, bit for bit in the control
arithmetic, with packed and padded sequences, and its gradients are those of transformers where nothing is rounded."""

import pytest
import torch
from tests.assertions import assert_bitwise
from tests.models.test_qwen3_moe import Observer
from tests.models.tiny_hybrids import Rows, make, run_in_chunks, tiny_model
from tests.models.tiny_models import EXACT

from tracefp4.errors import ConfigError
from tracefp4.formats.arithmetic import CONTROL, EMULATED, NATIVE
from tracefp4.guidance.session import record
from tracefp4.patching import PlanRules, apply, calibrate, plan
from tracefp4.qat.attention import no_mask

RULES = {"fp4": PlanRules(guidance="mantissa"), "bf16": PlanRules(mode="bf16", guidance="none", gate="none")}


def chain(mode, arithmetic, **changes):
    """A patched model and its calibrated plan."""
    model = tiny_model(**changes)
    made = plan(model, RULES[mode])
    if mode == "fp4":
        applied = apply(model, made, arithmetic=arithmetic)
        tokens = torch.randint(0, 40, (4, 16))
        made = calibrate(model, made, input_ids=tokens, attention_mask=torch.ones_like(tokens))
        applied.undo()
    return model, made, apply(model, made, arithmetic=arithmetic)


@torch.no_grad()
def logits_of(model, tokens, **options):
    options = {"attention_mask": no_mask(tokens.device), "is_causal_row": True} | options
    return model(input_ids=tokens, use_cache=False, **options).logits


@pytest.mark.parametrize("mode", ["fp4", "bf16"])
def test_trainer_and_engine_are_equal_bit_for_bit(mode):
    model, made, _ = chain(mode, CONTROL)
    tokens = torch.randint(0, 40, (70,))
    engine_model, observers = make(model, made.layers, CONTROL), (Observer(), Observer())
    with record(observers[0]):
        trained = logits_of(model, tokens[None])[0]
    rows = Rows(engine_model, 1, 70)
    with record(observers[1]):
        sampled = rows.forward([(0, tokens.tolist())])[0]
    assert_bitwise(trained, sampled)
    ours, theirs = (observer.rows() for observer in observers)
    assert ours.keys() == theirs.keys() and len(ours) == (4 * 3 + 2 if mode == "fp4" else 4)
    for key, parts in ours.items():
        for part, wanted in zip(parts, theirs[key], strict=True):
            assert_bitwise(part.flatten(), wanted.flatten())
    assert_bitwise(run_in_chunks(engine_model, tokens[:9].tolist(), 1)[0], trained[:9])


def test_a_sequence_is_the_same_packed_padded_and_alone():
    model, _, _ = chain("fp4", CONTROL)
    one, other = torch.randint(0, 40, (1, 9)), torch.randint(0, 40, (1, 5))
    expected = [logits_of(model, tokens)[0] for tokens in (one, other)]
    positions = torch.cat([torch.arange(9), torch.arange(5)])[None]
    packed = logits_of(
        model,
        torch.cat([one, other], dim=1),
        position_ids=positions,
        segment_lengths=(9, 5),
        is_causal_row=False,
    )[0]
    assert_bitwise(packed, torch.cat(expected))
    right = torch.cat([other, torch.full((1, 4), 7)], dim=1)
    assert_bitwise(logits_of(model, torch.cat([one, right]))[1, :5], expected[1])
    left, mask = right.roll(4, 1), torch.tensor([[1] * 9, [0] * 4 + [1] * 5])
    where = (mask.cumsum(-1) - 1).clamp(min=0)
    found = logits_of(
        model, torch.cat([one, left]), attention_mask=mask, position_ids=where, is_causal_row=False
    )
    assert_bitwise(found[1, 4:], expected[1])


def test_gradients_are_those_of_transformers_when_nothing_is_rounded():
    tokens = torch.randint(0, 40, (2, 40))
    model = tiny_model()
    grads = []
    for is_patched in (False, True):
        if is_patched:
            apply(model, plan(model, RULES["bf16"]), arithmetic=EXACT)
        model.zero_grad()
        torch.log_softmax(model(input_ids=tokens, use_cache=False).logits, -1)[..., 3].sum().backward()
        grads.append({name: p.grad.clone() for name, p in model.named_parameters()})
    for name, expected in grads[0].items():
        assert (grads[1][name] - expected).norm() < 1e-3 * expected.norm(), name


@pytest.mark.parametrize("arithmetic", [EMULATED, NATIVE], ids=lambda a: a.name)
def test_every_parameter_learns(arithmetic):
    model, _, applied = chain(
        "fp4", arithmetic, num_hidden_layers=2, layer_types=["linear_attention", "full_attention"]
    )
    tokens = torch.randint(0, 40, (1, 12))
    logits = model(input_ids=tokens, use_cache=False, attention_mask=no_mask(tokens.device)).logits
    torch.log_softmax(logits.float(), -1)[..., 3].sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        assert parameter.grad.any() or ".experts." in name, name
    if arithmetic.emulates_bf16:
        assert_bitwise(logits.detach().bfloat16().float(), logits.detach())
    applied.undo()
    assert all("forward" not in vars(m) and not hasattr(m, "tracefp4") for m in model.modules())


def test_what_a_patched_model_does_not_compute_is_refused():
    from tracefp4.qat.context_parallel import context_parallel

    model, _, _ = chain("bf16", EMULATED)
    with pytest.raises(ConfigError, match="got a cache"):
        model(input_ids=torch.zeros(1, 3, dtype=torch.int64), use_cache=True)
    with pytest.raises(ConfigError, match="got gated delta layers"), context_parallel(model, None):
        pass

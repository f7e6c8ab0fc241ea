"""The unquantized view of a patched model, and the slope measured through it."""

from dataclasses import replace

import pytest
import torch
from tests.rl.test_trainer import make_samples, update
from tests.rl.tiny_runs import make_config

from tracefp4.patching import PlanRules, apply, plan
from tracefp4.rl.opening import open_run
from tracefp4.rl.policy import load_policy
from tracefp4.rl.rundir import RunDirectory
from tracefp4.rl.transmission import TransmissionProbe, unquantized_forward


def open_tiny(tiny, path, **changes):
    config = make_config(*tiny, path, **changes)
    return open_run(config, RunDirectory(config.run.dir, resume=False), resume=False)


def test_the_unquantized_forward_is_the_bf16_models(tiny, tmp_path):
    run = open_tiny(tiny, tmp_path / "run")
    policy = load_policy(tiny[0])
    other = apply(
        policy.model,
        plan(policy.model, PlanRules(mode="bf16", guidance="none")),
        arithmetic=run.trainer.arithmetic,
    )
    samples = [replace(sample, record=None) for sample in make_samples(run)]
    expected = replace(run.trainer, applied=other, optimizer=None).score(samples).logprobs
    quantized = run.trainer.score(samples).logprobs
    with unquantized_forward(run.applied.model):
        found = run.trainer.score(samples).logprobs
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    again = run.trainer.score(samples).logprobs
    assert all(torch.equal(a, b) for a, b in zip(quantized, again, strict=True)), "everything was put back"
    assert not torch.equal(found[0], quantized[0])


def test_the_unquantized_forward_is_put_back_after_an_error(tiny, tmp_path):
    run = open_tiny(tiny, tmp_path / "run")
    before = [module.tracefp4 for module in run.applied.model.modules() if hasattr(module, "tracefp4")]
    with pytest.raises(RuntimeError), unquantized_forward(run.applied.model):
        raise RuntimeError
    after = [module.tracefp4 for module in run.applied.model.modules() if hasattr(module, "tracefp4")]
    assert all(one is two for one, two in zip(before, after, strict=True))


def test_a_bf16_run_transmits_everything(tiny, tmp_path):
    run = open_tiny(tiny, tmp_path / "run", quantization__mode="bf16", quantization__guidance="none")
    samples = make_samples(run)
    probe = TransmissionProbe(run.trainer, samples, num_samples=8)
    update(run.trainer, samples)
    found = probe.finish()
    assert found["transmission/slope"] == 1.0
    assert found["transmission/noise_ratio"] == 0.0
    assert found["transmission/signal_rms"] > 0


def test_guidance_hides_a_part_of_a_small_update(tiny, tmp_path):
    slopes = {}
    for guidance in ("mantissa", "none"):
        run = open_tiny(tiny, tmp_path / guidance, quantization__guidance=guidance, train__lr=1e-3)
        samples = make_samples(run, count=24)
        probe = TransmissionProbe(run.trainer, samples, num_samples=24)
        for _ in range(2):
            update(run.trainer, samples)
        slopes[guidance] = probe.finish()["transmission/slope"]
    assert 0.0 < slopes["mantissa"] < slopes["none"] < 1.4, slopes


def test_without_an_update_there_is_nothing_to_see(tiny, tmp_path):
    run = open_tiny(tiny, tmp_path / "run")
    samples = make_samples(run)
    found = TransmissionProbe(run.trainer, samples, num_samples=2).finish()
    assert "transmission/slope" not in found
    assert found["transmission/signal_rms"] == 0.0
    assert found["transmission/num_tokens"] == len(samples[0].token_ids) + len(samples[3].token_ids)
    empty = replace(samples[0], token_ids=(), rollout_logprobs=(), weight_versions=(), record=None)
    assert TransmissionProbe(run.trainer, [empty], num_samples=2).finish() == {}


def test_samples_of_different_ages_are_reported_apart(tiny, tmp_path):
    run = open_tiny(tiny, tmp_path / "run", train__lr=1e-3)
    samples = make_samples(run, count=24)
    made = [
        replace(sample, weight_versions=(i % 2,) * len(sample.token_ids)) for i, sample in enumerate(samples)
    ]
    probe = TransmissionProbe(run.trainer, made, num_samples=24, version=1)
    update(run.trainer, samples)
    found = probe.finish()
    tokens = [sum(len(sample.token_ids) for sample in made[i::2]) for i in (0, 1)]
    assert [found[f"lag{lag}/transmission/num_tokens"] for lag in (1, 0)] == tokens
    assert found["transmission/num_tokens"] == sum(tokens)
    assert min(found[f"lag{lag}/guidance/followed_values_fraction"] for lag in (0, 1)) > 0.8
    slopes = [found[f"lag{lag}/transmission/slope"] for lag in (0, 1)]
    assert min(slopes) <= found["transmission/slope"] <= max(slopes)


def test_one_age_that_is_not_the_present_is_named(tiny, tmp_path):
    run = open_tiny(tiny, tmp_path / "run", train__lr=1e-3)
    samples = make_samples(run)
    probe = TransmissionProbe(run.trainer, samples, num_samples=6, version=3)
    update(run.trainer, samples)
    found = probe.finish()
    assert found["lag3/transmission/slope"] == found["transmission/slope"]
    assert not any(name.startswith("lag0/") for name in found)

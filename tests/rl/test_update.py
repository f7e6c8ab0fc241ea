"""A rollout's samples over several optimizer steps: the guided old pass, the reference, lags and sampling rules."""

import json
import math
from dataclasses import replace

import pytest
import torch
from tests.rl.test_trainer import ALONE, make_samples, masters
from tests.rl.tiny_runs import changed, make_config

from tracefp4.errors import ConfigError
from tracefp4.rl.opening import open_run
from tracefp4.rl.policy import GenerationDefaults
from tracefp4.rl.rundir import RunDirectory
from tracefp4.rl.update import (
    Updater,
    evaluation_params,
    followed_of_lags,
    loss_config,
    merge_steps,
    mismatch_of,
    mismatch_of_lags,
    sampling_params,
    with_gradient,
)

DEFAULTS = GenerationDefaults(stop_token_ids=(1,), temperature=0.7, top_p=1.0, top_k=0)


def open_tiny(tiny, path, **changes):
    config = make_config(*tiny, path, **changes)
    return open_run(config, RunDirectory(config.run.dir, resume=False), resume=False)


@pytest.fixture
def run(tiny, tmp_path):
    return open_tiny(tiny, tmp_path / "run")


def test_old_log_probs_are_guided_so_ratios_carry_no_rounding_noise(tiny, tmp_path):
    run = open_tiny(
        tiny, tmp_path / "run", train__optimizer_steps_per_rollout=3, train__micro_batch_tokens=ALONE,
        train__lr=1e-30,
    )  # fmt: skip
    found = Updater(run.trainer, run.config).update(make_samples(run), optimizer_step=0, version=0)
    assert found["ratio_max"] == found["ratio_min"] == 1.0, "the weights stood still, so must the ratio"


def test_every_sample_is_trained_once(tiny, tmp_path):
    run = open_tiny(tiny, tmp_path / "run", train__optimizer_steps_per_rollout=4)
    samples = make_samples(run)
    seen = []
    real = run.trainer.update
    run.trainer.update = lambda chosen, **kw: (
        seen.append([s.trajectory for s in chosen]) or real(chosen, **kw)
    )
    updater = Updater(run.trainer, run.config)
    updater.update(samples, optimizer_step=0, version=0)
    assert updater.steps_taken == 4
    assert sorted(map(len, seen)) == [1, 1, 2, 2]
    assert sorted(name for names in seen for name in names) == sorted(sample.trajectory for sample in samples)


def test_warm_up_scales_the_first_optimizer_steps(tiny, tmp_path):
    run = open_tiny(tiny, tmp_path / "run", train__optimizer_steps_per_rollout=2, train__warmup_steps=4)
    scales = []
    real = run.trainer.update
    run.trainer.update = lambda chosen, **kw: scales.append(kw["lr_scale"]) or real(chosen, **kw)
    updater = Updater(run.trainer, run.config)
    updater.update(make_samples(run), optimizer_step=0, version=0)
    updater.update(make_samples(run), optimizer_step=2, version=0)
    assert scales == [0.25, 0.5, 0.75, 1.0]


def test_no_samples_take_no_step(tiny, tmp_path):
    run = open_tiny(tiny, tmp_path / "run")
    updater = Updater(run.trainer, run.config)
    found = updater.update([], optimizer_step=0, version=0)
    assert found == {"trained_samples": 0, "samples_skipped": 0}
    assert updater.steps_taken == 0


def test_fewer_samples_than_optimizer_steps_take_one_step_each(tiny, tmp_path):
    run = open_tiny(tiny, tmp_path / "run", train__optimizer_steps_per_rollout=4)
    updater = Updater(run.trainer, run.config)
    found = updater.update(make_samples(run)[:2], optimizer_step=0, version=0)
    assert updater.steps_taken == found["trained_samples"] == 2


def test_a_step_whose_gradient_is_not_finite_is_counted_and_not_taken(tiny, tmp_path):
    run = open_tiny(tiny, tmp_path / "run", train__optimizer_steps_per_rollout=2)
    samples = make_samples(run)
    updater = Updater(run.trainer, run.config)
    broken = spoil_gradient(run, calls={0, 1})
    before = masters(run.trainer)
    found = updater.update(samples, optimizer_step=0, version=0)
    assert (updater.steps_taken, found["optimizer_steps_skipped"], found["trained_samples"]) == (0, 2, 0)
    assert found["grad_norm"] is None
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert all(torch.equal(a, b) for a, b in zip(before, masters(run.trainer), strict=True))
    broken.clear()
    broken.add(3)
    found = updater.update(samples, optimizer_step=0, version=0)
    assert (updater.steps_taken, found["optimizer_steps_skipped"], found["trained_samples"]) == (1, 1, 3)
    assert math.isfinite(found["grad_norm"])


def spoil_gradient(run, *, calls):
    """Put an infinity into the gradient of the optimizer calls with these numbers (from 0)."""
    real, count = run.trainer.optimizer.step, []

    def step(**settings):
        if len(count) in calls:
            run.trainer.optimizer.copies[0].grad.view(-1)[0] = math.inf
        count.append(1)
        return real(**settings)

    run.trainer.optimizer.step = step
    return calls


def in_groups(samples, groups, rewards, advantages):
    """The same samples with these groups, rewards and advantages."""
    rows = zip(samples, groups, rewards, advantages, strict=True)
    return [replace(s, group_index=g, reward=r, advantage=a) for s, g, r, a in rows]


def test_only_samples_that_say_nothing_are_left_out(tiny, tmp_path):
    samples = make_samples(open_tiny(tiny, tmp_path / "run"))
    cases = in_groups(samples, [0, 0, 1, 1, 1, 2], [1, 1, 0, 0.5, 1, 0], [0, 0, -1, 0, 1, 0.5])
    # group 0 has equal rewards; the middle of group 1 has advantage 0; group 2 has the caller's own advantage
    assert with_gradient(cases) == cases[2:]


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "dr_grpo"])
@pytest.mark.parametrize("coefficient", [0.0, 0.1])
def test_skipped_groups_are_in_no_forward_and_no_denominator(tiny, tmp_path, aggregation, coefficient):
    found, after = [], []
    for name in ("with", "without"):
        run = open_tiny(
            tiny, tmp_path / name, loss__aggregation=aggregation, loss__kl_coef=coefficient,
            train__micro_batch_tokens=ALONE,
        )  # fmt: skip
        samples = in_groups(make_samples(run), [0, 0, 1, 1, 2, 2], [1, 1, 0, 1, 0, 0], [0, 0, -1, 1, 0, 0])
        passed = []
        real = run.trainer.update
        run.trainer.update = lambda chosen, real=real, passed=passed, **kw: (
            passed.extend(chosen) or real(chosen, **kw)
        )
        updater = Updater(run.trainer, run.config, reference=run.reference)
        chosen = samples if name == "with" else samples[2:4]
        found.append(updater.update(chosen, optimizer_step=0, version=0))
        assert passed == samples[2:4]
        after.append(masters(run.trainer))
    assert [row.pop("samples_skipped") for row in found] == [4, 0]
    assert found[0]["trained_samples"] == 2
    assert found[0]["mismatch/num_tokens"] == sum(len(sample.token_ids) for sample in samples[2:4])
    for row in found:
        row.pop("train_seconds")
    assert found[0] == found[1]
    assert all(torch.equal(a, b) for a, b in zip(*after, strict=True))


@pytest.mark.parametrize("reason", ["equal rewards", "all masked"])
def test_without_anything_to_learn_from_no_step_is_taken(tiny, tmp_path, reason):
    run = open_tiny(tiny, tmp_path / "run", train__truncated="mask")
    samples = make_samples(run)
    if reason == "equal rewards":
        samples = [replace(sample, advantage=0.0) for sample in samples]
    else:
        samples = [replace(sample, is_truncated=True, finish_reason="length") for sample in samples]
    before = masters(run.trainer)
    updater = Updater(run.trainer, run.config)
    found = updater.update(samples, optimizer_step=0, version=2)
    assert updater.steps_taken == 0
    assert found == {
        "trained_samples": 0, "samples_skipped": 6 if reason == "equal rewards" else 0,
        "version_lag_mean": 2.0, "version_lag_max": 2,
    }  # fmt: skip
    assert all(torch.equal(a, b) for a, b in zip(before, masters(run.trainer), strict=True))


def test_norms_and_guidance_are_means_over_steps():
    parts = [
        {"num_tokens": n, "ratio_mean": r, "guidance/changed_fraction": g, "grad_norm": norm,
         "optimizer_steps_skipped": skipped}
        for n, r, g, norm, skipped in [
            (10.0, 1.0, 0.2, 1.0, 0.0), (30.0, 2.0, 0.4, 3.0, 0.0), (5.0, 1.0, 0.6, math.inf, 1.0),
        ]
    ]  # fmt: skip
    found = merge_steps(parts)
    assert found["ratio_mean"] == pytest.approx((10 + 60 + 5) / 45)
    assert found["guidance/changed_fraction"] == pytest.approx(0.4)
    assert (found["grad_norm"], found["optimizer_steps_skipped"], found["num_tokens"]) == (2.0, 1.0, 45.0)


@pytest.mark.parametrize("order", [1, -1])
def test_a_share_that_only_some_steps_have_is_the_mean_over_those(order):
    # Mutation: the names of the first step are read from every step.
    common = {
        "num_tokens": 3.0,
        "grad_norm": 1.0,
        "optimizer_steps_skipped": 0.0,
        "guidance/followed_fraction": 1.0,
    }
    parts = [common, {**common, "rounding/clipped_fraction": 0.25, "guidance/followed_fraction": 0.5}]
    found = merge_steps(parts[::order])
    assert found["rounding/clipped_fraction"] == 0.25
    assert found["guidance/followed_fraction"] == 0.75


def test_the_kl_term_needs_a_reference(tiny, tmp_path):
    run = open_tiny(tiny, tmp_path / "run")
    with pytest.raises(ConfigError, match="loss.kl_coef: 0.1 needs a reference policy"):
        Updater(run.trainer, changed(run.config, loss__kl_coef=0.1))


def test_the_reference_is_its_own_bf16_model_and_follows_nothing(tiny, tmp_path):
    run = open_tiny(tiny, tmp_path / "run", loss__kl_coef=0.1)
    reference = run.reference
    assert reference.applied.model is not run.applied.model
    assert reference.plan.num_quantized == 0
    assert not reference.plan.rules.replay_routing
    assert reference.optimizer is None
    samples = make_samples(run)
    updater = Updater(run.trainer, run.config, reference=reference)
    before = updater._reference_logprobs(samples)
    for step in range(3):
        found = updater.update(samples, optimizer_step=step, version=step)
    assert found["reference_kl"] > 0
    after = updater._reference_logprobs(samples)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)), "training moved the reference"


def test_the_kl_term_holds_the_policy_back(tiny, tmp_path):
    drift = {}
    for coefficient in (1e-6, 5.0):
        run = open_tiny(tiny, tmp_path / str(coefficient), loss__kl_coef=coefficient, train__lr=1e-3)
        samples = make_samples(run)
        updater = Updater(run.trainer, run.config, reference=run.reference)
        for step in range(8):
            found = updater.update(samples, optimizer_step=step, version=step)
        drift[coefficient] = found["reference_kl"]
    assert drift[5.0] < 0.6 * drift[1e-6]


def test_a_resumed_run_keeps_the_starting_checkpoint_as_reference(tiny, tmp_path):
    run = open_tiny(tiny, tmp_path / "run", loss__kl_coef=0.1, train__lr=0.01)
    samples = make_samples(run)
    updater = Updater(run.trainer, run.config, reference=run.reference)
    before = updater._reference_logprobs(samples)
    updater.update(samples, optimizer_step=0, version=0)
    run.step = 1
    run.save()
    again = open_run(run.config, RunDirectory(run.config.run.dir, resume=True), resume=True)
    after = Updater(again.trainer, again.config, reference=again.reference)._reference_logprobs(samples)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_mismatch_by_lag_adds_up_to_the_whole(tiny, tmp_path):
    run = open_tiny(tiny, tmp_path / "run")
    samples = make_samples(run)
    mixed = [
        replace(s, weight_versions=(i % 3,) * len(s.token_ids), record=None) for i, s in enumerate(samples)
    ]
    logprobs = run.trainer.score(samples).logprobs
    whole = mismatch_of(mixed, logprobs)
    found = mismatch_of_lags(mixed, logprobs, version=2)
    counts = [found[f"lag{lag}/mismatch/num_tokens"] for lag in (0, 1, 2)]
    assert sum(counts) == whole["mismatch/num_tokens"]
    means = [found[f"lag{lag}/mismatch/abs_mean"] for lag in (0, 1, 2)]
    weighted = sum(n * mean for n, mean in zip(counts, means, strict=True)) / sum(counts)
    assert weighted == pytest.approx(whole["mismatch/abs_mean"])
    assert mismatch_of_lags(samples, logprobs, version=0) == {}


def test_ver_1_a_sample_of_several_versions_is_reported_token_by_token(run):
    # Mutations: the version of the first token for all; records attributed by the trainer's version.
    sample = make_samples(run)[0]
    count = len(sample.token_ids)
    assert count == 8
    mixed = replace(sample, weight_versions=(7, 7, 7, 8, 9, 9, 9, 9))
    assert mixed.version_lag(9) == 2
    (logprobs,) = run.trainer.score([mixed]).logprobs
    found = mismatch_of_lags([mixed], [logprobs], version=9)
    assert [found[f"lag{lag}/mismatch/num_tokens"] for lag in (0, 1, 2)] == [4, 1, 3]
    gap = (logprobs.double() - torch.tensor(mixed.rollout_logprobs, dtype=torch.float64)).abs()
    assert found["lag1/mismatch/abs_mean"] == pytest.approx(gap[3].item())
    followed = followed_of_lags([mixed], version=9)
    assert followed == {f"lag{lag}/guidance/followed_fraction": 1.0 for lag in (0, 1, 2)}
    record = mixed.record
    valid = record.valid.clone()
    valid[len(mixed.prompt_ids) - 1 + torch.tensor([0, 2, 7])] = False  # what tokens 0, 2 and 7 came from
    lost = replace(mixed, record=replace(record, valid=valid))
    found = followed_of_lags([lost, replace(mixed, record=None)], version=9)
    assert found == {
        "lag0/guidance/followed_fraction": 3 / 8,
        "lag1/guidance/followed_fraction": 1 / 2,
        "lag2/guidance/followed_fraction": 1 / 6,
    }
    turns = replace(mixed, trained_mask=(False,) * 4 + (True,) * 4)
    assert followed_of_lags([turns], version=9) == {}, "what is left is of this version"


@pytest.mark.parametrize(
    ("defaults", "changes"),
    [
        (replace(DEFAULTS, top_p=0.9), {}),
        (replace(DEFAULTS, top_k=20), {}),
        (DEFAULTS, {"rollout__top_p": 0.5}),
        (DEFAULTS, {"rollout__top_k": 5}),
    ],
    ids=["checkpoint's top-p", "checkpoint's top-k", "recipe's top-p", "recipe's top-k"],
)
def test_training_on_a_cut_distribution_is_refused(tiny, tmp_path, defaults, changes):
    with pytest.raises(ConfigError, match="full distribution; got top_p=.*Set rollout.top_p = 1.0"):
        sampling_params(make_config(*tiny, tmp_path, **changes), defaults)


def test_the_recipe_overrides_the_checkpoints_sampling(tiny, tmp_path):
    config = make_config(*tiny, tmp_path, rollout__top_p=1.0, rollout__top_k=0, rollout__temperature=0.9)
    found = sampling_params(config, replace(DEFAULTS, top_p=0.5, top_k=9))
    assert (found(0).temperature, found(0).top_p, found(0).top_k) == (0.9, 1.0, 0)
    assert found(0).stop_token_ids == (1,)
    assert found(0).seed != found(1).seed
    config = make_config(*tiny, tmp_path)
    assert sampling_params(config, DEFAULTS)(0).temperature == 0.7
    with pytest.raises(ConfigError, match="temperature must be above 0"):
        sampling_params(config, replace(DEFAULTS, temperature=0.0))


def test_evaluations_always_draw_alike(tiny, tmp_path):
    config = make_config(*tiny, tmp_path, run__eval_temperature=0.5)
    assert evaluation_params(config, DEFAULTS) == evaluation_params(config, DEFAULTS)
    assert evaluation_params(config, DEFAULTS).temperature == 0.5


def test_the_loss_table_is_translated(tiny, tmp_path):
    config = make_config(*tiny, tmp_path, loss__tis_cap=0.0, loss__aggregation="dr_grpo", loss__kl_coef=0.5)
    found = loss_config(config)
    assert (found.tis_cap, found.constant_length, found.kl_coefficient) == (None, 6, 0.5)

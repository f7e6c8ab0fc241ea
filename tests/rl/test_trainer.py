"""The trainer scores and updates: guided by position, blind to batching, and only on what is trained."""

from dataclasses import replace

import pytest
import torch
from tests.rl.tiny_runs import make_config

from tracefp4.errors import RecordError
from tracefp4.formats.arithmetic import EMULATED
from tracefp4.guidance.joining import recode_all
from tracefp4.rl.losses import LossConfig
from tracefp4.rl.opening import open_run
from tracefp4.rl.rundir import RunDirectory
from tracefp4.rl.sync import build_engine
from tracefp4.rl.trainer import with_advantages
from tracefp4.rl.update import Updater, mismatch_of, mismatch_of_lags
from tracefp4.rollout import SamplingParams

NO_CAP = LossConfig(tis_cap=None)
ALONE = 17  # micro-batch budget that no two of the samples fit into


@pytest.fixture
def run(tiny, tmp_path):
    config = make_config(*tiny, tmp_path / "run")
    return open_run(config, RunDirectory(config.run.dir, resume=False), resume=False)


@pytest.fixture
def samples(run):
    """Six samples with whole records."""
    return make_samples(run)


def make_samples(run, *, count=6, max_tokens=8, records=True):
    from tracefp4.rl.samples import TrainingSample

    engine = build_engine(
        run.applied.model, run.applied.plan, arithmetic=EMULATED, rollout=run.config.rollout,
        records=run.applied.plan.guided_sites if records else False,
    )  # fmt: skip
    prompts = [[5 + i, 9, 60 + i][: 1 + i % 3] for i in range(count)]
    groups = engine.generate(prompts, SamplingParams(max_tokens=max_tokens, seed=4))
    return [
        TrainingSample(
            trajectory=c.record.identity.trajectory if c.record else f"{i}.0",
            prompt_ids=tuple(c.prompt_ids),
            token_ids=tuple(c.token_ids),
            rollout_logprobs=tuple(c.logprobs),
            weight_versions=tuple(c.weight_versions),
            advantage=1.0 if i % 2 else -1.0,
            group_index=i,
            is_truncated=c.finish_reason == "length",
            finish_reason=c.finish_reason,
            record=c.record,
        )
        for i, (c,) in enumerate(groups)
    ]


def distance(scored, samples):
    """Mean |log p_train - log p_rollout|."""
    gaps = [
        (logprobs.double() - torch.tensor(sample.rollout_logprobs, dtype=torch.float64)).abs()
        for logprobs, sample in zip(scored.logprobs, samples, strict=True)
    ]
    return torch.cat(gaps).mean().item()


def update(trainer, samples, **changes):
    settings = {
        "old_logprobs": None, "ref_logprobs": None, "loss": NO_CAP, "lr_scale": 1.0, "grad_clip": 0.0,
    }  # fmt: skip
    return trainer.update(samples, **(settings | changes))


def masters(trainer):
    return [master.detach().clone() for master in trainer.optimizer.masters]


def test_guided_scores_are_closer_to_the_rollout_than_nearest_ones(run, samples):
    guided = distance(run.trainer.score(samples), samples)
    nearest = distance(run.trainer.score([replace(s, record=None) for s in samples]), samples)
    assert guided < 0.7 * nearest


def test_micro_batches_and_order_do_not_matter(run, samples):
    whole = run.trainer.score(samples).logprobs
    alone = replace(run.trainer, micro_batch_tokens=ALONE).score(samples).logprobs
    turned = run.trainer.score(samples[::-1]).logprobs[::-1]
    for one, two, three in zip(whole, alone, turned, strict=True):
        # one bf16 step of a logit of size 4 is 1/64; batch shape may change the order of a sum
        torch.testing.assert_close(one, two, atol=0.02, rtol=0)
        torch.testing.assert_close(one, three, atol=0.02, rtol=0)


def test_recoding_before_scoring_changes_nothing(run, samples):
    records = recode_all([sample.record for sample in samples], "mantissa")
    recoded = [replace(s, record=r) for s, r in zip(samples, records, strict=True)]
    once, twice = run.trainer.score(samples), run.trainer.score(recoded)
    assert all(torch.equal(a, b) for a, b in zip(once.logprobs, twice.logprobs, strict=True))


def test_agreement_is_measured_against_whole_records_only(run, samples):
    measured = run.trainer.score(samples, measure=True).agreement
    assert set(measured) == {(kind, layer) for kind in "xkv" for layer in (0, 1)}
    before = sum(counts.mismatched_before for counts in measured.values())
    after = sum(counts.mismatched_after for counts in measured.values())
    assert after < before
    records = recode_all([sample.record for sample in samples], "mantissa")
    recoded = [replace(s, record=r) for s, r in zip(samples, records, strict=True)]
    with pytest.raises(RecordError, match="References must have codec 'full'"):
        run.trainer.score(recoded, measure=True)


def test_places_without_a_record_are_counted_at_guided_sites(run, samples):
    last_tokens = len(samples) * len(run.trainer.plan.guided_sites)
    assert run.trainer.score(samples).positions_missing == last_tokens
    without = [replace(samples[0], record=None), *samples[1:]]
    first = (samples[0].num_tokens - 1) * len(run.trainer.plan.guided_sites)
    assert run.trainer.score(without).positions_missing == last_tokens + first


@pytest.mark.parametrize("name", ["plan_digest", "scheme_digest"])
def test_a_record_of_another_plan_or_scheme_is_refused(run, samples, name):
    record = samples[0].record
    other = replace(record, identity=replace(record.identity, **{name: "0123456789abcdef"}))
    with pytest.raises(RecordError, match="'0123456789abcdef', this side's is"):
        run.trainer.score([replace(samples[0], record=other)])
    with pytest.raises(RecordError, match="refused"):
        update(run.trainer, [replace(samples[0], record=other)])


def test_an_update_moves_probability_towards_advantage(run, samples):
    before = run.trainer.score(samples).logprobs
    for _ in range(3):
        update(run.trainer, samples)
    after = run.trainer.score(samples).logprobs
    gain = [(b - a).mean().item() for a, b in zip(before, after, strict=True)]
    assert all((value > 0) == (sample.advantage > 0) for value, sample in zip(gain, samples, strict=True)), (
        gain
    )


def test_without_advantage_nothing_moves(run, samples):
    before = masters(run.trainer)
    metrics, _ = update(run.trainer, with_advantages(samples, torch.zeros(len(samples))))
    assert metrics["grad_norm"] == 0.0
    assert all(torch.equal(a, b) for a, b in zip(before, masters(run.trainer), strict=True))


def test_masked_truncated_samples_are_not_trained(run, samples):
    cut = [replace(sample, is_truncated=True, finish_reason="length") for sample in samples]
    before = masters(run.trainer)
    metrics, seen = update(run.trainer, cut, trains_truncated=False)
    assert metrics["num_tokens"] == 0
    assert [len(values) for values in seen] == [len(sample.token_ids) for sample in samples]
    assert all(torch.equal(a, b) for a, b in zip(before, masters(run.trainer), strict=True))
    metrics, _ = update(run.trainer, cut, trains_truncated=True)
    assert metrics["num_tokens"] == sum(len(sample.token_ids) for sample in samples)


@pytest.mark.parametrize("budget", [ALONE, 10_000])
def test_numbers_that_are_not_finite_are_refused_before_a_weight_moves(run, samples, budget):
    # Mutations: losses are read after the step, or never; the next update adds to the gradients of this one.
    run.trainer.micro_batch_tokens = budget
    old = list(run.trainer.score(samples).logprobs)
    norm = update(run.trainer, samples, old_logprobs=old, lr_scale=0.0)[0]["grad_norm"]
    before = masters(run.trainer)
    bad = [*old[:-1], torch.full_like(old[-1], torch.nan)]
    with pytest.raises(RecordError, match="needs finite old_logprobs at trained tokens; got nan"):
        update(run.trainer, samples, old_logprobs=bad)
    assert all(torch.equal(a, b) for a, b in zip(before, masters(run.trainer), strict=True))
    assert update(run.trainer, samples, old_logprobs=old, lr_scale=0.0)[0]["grad_norm"] == norm > 0


def with_answers(samples):
    """The samples with every second completion token written by the environment."""
    flags = [tuple(i % 2 == 0 for i in range(len(sample.token_ids))) for sample in samples]
    return [replace(sample, trained_mask=mask) for sample, mask in zip(samples, flags, strict=True)]


def test_tokens_of_the_environment_enter_neither_loss_nor_metrics(run, samples):
    # Mutations: a denominator over the completion; mismatch over all tokens; a weight from a log-prob of 0.
    turns = with_answers(samples)
    old = list(run.trainer.score(samples).logprobs)
    poisoned = [
        torch.where(torch.tensor(sample.trained_flags), values, torch.nan)
        for sample, values in zip(turns, old, strict=True)
    ]
    before = masters(run.trainer)
    metrics, seen = update(run.trainer, turns, old_logprobs=poisoned, lr_scale=0.0)
    assert metrics["num_tokens"] == sum(sample.num_trained for sample in turns)
    assert metrics["ratio_max"] == metrics["ratio_min"] == 1.0
    assert [len(values) for values in seen] == [len(sample.token_ids) for sample in turns]
    assert all(torch.equal(a, b) for a, b in zip(before, masters(run.trainer), strict=True))
    assert mismatch_of(turns, seen)["mismatch/num_tokens"] == metrics["num_tokens"]
    assert mismatch_of_lags(turns, seen, version=0) == {}, "their version is not a lag"
    spoiled = [torch.where(torch.isnan(p), 1e3, s) for p, s in zip(poisoned, seen, strict=True)]
    assert mismatch_of(turns, spoiled) == mismatch_of(turns, seen)


def test_a_sample_that_the_policy_wrote_nothing_of_takes_no_step(run, samples):
    none = [replace(sample, trained_mask=(False,) * len(sample.token_ids)) for sample in samples]
    updater = Updater(run.trainer, run.config)
    found = updater.update(none, optimizer_step=0, version=0)
    assert updater.steps_taken == 0 and found["trained_samples"] == 0


def test_the_gradient_does_not_depend_on_micro_batches(tiny, tmp_path):
    norms = []
    for budget in (ALONE, 1000):
        config = make_config(*tiny, tmp_path / str(budget), train__micro_batch_tokens=budget)
        run = open_run(config, RunDirectory(config.run.dir, resume=False), resume=False)
        metrics, _ = update(run.trainer, make_samples(run))
        norms.append(metrics["grad_norm"])
    assert norms[0] == pytest.approx(norms[1], rel=0.02)


def test_old_logprobs_of_the_same_pass_give_ratio_one_exactly(run, samples):
    trainer = replace(run.trainer, micro_batch_tokens=ALONE)
    old = list(trainer.score(samples).logprobs)
    metrics, seen = update(trainer, samples, old_logprobs=old)
    assert metrics["ratio_max"] == metrics["ratio_min"] == 1.0
    assert all(torch.equal(a, b) for a, b in zip(old, seen, strict=True))


def test_log_probs_of_other_samples_are_refused(run, samples):
    with pytest.raises(RecordError, match="log-probs do not fit the batch"):
        update(run.trainer, samples, old_logprobs=[torch.zeros(1)] * len(samples))


def test_activation_checkpointing_changes_no_gradient(tiny, tmp_path):
    found = []
    for kept in ("none", "full"):
        config = make_config(*tiny, tmp_path / kept, train__activation_checkpointing=kept)
        run = open_run(config, RunDirectory(config.run.dir, resume=False), resume=False)
        metrics, _ = update(run.trainer, make_samples(run))
        found.append((metrics, masters(run.trainer)))
        is_on = run.applied.model.is_gradient_checkpointing and run.applied.model.training
        assert is_on == (kept == "full")
    assert found[0][0] == found[1][0]
    assert all(torch.equal(a, b) for a, b in zip(found[0][1], found[1][1], strict=True))


def test_a_recipe_may_pack(tiny, tmp_path):
    # Mutation: an option that reaches no trainer.
    found = []
    for packing in (False, True):
        config = make_config(*tiny, tmp_path / str(packing), train__packing=packing)
        run = open_run(config, RunDirectory(config.run.dir, resume=False), resume=False)
        assert run.trainer.packing == packing
        found.append(update(run.trainer, make_samples(run))[0])
    assert found[0]["num_tokens"] == found[1]["num_tokens"]
    # float32 sums over another number of rows, then bf16 roundings of their results
    assert found[0]["grad_norm"] == pytest.approx(found[1]["grad_norm"], rel=0.02)


def test_the_share_of_values_followed_is_reported(run, samples):
    metrics, _ = update(run.trainer, samples)
    tokens = sum(sample.num_tokens for sample in samples)
    assert metrics["guidance/followed_fraction"] == pytest.approx((tokens - len(samples)) / tokens)
    assert 0 < metrics["guidance/changed_fraction"] < 0.5


def test_the_share_of_values_changed_is_of_those_with_a_record(run, samples):
    # Mutation: samples without a record in the denominator. Alone, or beside others: the same share.
    bare = [replace(sample, record=None) for sample in samples]
    alone = replace(run.trainer, micro_batch_tokens=ALONE).score(samples).values_changed_fraction
    beside = replace(run.trainer, micro_batch_tokens=ALONE).score([*samples, *bare]).values_changed_fraction
    assert alone == beside > 0
    assert run.trainer.score(bare).values_changed_fraction == 0.0


def test_a_run_without_guidance_reports_none(tiny, tmp_path):
    config = make_config(*tiny, tmp_path / "run", quantization__guidance="none")
    run = open_run(config, RunDirectory(config.run.dir, resume=False), resume=False)
    metrics, _ = update(run.trainer, make_samples(run))
    assert not [name for name in metrics if name.startswith("guidance/")]

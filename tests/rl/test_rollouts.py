"""From tasks to samples: names, records in the plan's codec, bytes, and what becomes of truncated completions."""

import pytest
import torch
from tests.rl.tiny_runs import make_config

from tracefp4.guidance import Site
from tracefp4.guidance.joining import records_equal
from tracefp4.patching.budget import decisions_for, record_bytes
from tracefp4.patching.catalogue import shape_by_name
from tracefp4.rl.loop import _maker
from tracefp4.rl.opening import open_run
from tracefp4.rl.rollouts import bytes_per_token
from tracefp4.rl.rundir import RunDirectory
from tracefp4.rl.update import sampling_params

PLAIN = "tests.rl.tiny_runs:share_plain"


def make(tiny, path, *, steps=1, **changes):
    """Rollouts of the first steps, all under the same weights."""
    settings = {"task__reward": PLAIN} | changes
    config = make_config(*tiny, path, **settings)
    run = open_run(config, RunDirectory(config.run.dir, resume=False), resume=False)
    maker, params = _maker(run), sampling_params(config, run.policy.defaults)
    return run, [maker.make(run.stream.take(3), params(step), step=step) for step in range(steps)]


def test_trajectories_are_unique_over_the_steps_of_a_run(tiny, tmp_path):
    _, rollouts = make(tiny, tmp_path / "run", steps=2)
    names = [sample.trajectory for rollout in rollouts for sample in rollout.samples]
    assert len(set(names)) == len(names) == 24
    assert names[:5] == ["0.0.0", "0.0.1", "0.0.2", "0.0.3", "0.1.0"]
    assert names[12] == "1.0.0"
    assert all(s.record.identity.trajectory == s.trajectory for r in rollouts for s in r.samples)


def test_groups_are_adjacent_and_advantages_are_within_groups(tiny, tmp_path):
    _, (rollout,) = make(tiny, tmp_path / "run")
    assert [sample.group_index for sample in rollout.samples] == [0] * 4 + [1] * 4 + [2] * 4
    for group in range(3):
        rewards = torch.tensor([s.reward for s in rollout.samples if s.group_index == group])
        advantages = torch.tensor([s.advantage for s in rollout.samples if s.group_index == group])
        if rewards.min() < rewards.max():
            torch.testing.assert_close(advantages, (rewards - rewards.mean()) / (rewards.std() + 1e-6))
        else:
            assert torch.all(advantages == 0)
    assert rollout.metrics["reward_mean"] == pytest.approx(sum(s.reward for s in rollout.samples) / 12)


@pytest.mark.parametrize(("codec", "bits"), [("mantissa", 1.5), ("full", 4.5)])
def test_records_are_kept_in_the_plans_codec_and_weighed(tiny, tmp_path, codec, bits):
    _, (rollout,) = make(tiny, tmp_path / "run", quantization__guidance=codec)
    record = rollout.samples[0].record
    assert {part.codec for part in record.sites.values()} == {codec}
    values = 2 * (32 + 16 + 16)  # two layers: x, k, v
    assert rollout.metrics["guidance_bytes_per_token"] == pytest.approx(values * bits / 8)
    size = record.num_bytes()
    assert (size.codes + size.block_scales) / record.length == pytest.approx(values * bits / 8)


def test_references_keep_whole_codes_and_are_spread_over_the_step(tiny, tmp_path):
    run, _ = make(tiny, tmp_path / "run", steps=0)
    params = sampling_params(run.config, run.policy.defaults)(0)
    rollout = _maker(run).make(run.stream.take(3), params, num_references=3)
    assert [sample.trajectory for sample in rollout.references] == ["0.0.0", "0.1.0", "0.2.0"]
    kept = {sample.trajectory: sample.record for sample in rollout.samples}
    for sample in rollout.references:
        assert {part.codec for part in sample.record.sites.values()} == {"full"}
        assert records_equal(sample.record.recode("mantissa"), kept[sample.trajectory])
        # RES-1: three kept records do not hold the memory of all twelve.
        payload = sample.record.sites[Site("x", 0)].payload
        assert payload.untyped_storage().nbytes() == payload.numel()


def test_bytes_are_computed_without_recoding(tiny, tmp_path):
    _, (rollout,) = make(tiny, tmp_path / "run", quantization__guidance="full")
    size = rollout.samples[0].record.recode("mantissa").num_bytes()
    expected = (size.codes + size.block_scales) / rollout.samples[0].record.length
    assert bytes_per_token(rollout.samples, codec="mantissa") == pytest.approx(expected)
    assert bytes_per_token(rollout.samples, codec="none") == 0.0


def test_both_codecs_keep_the_same_decisions(tiny, tmp_path):
    _, (full,) = make(tiny, tmp_path / "full", quantization__guidance="full")
    _, (bits,) = make(tiny, tmp_path / "bits")
    for one, two in zip(full.samples, bits.samples, strict=True):
        assert records_equal(one.record.recode("mantissa"), two.record)


def test_without_guidance_only_the_routing_is_recorded(tiny, tmp_path):
    _, (rollout,) = make(tiny, tmp_path / "run", quantization__guidance="none")
    assert all(s.record.sites == {} and s.record.routed is not None for s in rollout.samples)
    assert rollout.metrics["guidance_bytes_per_token"] == 0.0


@pytest.mark.parametrize(
    ("mode", "guidance", "replay_routing"),
    [
        ("fp4", "secded", True),
        ("fp4", "secded", False),
        ("fp4", "none", True),
        ("fp4", "none", False),
        ("bf16", "none", True),
    ],
)
def test_samples_keep_the_bytes_that_plan_counts(tiny, tmp_path, mode, guidance, replay_routing):
    run, (rollout,) = make(
        tiny, tmp_path / "run", quantization__mode=mode, quantization__guidance=guidance,
        quantization__replay_routing=replay_routing,
    )  # fmt: skip
    rules, shape = run.config.quantization, shape_by_name(str(tiny[0]))
    counted = record_bytes(shape, decisions_for(shape, rules), rules)
    assert counted.routed_ids == (4 if replay_routing else 0)  # two layers, two of four experts
    for sample in rollout.samples:
        held = sample.record.num_bytes()
        assert (held.total, held.routed) == (
            sample.record.length * counted.total,
            sample.record.length * counted.routed_ids,
        )


def test_penalized_truncation_gets_reward_zero(tiny, tmp_path):
    _, (kept,) = make(tiny, tmp_path / "mask", train__truncated="mask")
    _, (cut,) = make(tiny, tmp_path / "penalize", train__truncated="penalize")
    assert any(s.is_truncated and s.reward > 0 for s in kept.samples)
    for one, two in zip(kept.samples, cut.samples, strict=True):
        assert one.token_ids == two.token_ids
        assert two.reward == (0.0 if two.is_truncated else one.reward)
    share = sum(s.is_truncated for s in cut.samples) / 12
    assert cut.metrics["truncated_fraction"] == pytest.approx(share)


def test_outcomes_are_counted_per_step(tiny, tmp_path):
    _, rollouts = make(tiny, tmp_path / "run", steps=2)
    assert [rollout.metrics["reward/scored"] for rollout in rollouts] == [12.0, 12.0]
    _, (failed,) = make(tiny, tmp_path / "broken", task__reward="math:sqrt")
    assert failed.metrics["reward/error"] == 12.0
    assert failed.metrics["reward_mean"] == 0.0

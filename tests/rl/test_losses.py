"""The loss against hand-worked values, the log of public faults, and finite differences in float64."""

import math

import pytest
import torch

from tracefp4.errors import ConfigError, RecordError
from tracefp4.rl.loss_metrics import merge_metrics
from tracefp4.rl.losses import LossConfig, LossData, grpo_loss, loss_denominator

# hand-worked decimals are written with six digits
SIX_DIGITS = 1e-6


def run(new, *, old=None, rollout=None, advantages=None, mask=None, config=None, denominator=None, ref=None):
    """Call the loss on lists; old and rollout default to new, mask to all, the denominator to its own."""
    new = torch.tensor(new, requires_grad=True) if not isinstance(new, torch.Tensor) else new
    fill = lambda value: new.detach().clone() if value is None else torch.as_tensor(value, dtype=new.dtype)  # noqa: E731
    mask = torch.ones(new.shape, dtype=torch.bool) if mask is None else torch.tensor(mask, dtype=torch.bool)
    advantages = torch.ones(new.shape[0]) if advantages is None else torch.tensor(advantages)
    config = config or LossConfig()
    data = LossData(
        old_logprobs=fill(old),
        rollout_logprobs=fill(rollout if rollout is not None else old),
        advantages=advantages,
        mask=mask,
        ref_logprobs=None if ref is None else torch.as_tensor(ref, dtype=new.dtype),
    )
    denominator = loss_denominator(mask, config=config) if denominator is None else denominator
    output = grpo_loss(new, data=data, config=config, denominator=denominator)
    output.loss.backward()
    return output, new.grad


LOS_6 = {
    "new": [[0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]],
    "mask": [[1, 1, 1, 1], [1, 1, 0, 0]],
    "advantages": [-1.0, -4.0],
}


def config_of(aggregation, constant_length=8):
    return LossConfig(
        aggregation=aggregation, constant_length=constant_length if aggregation == "dr_grpo" else None
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_los_1_a_rejected_token_with_a_huge_weight_leaves_loss_and_gradient_finite(dtype):
    new = torch.tensor([[-1.0, -1.0]], dtype=dtype, requires_grad=True)
    output, grad = run(
        new, old=[[-1.0, -1.0]], rollout=[[-1001.0, -1.0]], config=LossConfig(keep_range=(0.5, 5.0))
    )
    assert output.loss.item() == -0.5
    assert grad.tolist() == [[0.0, -0.5]]
    assert all(math.isfinite(value) for value in output.metrics.values())
    assert output.metrics["tis_dropped_fraction"] == 0.5


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "dr_grpo"])
def test_los_3_zero_advantages_without_kl_give_exactly_zero_gradients(aggregation):
    output, grad = run(
        [[-1.0, -2.0], [-0.5, -0.1]],
        old=[[-1.5, -2.0], [-0.7, -0.1]],
        advantages=[0.0, 0.0],
        config=config_of(aggregation),
    )
    assert output.loss.item() == 0.0
    assert torch.equal(grad, torch.zeros(2, 2))


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "dr_grpo"])
def test_los_5_a_batch_without_trained_tokens_has_loss_zero_and_finite_metrics(aggregation):
    output, grad = run([[-1.0, -2.0], [-3.0, -4.0]], mask=[[0, 0], [0, 0]], config=config_of(aggregation))
    assert output.loss.item() == 0.0
    assert torch.equal(grad, torch.zeros(2, 2))
    assert all(math.isfinite(value) for value in output.metrics.values())
    assert output.metrics["num_tokens"] == 0


@pytest.mark.parametrize(
    ("aggregation", "expected"), [("token_mean", 1.0), ("sequence_mean", 1.0), ("dr_grpo", 3 / 8)]
)
def test_los_5_numerator_and_denominator_use_the_same_mask(aggregation, expected):
    output, _ = run(
        [[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]],
        mask=[[0, 0, 0], [1, 1, 1]],
        advantages=[-1.0, -1.0],
        config=config_of(aggregation),
    )
    assert output.loss.item() == pytest.approx(expected, abs=SIX_DIGITS)


@pytest.mark.parametrize(
    ("aggregation", "expected"), [("token_mean", 2.0), ("sequence_mean", 2.5), ("dr_grpo", 0.75)]
)
def test_los_6_each_aggregation_is_the_one_it_is_called(aggregation, expected):
    output, _ = run(**LOS_6, config=config_of(aggregation))
    assert output.loss.item() == expected


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "dr_grpo"])
def test_los_7_micro_batches_with_the_global_denominator_equal_one_batch(aggregation):
    config = config_of(aggregation)
    whole, grad = run(**LOS_6, config=config)
    masks = [torch.tensor([row], dtype=torch.bool) for row in LOS_6["mask"]]
    denominator = sum(loss_denominator(mask, config=config) for mask in masks)
    parts = [
        run(
            [LOS_6["new"][row]],
            mask=[LOS_6["mask"][row]],
            advantages=[LOS_6["advantages"][row]],
            config=config,
            denominator=denominator,
        )
        for row in range(2)
    ]
    assert sum(output.loss.item() for output, _ in parts) == pytest.approx(whole.loss.item(), abs=SIX_DIGITS)
    assert torch.allclose(torch.cat([part for _, part in parts]), grad, atol=1e-6)
    merged = merge_metrics([output.metrics for output, _ in parts])
    assert merged == pytest.approx(whole.metrics)


def test_los_9_the_weight_comes_from_the_old_log_probs_without_gradient():
    output, grad = run([[-1.0]], old=[[-1.0]], rollout=[[-1.5]], config=LossConfig(tis_cap=2.0))
    assert grad.item() == pytest.approx(-1.648721, abs=SIX_DIGITS)
    assert output.loss.item() == pytest.approx(-1.648721, abs=SIX_DIGITS)


def test_los_9_no_gradient_reaches_the_old_and_rollout_log_probs():
    new = torch.tensor([[-1.0]], requires_grad=True)
    data = LossData(
        old_logprobs=new,
        rollout_logprobs=new - 0.5,
        advantages=torch.ones(1),
        mask=torch.ones(1, 1, dtype=torch.bool),
    )
    grpo_loss(new, data=data, config=LossConfig(), denominator=1.0).loss.backward()
    assert new.grad.item() == pytest.approx(-1.648721, abs=SIX_DIGITS)


@pytest.mark.parametrize("sentinel", [1.0, -math.inf, math.inf, math.nan, 1e9], ids=str)
def test_lgp_5_a_sentinel_at_a_masked_position_changes_nothing(sentinel):
    config = LossConfig(kl_coefficient=0.1, keep_range=(0.5, 5.0), aggregation="sequence_mean")

    def with_value(value):
        row = [[-0.5, value, -0.7]]
        ref = [[-0.6, value, -0.7]]
        return run(row, old=row, rollout=row, mask=[[1, 0, 1]], config=config, ref=ref)

    (clean, clean_grad), (dirty, dirty_grad) = with_value(-0.6), with_value(sentinel)
    assert dirty.loss.item() == clean.loss.item()
    assert torch.equal(dirty_grad, clean_grad)
    assert dirty.metrics == clean.metrics


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "loss", "grad"),
    [
        (math.log(1.5), 1.0, -1.28, 0.0),  # above 1 + .28, gain: clipped
        (math.log(1.1), 1.0, -1.1, -1.1),  # inside
        (math.log(0.5), 1.0, -0.5, -0.5),  # below, gain: not clipped
        (math.log(0.5), -1.0, 0.8, 0.0),  # below 1 - .2, loss: clipped
        (math.log(1.5), -1.0, 1.5, 1.5),  # above, loss: not clipped
        (math.log(4.0), -2.0, 8.0, 8.0),  # unbounded without dual clip
    ],
    ids=["high", "inside", "low gain", "low", "high loss", "far"],
)
def test_ppo_clips_each_side_where_it_should(log_ratio, advantage, loss, grad):
    output, found = run(
        [[-1.0 + log_ratio]], old=[[-1.0]], advantages=[advantage], config=LossConfig(clip_high=0.28)
    )
    assert output.loss.item() == pytest.approx(loss, abs=SIX_DIGITS)
    assert found.item() == pytest.approx(grad, abs=2e-6)


def test_dual_clip_bounds_the_loss_of_negative_advantages_only():
    config = LossConfig(dual_clip=3.0)
    output, grad = run(
        [[math.log(4.0), math.log(4.0)]], old=[[0.0, 0.0]], config=config, advantages=[[-2.0, 2.0]]
    )
    assert output.loss.item() == pytest.approx((6.0 - 2.4) / 2, abs=SIX_DIGITS)
    assert grad.tolist() == [[0.0, 0.0]]
    assert output.metrics["dual_clip_fraction"] == 0.5


def test_metrics_count_clipping_and_truncation():
    new = [[math.log(0.5), math.log(2.0), 0.0, 0.0]]
    output, _ = run(
        new,
        old=[[0.0] * 4],
        rollout=[[0.0, 0.0, -math.log(10.0), -math.log(2.0)]],
        advantages=[[-1.0, 1.0, 1.0, 1.0]],
    )
    metrics = output.metrics
    assert metrics["clip_low_fraction"] == 0.25
    assert metrics["clip_high_fraction"] == 0.25
    assert metrics["ratio_mean"] == pytest.approx(4.5 / 4)
    assert metrics["ratio_max"] == pytest.approx(2.0)
    assert metrics["tis_clipped_fraction"] == 0.25
    assert metrics["tis_raw_max"] == pytest.approx(10.0)
    assert metrics["tis_mean"] == pytest.approx((1 + 1 + 5 + 2) / 4)
    assert metrics["tis_raw_mean"] == pytest.approx(14 / 4)


def test_without_cap_and_range_the_weight_is_one():
    output, grad = run([[-1.0]], old=[[-1.0]], rollout=[[-3.0]], config=LossConfig(tis_cap=None))
    assert output.loss.item() == -1.0
    assert grad.item() == -1.0


def test_keep_range_without_cap_keeps_the_raw_weight_inside():
    output, _ = run(
        [[-1.0, -1.0]],
        old=[[-1.0, -1.0]],
        rollout=[[-1.0 - math.log(4), -1.0 - math.log(6)]],
        config=LossConfig(tis_cap=None, keep_range=(0.5, 5.0)),
    )
    assert output.loss.item() == pytest.approx(-2.0, abs=SIX_DIGITS)


def test_reference_kl_is_k3_and_is_not_weighted():
    output, grad = run(
        [[-1.0]],
        old=[[-1.0]],
        rollout=[[-2.0]],
        advantages=[0.0],
        ref=[[-1.5]],
        config=LossConfig(kl_coefficient=0.1),
    )
    k3 = math.exp(-0.5) + 0.5 - 1.0
    assert output.loss.item() == pytest.approx(0.1 * k3, abs=1e-7)
    assert grad.item() == pytest.approx(0.1 * (1.0 - math.exp(-0.5)), abs=1e-7)
    assert output.metrics["reference_kl"] == pytest.approx(k3, abs=SIX_DIGITS)


def test_log_ratios_beyond_the_bound_are_clamped():
    output, grad = run([[30.0]], old=[[0.0]], advantages=[-1.0])
    assert output.loss.item() == pytest.approx(math.exp(20.0), rel=1e-6)
    assert grad.item() == 0.0


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "dr_grpo"])
def test_gradient_agrees_with_finite_differences(aggregation):
    generator = torch.Generator().manual_seed(3)
    draw = lambda spread: spread * torch.randn(3, 5, dtype=torch.float64, generator=generator)  # noqa: E731
    old = -1.0 + draw(0.5)
    mask = torch.rand(3, 5, generator=generator) < 0.7
    new = (old + draw(0.3)).requires_grad_(True)  # no ratio within 1e-4 of a clipping edge at this seed
    config = LossConfig(
        aggregation=aggregation,
        constant_length=8 if aggregation == "dr_grpo" else None,
        clip_high=0.28,
        dual_clip=3.0,
        kl_coefficient=0.05,
        keep_range=(0.3, 6.0),
    )
    data = LossData(
        old_logprobs=old,
        rollout_logprobs=old + draw(0.5),
        advantages=draw(1.0)[:, 0],
        mask=mask,
        ref_logprobs=old + draw(0.2),
    )
    ratio = (new - old).exp()
    assert min((ratio - edge).abs().min() for edge in (0.8, 1.28, 3.0)) > 1e-4
    assert torch.autograd.gradcheck(
        lambda logprobs: grpo_loss(logprobs, data=data, config=config, denominator=7.0).loss, (new,)
    )


@pytest.mark.parametrize("name", ["logprobs", "old_logprobs", "rollout_logprobs", "advantages"])
def test_a_nan_at_a_trained_token_is_refused_with_its_position(name):
    values = {
        key: torch.zeros(2, 3) for key in ("logprobs", "old_logprobs", "rollout_logprobs", "advantages")
    }
    values[name][1, 2] = math.nan
    data = LossData(
        mask=torch.ones(2, 3, dtype=torch.bool),
        **{key: value for key, value in values.items() if key != "logprobs"},
    )
    with pytest.raises(RecordError, match=f"{name} .*sample 1, position 2"):
        grpo_loss(values["logprobs"], data=data, config=LossConfig(keep_range=(0.5, 2.0)), denominator=6.0)


@pytest.mark.parametrize(
    "fields",
    [
        {"clip_low": 1.0},
        {"clip_high": -0.1},
        {"dual_clip": 1.0},
        {"tis_cap": 0.0},
        {"keep_range": (2.0, 1.0)},
        {"aggregation": "mean"},
        {"aggregation": "dr_grpo"},
        {"constant_length": 4},
        {"kl_coefficient": -1.0},
        {"clip_low": math.nan},
    ],
    ids=str,
)
def test_a_config_outside_its_range_is_refused(fields):
    with pytest.raises(ConfigError, match=r"LossConfig\."):
        LossConfig(**fields)


def test_shapes_masks_and_a_missing_reference_are_refused():
    zeros, mask = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)

    def call(new=zeros, denominator=6.0, config=None, **changes):
        fields = {
            "old_logprobs": zeros,
            "rollout_logprobs": zeros,
            "advantages": torch.zeros(2),
            "mask": mask,
        }
        data = LossData(**{**fields, **changes})
        return grpo_loss(new, data=data, config=config or LossConfig(), denominator=denominator)

    call()
    for arguments in (
        {"new": torch.zeros(6)},
        {"mask": mask.long()},
        {"old_logprobs": torch.zeros(2, 2)},
        {"advantages": torch.zeros(3)},
        {"denominator": -1.0},
        {"denominator": math.nan},
        {"config": LossConfig(kl_coefficient=0.1)},
    ):
        with pytest.raises(ConfigError):
            call(**arguments)


def test_merge_metrics_weights_by_tokens_and_ignores_empty_parts():
    one = {"num_tokens": 1.0, "ratio_mean": 2.0, "ratio_max": 2.0, "ratio_min": 2.0}
    three = {"num_tokens": 3.0, "ratio_mean": 1.0, "ratio_max": 1.5, "ratio_min": 0.5}
    none = {"num_tokens": 0.0, "ratio_mean": 1.0, "ratio_max": 99.0, "ratio_min": -99.0}
    assert merge_metrics([one, none, three]) == {
        "num_tokens": 4.0,
        "ratio_mean": 1.25,
        "ratio_max": 2.0,
        "ratio_min": 0.5,
    }
    assert merge_metrics([none]) == none
    assert merge_metrics([]) == {}

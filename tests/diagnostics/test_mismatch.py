"""Mismatch metrics against values worked out by hand."""

import math

import pytest
import torch

from tracefp4.diagnostics.mismatch import mismatch_by_lag, mismatch_metrics, summary_metrics, token_pair
from tracefp4.errors import ConfigError, RecordError

# sequence 0 has p = (.5, .25), q = (.25, .5); sequence 1 has p = q = .5; masked entries hold NaN
LN2 = math.log(2.0)
TRAIN = torch.tensor([[-LN2, -2 * LN2], [-LN2, math.nan]], dtype=torch.float64)
ROLLOUT = torch.tensor([[-2 * LN2, -LN2], [-LN2, math.nan]], dtype=torch.float64)
MASK = torch.tensor([[True, True], [True, False]])
EXACT = 1e-12


def metrics(train=TRAIN, rollout=ROLLOUT, mask=MASK):
    return mismatch_metrics(train, rollout_logprobs=rollout, mask=mask)


HAND_WORKED = {
    # d = (ln 2, -ln 2, 0)
    "mismatch/num_tokens": 3.0,
    "mismatch/abs_mean": 2 * LN2 / 3,
    "mismatch/abs_p99": LN2,
    "mismatch/abs_max": LN2,
    "mismatch/k1": 0.0,
    "mismatch/k2": LN2**2 / 3,
    # e^d - 1 - d: 1 - ln2, -1/2 + ln2, 0
    "mismatch/k3": 0.5 / 3,
    "rollout_corr/kl": 0.0,
    "rollout_corr/k3_kl": 0.5 / 3,
    # mean log p: -1.5 ln2 and -ln2, on both sides
    "rollout_corr/training_ppl": (2**1.5 + 2) / 2,
    "rollout_corr/training_log_ppl": 1.25 * LN2,
    "rollout_corr/rollout_ppl": (2**1.5 + 2) / 2,
    "rollout_corr/rollout_log_ppl": 1.25 * LN2,
    "rollout_corr/log_ppl_diff": 0.0,
    "rollout_corr/log_ppl_abs_diff": 0.0,
    "rollout_corr/log_ppl_diff_max": 0.0,
    "rollout_corr/log_ppl_diff_min": 0.0,
    "rollout_corr/ppl_ratio": 1.0,
    # squares of the ratios: 4, 1/4, 1
    "rollout_corr/chi2_token": 5.25 / 3 - 1,
    "rollout_corr/chi2_seq": 0.0,
    # |p - q| = (.25, .25, 0): mean 1/6, unbiased std sqrt(1/48)
    "training/rollout_probs_diff_max": 0.25,
    "training/rollout_probs_diff_mean": 0.5 / 3,
    "training/rollout_probs_diff_std": math.sqrt(1 / 48),
    # p = (.5, .25, .5), q = (.25, .5, .5): covariance -1/72, variances 1/36 over the same count
    "training/rollout_actor_probs_pearson_corr": -0.5,
    "token_mult_prob_error": 5 / 3,
    "gen_kl_error": 0.5 / 3,
    "policy_kl_error": 0.5 / 3,
    # m = 3/8: tokens 0 and 1 each (3/4 - 1 - ln(3/4) + 3/2 - 1 - ln(3/2)) / 2 with k3(x) = e^-x - 1 + x
    "sampling_importance_ratio": 3.5 / 3,
}


@pytest.mark.parametrize("name", HAND_WORKED)
def test_each_metric_has_its_hand_worked_value(name):
    assert metrics()[name] == pytest.approx(HAND_WORKED[name], abs=EXACT)


def test_js_divergence_is_the_mean_of_two_k3_terms_to_the_mixture():
    # m = 3/8 for tokens 0 and 1; k3 of log(p/m), NeMo-RL's sign: r - 1 - ln r with r = p/m = 4/3 and 2/3
    per_token = ((4 / 3 - 1 - math.log(4 / 3)) + (2 / 3 - 1 - math.log(2 / 3))) / 2
    assert metrics()["js_divergence_error"] == pytest.approx(2 * per_token / 3, abs=EXACT)


def test_every_name_is_tested():
    assert set(metrics()) == {*HAND_WORKED, "js_divergence_error"}


def test_the_sign_of_d_is_train_minus_rollout():
    found = mismatch_metrics(
        torch.tensor([[-1.0, -1.0]]),
        rollout_logprobs=torch.tensor([[-2.0, -2.0]]),
        mask=torch.ones(1, 2, dtype=torch.bool),
    )
    assert found["mismatch/k1"] == -1.0
    assert found["rollout_corr/kl"] == -1.0
    assert found["rollout_corr/log_ppl_diff"] == -1.0
    assert found["gen_kl_error"] == pytest.approx(math.e - 2)
    assert found["policy_kl_error"] == pytest.approx(1 / math.e)
    assert found["rollout_corr/chi2_seq"] == pytest.approx(math.exp(4.0) - 1)


def test_equal_sides_are_at_the_perfect_value_of_every_metric():
    found = metrics(rollout=TRAIN)
    ones = {
        "token_mult_prob_error",
        "sampling_importance_ratio",
        "rollout_corr/ppl_ratio",
        "training/rollout_actor_probs_pearson_corr",
    }
    for name, value in found.items():
        if name not in {"mismatch/num_tokens"} and "ppl" not in name.replace("log_ppl_", "").replace(
            "_ratio", ""
        ):
            assert value == (1.0 if name in ones else 0.0), name
    assert found["rollout_corr/training_ppl"] == found["rollout_corr/rollout_ppl"]


@pytest.mark.parametrize("side", ["train", "rollout"])
@pytest.mark.parametrize("bad", [math.nan, -math.inf], ids=str)
def test_lgp_4_a_nan_is_an_error_with_its_position_and_never_a_smaller_difference(side, bad):
    sides = {"train": TRAIN.clone(), "rollout": ROLLOUT.clone()}
    sides[side][1, 0] = bad
    with pytest.raises(RecordError, match=f"on the {side} side at sample 1, position 0"):
        metrics(**sides)


def test_no_trained_token_reports_its_count_and_nothing_else():
    assert metrics(mask=torch.zeros_like(MASK)) == {"mismatch/num_tokens": 0.0}


def test_a_huge_difference_stays_finite_where_the_frameworks_clamp():
    pair = token_pair(
        torch.tensor([[0.0]]), rollout_logprobs=torch.tensor([[-1000.0]]), mask=torch.tensor([[True]])
    )
    found = mismatch_metrics(
        torch.tensor([[0.0]]), rollout_logprobs=torch.tensor([[-1000.0]]), mask=torch.tensor([[True]])
    )
    assert found["rollout_corr/chi2_token"] == pytest.approx(math.exp(40.0))
    assert found["sampling_importance_ratio"] == 0.0
    assert summary_metrics(pair)["mismatch/abs_max"] == 1000.0


def test_p99_interpolates_between_order_statistics():
    train = -torch.arange(1, 102, dtype=torch.float64)[None]
    found = mismatch_metrics(train, rollout_logprobs=torch.zeros_like(train), mask=torch.ones(1, 101).bool())
    assert found["mismatch/abs_p99"] == pytest.approx(100.0)


def test_metrics_by_version_lag_split_the_tokens():
    lag = torch.tensor([[0, 2], [0, -1]])
    found = mismatch_by_lag(TRAIN, rollout_logprobs=ROLLOUT, mask=MASK, version_lag=lag)
    assert list(found) == [0, 2]
    assert [found[key]["mismatch/num_tokens"] for key in found] == [2.0, 1.0]
    assert found[2]["mismatch/k1"] == pytest.approx(LN2)


def test_wrong_shapes_and_masks_are_refused():
    with pytest.raises(ConfigError, match="one shape"):
        metrics(rollout=ROLLOUT[:1])
    with pytest.raises(ConfigError, match="boolean"):
        metrics(mask=MASK.long())

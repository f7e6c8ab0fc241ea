"""Training samples: one length for all per-token arrays, cuts that take all along, refused log-probs."""

import math

import pytest
import torch

from tracefp4.errors import ConfigError, RecordError
from tracefp4.guidance.record import Record, RecordIdentity
from tracefp4.rl.samples import TrainingSample, check_logprobs, spread


def rows(length, *, start=0, trajectory="a"):
    """A guidance record of `length` positions; the version of position p is p, so rows can be told apart."""
    identity = RecordIdentity(
        trajectory=trajectory,
        weight_versions=torch.arange(start, start + length, dtype=torch.int32),
        scheme_digest="s",
        plan_digest="p",
    )
    valid = torch.ones(length, dtype=torch.bool)
    return Record(identity=identity, start=start, length=length, sites={}, routed=None, valid=valid)


def sample(prompt=5, completion=6, **changes):
    fields = {
        "trajectory": "a",
        "prompt_ids": tuple(range(10, 10 + prompt)),
        "token_ids": tuple(range(20, 20 + completion)),
        "rollout_logprobs": tuple(-0.1 * (index + 1) for index in range(completion)),
        "weight_versions": tuple([3] * (completion // 2) + [4] * (completion - completion // 2)),
    }
    return TrainingSample(**{**fields, **changes})


def test_aln_1_a_record_has_one_row_less_than_tokens():
    good = sample(2, 3, record=rows(4))
    assert good.input_ids == (10, 11, 20, 21, 22)
    for wrong in (3, 5):
        with pytest.raises(RecordError, match=r"allowed is 0 \.\. 3"):
            sample(2, 3, record=rows(wrong))


def test_aln_3_a_cut_takes_tokens_log_probs_and_record_together():
    whole = sample(record=rows(10))
    eight = whole.truncate(8)
    assert eight.num_tokens == 8
    assert eight.token_ids == (20, 21, 22)
    assert eight.rollout_logprobs == whole.rollout_logprobs[:3]
    assert eight.weight_versions == (3, 3, 3)
    assert eight.record.versions().tolist() == list(range(8))
    assert eight.is_truncated and eight.finish_reason == "length"
    four = whole.truncate(4)
    assert four.input_ids == (10, 11, 12, 13)
    assert four.token_ids == () and four.record.versions().tolist() == [0, 1, 2, 3]
    assert whole.truncate(11) is whole
    assert eight.truncate(7).record.length == 7


@pytest.mark.parametrize(
    ("field", "values"), [("rollout_logprobs", (-0.1,) * 5), ("weight_versions", (3,) * 7)]
)
def test_aln_3_arrays_of_another_length_are_refused(field, values):
    with pytest.raises(RecordError, match=f"{len(values)} {field} for 6 completion"):
        sample(**{field: values})


def test_aln_5_training_sees_the_sampled_ids():
    # vocabulary: 3 = 'a', 4 = 'b', 7 = 'ab'; encoding the text 'ab' again would give (7,)
    found = sample(1, 2, token_ids=[3, 4])
    assert found.token_ids == (3, 4)
    with pytest.raises(RecordError, match="2 rollout_logprobs for 1"):
        sample(1, 2, token_ids=[7])


@pytest.mark.parametrize("bad", [None, math.nan, -math.inf, math.inf, 1.0], ids=str)
def test_lgp_4_a_log_prob_that_no_softmax_gives_is_refused_with_its_position(bad):
    with pytest.raises(RecordError, match=r"'a' has rollout log-prob .* at completion position 1"):
        sample(1, 4, rollout_logprobs=[-0.5, bad, -0.2, -1.0])
    with pytest.raises(RecordError, match=r"'b' has .* position 0"):
        check_logprobs([bad], sample="b")


def test_records_of_another_trajectory_or_start_are_refused():
    with pytest.raises(RecordError, match="trajectory 'b'"):
        sample(record=rows(10, trajectory="b"))
    with pytest.raises(RecordError, match=r"rows 1 \.\. 10"):
        sample(record=rows(10, start=1))


def test_an_engine_that_hit_its_limit_has_no_row_for_the_last_token():
    found = sample(record=rows(10), is_truncated=True, finish_reason="length")
    assert found.record.length == 10


def test_version_lag_is_that_of_the_oldest_token():
    assert sample().version_lag(5) == 2
    assert sample(2, 0).version_lag(5) == 0


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"prompt_ids": ()}, ConfigError),
        ({"finish_reason": "eos"}, ConfigError),
        ({"reward": math.nan}, RecordError),
        ({"advantage": math.inf}, RecordError),
    ],
    ids=["prompt", "reason", "reward", "advantage"],
)
def test_other_fields_outside_their_range_are_refused(fields, error):
    with pytest.raises(error):
        sample(**fields)
    with pytest.raises(ConfigError, match="max_tokens"):
        sample().truncate(0)


def test_untrained_tokens_have_no_log_prob_and_no_version():
    # Mutation: the environment's tokens keep what the caller put there.
    found = sample(
        1,
        5,
        rollout_logprobs=[-0.5, None, math.nan, 1.0, -0.25],
        weight_versions=[3, None, 0, 0, 4],
        trained_mask=[1, 0, 0, 0, 1],
    )
    assert found.trained_mask == (True, False, False, False, True)
    assert found.rollout_logprobs == (-0.5, 0.0, 0.0, 0.0, -0.25)
    assert found.weight_versions == (3, -1, -1, -1, 4)
    assert found.num_trained == 2
    assert sample(1, 5).num_trained == 5 and sample(1, 2).trained_flags == (True, True)
    with pytest.raises(RecordError, match="log-prob None at completion position 4"):
        sample(1, 5, rollout_logprobs=[-0.5, 0, 0, 0, None], trained_mask=[1, 0, 0, 0, 1])


def test_ver_1_the_lag_of_a_sample_is_that_of_its_trained_tokens():
    # Mutation: a tool's answer without a version makes every sample too old.
    found = sample(1, 8, weight_versions=[7, 7, 7, 8, 9, 9, 9, 9])
    assert found.version_lag(9) == 2
    turns = sample(1, 8, weight_versions=[None] * 3 + [8] + [9] * 4, trained_mask=[False] * 3 + [True] * 5)
    assert turns.version_lag(9) == 1
    assert sample(1, 2, weight_versions=[0, 0], trained_mask=[False, False]).version_lag(9) == 0


def test_aln_3_flags_are_cut_with_their_tokens_and_refused_at_another_length():
    found = sample(1, 5, trained_mask=[True, False, True, True, True]).truncate(3)
    assert found.trained_mask == (True, False)
    with pytest.raises(RecordError, match="4 trained_mask for 6 completion"):
        sample(trained_mask=[True] * 4)


@pytest.mark.parametrize(
    ("num", "count", "expected"),
    [
        (12, 8, [0, 1, 3, 4, 6, 7, 9, 10]),
        (7, 4, [0, 1, 3, 5]),
        (6, 2, [0, 3]),
        (3, 9, [0, 1, 2]),
        (0, 4, []),
        (5, 0, []),
    ],
)
def test_items_are_spread_over_the_whole_whatever_their_number(num, count, expected):
    # Mutation: items[:: num // count][:count], which takes the first 8 of 12: groups at the end are never seen.
    assert spread(range(num), count=count) == expected

"""Group advantages against hand-worked values."""

import math

import pytest
import torch

from tracefp4.errors import ConfigError, RecordError
from tracefp4.rl.advantages import AdvantageConfig, group_advantages

EQUAL = [[1.0] * 4, [0.0] * 4, [0.1] * 4]
MIXED = [0.0, 1.0, 1.0, 0.0]


def advantages(rewards, groups, dtype=torch.float32, normalize="std"):
    return group_advantages(
        torch.tensor(rewards, dtype=dtype),
        groups=torch.tensor(groups),
        config=AdvantageConfig(normalize=normalize),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("normalize", ["std", "none"])
def test_los_3_equal_rewards_give_exactly_zero_and_are_reported(dtype, normalize):
    rewards = [value for group in [*EQUAL, MIXED] for value in group]
    groups = [index for index in range(4) for _ in range(4)]
    found = advantages(rewards, groups, dtype, normalize)
    assert found.values[:12].tolist() == [0.0] * 12
    assert found.skipped.tolist() == [True] * 12 + [False] * 4
    assert (found.num_groups, found.num_skipped_groups) == (4, 3)
    size = 0.5 / (0.5773502691896258 + 1e-6) if normalize == "std" else 0.5
    assert found.values[12:].tolist() == pytest.approx([-size, size, size, -size], abs=1e-7)


@pytest.mark.parametrize("size", [1, 3, 5, 6, 7, 10])
@pytest.mark.parametrize("value", [0.1, 0.3, 1e300])
def test_los_3_a_mean_that_is_off_by_a_bit_invents_no_advantage(size, value):
    found = advantages([value] * size, [0] * size, torch.float64)
    assert found.values.tolist() == [0.0] * size
    assert found.num_skipped_groups == 1
    assert found.group_std_mean == 0.0


def test_groups_may_be_interleaved_and_of_different_sizes():
    found = advantages([1.0, 5.0, 3.0, 5.0, 2.0], [7, -1, 7, -1, 3], normalize="none")
    assert found.values.tolist() == [-1.0, 0.0, 1.0, 0.0, 0.0]
    assert found.skipped.tolist() == [False, True, False, True, True]
    assert found.reward_mean == pytest.approx(3.2)


def test_a_tiny_real_difference_is_not_skipped():
    found = advantages([0.1, 0.1 + 1e-12], [0, 0], torch.float64)
    assert found.num_skipped_groups == 0
    assert found.values[1] > 0


def test_no_rewards_give_no_advantages():
    found = group_advantages(
        torch.zeros(0), groups=torch.zeros(0, dtype=torch.int64), config=AdvantageConfig()
    )
    assert found.values.shape == (0,)
    assert found.num_groups == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=str)
def test_a_reward_that_is_not_finite_is_refused(bad):
    with pytest.raises(RecordError, match="sample 1"):
        advantages([0.0, bad], [0, 0])


def test_wrong_shapes_and_configs_are_refused():
    with pytest.raises(ConfigError, match="Flatten both"):
        group_advantages(torch.zeros(2, 2), groups=torch.zeros(4), config=AdvantageConfig())
    with pytest.raises(ConfigError, match="normalize"):
        AdvantageConfig(normalize="population")
    with pytest.raises(ConfigError, match="epsilon"):
        AdvantageConfig(epsilon=0.0)

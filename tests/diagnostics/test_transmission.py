"""Update transmission: slope, interval and noise against hand-worked values and a simulation."""

import math

import pytest
import torch

from tracefp4.diagnostics.transmission import student_quantile, update_transmission
from tracefp4.errors import ConfigError, RecordError

FLOAT64 = 1e-12


def regress(quantized, reference, mask=None, **options):
    quantized, reference = (torch.tensor(rows, dtype=torch.float64) for rows in (quantized, reference))
    mask = torch.ones(reference.shape, dtype=torch.bool) if mask is None else torch.tensor(mask)
    return update_transmission(quantized, reference_change=reference, mask=mask, **options)


def test_hand_worked_slope_noise_and_interval():
    # a = (1, 2 | 2), b = (1, 1 | 3): slope (1+2+6)/9 = 1; residuals (0, -1 | 1)
    found = regress(
        [[1.0, 1.0], [3.0, math.nan]], [[1.0, 2.0], [2.0, math.nan]], [[True, True], [True, False]]
    )
    assert found.slope == pytest.approx(1.0, abs=FLOAT64)
    assert found.signal_rms == pytest.approx(math.sqrt(3.0), abs=FLOAT64)
    assert found.noise_ratio == pytest.approx(math.sqrt(2 / 3) / math.sqrt(3.0), abs=FLOAT64)
    # cluster scores -2 and 2: variance 8/81 * 2; t of one degree at 97.5% is 12.7062
    half_width = 12.706204736 * math.sqrt(16 / 81)
    assert found.high - found.slope == pytest.approx(half_width, rel=1e-9)
    assert found.slope - found.low == pytest.approx(half_width, rel=1e-9)
    assert (found.num_tokens, found.num_clusters) == (3, 2)


@pytest.mark.parametrize("share", [0.0, 0.1, 1.0, -1.0])
def test_an_exactly_scaled_change_has_that_slope_no_noise_and_no_width(share):
    change = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = update_transmission(
        share * change, reference_change=change, mask=torch.ones(4, 6, dtype=torch.bool)
    )
    assert found.slope == pytest.approx(share, abs=FLOAT64)
    assert found.noise_ratio == pytest.approx(0.0, abs=FLOAT64)
    assert found.high - found.low == pytest.approx(0.0, abs=FLOAT64)


def test_there_is_no_intercept():
    assert regress([[2.0, 3.0]], [[1.0, 2.0]]).slope == pytest.approx(8 / 5, abs=FLOAT64)


def test_the_interval_covers_the_true_slope_as_often_as_it_says_under_correlated_noise():
    generator = torch.Generator().manual_seed(1)
    mask, covered = torch.ones(8, 16, dtype=torch.bool), 0
    for _ in range(200):
        change = torch.randn(8, 16, generator=generator)
        shared = torch.randn(8, 1, generator=generator) * change.sign()  # noise common to a sequence
        noisy = 0.4 * change + 0.5 * shared + 0.3 * torch.randn(8, 16, generator=generator)
        found = update_transmission(noisy, reference_change=change, mask=mask)
        covered += found.low <= 0.4 <= found.high
    assert 178 <= covered <= 199  # 95% of 200 is 190; four standard deviations of a binomial are 12


def test_no_change_of_the_unquantized_model_gives_no_slope_and_no_number_for_it():
    found = regress([[0.1, -0.1]], [[0.0, 0.0]])
    assert math.isnan(found.slope) and found.signal_rms == 0.0
    assert found.metrics() == {"transmission/signal_rms": 0.0, "transmission/num_tokens": 2.0}


def test_a_single_sequence_uses_its_tokens_and_a_single_token_has_no_interval():
    assert regress([[1.0, 1.0, 3.0]], [[1.0, 2.0, 2.0]]).num_clusters == 3
    lone = regress([[1.0]], [[2.0]])
    assert lone.slope == 0.5 and math.isnan(lone.low)
    assert "transmission/low" not in lone.metrics()


@pytest.mark.parametrize(
    ("degrees", "expected", "relative"),
    # two-sided 95% points of a printed t table
    [
        (1, 12.7062, 1e-5),
        (2, 4.30265, 1e-5),
        (3, 3.18245, 2e-2),
        (5, 2.57058, 2e-3),
        (7, 2.36462, 1e-3),
        (15, 2.13145, 1e-4),
        (1000, 1.96234, 1e-5),
    ],
)
def test_student_quantiles_match_the_table(degrees, expected, relative):
    assert student_quantile(0.975, degrees=degrees) == pytest.approx(expected, rel=relative)


def test_bad_input_is_refused():
    with pytest.raises(RecordError, match="reference_change at sample 0, position 1"):
        regress([[1.0, 1.0]], [[1.0, math.inf]])
    with pytest.raises(ConfigError, match="at least one token"):
        regress([[1.0]], [[1.0]], [[False]])
    with pytest.raises(ConfigError, match="confidence"):
        regress([[1.0]], [[1.0]], confidence=1.0)
    with pytest.raises(ConfigError, match="one shape"):
        regress([[1.0]], [[1.0, 2.0]])

"""Paired comparisons: by hand, against scipy's numbers, and what a single seed may claim."""

import math
from dataclasses import replace

import pytest

from tracefp4.study.following import FollowingSettings, check_claims, jobs
from tracefp4.study.verdict import Comparison, compare_cells, gains

# student_quantile is an expansion, good to about 1e-3 at four degrees of freedom; times sd / sqrt(5)
QUANTILE_ERROR = 1e-5


def _rows(areas, *, cell="lag0_steps1"):
    return [
        {"cell": cell, "arm": arm, "seed": seed, "area": area, "accuracy_before": 0.1, "accuracy_after": area}
        for arm, values in areas.items()
        for seed, area in enumerate(values)
    ]


def test_difference_and_bounds_by_hand():
    rows = _rows({"gated": [0.30, 0.34, 0.32, 0.36, 0.33], "ungated": [0.31, 0.33, 0.30, 0.34, 0.32]})
    (found,) = compare_cells(rows)
    # differences -.01 .01 .02 .02 .01: mean .01, sd .012247; t(.95, 4) = 2.131847 (any table)
    assert found.difference == pytest.approx(0.01)
    half_width = 2.131847 * 0.0122474487 / math.sqrt(5)
    assert found.low == pytest.approx(0.01 - half_width, abs=QUANTILE_ERROR)
    assert found.high == pytest.approx(0.01 + half_width, abs=QUANTILE_ERROR)
    assert (found.arm, found.base, found.num_seeds) == ("gated", "ungated", 5)


def test_pairs_are_by_seed_whatever_the_order_of_the_rows():
    rows = _rows({"gated": [0.1, 0.9], "ungated": [0.0, 0.8]})
    (found,) = compare_cells(rows[::-1])
    assert found.difference == pytest.approx(0.1)
    assert found.high - found.low == pytest.approx(0.0, abs=1e-12)


def test_seeds_that_one_arm_lacks_are_left_out():
    (found,) = compare_cells(_rows({"gated": [0.5, 0.6, 0.7], "qat": [0.4, 0.5]}))
    assert found.num_seeds == 2
    assert compare_cells(_rows({"gated": [0.5]})) == []


def test_a_single_seed_claims_nothing():
    (found,) = compare_cells(_rows({"gated": [0.5], "ungated": [0.4]}))
    assert math.isnan(found.low)
    assert check_claims([found], {})["gated_not_worse"] is False


@pytest.mark.parametrize(("low", "holds"), [(-0.019, True), (-0.021, False)])
def test_the_margin_is_two_hundredths(low, holds):
    made = Comparison(cell="c", arm="gated", base="ungated", difference=0.0, low=low, high=0.1, num_seeds=5)
    claims = check_claims([made], {"c": 0.2})
    assert claims == {"task_teaches": True, "gated_not_worse": holds, "coded_not_worse": False}
    coded = check_claims([replace(made, arm="coded")], {"c": 0.2})
    assert coded == {"task_teaches": True, "gated_not_worse": False, "coded_not_worse": holds}
    assert check_claims([made], {"c": 0.14})["task_teaches"] is False


def test_one_bad_cell_is_enough():
    good = Comparison(cell="a", arm="gated", base="ungated", difference=0.0, low=0.0, high=0.1, num_seeds=5)
    bad = Comparison(cell="b", arm="gated", base="ungated", difference=-0.1, low=-0.2, high=0.0, num_seeds=5)
    assert not check_claims([good, bad], {})["gated_not_worse"]


def test_gains_are_means_over_the_seeds():
    rows = _rows({"bf16": [0.3, 0.5], "qat": [0.2]})
    assert gains(rows, arm="bf16") == {"lag0_steps1": pytest.approx(0.3)}


def test_every_cell_has_every_arm_and_seed_once():
    found = jobs(FollowingSettings())
    assert len(found) == len({(j.arm, j.seed, j.cell) for j in found}) == 5 * 5 * 4
    assert [j.optimizer_steps for j in found] == sorted((j.optimizer_steps for j in found), reverse=True)


def test_without_a_bf16_arm_nobody_knows_what_the_task_teaches():
    assert set(check_claims([], {}).values()) == {False}

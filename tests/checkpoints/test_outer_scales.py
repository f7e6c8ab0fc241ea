"""Outer scales between the ways they are stored: exact, or refused."""

import pytest
import torch

from tracefp4.checkpoints.outer_scales import are_powers_of_two, converted
from tracefp4.errors import FormatError
from tracefp4.formats.scheme import MAX_EXPONENT, MIN_EXPONENT

EVERY = torch.arange(MIN_EXPONENT, MAX_EXPONENT + 1, dtype=torch.int8)


def test_every_exponent_has_its_power_and_comes_back():
    multiplier = converted(EVERY, kind="exponent", to="multiplier")
    divisor = converted(EVERY, kind="exponent", to="divisor")
    assert multiplier.tolist() == [2.0**k for k in EVERY.tolist()]
    assert divisor.tolist() == [2.0**-k for k in EVERY.tolist()]
    assert torch.equal(converted(multiplier, kind="multiplier", to="divisor"), divisor)
    assert torch.equal(converted(divisor, kind="divisor", to="multiplier"), multiplier)
    assert torch.equal(converted(divisor, kind="divisor", to="exponent"), EVERY)
    assert torch.equal(converted(multiplier, kind="multiplier", to="exponent"), EVERY)


@pytest.mark.parametrize("value", [1.5, 0.0, -1.0, float("inf"), float("nan"), 2.0**-130, 2.0**127])
def test_what_is_no_power_is_refused(value):
    outer = torch.tensor([1.0, value])
    assert are_powers_of_two(outer).tolist() == [True, False]
    with pytest.raises(FormatError, match="Only powers of two"):
        converted(outer, kind="multiplier", to="divisor")
    assert converted(outer, kind="divisor", to="divisor") is outer


def test_an_exponent_out_of_range_and_a_maximum_are_refused():
    with pytest.raises(FormatError, match="multiplier cannot be stored as exponent"):
        converted(torch.tensor(2.0**120), kind="multiplier", to="exponent")
    with pytest.raises(FormatError, match="amax cannot be stored as divisor"):
        converted(torch.tensor(2.0), kind="amax", to="divisor")

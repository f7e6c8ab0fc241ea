"""Static exponents from samples."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tracefp4.errors import FormatError
from tracefp4.formats.calibration import HEADROOM_EXPONENT, calibrate_exponent, check_operand
from tracefp4.formats.schemes import NVFP4_KV


def test_kvq_calibration_leaves_headroom_and_keeps_small_values_normal():
    x = torch.randn(64, 32) * 0.01
    k = calibrate_exponent(x)
    assert HEADROOM_EXPONENT == 3  # 8 times the largest value of the sample still fits
    largest = x.abs().max().item() / 6 / 2.0**k
    assert 448 / 2 ** (HEADROOM_EXPONENT + 1) < largest <= 448 / 2**HEADROOM_EXPONENT
    assert x.abs().view(64, 2, 16).amax(-1).min().item() / 6 / 2.0**k > 2.0**-6
    assert calibrate_exponent(x.double()) == calibrate_exponent(x.bfloat16().float()) == k


@given(st.integers(-80, 80))
def test_calibration_follows_powers_of_two(power):
    x = torch.linspace(-1, 1, 32)
    assert calibrate_exponent(x * 2.0**power) == calibrate_exponent(x) + power


@pytest.mark.parametrize(
    ("sample", "message"), [(torch.zeros(0, 16), "empty"), (torch.tensor([float("nan"), 1]), "NaN")]
)
def test_calibration_refuses_what_it_cannot_measure(sample, message):
    with pytest.raises(FormatError, match=message):
        calibrate_exponent(sample)


def test_calibration_of_zeros_is_the_neutral_exponent():
    assert calibrate_exponent(torch.zeros(4, 16)) == 0


@pytest.mark.parametrize("exponent", [-111, 117, 1.5, torch.tensor(1)], ids=repr)
def test_an_exponent_is_an_int_in_range(exponent):
    with pytest.raises(FormatError, match=r"exponent must lie in \[-110, 116\], an int; got"):
        check_operand(torch.ones(16), NVFP4_KV, exponent)


def test_calibration_stays_in_the_range_of_exponents():
    huge = torch.full((16,), torch.finfo(torch.float32).max)
    assert calibrate_exponent(huge) == 116
    assert calibrate_exponent(torch.full((16,), 2.0**-149)) == -110 + HEADROOM_EXPONENT

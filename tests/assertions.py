"""One assertion per strength of claim: equal bit for bit, within k units in the last place, above a
signal-to-noise ratio, equal lists of names. A numerics test uses the strongest one that is true."""

from collections.abc import Iterable

import torch
from torch import Tensor

_INTEGER_OF_WIDTH = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def assert_bitwise(actual: Tensor, expected: Tensor) -> None:
    """Same dtype, shape and bytes: -0.0 differs from 0.0, and two NaNs are equal only if their bits are."""
    assert actual.dtype == expected.dtype, f"dtype {actual.dtype} != {expected.dtype}"
    assert actual.shape == expected.shape, f"shape {tuple(actual.shape)} != {tuple(expected.shape)}"
    integer = _INTEGER_OF_WIDTH[actual.dtype.itemsize]
    got, want = (
        t.detach().contiguous().view(integer) if t.dtype != torch.bool else t for t in (actual, expected)
    )
    differs = (got != want).nonzero()
    if len(differs):
        where = tuple(differs[0].tolist())
        raise AssertionError(
            f"{len(differs)} of {got.numel()} differ; first at {where}: "
            f"{actual[where].item()!r} != {expected[where].item()!r}"
        )


def assert_same_values(actual: Tensor, expected: Tensor) -> None:
    """Same shape and real numbers, whatever the dtype: -0.0 equals 0.0, NaN equals NaN."""
    assert actual.shape == expected.shape, f"shape {tuple(actual.shape)} != {tuple(expected.shape)}"
    torch.testing.assert_close(actual.double(), expected.double(), rtol=0, atol=0, equal_nan=True)


def assert_within_ulp(actual: Tensor, expected: Tensor, ulps: int) -> None:
    """Same dtype and shape, and at most `ulps` representable numbers apart (finite float32 or float64)."""
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    integer = _INTEGER_OF_WIDTH[actual.dtype.itemsize]
    sign = -(2 ** (8 * actual.dtype.itemsize - 1))

    def ordinal(t: Tensor) -> Tensor:
        bits = t.detach().contiguous().view(integer).to(torch.int64)
        return torch.where(bits < 0, sign - bits, bits)

    worst = (ordinal(actual) - ordinal(expected)).abs().max().item() if actual.numel() else 0
    assert worst <= ulps, f"{worst} units in the last place apart; at most {ulps} allowed"


def sqnr_db(actual: Tensor, expected: Tensor) -> float:
    """Signal-to-quantization-noise ratio, 10 log10(|expected|^2 / |actual - expected|^2), in decibels."""
    signal = expected.double().square().sum()
    noise = (actual.double() - expected.double()).square().sum()
    return float("inf") if noise == 0 else float(10 * torch.log10(signal / noise))


def assert_sqnr(actual: Tensor, expected: Tensor, at_least_db: float) -> None:
    """Signal-to-noise ratio of at least so many decibels."""
    got = sqnr_db(actual, expected)
    assert got >= at_least_db, f"SQNR {got:.2f} dB is below {at_least_db:.2f} dB"


def assert_names_equal(actual: Iterable[str], expected: Iterable[str]) -> None:
    """The same names, in the same order; the message shows what is missing and what is extra."""
    got, want = list(actual), list(expected)
    assert got == want, (
        f"missing {sorted(set(want) - set(got))}, extra {sorted(set(got) - set(want))}, got {got}"
    )

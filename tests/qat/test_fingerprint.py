"""The fingerprint of a tensor's bits: every change is seen, equal bits are equal whatever their memory."""

import pytest
import torch

from tracefp4.qat.fingerprint import _multipliers, _product, fingerprint


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_equal_bits_have_equal_fingerprints(dtype):
    x = torch.randn(3, 8, 32).to(dtype)
    assert fingerprint(x) == fingerprint(x.clone()) == fingerprint(x.transpose(0, 1).clone().transpose(0, 1))
    assert fingerprint(torch.empty(0, 32, dtype=dtype)) == fingerprint(torch.empty(0, 32, dtype=dtype))


def test_every_single_bit_counts():
    x = torch.randn(2, 16)
    seen = {fingerprint(x)}
    for word in range(x.numel()):
        for bit in range(0, 32, 5):
            y = x.clone()
            y.view(torch.int32).view(-1)[word] ^= 1 << bit
            seen.add(fingerprint(y))
    assert len(seen) == 1 + 32 * 7


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.flip(0),
        lambda x: x.flip(1),
        lambda x: x.T,
        lambda x: -x,
        lambda x: x.roll(1, 0),
        lambda x: x * 2,
    ],
    ids=["rows", "columns", "transposed", "signs", "rolled", "doubled"],
)
def test_moves_and_changes_of_every_value_are_seen(change):
    # Mutations: a plain sum; the same multipliers for rows and columns.
    x = torch.randn(32, 32, dtype=torch.float64)
    assert fingerprint(change(x)) != fingerprint(x)


def test_the_product_without_integer_matrices_is_the_same_number():
    words = torch.randint(-(2**63), 2**63 - 1, (7, 33))
    odd = _multipliers(33, 1, torch.device("cpu"))
    assert torch.equal((words * odd).sum(-1), _product(words, odd))

"""Packed rows: the tokens of several samples without padding, and the way back to their samples."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.rl.test_batching import SAMPLES, sample

from tracefp4.errors import ConfigError
from tracefp4.rl.batching import micro_batches, pad, token_logprobs
from tracefp4.rl.packing import pack, packed_micro_batches


@pytest.mark.parametrize("padding", [{}, {"side": "left"}, {"left_extra": 2}], ids=["right", "left", "extra"])
def test_a_packed_row_is_the_tokens_of_every_sample_in_order(padding):
    row = pack(pad(SAMPLES, pad_id=0, **padding))
    assert row.input_ids.tolist() == [[11, 12, 21, 22, 23, 31, 41]]
    assert row.positions.tolist() == [[0, 1, 2, 3, 4, 0, 1]]
    assert row.record_index.tolist() == [[0, 0, 0, 0, 0, 1, 1]]
    assert row.lengths == (5, 2)


def test_values_come_back_to_their_samples():
    batch = pad(SAMPLES, pad_id=0, side="left", left_extra=1)
    row = pack(batch)
    assert torch.equal(row.packed(batch.input_ids), row.input_ids)
    values = torch.arange(1.0, 8.0)[None].requires_grad_()
    back = row.unpacked(values)
    assert back.tolist() == [[0, 1, 2, 3, 4, 5], [0, 0, 0, 0, 6, 7]]
    (back * torch.arange(12.0).view(2, 6)).sum().backward()
    assert values.grad.tolist() == [[1, 2, 3, 4, 5, 10, 11]]


def test_pad_3_labels_do_not_cross_the_border_of_packed_samples():
    # Mutation: every token but the row's first is predicted by the one before it.
    row = pack(pad([sample([31], [32, 33]), sample([41], [42])], pad_id=0))
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 5, 50, generator=generator, dtype=torch.float64).requires_grad_()
    found = token_logprobs(logits, input_ids=row.input_ids, mask=row.labelled())
    labels = [32, 33, None, 42, None]
    expected = torch.log_softmax(logits, dim=-1)
    for place, label in enumerate(labels):
        if label is not None:
            assert found[0, place + 1] == expected[0, place, label]
    assert found[0, [0, 3]].tolist() == [0, 0], "nothing predicts the first token of a sample"
    found.sum().backward()
    assert logits.grad.abs().sum(-1).gt(0).tolist() == [[label is not None for label in labels]]


def test_packed_micro_batches_fill_the_budget_from_long_to_short():
    assert packed_micro_batches([3, 5, 2, 2], max_tokens=7) == [(1, 2), (0, 3)]
    assert packed_micro_batches([], max_tokens=4) == []
    assert packed_micro_batches([4, 4, 4], max_tokens=4) == [(0,), (1,), (2,)]
    with pytest.raises(ConfigError, match="sample 1 of 5"):
        packed_micro_batches([3, 5], max_tokens=4)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 20), max_size=30), st.integers(20, 60))
def test_packed_micro_batches_hold_every_sample_once_within_the_budget(lengths, budget):
    order = packed_micro_batches(lengths, max_tokens=budget)
    assert sorted(index for part in order for index in part) == list(range(len(lengths)))
    sizes = [sum(lengths[index] for index in part) for part in order]
    assert all(size <= budget for size in sizes)
    assert all(one + other > budget for one, other in pairwise(sizes)), "no two neighbours fit into one"
    assert len(order) <= len(micro_batches(lengths, max_tokens=budget, sorts_by_length=True))

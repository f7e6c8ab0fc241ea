"""Which columns a rank holds, and the order in which they come back; the passes are in tests/parity."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tracefp4.errors import ConfigError
from tracefp4.qat import SiteSettings
from tracefp4.qat.context_parallel import (
    LAYOUTS,
    SequenceShard,
    columns_of_ranks,
    context_parallel,
    split_sequence,
)


def shard_of(positions, rank, num_ranks, layout):
    every = columns_of_ranks(positions.shape[1], num_ranks=num_ranks, layout=layout)
    order = every.reshape(-1).argsort()
    return SequenceShard(positions=positions, columns=every[rank], order=order, group=None)


def test_pad_5_eight_tokens_on_two_ranks():
    # Mutations: one layout for both; the second half not mirrored.
    assert columns_of_ranks(8, num_ranks=2, layout="zigzag").tolist() == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert columns_of_ranks(8, num_ranks=2, layout="contiguous").tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


@given(parts=st.integers(1, 5), num_ranks=st.integers(1, 5), layout=st.sampled_from(LAYOUTS))
def test_pad_5_every_column_is_on_one_rank_and_comes_back_in_its_place(parts, num_ranks, layout):
    rows = torch.arange(2 * num_ranks * parts).expand(2, -1)  # record row of token t is t
    shards = [shard_of(rows, rank, num_ranks, layout) for rank in range(num_ranks)]
    joined = torch.cat([shard.take(rows) for shard in shards], 1)
    assert torch.equal(joined.index_select(1, shards[0].order), rows)
    assert all((shard.columns.diff() > 0).all() for shard in shards)


@given(parts=st.integers(1, 4), num_ranks=st.integers(1, 4))
def test_zigzag_gives_every_rank_the_same_number_of_scores(parts, num_ranks):
    every = columns_of_ranks(2 * num_ranks * parts, num_ranks=num_ranks, layout="zigzag")
    assert len({int((columns + 1).sum()) for columns in every}) == 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_query_sees_its_past_and_no_padding(layout):
    positions = torch.tensor([[-1, -1, 0, 1, 2, 3, 4, 5], [0, 1, 2, 3, -1, -1, -1, -1]])
    for rank in range(2):
        shard = shard_of(positions, rank, 2, layout)
        visible = ~shard.hidden_keys(torch.device("cpu"))
        for row in range(2):
            for i, column in enumerate(shard.columns.tolist()):
                own = positions[row, column]
                seen = positions[row][visible[row, 0, i]].tolist()
                assert seen == (list(range(own + 1)) if own >= 0 else positions[row].tolist())


def test_splits_that_are_not_even_or_packed_are_refused():
    with pytest.raises(ConfigError, match=r"10 columns do not divide into 4 equal parts.*12 columns"):
        columns_of_ranks(10, num_ranks=2, layout="zigzag")
    with pytest.raises(ConfigError, match="contiguous, zigzag; got 'striped'"):
        columns_of_ranks(8, num_ranks=2, layout="striped")
    with pytest.raises(ConfigError, match="position 0 after 3 in row 1"):
        split_sequence(torch.tensor([[0, 1, 2, 3, 4, 5], [1, 2, 3, 0, 1, -1]]))


def test_a_split_ends_with_its_context_and_does_not_nest():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.tracefp4 = SiteSettings(0, None, None)

    model, shard = nn.Sequential(Attention(), Attention()), SimpleNamespace()
    with pytest.raises(ConfigError, match="0 patched attention"), context_parallel(nn.Linear(1, 1), shard):
        pass
    with pytest.raises(KeyError), context_parallel(model, shard):
        assert all(layer.tracefp4.sequence is shard for layer in model)
        with pytest.raises(ConfigError, match="split already: True"), context_parallel(model, shard):
            pass
        assert all(layer.tracefp4.sequence is shard for layer in model)
        raise KeyError
    assert all(layer.tracefp4.sequence is None for layer in model)

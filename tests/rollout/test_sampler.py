"""Sampling: noise that depends on identity alone, the distribution after each cut, and its log-probs."""

import math
from dataclasses import replace

import pytest
import torch

from tracefp4.ops.sample import Draws, draw
from tracefp4.ops.sample.noise import uniform
from tracefp4.ops.sample.reference import inverse_cdf, truncated
from tracefp4.rollout.noise import noise_key


def batch(size, *, temperature=1.0, top_k=0, top_p=1.0, seed=0):
    return Draws(
        keys=torch.tensor(
            [noise_key(seed=seed, prompt_index=i, sample_index=0) for i in range(size)], dtype=torch.int64
        ),
        positions=torch.full((size,), 5),
        temperature=torch.full((size,), temperature, dtype=torch.float64),
        top_k=torch.full((size,), top_k),
        top_p=torch.full((size,), top_p, dtype=torch.float64),
    )


def test_noise_is_the_documented_hash():
    # splitmix64's first output for state 0 is 0xE220A8397B1DCDAF: key 0, position 1.
    found = uniform(torch.tensor([0]), torch.tensor([1]))
    assert found.item() == (0xE220A8397B1DCDAF >> 11) * 2.0**-53


def test_noise_is_uniform_and_streams_differ():
    keys = torch.tensor(
        [
            noise_key(seed=s, prompt_index=p, sample_index=i)
            for s in (0, 1)
            for p in range(20)
            for i in range(20)
        ]
    )
    assert keys.unique().numel() == 800
    noise = uniform(keys[:, None].expand(-1, 100).reshape(-1), torch.arange(100).repeat(800))
    # 80,000 draws: standard error of the mean .001, of each tenth's share .001; five of them
    assert abs(noise.mean().item() - 0.5) < 0.005
    assert (torch.histc(noise.float(), 10, 0, 1) / 80_000 - 0.1).abs().max() < 0.0055
    assert noise.min() >= 0 and noise.max() < 1 and noise.unique().numel() > 79_900


def test_a_draw_does_not_depend_on_the_rest_of_the_batch():
    logits = torch.randn(33, 50)
    tokens, logprobs = draw(logits, batch(33))
    alone = batch(33)
    for i in (0, 7, 32):
        columns = {f: getattr(alone, f) for f in alone.__slots__}
        one = Draws(**{f: None if column is None else column[i : i + 1] for f, column in columns.items()})
        token, logprob = draw(logits[i : i + 1], one)
        assert token[0] == tokens[i] and logprob[0] == logprobs[i]


def test_forced_rows_take_their_token_and_its_log_prob_others_are_drawn():
    logits = torch.randn(4, 10)
    free, free_logprobs = draw(logits, batch(4))
    forced = torch.tensor([-1, 3, -1, 9])
    tokens, logprobs = draw(logits, replace(batch(4), forced=forced))
    assert tokens.tolist() == [free[0], 3, free[2], 9]
    expected = logits.double().log_softmax(-1)[[1, 3], [3, 9]]
    assert torch.allclose(logprobs[[1, 3]], expected, atol=1e-12)
    assert torch.equal(logprobs[[0, 2]], free_logprobs[[0, 2]])


def test_frequencies_follow_the_probabilities():
    probs = torch.tensor([0.5, 0.25, 0.125, 0.0, 0.125])
    tokens, logprobs = draw(probs.log().expand(20_000, 5), batch(20_000))
    shares = torch.bincount(tokens, minlength=5) / 20_000
    assert shares[3] == 0 and (shares - probs).abs().max() < 5 * math.sqrt(0.25 / 20_000)
    assert torch.allclose(logprobs.exp(), probs.double()[tokens])


def test_temperature_divides_logits():
    logits = torch.randn(64, 10)
    tokens, logprobs = draw(logits, batch(64, temperature=0.5))
    expected = (logits.double() * 2).log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    assert torch.allclose(logprobs, expected, atol=1e-12)


@pytest.mark.parametrize(
    ("top_k", "top_p", "expected"),
    [
        (0, 1.0, [0.4, 0.1, 0.3, 0.2]),
        (2, 1.0, [4 / 7, 0, 3 / 7, 0]),
        (1, 1.0, [1, 0, 0, 0]),
        (0, 0.39, [1, 0, 0, 0]),
        (0, 0.5, [4 / 7, 0, 3 / 7, 0]),
        (0, 0.75, [4 / 9, 0, 3 / 9, 2 / 9]),
        (0, 1e-9, [1, 0, 0, 0]),
        (9, 1.0, [0.4, 0.1, 0.3, 0.2]),
        (2, 0.5, [1, 0, 0, 0]),
    ],
)
def test_cuts(top_k, top_p, expected):
    probs = torch.tensor([[0.4, 0.1, 0.3, 0.2]], dtype=torch.float64)
    found = truncated(probs, top_k=torch.tensor([top_k]), top_p=torch.tensor([top_p], dtype=torch.float64))
    assert torch.allclose(found, torch.tensor([expected], dtype=torch.float64), atol=1e-15)


def test_ties_at_a_cut_keep_the_lowest_ids():
    probs = torch.full((1, 4), 0.25, dtype=torch.float64)
    found = truncated(probs, top_k=torch.tensor([2]), top_p=torch.tensor([1.0]))
    assert found.tolist() == [[0.5, 0.5, 0, 0]]


def test_logprob_is_of_the_distribution_sampled_from():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]]).expand(200, 4)
    tokens, logprobs = draw(logits, batch(200, top_k=2))
    expected = torch.tensor([2.0, 1.0], dtype=torch.float64).log_softmax(-1)
    assert set(tokens.tolist()) == {0, 1} and torch.allclose(logprobs, expected[tokens])


def test_greedy_rows_take_the_largest_and_mix_with_sampled_ones():
    logits = torch.randn(8, 30)
    mixed = batch(8)
    mixed.temperature[::2] = 0
    tokens, logprobs = draw(logits, mixed)
    assert (tokens[::2] == logits.argmax(-1)[::2]).all()
    expected = logits.double().log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    assert torch.allclose(logprobs, expected)
    sampled, _ = draw(logits, batch(8))
    assert (tokens[1::2] == sampled[1::2]).all()


def test_the_ends_of_the_noise_never_reach_impossible_tokens():
    probs = torch.tensor([[0.0, 0.3, 0.7, 0.0]], dtype=torch.float64)
    assert inverse_cdf(probs, torch.tensor([0.0], dtype=torch.float64)).item() == 1
    assert inverse_cdf(probs, torch.tensor([1.0], dtype=torch.float64)).item() == 2


def test_no_rows():
    tokens, logprobs = draw(torch.zeros(0, 5), batch(0))
    assert tokens.shape == logprobs.shape == (0,)

"""Padding, positions, masks, token log-probs and micro-batches."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.rollout.engines import make_engine, sampled

from tracefp4.errors import ConfigError
from tracefp4.ops.sample import Sampled
from tracefp4.rl.advantages import AdvantageConfig
from tracefp4.rl.batching import (
    micro_batches,
    pad,
    token_logprobs,
    token_positions,
)
from tracefp4.rl.rewards import RewardConfig, Scorer
from tracefp4.rl.rollouts import RolloutMaker
from tracefp4.rl.samples import TrainingSample
from tracefp4.rl.tasks import Task
from tracefp4.rollout.noise import noise_key

# two float32 log-softmaxes of the same logits in different batch shapes
FLOAT32_LOGPROB = 1e-6


def sample(prompt, completion, **changes):
    fields = {
        "trajectory": "t",
        "prompt_ids": prompt,
        "token_ids": completion,
        "rollout_logprobs": [-0.25 * (index + 1) for index in range(len(completion))],
        "weight_versions": [2] * len(completion),
    }
    return TrainingSample(**{**fields, **changes})


SAMPLES = [sample([11, 12], [21, 22, 23], advantage=0.5), sample([31], [41], advantage=-1.0, group_index=1)]


def test_right_padding_aligns_everything_on_the_token_it_belongs_to():
    batch = pad(SAMPLES, pad_id=0)
    assert batch.input_ids.tolist() == [[11, 12, 21, 22, 23], [31, 41, 0, 0, 0]]
    assert batch.positions.tolist() == [[0, 1, 2, 3, 4], [0, 1, -1, -1, -1]]
    assert batch.loss_mask.tolist() == [[False, False, True, True, True], [False, True, False, False, False]]
    assert batch.rollout_logprobs.tolist() == [[0, 0, -0.25, -0.5, -0.75], [0, -0.25, 0, 0, 0]]
    assert batch.weight_versions.tolist() == [[-1, -1, 2, 2, 2], [-1, 2, -1, -1, -1]]
    assert batch.advantages.tolist() == [0.5, -1.0]
    assert batch.group_index.tolist() == [0, 1]
    assert torch.equal(batch.attention_mask, batch.positions >= 0)


def test_left_padding_and_extra_columns_only_move_the_tokens():
    right, left = pad(SAMPLES, pad_id=0), pad(SAMPLES, pad_id=0, side="left", left_extra=3)
    assert left.input_ids.shape == (2, 8)
    assert left.positions.tolist()[1] == [-1, -1, -1, -1, -1, -1, 0, 1]
    assert left.model_positions().min() == 0
    assert torch.equal(left.completion_mask, left.loss_mask)
    for name in ("input_ids", "positions", "loss_mask", "rollout_logprobs", "weight_versions"):
        assert torch.equal(
            getattr(left, name)[left.attention_mask], getattr(right, name)[right.attention_mask]
        ), name


def test_masks_do_not_look_at_ids_when_padding_equals_a_stop_token():
    batch = pad([sample([2], [5, 2]), sample([2], [5, 6, 2])], pad_id=2)
    assert batch.loss_mask.tolist() == [[False, True, True, False], [False, True, True, True]]


def test_truncated_samples_can_be_taken_out_of_the_loss():
    cut = sample([1], [4, 5], is_truncated=True, finish_reason="length")
    assert pad([cut], pad_id=0).loss_mask.sum() == 2
    assert pad([cut], pad_id=0, trains_truncated=False).loss_mask.sum() == 0
    assert pad([cut], pad_id=0, trains_truncated=False).completion_mask.sum() == 2


def test_tokens_of_the_environment_are_inputs_and_never_trained():
    # Mutation: a loss mask that takes the whole completion.
    turns = sample([11], [21, 31, 32, 22], trained_mask=[True, False, False, True])
    batch = pad([turns, SAMPLES[1]], pad_id=0)
    assert batch.input_ids[0].tolist() == [11, 21, 31, 32, 22]
    assert batch.loss_mask.int().tolist() == [[0, 1, 0, 0, 1], [0, 1, 0, 0, 0]]
    assert batch.completion_mask.int().tolist() == [[0, 1, 1, 1, 1], [0, 1, 0, 0, 0]]
    assert batch.weight_versions.tolist() == [[-1, 2, -1, -1, 2], [-1, 2, -1, -1, -1]]
    assert batch.rollout_logprobs.tolist() == [[0, -0.25, 0, 0, -1.0], [0, -0.25, 0, 0, 0]]
    cut = replace(turns, is_truncated=True, finish_reason="length")
    assert pad([cut], pad_id=0, trains_truncated=False).loss_mask.sum() == 0


def test_aln_3_a_sample_cut_inside_its_prompt_has_no_loss_token():
    batch = pad([SAMPLES[0].truncate(1), SAMPLES[0].truncate(4)], pad_id=0)
    assert batch.loss_mask.tolist() == [[False] * 4, [False, False, True, True]]


PROMPT = "bc"


class Characters:
    """A tokenizer whose ids are characters."""

    def encode(self, text):
        return [ord(letter) - ord("a") for letter in text]

    def decode(self, ids, skip_special_tokens):
        return "".join(chr(ord("a") + i) for i in ids)


def reward_nothing(prompt, completion, answer):
    """Reward: 0."""
    return 0.0


def scripted_samples(monkeypatch, scripts, *, stop_token_ids):
    """What the rollout makes of one group when the engine draws sample i's tokens from scripts[i]."""

    params = sampled(len(scripts[0]), n=len(scripts), stop_token_ids=stop_token_ids)
    places = range(len(scripts))
    keys = {noise_key(seed=params.seed, prompt_index=0, sample_index=i): i for i in places}

    def drawn(logits, draws):
        drawn_for = zip(draws.keys.tolist(), draws.positions.tolist(), strict=True)
        tokens = [scripts[keys[key]][position - len(PROMPT)] for key, position in drawn_for]
        return Sampled(torch.tensor(tokens), torch.full((len(tokens),), -0.5, dtype=torch.float64))

    monkeypatch.setattr("tracefp4.rollout.runner.draw", drawn)
    function = f"{__name__}:reward_nothing"
    maker = RolloutMaker(
        engine=make_engine(),
        tokenizer=Characters(),
        scorer=Scorer(RewardConfig(verifier="function", function=function)),
        advantage=AdvantageConfig(),
        truncated="mask",
        codec="mantissa",
    )
    return maker.make([Task(source="test", index=0, prompt=PROMPT)], params).samples


def test_aln_7_the_first_end_token_is_trained_and_nothing_after_it(monkeypatch):
    scripts = [[5, 9, 2, 2, 2], [5, 7, 2, 2, 2], [5, 6, 8, 9, 4]]
    samples = scripted_samples(monkeypatch, scripts, stop_token_ids=(2, 7))
    assert [list(found.token_ids) for found in samples] == [[5, 9, 2], [5, 7], [5, 6, 8, 9, 4]]
    assert [found.finish_reason for found in samples] == ["stop", "stop", "length"]
    assert [found.is_truncated for found in samples] == [False, False, True]
    expected = [[1, 1, 1, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 1, 1]]
    batch = pad(samples, pad_id=2)
    assert batch.input_ids[:, 2:].tolist() == [[5, 9, 2, 2, 2], [5, 7, 2, 2, 2], [5, 6, 8, 9, 4]]
    assert batch.loss_mask[:, 2:].int().tolist() == expected
    assert not batch.loss_mask[:, :2].any()
    left = pad(samples, pad_id=2, side="left")
    assert left.loss_mask.sum(-1).tolist() == [3, 2, 5]
    masked = pad(samples, pad_id=2, trains_truncated=False)
    assert masked.loss_mask[:, 2:].int().tolist() == [*expected[:2], [0] * 5]


def test_pad_6_left_padded_rows_are_scored_like_the_sample_alone():
    torch.manual_seed(0)
    tokens, places, head = torch.nn.Embedding(50, 8), torch.nn.Embedding(16, 8), torch.nn.Linear(8, 50)

    def score(batch):
        hidden = tokens(batch.input_ids) + places(batch.model_positions())
        visible = (
            batch.attention_mask[:, None, :] & torch.ones(hidden.shape[1], hidden.shape[1]).tril().bool()
        )
        hidden = torch.nn.functional.scaled_dot_product_attention(hidden, hidden, hidden, attn_mask=visible)
        return token_logprobs(head(hidden), input_ids=batch.input_ids, mask=batch.loss_mask)[batch.loss_mask]

    alone = pad(SAMPLES[:1], pad_id=0)
    padded = pad(SAMPLES[:1], pad_id=0, side="left", left_extra=3)
    assert padded.positions.tolist() == [[-1, -1, -1, 0, 1, 2, 3, 4]]
    assert torch.allclose(score(alone), score(padded), atol=FLOAT32_LOGPROB)


def test_lgp_1_the_temperature_divides_logits():
    logits = torch.tensor([[[2.0, 1.0, 0.0], [9.0, 9.0, 9.0]]])
    found = token_logprobs(logits, input_ids=torch.tensor([[1, 0]]), temperature=0.5)
    assert found[0, 1].item() == pytest.approx(-0.142932, abs=1e-6)
    assert found[0, 0] == 0


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan], ids=str)
def test_lgp_1_temperature_zero_is_refused(temperature):
    with pytest.raises(ConfigError, match="temperature > 0"):
        token_logprobs(
            torch.zeros(1, 2, 3), input_ids=torch.zeros(1, 2, dtype=torch.int64), temperature=temperature
        )


@pytest.mark.parametrize("chunk_tokens", [1, 3, 100])
def test_token_log_probs_equal_log_softmax_in_chunks_of_any_size(chunk_tokens):
    logits = torch.randn(2, 4, 7, generator=torch.Generator().manual_seed(1))
    ids = torch.tensor([[0, 3, 6, 1], [2, 2, 5, 4]])
    whole = torch.log_softmax(logits / 0.7, -1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
    found = token_logprobs(logits, input_ids=ids, temperature=0.7, chunk_tokens=chunk_tokens)
    assert torch.equal(found[:, 1:], whole)


def test_token_log_probs_agree_with_finite_differences():
    logits = torch.randn(
        2, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(2)
    ).requires_grad_()
    ids = torch.tensor([[0, 3, 4, 1], [2, 2, 0, 4]])
    mask = torch.tensor([[True, True, False, True], [False, False, True, True]])
    assert torch.autograd.gradcheck(
        lambda z: token_logprobs(z, input_ids=ids, temperature=0.8, mask=mask, chunk_tokens=2), (logits,)
    )


def test_nan_logits_at_unread_positions_reach_neither_values_nor_gradients():
    logits = torch.zeros(1, 4, 3)
    logits[0, 0] = math.nan
    logits.requires_grad_()
    found = token_logprobs(
        logits,
        input_ids=torch.zeros(1, 4, dtype=torch.int64),
        mask=torch.tensor([[False, False, True, True]]),
    )
    found.sum().backward()
    assert torch.isfinite(found).all()
    assert torch.isfinite(logits.grad).all()


@pytest.mark.parametrize(
    ("dtype", "computed"), [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)]
)
def test_log_probs_are_computed_in_float32_or_better(dtype, computed):
    logits = torch.zeros(1, 2, 3, dtype=dtype, requires_grad=True)
    found = token_logprobs(logits, input_ids=torch.zeros(1, 2, dtype=torch.int64))
    found.sum().backward()
    assert found.dtype == computed
    assert logits.grad.dtype == dtype


def test_no_wanted_token_gives_zeros_with_a_graph():
    logits = torch.zeros(2, 1, 3, requires_grad=True)
    found = token_logprobs(logits, input_ids=torch.zeros(2, 1, dtype=torch.int64))
    found.sum().backward()
    assert found.tolist() == [[0.0], [0.0]]
    assert torch.equal(logits.grad, torch.zeros(2, 1, 3))


def test_micro_batches_respect_the_padded_budget_and_keep_the_order_map():
    assert micro_batches([3, 5, 2, 2], max_tokens=10) == [(0, 1), (2, 3)]
    assert micro_batches([3, 5, 2, 2], max_tokens=10, sorts_by_length=True) == [(1, 0), (2, 3)]
    assert micro_batches([3, 5, 2, 2], max_tokens=100, max_samples=3) == [(0, 1, 2), (3,)]
    assert micro_batches([], max_tokens=4) == []
    with pytest.raises(ConfigError, match="sample 1 of 5"):
        micro_batches([3, 5], max_tokens=4)
    with pytest.raises(ConfigError, match="max_samples"):
        micro_batches([3], max_tokens=4, max_samples=0)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 20), max_size=30), st.integers(20, 60), st.booleans())
def test_micro_batches_hold_every_sample_once_within_the_budget(lengths, budget, is_sorted):
    order = micro_batches(lengths, max_tokens=budget, sorts_by_length=is_sorted)
    assert sorted(index for part in order for index in part) == list(range(len(lengths)))
    assert all(max(lengths[index] for index in part) * len(part) <= budget for part in order)


def test_positions_restart_behind_gaps_only_by_counting_tokens():
    mask = torch.tensor([[False, True, True, False, True]])
    assert token_positions(mask).tolist() == [[-1, 0, 1, -1, 2]]


@pytest.mark.parametrize("changes", [{"side": "both"}, {"pad_id": -1}, {"left_extra": -1}], ids=str)
def test_pad_refuses_arguments_outside_their_range(changes):
    with pytest.raises(ConfigError):
        pad(SAMPLES, **{"pad_id": 0, **changes})
    with pytest.raises(ConfigError, match="at least one sample"):
        pad([], pad_id=0)


def test_token_log_probs_refuse_shapes_that_differ():
    with pytest.raises(ConfigError, match="unshifted"):
        token_logprobs(torch.zeros(1, 2, 3), input_ids=torch.zeros(1, 3, dtype=torch.int64))

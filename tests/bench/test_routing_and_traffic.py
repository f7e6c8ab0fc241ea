"""Routing that is drawn, and bytes that are counted: both against closed forms."""

import pytest
import torch

from tracefp4.bench import traffic
from tracefp4.bench.routing import SKEWS, draw_experts, num_distinct
from tracefp4.patching.budget import decisions_for, memory
from tracefp4.patching.catalogue import KNOWN_SHAPES
from tracefp4.patching.rules import PlanRules

SHAPE = KNOWN_SHAPES["qwen3-30b-a3b"]


@pytest.mark.parametrize("skew", SKEWS)
def test_experts_of_a_token_are_distinct_and_draws_repeat(skew):
    ids = draw_experts(200, num_experts=16, top_k=5, skew=skew, seed=3)
    assert ids.shape == (200, 5) and ids.dtype == torch.int64
    assert all(len(set(row)) == 5 and min(row) >= 0 and max(row) < 16 for row in ids.tolist())
    assert torch.equal(ids, draw_experts(200, num_experts=16, top_k=5, skew=skew, seed=3))
    assert not torch.equal(ids, draw_experts(200, num_experts=16, top_k=5, skew=skew, seed=4))


@pytest.mark.parametrize("num_tokens", [8, 64])
def test_uniform_routing_touches_as_many_experts_as_it_should(num_tokens):
    found = [
        num_distinct(draw_experts(num_tokens, num_experts=128, top_k=8, skew="uniform", seed=s))
        for s in range(40)
    ]
    assert sum(found) / 40 == pytest.approx(128 * (1 - (1 - 8 / 128) ** num_tokens), rel=0.02)


def test_zipf_routing_is_proportional_to_one_over_the_rank():
    ids = draw_experts(60000, num_experts=8, top_k=1, skew="zipf", seed=0)
    shares = ids.flatten().bincount(minlength=8).sort(descending=True).values / 60000
    ranks = 1 / torch.arange(1, 9)
    assert torch.allclose(shares, ranks / ranks.sum(), atol=0.01)
    skewed, even = (
        num_distinct(draw_experts(64, num_experts=128, top_k=8, skew=skew, seed=1))
        for skew in ("zipf", "uniform")
    )
    assert skewed < 0.9 * even


def test_an_expert_layer_moves_its_weights_in_use_once():
    found = traffic.expert_layer(SHAPE, num_tokens=64, distinct=126, weight_bytes=traffic.BF16)
    weights, activations = 126 * 3 * 2048 * 768 * 2, 2 * 64 * 2048 * 2
    assert found.bytes == weights + activations
    assert found.flops == 2 * 64 * 8 * 3 * 2048 * 768
    four_bits = traffic.expert_layer(SHAPE, num_tokens=64, distinct=126, weight_bytes=traffic.NVFP4)
    assert weights / (four_bits.bytes - activations) == pytest.approx(3.5556, abs=1e-3)


def test_a_cache_is_read_once_and_a_head_once():
    found = traffic.decode_attention(SHAPE, num_tokens=1000, value_bytes=traffic.NVFP4)
    assert found == (1000 * 2 * 4 * 128 * 0.5625, 4 * 1000 * 32 * 128)
    large = KNOWN_SHAPES["qwen3.5-35b-a3b"]
    assert traffic.head(large, num_rows=0).bytes == 248320 * 2048 * 2
    assert traffic.head(large, num_rows=3).flops == 2 * 3 * 248320 * 2048
    assert traffic.append(SHAPE, num_tokens=10, value_bytes=traffic.NVFP4).bytes == 10 * 2 * 4 * 128 * 2.5625


def test_a_delta_step_reads_and_writes_the_states_that_a_budget_counts():
    large = KNOWN_SHAPES["qwen3.5-35b-a3b"]
    one, two = (traffic.delta_step(large, num_seqs=n, state_bytes=4.0).bytes for n in (1, 2))
    budget = memory(large, decisions_for(large, PlanRules()), context=1, batch=1).state / 30
    rows = 2 * (8192 + 4096 + 4096 + 64)
    assert two - one == 2 * budget + rows
    assert one == 2 * budget + rows + 2 * 4 * 8192


def test_elementwise_traffic_adds_up_and_refit_reads_twice_where_it_must():
    assert traffic.elementwise(100, 2.0, 0.5625) == (256.25, 0.0)
    values = 128 * 3 * 2048 * 768
    assert (
        traffic.refit(SHAPE).bytes == values * 2.5625
        and traffic.refit(SHAPE, passes=2).bytes == values * 4.5625
    )

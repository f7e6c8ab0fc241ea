"""kv_attention against a scalar-minded oracle in float64: grouped queries, causality, splits, and what
padding may hold."""

import math

import pytest
import torch
from tests.assertions import assert_bitwise

from tracefp4.errors import FormatError
from tracefp4.formats.arithmetic import round_bf16
from tracefp4.formats.schemes import NVFP4_KV
from tracefp4.formats.tensor import BlockTensor
from tracefp4.ops.dequantize import dequantize
from tracefp4.ops.kv_attention import SPLIT, kv_attention
from tracefp4.ops.pages import LayerPages
from tracefp4.ops.quantize import quantize

FRAMES, PAGE, HEADS, KV_HEADS, DIM = 12, 16, 4, 2, 32
# float64 sums of at most 160 terms below 10, in another order
CLOSE = 1e-12


def new_pages(exponent, is_fp4=True):
    x = torch.randn(KV_HEADS, FRAMES, PAGE, DIM) * 2.0**exponent
    if not is_fp4:
        return x.bfloat16()
    return quantize(x, scheme=NVFP4_KV, exponent=exponent)


def values_of(pages, table):
    """[L, C, D] of one sequence, float64."""
    values = dequantize(pages, dtype=torch.float64) if isinstance(pages, BlockTensor) else pages.double()
    return values[:, table].flatten(1, 2).transpose(0, 1)


def oracle(query, position, keys, values, *, rounds):
    """One query [H, D] over [L, C, D]; the equation of the op, written one head at a time."""
    out = []
    for head in range(HEADS):
        kv_head = head // (HEADS // KV_HEADS)
        k, v = keys[: position + 1, kv_head], values[: position + 1, kv_head]
        scores = (k @ query[head]) / math.sqrt(DIM)
        exps = (scores - scores.max()).exp()
        total, summed = 0.0, torch.zeros(DIM, dtype=torch.float64)
        for begin in range(0, position + 1, SPLIT):
            part = exps[begin : begin + SPLIT]
            total += part.sum()
            summed += (round_bf16(part) if rounds else part) @ v[begin : begin + SPLIT]
        out.append(summed / total)
    return torch.stack(out)


@pytest.mark.parametrize("is_fp4", [True, False], ids=["fp4", "bf16"])
@pytest.mark.parametrize("rounds", [True, False], ids=["rounded", "exact"])
def test_equals_the_oracle(is_fp4, rounds):
    keys, values = new_pages(1, is_fp4), new_pages(-3, is_fp4)
    table = torch.tensor([[3, 0, 5, 7, 1, 9], [2, 11, 4, 4, 4, 4]])
    positions = torch.tensor([[0, 17, 70, 95], [0, 1, 20, 31]])
    queries = torch.randn(2, 4, HEADS, DIM, dtype=torch.float64)
    found = kv_attention(
        queries,
        LayerPages(keys=keys, values=values),
        page_table=table,
        positions=positions,
        rounds_probabilities=rounds,
    )
    for b in range(2):
        k, v = values_of(keys, table[b]), values_of(values, table[b])
        for i in range(4):
            expected = oracle(queries[b, i], int(positions[b, i]), k, v, rounds=rounds)
            assert (found[b, i] - expected).abs().max() < CLOSE


def test_rounding_happens_per_split_to_unnormalised_probabilities():
    # A trainer that rounds the normalised row gets another result: the two orders must not be confused.
    keys, values = new_pages(0), new_pages(0)
    table, positions = torch.arange(6)[None], torch.tensor([[95]])
    queries = torch.randn(1, 1, HEADS, DIM, dtype=torch.float64)
    found = kv_attention(
        queries,
        LayerPages(keys=keys, values=values),
        page_table=table,
        positions=positions,
        rounds_probabilities=True,
    )
    k, v = (
        values_of(keys, table[0]).repeat_interleave(2, 1),
        values_of(values, table[0]).repeat_interleave(2, 1),
    )
    probs = (torch.einsum("hd,lhd->hl", queries[0, 0], k) / math.sqrt(DIM)).softmax(-1)
    full_row = torch.einsum("hl,lhd->hd", round_bf16(probs), v)
    assert (found[0, 0] - full_row).abs().max() > 1e-6


def test_one_prefill_equals_single_queries():
    keys, values = new_pages(0), new_pages(0)
    queries = torch.randn(1, 40, HEADS, DIM, dtype=torch.float64)
    arguments = {"pages": LayerPages(keys=keys, values=values), "rounds_probabilities": False}
    whole = kv_attention(
        queries, page_table=torch.tensor([[4, 2, 8]]), positions=torch.arange(40)[None], **arguments
    )
    for i in (0, 15, 16, 39):
        alone = kv_attention(
            queries[:, i : i + 1],
            page_table=torch.tensor([[4, 2, 8]]),
            positions=torch.tensor([[i]]),
            **arguments,
        )
        assert_bitwise(round_bf16(alone), round_bf16(whole[:, i : i + 1]))


def test_later_positions_of_the_page_are_not_seen():
    keys, values = new_pages(0), new_pages(0)
    arguments = {
        "page_table": torch.tensor([[1]]),
        "positions": torch.tensor([[6]]),
        "rounds_probabilities": True,
    }
    queries = torch.randn(1, 1, HEADS, DIM)
    before = kv_attention(queries, LayerPages(keys=keys, values=values), **arguments)
    for pages in (keys, values):
        pages.packed[:, 1, 7:] = 0x77
        pages.packed[:, 2:] = 0x77
    assert_bitwise(kv_attention(queries, LayerPages(keys=keys, values=values), **arguments), before)


def test_no_sequences_and_bf16_queries():
    keys, values = new_pages(0), new_pages(0)
    table, positions = torch.zeros(0, 1, dtype=torch.int64), torch.zeros(0, 1, dtype=torch.int64)
    queries = torch.zeros(0, 1, HEADS, DIM, dtype=torch.bfloat16)
    found = kv_attention(
        queries,
        LayerPages(keys=keys, values=values),
        page_table=table,
        positions=positions,
        rounds_probabilities=True,
    )
    assert found.shape == (0, 1, HEADS, DIM) and found.dtype == torch.bfloat16


def test_heads_that_do_not_fit_are_refused():
    keys = values = new_pages(0)
    with pytest.raises(FormatError, match="3 query heads"):
        kv_attention(
            torch.zeros(1, 1, 3, DIM),
            LayerPages(keys=keys, values=values),
            page_table=torch.zeros(1, 1, dtype=torch.int64),
            positions=torch.zeros(1, 1, dtype=torch.int64),
            rounds_probabilities=True,
        )

"""Scheduling: who runs when pages and places are short, and that giving way changes no byte."""

import dataclasses

import pytest
import torch
from tests.rollout.engines import make_engine, make_prompts, outputs, sampled

from tracefp4.errors import ConfigError
from tracefp4.guidance import records_equal


def run(prompts, params, **changes):
    engine = make_engine(control=True, **changes)
    return engine.generate(prompts, params), engine.stats


def without_identity(record):
    return dataclasses.replace(record, identity=dataclasses.replace(record.identity, trajectory=""))


def assert_same(found, expected):
    assert outputs(found) == outputs(expected)
    for row, expected_row in zip(found, expected, strict=True):
        for completion, other in zip(row, expected_row, strict=True):
            assert records_equal(without_identity(completion.record), without_identity(other.record))


@pytest.mark.parametrize("num_pages", [9, 12])
def test_preemption_restores_the_same_bytes(num_pages):
    prompts, params = make_prompts(4, shortest=6, longest=10), sampled(14, n=2, seed=1)
    expected, roomy = run(prompts, params)
    found, tight = run(prompts, params, num_pages=num_pages)
    assert roomy.preemptions == 0 and roomy.pages_swapped_out == 0
    assert tight.preemptions > 0 and tight.pages_swapped_out > 0
    assert tight.peak_pages <= num_pages < roomy.peak_pages
    assert tight.prefill_tokens == roomy.prefill_tokens == sum(map(len, prompts))
    assert_same(found, expected)


@pytest.mark.parametrize(
    "changes", [{"max_tokens_per_step": 8}, {"max_batch": 1, "max_tokens_per_step": 1}, {"max_batch": 3}]
)
def test_chunks_and_places_change_nothing(changes):
    prompts, params = make_prompts(4, shortest=3, longest=12), sampled(7, n=3, seed=2)
    expected, _ = run(prompts, params)
    found, _ = run(prompts, params, **changes)
    assert_same(found, expected)


def test_a_prompt_is_computed_once_and_its_pages_are_shared():
    prompt = make_prompts(1, shortest=8, longest=8)
    _, alone = run(prompt, sampled(4))
    _, group = run(prompt, sampled(4, n=6))
    assert alone.prefill_tokens == group.prefill_tokens == 8
    # 8 prompt positions are two full pages that nobody copies; 3 more inputs per sample need one page each
    assert alone.peak_pages == 2 + 1 and group.peak_pages == 2 + 6


def test_a_partly_filled_last_page_is_copied_by_all_but_the_last():
    prompt = make_prompts(1, shortest=6, longest=6)
    expected = [run(prompt, sampled(8, n=n))[0][0] for n in (1, 2, 5)]
    firsts = [row[0].token_ids for row in expected]
    assert firsts[0] == firsts[1] == firsts[2]
    _, stats = run(prompt, sampled(2, n=5))
    assert stats.peak_pages <= 1 + 1 + 5


def test_requests_join_and_leave_between_steps():
    prompts = make_prompts(3)
    expected, _ = run(prompts, sampled(6, seed=4))
    engine = make_engine(control=True)
    for index, prompt in enumerate(prompts):
        engine.submit(prompt, sampled(6, seed=4), prompt_index=index)
        engine.step()
    found = []
    while engine.has_work:
        engine.step()
        found += engine.take_finished()
    assert [(c.token_ids, c.logprobs) for c in found] == [
        (row[0].token_ids, row[0].logprobs) for row in expected
    ]


def test_the_pool_may_be_smaller_than_all_maximum_lengths():
    prompts, params = make_prompts(8, longest=4), sampled(30, stop_token_ids=tuple(range(0, 40, 4)))
    _, stats = run(prompts, params, num_pages=16)
    at_most = sum(-(-(len(prompt) + 30 - 1) // 4) for prompt in prompts)
    assert stats.peak_pages <= 16 < at_most


def test_a_request_that_can_never_fit_is_refused_before_anything_runs():
    engine = make_engine(num_pages=4)
    with pytest.raises(ConfigError, match="needs 5 pages. The pool has 4 pages of 4 positions"):
        engine.generate([[1, 2, 3], [1] * 10], sampled(8))
    assert not engine.has_work
    assert [len(c.token_ids) for c in engine.generate([[1] * 9], sampled(8))[0]] == [8]
    # 9 prompt tokens leave a partly filled page: two samples need one page more
    with pytest.raises(ConfigError, match="needs 5 pages"):
        engine.generate([[1] * 9], sampled(8, n=2))


@pytest.mark.parametrize(("max_batch", "max_tokens"), [(0, 8), (8, 7)])
def test_limits_out_of_range_are_refused(max_batch, max_tokens):
    with pytest.raises(ConfigError, match=f"max_batch {max_batch}"):
        make_engine(max_batch=max_batch, max_tokens_per_step=max_tokens)


def test_all_pages_come_back():
    engine = make_engine(num_pages=12)
    engine.generate(make_prompts(5), sampled(9, n=3))
    assert engine._allocator.num_used == 0
    request = engine.submit([1, 2, 3], sampled(9, n=2))
    engine.step()
    engine.abort(request)
    assert engine._allocator.num_used == 0 and not engine.has_work


def test_an_error_in_a_step_leaves_the_engine_usable(monkeypatch):
    engine = make_engine()
    expected = outputs(engine.generate([[1, 2, 3]], sampled(4)))
    forward, calls = engine._model.forward, []

    def fail_third(*args):
        calls.append(None)
        if len(calls) == 3:
            raise RuntimeError("out of memory")
        return forward(*args)

    monkeypatch.setattr(engine._model, "forward", fail_third)
    with pytest.raises(RuntimeError):
        engine.generate([[1, 2, 3], [4, 5]], sampled(4))
    assert not engine.has_work and engine._allocator.num_used == 0
    assert outputs(engine.generate([[1, 2, 3]], sampled(4))) == expected


def test_random_workloads_leave_nothing_behind():
    generator = torch.Generator().manual_seed(3)
    for _ in range(3):
        num_pages, max_batch = (int(torch.randint(low, 14, (), generator=generator)) for low in (8, 1))
        engine = make_engine(num_pages=num_pages, max_batch=max_batch, max_tokens_per_step=max(16, max_batch))
        prompts = make_prompts(6, longest=12)
        found = engine.generate(prompts, sampled(10, n=2, stop_token_ids=(0, 1, 2)))
        assert all(len(row) == 2 for row in found) and engine._allocator.num_used == 0

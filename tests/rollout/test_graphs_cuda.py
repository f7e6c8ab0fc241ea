"""On a GPU: captured decode passes against eager ones, token for token and record for record, and what waits."""

import time
from contextlib import contextmanager

import pytest
import torch
from tests.models.tiny_models import tiny_model
from tests.rollout.engines import make_engine, make_prompts, outputs, sampled

from tracefp4.formats.arithmetic import NATIVE
from tracefp4.guidance import records_equal
from tracefp4.rollout.graphs import Started

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PARAMS = {"n": 2, "seed": 3, "top_k": 9, "top_p": 0.9}


def model_on_gpu(seed=0):
    # head dim and page size that the kernels take
    return tiny_model(seed, hidden_size=128, head_dim=64, moe_intermediate_size=64).cuda()


def engine_of(model, **changes):
    settings = {"arithmetic": NATIVE, "page_size": 16, "num_pages": 64, "max_length": 256}
    return make_engine(model, **(settings | changes))


def assert_same(found, expected):
    assert outputs(found) == outputs(expected)
    for row, expected_row in zip(found, expected, strict=True):
        for completion, other in zip(row, expected_row, strict=True):
            assert records_equal(completion.record, other.record)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"max_batch": 3},
        {"num_pages": 7, "max_length": 64},
        {"max_tokens_per_step": 8},
        {"prefix_cache": True},
        {"max_batch": 20, "captures_at_start": True},
    ],
    ids=["default", "few", "preemption", "chunks", "prefixes", "at-start"],
)
def test_graphs_give_what_eager_passes_give(changes):
    model, prompts = model_on_gpu(), make_prompts(6, shortest=6, longest=20)
    params = sampled(24, **PARAMS)
    eager, captured = engine_of(model, graphs=False, **changes), engine_of(model, **changes)
    for asked in (prompts, prompts[:2]):
        assert_same(captured.generate(asked, params), eager.generate(asked, params))
    assert captured.stats.why_eager == "" and captured.stats.eager_passes == 0
    assert captured.stats.graph_passes > captured.stats.ahead_passes > 0 and eager.stats.graph_passes == 0
    if "num_pages" in changes:
        assert captured.stats.preemptions > 0


def test_new_weights_between_steps_are_those_that_graphs_read():
    first, second, prompts = model_on_gpu(), model_on_gpu(seed=1), make_prompts(3)

    def run(engine):
        for index, prompt in enumerate(prompts):
            engine.submit(prompt, sampled(12, seed=2), prompt_index=index)
            engine.step()
        engine.update_weights(second.state_dict(), version=1)
        engine.step()
        engine.pause()
        engine.resume()
        while engine.has_work:
            engine.step()
        return [engine.take_finished()]

    expected = run(engine_of(first, graphs=False))
    assert_same(run(engine_of(first)), expected)
    assert expected[0][0].weight_versions[-1] == 1


@pytest.mark.parametrize("changes", [{}, {"num_pages": 12, "max_length": 64}, {"max_log_rows": 40}])
def test_passes_started_ahead_give_what_the_plain_order_gives(changes):
    first, second, prompts = model_on_gpu(), model_on_gpu(seed=1), make_prompts(4, shortest=6, longest=20)
    # where pages are short, who waits for them may enter a step later than in the plain order
    stops = () if "num_pages" in changes else (1, 2)

    def run(engine):
        for index, prompt in enumerate(prompts):
            engine.submit(prompt, sampled(30, n=2, seed=2, stop_token_ids=stops), prompt_index=index)
        ended = [s.order for _ in range(8) for s in engine.step()]
        engine.update_weights(second.state_dict(), version=1)
        ended += [s.order for _ in range(4) for s in engine.step()]
        engine.pause()
        engine.resume()
        engine.abort(1)
        while engine.has_work:
            ended += [s.order for s in engine.step()]
        return sorted(ended), engine.take_finished()

    ahead, plain = engine_of(first, **changes), engine_of(first, **changes)
    plain._scheduler.place = lambda computed: False
    ended, found = run(ahead)
    expected_ended, expected = run(plain)
    assert ended == expected_ended
    assert_same([found], [expected])
    assert [c.weight_versions for c in found] == [c.weight_versions for c in expected]
    assert plain.stats.ahead_passes == 0 < ahead.stats.ahead_passes


def test_what_is_recorded_may_arrive_late(monkeypatch):
    # Mutation: the device slot is written again before it was copied.
    model, prompts = model_on_gpu(), make_prompts(6)
    expected = engine_of(model, graphs=False).generate(prompts, sampled(40))
    engine = engine_of(model)
    push = engine._recorder.ring.push

    def late(taps, *, sink, **changes):
        def wait(kept, count):
            time.sleep(0.005)
            sink(kept, count)

        push(taps, sink=wait, **changes)

    monkeypatch.setattr(engine._recorder.ring, "push", late)
    assert_same(engine.generate(prompts, sampled(40)), expected)
    assert engine.stats.record_waits > 0


@contextmanager
def no_waiting():
    """Any call that makes the host wait for the device in torch is an error; waiting for an event is none."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_decode_step_waits_for_its_tokens_alone(monkeypatch):
    engine = engine_of(model_on_gpu())
    for index, prompt in enumerate(make_prompts(5)):
        engine.submit(prompt, sampled(40), prompt_index=index)
    while len(engine._scheduler.rows) < 5 or not engine.stats.graph_passes:
        engine.step()
    waits, wait = [], Started.wait
    monkeypatch.setattr(Started, "wait", lambda started: waits.append(None) or wait(started))
    with no_waiting():
        for _ in range(20):
            engine.step()
    assert len(waits) == 20 and engine.stats.eager_passes == 0


def test_a_pool_is_sized_by_the_memory_that_is_left():
    # small parts, whatever else is on this GPU; what this process merely keeps would count as in use
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    free, total = torch.cuda.mem_get_info()
    share = (total - free + (2 << 30)) / total
    engine = engine_of(model_on_gpu(), num_pages=None, memory_share=share, max_batch=4)
    assert engine.num_pages == engine.pool.shape.num_pages > 4
    limit = 1.25 * (2 << 30)  # others on this GPU come and go
    assert engine.pool.num_bytes < limit
    engine.generate(make_prompts(3), sampled(9))
    assert torch.cuda.memory_reserved() - before < limit


def test_the_memory_of_the_pool_leaves_torch_and_comes_back():
    # Twice, because graphs captured anew need memory of their own; the allocator keeps nothing of either.
    model, prompts = model_on_gpu(), make_prompts(6, shortest=6, longest=20)
    engine = engine_of(model, num_pages=40_000)
    size = engine.pool.num_bytes
    assert size > 64 << 20
    expected = engine.generate(prompts, sampled(24, **PARAMS))
    for _ in range(2):
        held, kept = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        engine.release_pool()
        assert held - torch.cuda.memory_allocated() >= size
        assert kept - torch.cuda.memory_reserved() >= 0.9 * size
        engine.update_weights(model.state_dict(), version=engine.weight_version + 1)
        found = engine.generate(prompts, sampled(24, **PARAMS))
        assert outputs(found) == outputs(expected)
        assert torch.cuda.memory_allocated() <= held + (8 << 20)
    assert engine.stats.eager_passes == 0


def test_unfinished_sequences_go_on_after_a_release():
    model, prompts = model_on_gpu(), make_prompts(5, shortest=6, longest=20)
    expected = engine_of(model).generate(prompts, sampled(40))
    engine = engine_of(model)
    for index, prompt in enumerate(prompts):
        engine.submit(prompt, sampled(40), prompt_index=index)
    steps = 0
    while engine.has_work:
        engine.step()
        steps += 1
        if steps % 7 == 0:
            engine.release_pool()
    assert_same([[c] for c in engine.take_finished()], expected)
    assert engine.stats.pages_swapped_out > 0

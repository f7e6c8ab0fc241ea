"""On a GPU: engines of a model with states, captured against eager, and states that come and go."""

import pytest
import torch
from tests.models.tiny_hybrids import fp4, tiny_model
from tests.rollout.engines import make_engine, make_prompts, outputs, sampled
from tests.rollout.recorded import differing

from tracefp4.formats.arithmetic import NATIVE
from tracefp4.guidance import records_equal

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def model_on_gpu():
    # head dims and page size that the kernels take
    delta = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
    return tiny_model(hidden_size=128, head_dim=64, moe_intermediate_size=64, **delta).cuda()


def engine_of(model, **changes):
    settings = {"arithmetic": NATIVE, "page_size": 16, "num_pages": 64, "max_length": 256}
    return make_engine(model, precision=fp4(model), **(settings | changes))


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
        {"state_dtype": "bfloat16"},
        {"max_batch": 20, "captures_at_start": True},
    ],
    ids=["default", "few", "preemption", "bf16", "at-start"],
)
def test_graphs_give_what_eager_passes_give(changes):
    model, prompts = model_on_gpu(), make_prompts(6, shortest=6, longest=20)
    params = sampled(24, n=2, seed=3)
    eager, captured = engine_of(model, graphs=False, **changes), engine_of(model, **changes)
    for asked in (prompts, prompts[:2]):
        assert_same(captured.generate(asked, params), eager.generate(asked, params))
    assert captured.stats.why_eager == "" and captured.stats.eager_passes == 0
    assert captured.stats.graph_passes > captured.stats.ahead_passes > 0 == captured.stats.dropped_passes
    if "num_pages" in changes:
        assert captured.stats.preemptions > 0


def test_what_comes_between_two_steps_changes_no_draw():
    def run(engine, between):
        for index, prompt in enumerate(make_prompts(4)):
            engine.submit(prompt, sampled(16, seed=3), prompt_index=index)
        for _ in range(5):
            engine.step()
            between(engine)
        while engine.has_work:
            engine.step()
        return engine.take_finished()

    def rest(engine):
        engine.pause()
        engine.resume()

    model = model_on_gpu()
    expected = run(engine_of(model), lambda engine: None)
    for between in (rest, lambda engine: engine.release_pool()):
        assert_same([run(engine_of(model), between)], [expected])


def test_a_trajectory_goes_on_with_the_recorded_keys_and_values():
    engine = engine_of(model_on_gpu())
    first = [row[0] for row in engine.generate(make_prompts(4), sampled(20, seed=3))]
    for found, earlier in zip(engine.extend(first, [[3]] * 4, sampled(9, seed=4)), first, strict=True):
        assert differing(found.record, earlier.record, end=earlier.record.length) == []
        assert bool(found.record.valid.all())
    assert engine.stats.positions_recomputed == sum(c.record.length for c in first)


def test_a_pool_is_sized_beside_its_states():
    engine = engine_of(model_on_gpu(), num_pages=None, memory_share=0.2, max_batch=64)
    total = torch.cuda.mem_get_info()[1]
    assert engine.num_pages > 1 and torch.cuda.memory_reserved() < 0.2 * total
    engine.generate(make_prompts(3), sampled(4))

"""Qwen3.5-MoE by whole ops in bf16 storage: the definition's function, states and pages that move on together, new
weights in the same places. Here the ops are their references, or their kernels in the emulation."""

import dataclasses

import pytest
import torch
from tests.assertions import assert_bitwise
from tests.models.native import LOGITS_CLOSE, relative_error
from tests.models.test_qwen3_moe import Observer
from tests.models.tiny_hybrids import Rows, bf16, fp4, make, run_in_chunks, tiny_model

from tracefp4.errors import ConfigError
from tracefp4.formats.arithmetic import EMULATED, NATIVE
from tracefp4.guidance import ReplayBatch
from tracefp4.guidance.session import record, replay
from tracefp4.models import TokenBatch

# what native passes of four layers may differ in; a wrong layer gives errors around 1
CLOSE = 2 * LOGITS_CLOSE


def weights_only(model):
    return tuple(dataclasses.replace(layer, activation=None, kv=None) for layer in fp4(model))


@pytest.mark.parametrize("plan", [bf16, weights_only], ids=["bf16", "fp4_weights"])
def test_equals_the_definition_where_no_activation_is_rounded(plan):
    model = tiny_model(seed=1)
    tokens = torch.randint(0, 40, (13,)).tolist()
    wanted = run_in_chunks(make(model, plan(model), EMULATED), tokens, 13)
    for chunk in (13, 5, 1):
        found = run_in_chunks(make(model, plan(model), NATIVE), tokens, chunk)
        assert found.dtype == torch.bfloat16
        # experts of nearly equal weight may change places: most tokens have the same ones
        errors = torch.tensor([relative_error(f, w) for f, w in zip(found[0], wanted[0], strict=True)])
        assert errors.median() < CLOSE and (errors < CLOSE).float().mean() > 0.7


def test_sites_are_told_as_the_definition_has_them():
    model, tokens = tiny_model(), torch.randint(0, 40, (9,)).tolist()
    seen = []
    for arithmetic in (NATIVE, EMULATED):
        rows, observer = Rows(make(model, fp4(model), arithmetic), 1, 9), Observer()
        with record(observer):
            rows.forward([(0, tokens)])
        seen.append(observer.rows())
    assert seen[0].keys() == seen[1].keys() and len(seen[0]) == 4 * 3 + 2
    for key, parts in seen[0].items():
        for part, wanted in zip(parts, seen[1][key], strict=True):
            assert part.reshape(9, -1).shape == wanted.reshape(9, -1).shape
    first = next(key for key in seen[0] if str(key) == "layers.0.x")
    assert (seen[0][first][0] == seen[1][first][0]).float().mean() > 0.9
    native = make(model, fp4(model), NATIVE)
    session = replay(ReplayBatch(positions=torch.arange(3)[None], records=[None]))
    with session, pytest.raises(ConfigError, match="follows no records"):
        Rows(native, 1, 3).forward([(0, [1, 2, 3])])


def test_rows_that_fill_a_batch_up_leave_no_trace():
    model = tiny_model()
    engine_model = make(model, fp4(model), NATIVE)
    rows, alone = (Rows(engine_model, 2, 8) for _ in range(2))
    for some in (rows, alone):
        some.forward([(0, [1, 2, 3]), (1, [4, 5])])
    expected = alone.forward([(0, [6]), (1, [7])])
    segment, positions, slots = rows.segment(0, [(0, [6]), (1, [7])])
    filled = dataclasses.replace(
        segment,
        end=4,
        page_table=torch.cat([segment.page_table, torch.full((2, 2), rows.pool.null_frame)]),
        positions=torch.cat([segment.positions, torch.zeros(2, 1, dtype=torch.int64)]),
        state_slots=torch.cat([segment.state_slots, torch.tensor([-1, -1])]),
    )
    batch = TokenBatch(
        token_ids=torch.tensor([6, 7, 0, 0]),
        positions=torch.cat([positions, torch.zeros(2, dtype=torch.int64)]),
        slots=torch.cat([slots, torch.tensor([-1, -1])]),
        segments=[filled],
        logit_rows=torch.arange(4),
    )
    logits = engine_model.forward(batch, rows.pool)
    assert bool(logits.isfinite().all())
    assert_bitwise(logits[:2], torch.cat([expected[0], expected[1]]))
    for layer, state in rows.pool.states.layers.items():
        for part, other in zip(state, alone.pool.states.layers[layer], strict=True):
            assert_bitwise(part, other)


def test_new_weights_reach_what_is_derived_from_them_in_the_same_places():
    model, other = tiny_model(), tiny_model(seed=3)
    engine_model = make(model, fp4(model), NATIVE)
    weights, tokens = engine_model.weights, torch.randint(0, 40, (6,)).tolist()
    where = [t.data_ptr() for t in (weights.norm("model.norm.weight"), weights.delta(0).taps)]
    weights.load(other.state_dict())
    assert where == [t.data_ptr() for t in (weights.norm("model.norm.weight"), weights.delta(0).taps)]
    fresh = make(other, fp4(other), NATIVE)
    assert_bitwise(run_in_chunks(engine_model, tokens, 3), run_in_chunks(fresh, tokens, 3))
    stored = other.state_dict()["model.norm.weight"].bfloat16().float()
    assert_bitwise(weights.norm("model.norm.weight"), 1.0 + stored)

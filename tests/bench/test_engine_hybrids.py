"""The suite of the engine on models whose layers keep states: memory for them, bytes of them, and the same steps."""

import json

import pytest
import torch
from tests.bench.engine_bench import CPU, maker, point_result, workshop
from typer.testing import CliRunner

from tracefp4.bench.engine_build import Workshop
from tracefp4.bench.engine_decoding import STATE_STD, kept_states
from tracefp4.bench.engine_points import (
    MAX_BATCH,
    Load,
    Point,
    all_points,
    loads_of,
    side_by_side,
    state_bytes,
    step_bytes,
    token_bytes,
    weight_bytes,
)
from tracefp4.bench.engine_run import EngineOptions
from tracefp4.bench.engine_shapes import TINY, TINY_HYBRID, config_of, measured_shape, plan_of
from tracefp4.bench.gate_table import GATES
from tracefp4.cli.main import app
from tracefp4.errors import ConfigError
from tracefp4.models.qwen3_5_moe_config import read_sizes
from tracefp4.patching.rules import PlanRules

RUN = ("bench", "engine", "--random-weights", "tiny-hybrid", "--context", "128", "--steps", "2")
H200_BYTES = 0.9 * 150e9 - 2.7 * 2**30


def hybrid_engine(work, **changes):
    found = []
    shop = Workshop(shape=TINY_HYBRID, device=CPU, memory=0.9, page_size=16, longest=256, **changes)
    shop.use(lambda e: found.append(work(e)), "fp4", routing="uniform", max_batch=8, records=True)
    return found[0]


def test_the_large_shape_is_that_of_its_checkpoint():
    config = config_of(measured_shape("qwen3.5-35b-a3b"), max_positions=64)
    sizes, plan = read_sizes(config), plan_of(config, PlanRules())
    assert len(sizes.delta_layers) == 30 and sizes.delta_width == 8192 and sizes.rotary_dim == 64
    assert sum(layer.kv is not None for layer in plan.layers) == 10
    # 30 layers of 32 heads of 128 x 128, and 3 inputs of 8,192 channels in bf16
    assert state_bytes(sizes, 4.0) == 30 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)
    assert token_bytes(sizes, plan.layers) == 10 * 2 * 2 * 256 * 0.5625
    found = step_bytes(sizes, plan.layers, contexts=[8192] * 7, distinct=[256] * 40, matrix_bytes=2.0)
    assert found.states == 2 * 7 * state_bytes(sizes, 2.0)
    assert found.total == found.dense + found.experts + found.kv + found.states
    experts = 40 * 256 * 3 * 2048 * 512 * 0.5625
    assert weight_bytes(sizes, plan.layers) == pytest.approx(experts + 4.9e9, rel=0.01)


def test_states_take_memory_from_pages():
    def batch(state_pages):
        (load,) = loads_of(Point(128, "full"), num_pages=100, page_size=16, state_pages=state_pages)
        return len(load.contexts)

    assert [batch(share) for share in (0.0, 0.5, 2.0, 92.0)] == [12, 11, 10, 1]
    with pytest.raises(ConfigError, match="3 sequences of 128 tokens need the memory of 27 pages"):
        loads_of(Point(128, "batch", 3), num_pages=26, page_size=16, state_pages=1.0)


def test_every_batch_size_has_an_engine_of_its_own_where_there_are_states():
    loads = {
        Point(128, "full"): [Load((128,) * 4, "uniform")],
        Point(128, "steady"): [Load((70,) * 6, "uniform")],
        Point(128, "full", routing="zipf"): [Load((128,) * 4, "zipf")],
    }
    assert side_by_side(loads, has_states=False) == [loads] and side_by_side({}, has_states=False) == []
    full, steady, zipf = loads
    assert [list(found) for found in side_by_side(loads, has_states=True)] == [[steady], [full, zipf]]


def test_steps_begin_from_random_states_and_norms_of_one():
    def work(engine):
        engine.place([64] * 4, num_steps=8)
        assert engine.pool.states.layers[0].recurrent.std() == pytest.approx(STATE_STD, rel=0.05)
        assert bool((engine._model.weights.norm("model.layers.1.input_layernorm.weight") == 1).all())
        assert len(engine.take_steps(7)) == 7 and engine.count_record_differences() == 0
        return [part.clone() for part in engine.pool.states.layers[2]]

    for one, other in zip(hybrid_engine(work), hybrid_engine(work), strict=True):
        assert torch.equal(one, other) and bool(one.isfinite().all())


def test_a_pass_that_is_only_compared_moves_no_state():
    def work(engine):
        engine.place([64] * 4, num_steps=8)
        states = engine.pool.states
        before = [part.clone() for layer in states.layers.values() for part in layer]
        with kept_states(states):
            engine.take_steps(1)
            assert not torch.equal(before[1], states.layers[0].recurrent)
        after = [part for layer in states.layers.values() for part in layer]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))

    hybrid_engine(work)


def test_states_are_stored_as_asked_and_more_sequences_fit():
    shares = []
    for dtype in ("float32", "bfloat16"):
        engine_dtype = hybrid_engine(
            lambda engine: engine.pool.states.layers[0].recurrent.dtype, state_dtype=dtype
        )
        assert str(engine_dtype) == f"torch.{dtype}"
        shop = Workshop(
            shape=TINY_HYBRID, device=CPU, memory=0.9, page_size=16, longest=256, state_dtype=dtype
        )
        shares.append(shop.state_pages("fp4"))
    assert shares[0] > 1.5 * shares[1] > 0 == workshop().state_pages("fp4")


def test_the_command_measures_a_hybrid(tmp_path):
    out = tmp_path / "engine.json"
    options = ("--only", "full,recording", "--state-dtype", "bfloat16", "--out", str(out))
    result = CliRunner().invoke(app, [*RUN, *options])
    assert result.exit_code == 0, result.output
    rows = {row["id"]: row for row in json.loads(out.read_text())["rows"]}
    assert set(rows) == {f"engine.tiny-hybrid.128{end}.bf16_state" for end in ("", ".bf16", ".recording")}
    assert rows["engine.tiny-hybrid.128.bf16_state"]["check"]["error"] == 0


def test_a_state_dtype_is_refused_where_it_means_nothing():
    with pytest.raises(ConfigError, match=r"states of tiny cannot be stored like that.*Allowed is auto"):
        EngineOptions(shape=TINY, contexts=(1024,), state_dtype="float32")
    with pytest.raises(ConfigError, match="got 'fp8'. Allowed is auto or float32 or bfloat16"):
        EngineOptions(shape=TINY_HYBRID, contexts=(1024,), state_dtype="fp8")


def test_every_gate_of_the_hybrid_is_measured():
    sizes = read_sizes(config_of(measured_shape("qwen3.5-35b-a3b"), max_positions=64))
    ids = set()
    for suffix in (".fp32_state", ".bf16_state", ".bf16_state.memory60"):
        for plan, mode in (("fp4", PlanRules()), ("bf16", PlanRules(mode="bf16", guidance="none"))):
            precision = plan_of(config_of(measured_shape("qwen3.5-35b-a3b"), max_positions=64), mode).layers
            free = H200_BYTES - weight_bytes(sizes, precision)
            page_bytes = 16 * token_bytes(sizes, precision)
            share = state_bytes(sizes, 2.0 if "bf16" in suffix else 4.0) / page_bytes
            results = []
            for point in all_points((1024, 8192, 32768, 131072)):
                try:
                    loads_of(point, num_pages=int(free / page_bytes), page_size=16, state_pages=share)
                except ConfigError:
                    continue
                results.append(point_result(point, plan, step_s=0.03, num_pages=10**7))
            ids |= {row.id for row in maker("qwen3.5-35b-a3b", suffix=suffix).rows(results, {})}
    gated = {gate.row for gate in GATES if gate.row.startswith("engine.qwen3.5-35b-a3b.")}
    assert len(gated) == 11 and gated - ids == set()
    assert MAX_BATCH == 1024  # of the gate at 1k

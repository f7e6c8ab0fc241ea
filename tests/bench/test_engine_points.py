"""Points of the suite `engine`: batches that memory allows, ranges of contexts, and the bytes that a step must move."""

import pytest
import torch

from tracefp4.bench.engine_points import (
    GROUPS,
    MAX_BATCH,
    Point,
    all_points,
    chosen_points,
    first_context,
    grid,
    loads_of,
    mean_over,
    read_context,
    shown_context,
    spread,
    step_bytes,
    token_bytes,
    weight_bytes,
)
from tracefp4.bench.engine_shapes import PLANS, config_of, measured_names, measured_shape, plan_of
from tracefp4.errors import ConfigError
from tracefp4.models.qwen3_moe_config import read_sizes

H200_BYTES = 0.90 * 139 * 2**30 - 2.7 * 2**30


@pytest.fixture(scope="module")
def qwen3():
    config = config_of(measured_shape("qwen3-30b-a3b"), max_positions=8192)
    return read_sizes(config), {name: plan_of(config, rules).layers for name, rules in PLANS.items()}


def test_batches_are_those_that_the_memory_of_an_h200_allows(qwen3):
    sizes, plans = qwen3
    found = {}
    for name, precision in plans.items():
        pages = int((H200_BYTES - weight_bytes(sizes, precision)) / (16 * token_bytes(sizes, precision)))
        for accounting in ("full", "together", "steady"):
            load = loads_of(Point(8192, accounting), num_pages=pages, page_size=16)[0]
            found[name, accounting] = len(load.contexts)
    # arithmetic of the bytes alone gives 494 and 87, and 879 and 155 at spread ages; pages are whole
    assert found["fp4", "full"] == found["fp4", "together"] and 490 <= found["fp4", "full"] <= 494
    assert found["bf16", "full"] == found["bf16", "together"] and 85 <= found["bf16", "full"] <= 87
    assert 870 <= found["fp4", "steady"] <= 879 and 153 <= found["bf16", "steady"] <= 155


def test_bytes_of_a_step_are_weights_in_use_and_the_cache(qwen3):
    sizes, plans = qwen3
    found = step_bytes(sizes, plans["bf16"], contexts=[8192] * 87, distinct=[128] * 48)
    assert found.total == pytest.approx(130.3e9, rel=0.01)
    assert found.kv == 98304 * (8192 + 1) * 87 and found.experts == 48 * 128 * 3 * 2048 * 768 * 2
    half = step_bytes(sizes, plans["bf16"], contexts=[8192] * 87, distinct=[64] * 48)
    assert half.experts == found.experts / 2 and half.kv == found.kv
    coded = step_bytes(sizes, plans["fp4"], contexts=[8192] * 87, distinct=[128] * 48)
    assert coded.experts / found.experts == coded.kv / found.kv == 0.5625 / 2
    assert coded.dense == found.dense
    assert weight_bytes(sizes, plans["bf16"]) == pytest.approx(56.87 * 2**30, rel=0.001)


def test_contexts_of_a_batch_that_grows_and_of_ages():
    assert grid(8192) == (1024, 2048, 4096, 6144, 8192) and grid(32768)[:2] == (1024, 8192)
    assert grid(128) == (16, 32, 64, 96, 128) and first_context(1024) == 128
    ages = spread(8192, 7)
    assert sum(ages) / 7 == (1024 + 8192) / 2 and ages == tuple(sorted(ages))
    assert min(ages) > 1024 and max(ages) < 8192
    # over a range the mean is the integral: of a straight line its middle, wherever it was looked at
    assert mean_over([1, 2, 9], [1.0, 2.0, 9.0]) == 5.0 and mean_over([7], [3.0]) == 3.0
    assert mean_over([0, 1, 2], [0.0, 4.0, 0.0]) == 2.0


def test_sequences_fit_with_what_the_scheduler_keeps_free():
    (load,) = loads_of(Point(128, "full"), num_pages=33, page_size=16)
    assert load.contexts == (128,) * 4
    (load,) = loads_of(Point(128, "full"), num_pages=31, page_size=16)
    assert load.contexts == (128,) * 3
    (load,) = loads_of(Point(16, "full"), num_pages=16, page_size=16)
    assert len(load.contexts) == 15  # sixteen running sequences ask for one page more
    (load,) = loads_of(Point(16, "full"), num_pages=10**6, page_size=16)
    assert len(load.contexts) == MAX_BATCH
    (load,) = loads_of(Point(128, "batch", 3), num_pages=24, page_size=16)
    assert load.contexts == (128,) * 3
    with pytest.raises(
        ConfigError, match="3 sequences of 128 tokens need the memory of 24 pages; there is room for 23"
    ):
        loads_of(Point(128, "batch", 3), num_pages=23, page_size=16)
    for accounting in ("full", "together", "steady"):
        with pytest.raises(ConfigError, match="there is room for 1 of 16 positions"):
            loads_of(Point(128, accounting), num_pages=1, page_size=16)


def test_points_have_names_and_groups():
    points = all_points([8192, 32768])
    names = [point.name for point in points]
    assert len(set(names)) == len(names)
    assert {"8k", "8k.together", "32k.steady", "8k.batch64", "1k.batch1", "8k.zipf"} <= set(names)
    assert {point.group for point in points} == set(GROUPS) - {"recording"}
    # weights change once: one routing after the other
    assert [point.routing for point in points] == sorted(point.routing for point in points)
    assert [point.name for point in chosen_points(["zipf"], [8192])] == ["8k.zipf"]
    assert chosen_points([], [8192]) == all_points([8192])
    with pytest.raises(ConfigError, match="no group 'whole'; groups: full, together"):
        chosen_points(["whole"], [8192])


@pytest.mark.parametrize(("text", "tokens"), [("8k", 8192), ("32K", 32768), (" 128 ", 128), ("1000", 1000)])
def test_contexts_are_read_as_they_are_shown(text, tokens):
    assert read_context(text) == tokens and read_context(shown_context(tokens)) == tokens


@pytest.mark.parametrize("text", ["", "k", "-8k", "8 k", "1.5k", "15"])
def test_no_context(text):
    with pytest.raises(ConfigError, match="a context is a number of tokens"):
        read_context(text)


def test_shapes_that_are_built():
    names = ["qwen3.5-35b-a3b", "qwen3.5-122b-a10b", "qwen3.8-2.4t-a95b", "qwen3-30b-a3b", "qwen3-235b-a22b"]
    assert measured_names() == [*names, "tiny", "tiny-hybrid"]
    part = measured_shape("Qwen3-30B", layers=4)
    assert part.name == "Qwen3-30B-A3B.4_layers" and part.attention_layers == (0, 1, 2, 3)
    assert measured_shape("qwen3-30b-a3b", layers=48) == measured_shape("qwen3-30b-a3b")
    assert read_sizes(config_of(part, max_positions=64)).num_layers == 4
    for name, why in (("gpt-oss-20b", "does not build"), ("qwen4", "no known shape")):
        with pytest.raises(ConfigError, match=f"{why}.*shapes: qwen3.5-35b-a3b.*tiny"):
            measured_shape(name)
    with pytest.raises(ConfigError, match="cut to its first 3 layers; it has 2. Allowed: 1 to 2"):
        measured_shape("tiny", layers=3)


def test_a_plan_is_made_without_a_weight():
    config = config_of(measured_shape("qwen3-235b-a22b"), max_positions=64)
    before = torch.get_default_device()
    plans = {name: plan_of(config, rules) for name, rules in PLANS.items()}
    assert torch.get_default_device() == before and len(plans["fp4"].layers) == 94
    assert plans["fp4"].layers[0].weight.name == "NVFP4_TENSOR_POW2" and plans["bf16"].layers[0].kv is None

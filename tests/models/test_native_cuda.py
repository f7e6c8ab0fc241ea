"""The pass on a GPU: the function that the CPU computes, without a wait, and the same bits from a CUDA graph."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from tests.assertions import assert_bitwise
from tests.models.native import LOGITS_CLOSE, decoding, following, new_pool, relative_error, stored_bytes
from tests.models.test_qwen3_moe import make
from tests.models.tiny_models import FP4_LAYER, bf16, fp4, tiny_model
from tests.rollout.engines import make_engine

from tracefp4.formats.arithmetic import EMULATED, NATIVE
from tracefp4.formats.fragments import FragmentPages
from tracefp4.guidance import Site
from tracefp4.models import Qwen3MoeEngineModel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SIZES = {"hidden_size": 128, "head_dim": 64, "moe_intermediate_size": 64, "num_experts": 16}
LENGTH = 64
PRECISIONS = {
    "fp4": fp4(),
    "bf16": bf16(),
    "activations": (replace(FP4_LAYER, weight=None),) * 2,
    "weights": (replace(FP4_LAYER, activation=None, kv=None),) * 2,
}


def on_gpu(model):
    return {name: tensor.cuda() for name, tensor in model.state_dict().items()}


def native(model, precision):
    return Qwen3MoeEngineModel(model.config, on_gpu(model), precision=precision, arithmetic=NATIVE)


def taps_of(model):
    sites = [
        Site(kind, n)
        for n, layer in enumerate(model.precision)
        for kind in ("x", "w2", "k", "v")
        if layer.scheme_of(kind) is not None
    ]
    return model.taps(sites, routed_layers=(0, 1))


def parts_of(stacked):
    tensors = [t for s in stacked.sites.values() for t in (s.packed, s.block_scales, s.exponents)]
    return [t for t in (*tensors, stacked.ids) if t is not None]


class Inputs:
    """A decode batch of fixed size in memory that a graph reads, three sequences and a row that fills up."""

    def __init__(self, pool):
        self.pool = pool
        self.batch = self.of([1, 2, 3], position=0)

    def of(self, token_ids, *, position):
        return decoding(self.pool, token_ids, position=position, padding=4 - len(token_ids))

    def put(self, batch):
        for name in ("token_ids", "positions", "slots", "logit_rows"):
            getattr(self.batch, name).copy_(getattr(batch, name))
        self.batch.segments[0].page_table.copy_(batch.segments[0].page_table)
        self.batch.segments[0].positions.copy_(batch.segments[0].positions)


@pytest.mark.parametrize("name", PRECISIONS)
def test_the_definition_that_follows_the_record_of_a_gpu_computes_its_logits(name):
    precision, model = PRECISIONS[name], tiny_model(seed=1, **SIZES)
    torch.manual_seed(0)
    prompts = [torch.randint(0, 40, (n,)).tolist() for n in (6, 19, 11)]
    engine = make_engine(
        deepcopy(model).cuda(), precision=precision, arithmetic=NATIVE, page_size=16, max_tokens_per_step=16
    )
    if precision[0].kv is not None:
        assert isinstance(engine.pool.layers[0].keys, FragmentPages)
    rows = engine.force(prompts, [[[1, 2, 3]], [[4, 5]], [[6, 7, 8, 9]]])
    definition = make(model, precision, EMULATED)
    for (completion,) in rows:
        logits = following(definition, completion.prompt_ids + completion.token_ids, completion.record)
        logprobs = torch.log_softmax(logits.double(), -1)[len(completion.prompt_ids) - 1 :]
        found = logprobs.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        assert (found - torch.tensor(completion.logprobs)).abs().max() < 2 * LOGITS_CLOSE * logits.abs().max()


def test_bytes_of_the_first_layer_are_those_of_the_cpu():
    # K and V of the first layer have nothing before them but a norm and one product, whose sums run in another order
    model = tiny_model(seed=1, **SIZES)
    found = []
    for engine_model in (make(model, fp4(), NATIVE), native(model, fp4())):
        pool, taps = new_pool(engine_model, page_size=16), taps_of(engine_model)
        engine_model.native.reserve(LENGTH)
        engine_model.native.run(decoding(pool, list(range(12)), position=0), pool, taps)
        found.append(taps.stacked())
    for kind, least in (("k", 0.97), ("v", 0.97), ("x", 0.8)):
        here, there = (stacked.sites[kind].packed[0].cpu() for stacked in found)
        assert (here == there).float().mean() > least
    assert found[1].sites["k"].static_exponents == found[0].sites["k"].static_exponents


@pytest.mark.parametrize("name", PRECISIONS)
def test_a_pass_waits_for_nothing(name):
    model = native(tiny_model(seed=1, **SIZES), PRECISIONS[name])
    pool = new_pool(model, page_size=16)
    inputs = Inputs(pool)
    model.native.reserve(LENGTH)
    model.native.run(inputs.batch, pool, taps_of(model)).cpu()
    torch.cuda.set_sync_debug_mode("error")
    try:
        taps = taps_of(model)
        model.native.run(inputs.batch, pool, taps)
        taps.stacked()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", PRECISIONS)
def test_a_captured_pass_gives_the_bits_of_an_eager_one(name):
    transformers_model = tiny_model(seed=1, **SIZES)
    model = native(transformers_model, PRECISIONS[name])
    pool, other = new_pool(model, page_size=16), new_pool(model, page_size=16)
    inputs = Inputs(pool)
    model.native.reserve(LENGTH)

    def step(batch, of):
        taps = taps_of(model)
        return model.native.run(batch, of, taps), parts_of(taps.stacked())

    warm_up = torch.cuda.Stream()
    warm_up.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm_up):
        step(inputs.batch, pool)
    torch.cuda.current_stream().wait_stream(warm_up)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(inputs.batch, pool)
    state = on_gpu(transformers_model)
    for at in range(6):
        if at % 2:  # a new version, written where the graph reads the old one
            state = {name: tensor.flip(0) for name, tensor in state.items()}
            model.weights.load(state)
        tokens = [at, 5, 39 - at]
        inputs.put(inputs.of(tokens, position=at))
        graph.replay()
        hidden, parts = step(inputs.of(tokens, position=at), other)
        assert hidden.isfinite().all()
        assert_bitwise(captured[0][:3], hidden[:3])
        for replayed, eager in zip(captured[1], parts, strict=True):
            assert_bitwise(replayed, eager)
        for mine, its in zip(pages_of(pool), pages_of(other), strict=True):
            assert_bitwise(mine, its)


def pages_of(pool):
    if pool.layers[0].keys.__class__ is torch.Tensor:
        return [part for layer in pool.layers for part in (layer.keys, layer.values)]
    return stored_bytes(pool)


def test_rows_that_fill_up_a_batch_leave_no_trace():
    model = native(tiny_model(seed=1, **SIZES), fp4())
    pools = [new_pool(model, page_size=16) for _ in range(2)]
    model.native.reserve(LENGTH)
    found = [
        model.native.run(decoding(pool, [5, 6], position=0, padding=padding), pool)
        for pool, padding in zip(pools, (0, 6), strict=True)
    ]
    assert found[1].isfinite().all()
    assert relative_error(found[1][:2], found[0]) < LOGITS_CLOSE
    assert not any(part[:, -1].any() for part in stored_bytes(pools[1]))

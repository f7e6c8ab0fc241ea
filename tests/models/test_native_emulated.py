"""The pass by its GPU kernels, run by the emulation: how ops hand each other views, fragments and pages."""

import importlib

import pytest
import torch
from tests.assertions import assert_bitwise
from tests.emulation.emulator import COMPILER, Emulator
from tests.models.native import LOGITS_CLOSE, decoding, following, new_pool, relative_error
from tests.models.test_qwen3_moe import make
from tests.models.tiny_models import fp4, tiny_model
from tests.rollout.engines import make_engine

from tracefp4.formats.arithmetic import EMULATED, NATIVE
from tracefp4.formats.fragments import FragmentPages
from tracefp4.kvcache import pool as pool_module
from tracefp4.ops.backend import Backend

pytestmark = pytest.mark.skipif(COMPILER is None, reason="the emulation needs g++")
OPS = (
    "rms_norm",
    "rotary",
    "route",
    "expert_layer",
    "kv_append",
    "kv_attention",
    "swiglu",
    "quantize",
    "dequantize",
)
SIZES = {"num_hidden_layers": 1, "hidden_size": 128, "head_dim": 64, "moe_intermediate_size": 64}


@pytest.fixture
def emulated(monkeypatch):
    """Every op of a pass launches its kernels, each warp as far ahead as it can."""
    emulator = Emulator(3)
    for op in OPS:
        monkeypatch.setattr(f"tracefp4.ops.{op}.choose", lambda *asked, **also: Backend.CUDA)
        for value in vars(importlib.import_module(f"tracefp4.ops.{op}.device")).values():
            if hasattr(value, "runner"):
                monkeypatch.setattr(value, "runner", emulator)
    monkeypatch.setattr(pool_module, "choose", lambda *asked: Backend.CUDA)
    return emulator


@pytest.mark.slow
def test_the_definition_that_follows_the_record_of_kernels_computes_their_logits(emulated):
    # rows 0 .. 8 of prompts are chunks of 5 and 3, padded in one segment, beside decoding rows
    torch.manual_seed(0)
    model, precision = tiny_model(seed=1, **SIZES), fp4(1)
    prompts = [torch.randint(0, 40, (n,)).tolist() for n in (6, 9)]
    engine = make_engine(model, precision=precision, arithmetic=NATIVE, page_size=16, max_tokens_per_step=8)
    assert isinstance(engine.pool.layers[0].keys, FragmentPages)
    rows = engine.force(prompts, [[[1, 2, 3]], [[4, 5]]])
    definition = make(model, precision, EMULATED)
    for (completion,) in rows:
        logits = following(definition, completion.prompt_ids + completion.token_ids, completion.record)
        logprobs = torch.log_softmax(logits.double(), -1)[len(completion.prompt_ids) - 1 :]
        found = logprobs.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        assert (found - torch.tensor(completion.logprobs)).abs().max() < 2 * LOGITS_CLOSE * logits.abs().max()
    launched = emulated.launches
    assert {
        "normalize_rows",
        "norm_and_rotate",
        "route_tokens",
        "quantize_append",
        "attend",
        "combine",
    } <= launched.keys()


def test_rows_that_fill_up_a_batch_of_kernels_change_no_bit(emulated):
    model = make(tiny_model(seed=1, **SIZES), fp4(1), NATIVE)
    found = []
    for padding in (0, 2):
        pool = new_pool(model, page_size=16)
        for position in (0, 1):
            batch = decoding(pool, [3 + position, 8], position=position, padding=padding)
            model.native.reserve(4)
            taps = model.taps([], routed_layers=())
            hidden = model.native.run(batch, pool, taps)
        assert hidden.isfinite().all()
        found.append((hidden[:2], pool))
    assert relative_error(found[1][0], found[0][0]) < LOGITS_CLOSE
    for pool in (pool for _, pool in found):
        for part in (pool.layers[0].keys, pool.layers[0].values):
            assert not part.packed[:, -1].any() and not part.block_scales[:, -1].any()
    assert_bitwise(found[1][1].layers[0].keys.block_scales, found[0][1].layers[0].keys.block_scales)

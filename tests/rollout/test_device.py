"""Everything lives where the weights live: no factory call may use the default device, and bf16 storage runs.

No second device is needed to see the first: every call that makes a tensor in these rooms must name one.
"""

import sys

import pytest
import torch
from tests.models.tiny_models import tiny_model
from tests.rollout.engines import make_engine, make_prompts, sampled
from torch.overrides import TorchFunctionMode

from tracefp4.formats.arithmetic import NATIVE
from tracefp4.guidance import Site

ROOMS = ("rollout", "kvcache", "models")
FACTORIES = {torch.tensor, torch.zeros, torch.ones, torch.full, torch.empty, torch.arange, torch.as_tensor}
PARAMS = {"n": 2, "seed": 3, "top_k": 9, "top_p": 0.9}


class WithoutDevice(TorchFunctionMode):
    """Collects the lines of the engine's rooms that make a tensor without saying where."""

    def __init__(self):
        super().__init__()
        self.lines = set()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in FACTORIES and kwargs.get("device") is None:
            frame = sys._getframe(1)
            while "tracefp4" not in frame.f_code.co_filename:
                frame = frame.f_back
            room, module = frame.f_code.co_filename.split("/")[-2:]
            if room in ROOMS:
                self.lines.add(f"{room}/{module}:{frame.f_lineno}")
        return func(*args, **kwargs)


def test_no_tensor_is_made_on_the_default_device():
    # Mutation: torch.arange without a device in sampler.truncated, or torch.tensor in the runner.
    model, prompts = tiny_model(), make_prompts(4, longest=12)
    with WithoutDevice() as found:
        engine = make_engine(
            model, num_pages=9, max_tokens_per_step=8, max_swapped_pages=1, prefix_cache=True, max_log_rows=40
        )
        row = engine.generate(prompts, sampled(9, **PARAMS))
        engine.force(prompts, [[c.token_ids for c in group] for group in row])
        engine.extend(row[0], [[1], [2]], sampled(3))
        engine.submit(prompts[0], sampled(5))
        engine.step()
        engine.update_weights(model.state_dict(), version=1, recompute=True)
        engine.generate(prompts, sampled(3))
        engine.take_finished()
    stats = engine.stats
    assert min(stats.positions_restored, stats.positions_recomputed, stats.prefix_hits, stats.pages_lost) > 0
    assert engine.stats.pages_swapped_out > 0
    assert found.lines == set()


def test_the_engine_lives_on_the_device_of_its_state():
    engine = make_engine()
    assert engine._model.device == engine.pool.device == torch.device("cpu")
    assert engine.pool.layers[0].keys.packed.device == torch.device("cpu")


@pytest.mark.parametrize("records", [True, (Site("w2", 1), Site("k", 0))], ids=["default", "chosen"])
def test_bf16_storage_generates_and_records(records):
    model, prompts = tiny_model(), make_prompts(3)
    engine = make_engine(model, arithmetic=NATIVE, records=records)
    found = engine.generate(prompts, sampled(6, n=2))
    assert engine._model.weights.head.dtype == torch.bfloat16
    for row in found:
        for c in row:
            assert c.record.length == len(c.prompt_ids) + 5 and c.record.valid.all()
    forced = make_engine(model, arithmetic=NATIVE, records=records).force(
        prompts, [[c.token_ids for c in row] for row in found]
    )
    assert [[c.token_ids for c in row] for row in forced] == [[c.token_ids for c in row] for row in found]

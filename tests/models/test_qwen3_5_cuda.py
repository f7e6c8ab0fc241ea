"""Qwen3.5-MoE on a real GPU: the pass by kernels beside the definition on a processor, and a decode step in a graph."""

import pytest
import torch
from tests.assertions import assert_bitwise
from tests.models.native import relative_error
from tests.models.test_qwen3_5_native import CLOSE, weights_only
from tests.models.tiny_hybrids import Rows, fp4, make, run_in_chunks, tiny_model

from tracefp4.formats.arithmetic import EMULATED, NATIVE
from tracefp4.models import Qwen35MoeEngineModel, TokenBatch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
# what the kernels take: heads of 64 in attention and in delta layers, experts of whole fragments
SIZES = {
    "hidden_size": 256,
    "head_dim": 64,
    "moe_intermediate_size": 64,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}


def on_gpu(model, plan):
    state = {name: tensor.cuda() for name, tensor in model.state_dict().items()}
    return Qwen35MoeEngineModel(model.config, state, precision=plan(model), arithmetic=NATIVE)


class GpuRows(Rows):
    """Rows whose batches are moved to the GPU; pages of 16 tokens, as its kernels take them."""

    page = 16

    def batch(self, *works):
        return super().batch(*works).to(self.model.device)


def test_a_pass_computes_what_the_definition_does():
    model = tiny_model(seed=1, **SIZES)
    tokens = torch.randint(0, 40, (13,)).tolist()
    wanted = run_in_chunks(make(model, weights_only(model), EMULATED), tokens, 13)[0]
    rows = GpuRows(on_gpu(model, weights_only), 1, 13)
    parts = [rows.forward([(0, tokens[:8])])[0], *(rows.forward([(0, [t])])[0] for t in tokens[8:])]
    errors = torch.tensor([relative_error(f, w) for f, w in zip(torch.cat(parts), wanted, strict=True)])
    assert errors.median() < CLOSE and (errors < CLOSE).float().mean() > 0.7


def test_a_decode_step_in_a_graph_is_the_eager_one():
    model = tiny_model(seed=1, **SIZES)
    rows, eager = (GpuRows(on_gpu(model, fp4), 3, 12) for _ in range(2))
    prompts = [(0, [1, 2, 3]), (1, [4, 5]), (2, [6])]
    for some in (rows, eager):
        some.forward(prompts)
        some.model.native.reserve(12)
    native = rows.model.native
    batch = rows.batch([(sequence, [7]) for sequence in range(3)])
    before = [[part.clone() for part in state] for state in rows.pool.states.layers.values()]
    native.run(batch, rows.pool)  # every kernel was used before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = native.run(batch, rows.pool)
    for state, saved in zip(rows.pool.states.layers.values(), before, strict=True):
        for part, was in zip(state, saved, strict=True):
            part.copy_(was)
    for token in (7, 8, 9):
        step = [(sequence, [token + sequence]) for sequence in range(3)]
        new = rows.batch(step)
        _fill(batch, new)
        graph.replay()
        expected = eager.model.native.run(eager.batch(step), eager.pool)
        assert_bitwise(out.cpu(), expected.cpu())
        for some in (rows, eager):
            some.lengths = [length + 1 for length in some.lengths]


def _fill(batch: TokenBatch, new: TokenBatch) -> None:
    """Put a step's columns where the captured one reads them."""
    pairs = [(batch.token_ids, new.token_ids), (batch.positions, new.positions), (batch.slots, new.slots)]
    (to,), (of,) = batch.segments, new.segments
    pairs += [(getattr(to, n), getattr(of, n)) for n in ("page_table", "positions", "state_slots")]
    for target, source in pairs:
        target.copy_(source)

"""Gated delta layers on a real GPU: the comparisons of the emulation at the sizes of a model, and CUDA graphs."""

import pytest
import torch
from tests.assertions import assert_bitwise
from tests.ops.delta_cases import copy, layer, projected, states

from tracefp4.ops.backend import Backend
from tracefp4.ops.gated_delta import (
    DeltaState,
    DeltaWeights,
    Projected,
    gated_delta_prefill,
    gated_delta_step,
)
from tracefp4.ops.gated_delta.device import LIBRARY, advance_on_device, case_of, prepare_on_device, within
from tracefp4.ops.gated_delta.operands import Prepared, Storage
from tracefp4.ops.gated_delta.reference import advance_reference, prepare_reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
NATIVE = Storage(torch.bfloat16, False)
STATES = [torch.bfloat16, torch.float32]
NAMES = ("taps", "a_log", "dt_bias", "norm")


def on_gpu(parts):
    if isinstance(parts, DeltaWeights):
        return DeltaWeights(**{n: getattr(parts, n).cuda() for n in NAMES}, epsilon=parts.epsilon)
    return type(parts)(*(part.cuda() for part in parts))


@pytest.mark.parametrize("dtype", STATES, ids=str)
def test_both_launches_at_the_size_of_a_model(dtype):
    weights, slots = layer(16, 32, 128, 128), torch.tensor([5, -1, 0, 3, 7, 1])
    given, state = projected(weights, 6), states(weights, 128, 8, dtype=dtype)
    there, at, device_weights = on_gpu(state), slots.cuda(), on_gpu(weights)
    assert LIBRARY.status(at.device, case_of(device_weights, there)).is_usable
    wanted = prepare_reference(given, weights, state, slots, storage=NATIVE)
    found = prepare_on_device(on_gpu(given), device_weights, there, at)
    own = Prepared(*(part.cpu() for part in found))
    assert within(own, wanted).all()
    assert_bitwise(there.conv.cpu(), state.conv)
    gate = torch.full_like(given.z, 100.0)  # whose silu is itself in any library
    got = advance_on_device(found, gate.cuda(), device_weights, there.recurrent, at)
    exact = advance_reference(own, gate, weights, state.recurrent, slots, storage=NATIVE)
    assert_bitwise(got.cpu(), exact)
    assert_bitwise(there.recurrent.cpu(), state.recurrent)


@pytest.mark.parametrize("dtype", STATES, ids=str)
def test_a_graph_goes_on_with_new_inputs_and_repeats_bit_for_bit(dtype):
    weights = on_gpu(layer(16, 32, 128, 128))
    steps = [on_gpu(projected(weights_on_cpu(), 64, seed=seed)) for seed in range(3)]
    state, slots = on_gpu(states(weights_on_cpu(), 128, 64, dtype=dtype)), torch.randperm(64).cuda()
    eager, given = copy(state), Projected(*(part.clone() for part in steps[0]))
    wanted = [gated_delta_step(s, weights, eager, slots=slots, backend=Backend.CUDA).clone() for s in steps]
    before, graph = copy(state), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = gated_delta_step(given, weights, state, slots=slots, backend=Backend.CUDA)
    for part, was in zip(state, before, strict=True):
        part.copy_(was)
    for step, expected in zip(steps, wanted, strict=True):
        for part, new in zip(given, step, strict=True):
            part.copy_(new)
        graph.replay()
        assert_bitwise(out.cpu(), expected.cpu())
    for part, expected in zip(state, eager, strict=True):
        assert_bitwise(part.cpu(), expected.cpu())


def weights_on_cpu():
    return layer(16, 32, 128, 128)


def test_prefill_is_that_of_the_processor():
    weights = weights_on_cpu()
    given, state = projected(weights, 2, 150), states(weights, 128, dtype=torch.float32, is_zero=True)
    slots, lengths = torch.tensor([3, 0]), torch.tensor([150, 67])
    there: DeltaState = on_gpu(state)
    wanted = gated_delta_prefill(given, weights, state, slots=slots, lengths=lengths)
    got = gated_delta_prefill(
        on_gpu(given), on_gpu(weights), there, slots=slots.cuda(), lengths=lengths.cuda()
    )
    for row, length in enumerate(lengths.tolist()):
        one, other = (x[row, :length].float() for x in (got.cpu(), wanted))
        assert (one - other).norm() < 2.0**-7 * other.norm()
    assert (there.recurrent.cpu() - state.recurrent).norm() < 1e-2 * state.recurrent.norm()

"""The kernels of gated_delta against their definition, in any order of threads."""

import pytest
import torch
from tests.assertions import assert_bitwise
from tests.emulation.emulator import COMPILER, Emulator
from tests.ops.delta_cases import copy, layer, projected, states

from tracefp4.ops import nvrtc
from tracefp4.ops.gated_delta import Projected
from tracefp4.ops.gated_delta import device as delta_device
from tracefp4.ops.gated_delta.device import (
    STEP_THREADS,
    Case,
    advance_on_device,
    case_of,
    differences,
    is_covered,
    prepare_on_device,
    step_on_device,
    within,
)
from tracefp4.ops.gated_delta.operands import Storage
from tracefp4.ops.gated_delta.reference import advance_reference, prepare_reference
from tracefp4.ops.kernels import DTYPE

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="the emulation needs g++")
NATIVE = Storage(torch.bfloat16, False)
STATES = [torch.bfloat16, torch.float32]


@pytest.fixture(params=[0, 1, 2, 3])
def emulator(request, monkeypatch):
    emulator = Emulator(request.param)
    for file in (delta_device.LIBRARY, delta_device.PREPARING):
        monkeypatch.setattr(file, "runner", emulator)
    return emulator


def assert_step(given, weights, state, slots):
    """Both launches: exact where no exponential is, within what its last bits allow elsewhere."""
    theirs = copy(state)
    wanted = prepare_reference(given, weights, theirs, slots, storage=NATIVE)
    found = prepare_on_device(given, weights, state, slots)
    assert_bitwise(state.conv, theirs.conv)
    assert within(found, wanted).tolist() == [True] * 5
    is_equal = torch.cat([(f == w).flatten() for f, w in zip(found[2::2], wanted[2::2], strict=True)])
    assert is_equal.numel() == 0 or is_equal.float().mean() > 0.98
    # silu of 100 is 100 in any library: what is left is exact
    open_gate = torch.full_like(given.z, 100.0)
    got = advance_on_device(found, open_gate, weights, state.recurrent, slots)
    exact = advance_reference(found, open_gate, weights, theirs.recurrent, slots, storage=NATIVE)
    assert_bitwise(got, exact)
    assert_bitwise(state.recurrent, theirs.recurrent)


@needs_compiler
@pytest.mark.parametrize("dtype", STATES, ids=str)
@pytest.mark.parametrize(("key_dim", "value_dim"), [(64, 64), (64, 128), (128, 64), (128, 128)])
def test_states_and_outputs_are_those_of_the_reference(emulator, dtype, key_dim, value_dim):
    weights = layer(1, 2, key_dim, value_dim)
    state, slots = states(weights, key_dim, 3, dtype=dtype), torch.tensor([2, 0])
    assert is_covered(projected(weights, 2), weights, state)
    for seed in range(2):  # the second step reads what the first wrote
        assert_step(projected(weights, 2, seed=seed), weights, state, slots)


@needs_compiler
def test_every_head_and_sequence_has_its_own_place(emulator):
    weights = layer(2, 6, 64, 64, taps=3)
    state, slots = states(weights, 64, 7), torch.tensor([5, -1, 0, 6, -2, 3])
    before = copy(state)
    given = projected(weights, 6)
    assert_step(given, weights, state, slots)
    idle = [1, 2, 4]
    for part, was in zip(state, before, strict=True):
        assert_bitwise(part[idle], was[idle])
    out = step_on_device(given, weights, state, slots)
    assert not out[[1, 4]].any() and out[[0, 2, 3, 5]].any(1).all()
    nothing = Projected(*(part[:0] for part in given))
    assert step_on_device(nothing, weights, state, slots[:0]).shape == (0, 6 * 64)


@needs_compiler
def test_projections_are_read_where_one_matrix_product_left_them(emulator):
    weights = layer(1, 2, 64, 64)
    state, slots = states(weights, 64), torch.tensor([4, 1, 2])
    sizes = [part.shape[1] for part in projected(weights, 3)]
    whole = torch.randn(3, sum(sizes)).bfloat16()
    views = Projected(*whole.split(sizes, dim=1))
    assert not views.mixed.is_contiguous()
    theirs = copy(state)
    copies = Projected(*(part.contiguous() for part in views))
    assert_bitwise(
        step_on_device(views, weights, state, slots), step_on_device(copies, weights, theirs, slots)
    )
    assert_bitwise(state.recurrent, theirs.recurrent)
    odd = Projected(*(torch.randn(3, n + 1).bfloat16()[:, 1:] for n in sizes))
    assert_step(odd, weights, state, slots)


@needs_compiler
def test_the_gate_and_what_is_not_finite(emulator):
    weights = layer(1, 2, 64, 64)
    state, slots = states(weights, 64, dtype=torch.float32), torch.tensor([0, 1, 2, 3])
    given = projected(weights, 4)
    given.mixed[1, 3] = float("nan")  # of a query: the outputs of its heads, no state
    given.mixed[2, 200] = float("inf")  # of a value
    given.a[3], given.b[3] = 1e30, -1e30  # everything decays, nothing is written
    theirs = copy(state)
    got = step_on_device(given, weights, state, slots)
    found = prepare_reference(given, weights, theirs, slots, storage=NATIVE)
    wanted = advance_reference(found, given.z, weights, theirs.recurrent, slots, storage=NATIVE)
    assert torch.equal(got.isnan(), wanted.isnan())
    assert got[0].isfinite().all() and got[1].isnan().all() and state.recurrent[1].isfinite().all()
    assert got[2].isnan().any() and not got[2].isnan().all()  # the other value head knows nothing of it
    assert not state.recurrent[3].any() and not got[3].any()
    error = (got[0].float() - wanted[0].float()).abs() / wanted[0].float().abs().clamp_min(1e-3)
    assert error.max() < 2.0**-5


@needs_compiler
def test_a_sequence_gets_the_same_bits_in_every_batch(emulator):
    weights = layer(1, 2, 64, 64)
    given, state = projected(weights, 5), states(weights, 64)
    alone = copy(state)
    together = step_on_device(given, weights, state, torch.tensor([3, 1, 4, 0, 2]))
    one = Projected(*(part[2:3] for part in given))
    assert_bitwise(step_on_device(one, weights, alone, torch.tensor([4])), together[2:3])
    assert_bitwise(alone.recurrent[4], state.recurrent[4])


@needs_compiler
@pytest.mark.parametrize("case", [Case(torch.bfloat16, 64, 128, 4), Case(torch.float32, 128, 64, 2)], ids=str)
def test_the_check_at_first_use(emulator, case):
    assert differences(torch.device("cpu"), case) is None


def test_what_the_kernels_take():
    weights = layer(1, 2, 64, 64)
    given, state = projected(weights, 2), states(weights, 64)
    assert is_covered(given, weights, state)
    assert case_of(weights, state) == Case(torch.bfloat16, 64, 64, 4)
    assert not is_covered(Projected(*(p.float() for p in given)), weights, state)
    assert not is_covered(given, weights, state._replace(recurrent=state.recurrent.double()))
    assert not is_covered(given, weights, state._replace(recurrent=state.recurrent[..., :32].contiguous()))
    assert not is_covered(given, weights, state._replace(recurrent=state.recurrent.mT))


@pytest.mark.parametrize("architecture", ["sm_89", "sm_90a", "sm_100a", "sm_120a"])
@pytest.mark.parametrize("dtype", STATES, ids=str)
def test_the_files_compile_for(architecture, dtype):
    sizes, step = {"KEY_DIM": 128, "VALUE_DIM": 128}, {"STATE": DTYPE[dtype], "THREADS": STEP_THREADS[dtype]}
    for file, define in ((delta_device.LIBRARY, step), (delta_device.PREPARING, {"TAPS": 4})):
        built = nvrtc.build(file.program.source, defines=sizes | define, architecture=architecture)
        assert built.code[:4] == b"\x7fELF"

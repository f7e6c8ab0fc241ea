"""route against the engine's routing and float64; its GPU kernel against the reference, in any order of threads."""

import pytest
import torch
from tests.emulation.emulator import COMPILER, Emulator

from tracefp4.errors import BackendError, FormatError
from tracefp4.guidance.rounding import route_site
from tracefp4.ops import nvrtc
from tracefp4.ops.backend import Backend
from tracefp4.ops.route import device as route_device
from tracefp4.ops.route import route
from tracefp4.ops.route.device import Case, differences, route_on_device
from tracefp4.ops.route.reference import outside, route_reference

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="the emulation needs g++")


@pytest.fixture(params=[0, 1, 2, 3])
def emulator(request, monkeypatch):
    emulator = Emulator(request.param)
    monkeypatch.setattr(route_device.LIBRARY, "runner", emulator)
    return emulator


def logits_of(num_tokens, num_experts):
    """With ties, and a row of zeros of both signs."""
    torch.manual_seed(0)
    logits = (torch.randn(num_tokens, num_experts) * 3).bfloat16()
    logits[1::3] = logits[1::3].round()
    logits[2::5] = 0.0
    logits[2::5, 1::3] = -0.0
    return logits


def assert_routed(got, logits, top_k, renormalizes):
    wanted = route_reference(logits, top_k, renormalizes)
    assert got.ids.dtype == torch.int64 and torch.equal(got.ids, wanted.ids)
    assert not bool(outside(got.weights, logits, got.ids, renormalizes).any())


def test_the_reference_is_the_engine_s_routing():
    logits = logits_of(40, 64)
    for renormalizes in (False, True):
        found = route(logits, top_k=8, renormalizes=renormalizes)
        assert torch.equal(found.ids, route_site(0, logits, top_k=8))
        assert_routed(found, logits, 8, renormalizes)
    assert bool(((found.weights.float().sum(-1) - 1).abs() < 8 * 2.0**-9).all())
    next_one = (found.weights.view(torch.int16) + 1).view(torch.bfloat16)
    assert outside(next_one, logits, found.ids, True).float().mean() > 0.9  # the bound is not a loose one


@needs_compiler
@pytest.mark.parametrize("renormalizes", [False, True])
def test_ids_and_weights(emulator, renormalizes):
    for num_tokens in (0, 1, 13):
        logits = logits_of(num_tokens, 40) if num_tokens > 1 else torch.randn(num_tokens, 40).bfloat16()
        assert_routed(route_on_device(logits, 5, renormalizes), logits, 5, renormalizes)


@needs_compiler
def test_logits_that_are_not_finite(emulator):
    logits = logits_of(4, 40)
    logits[0, 3], logits[1, 7], logits[2, :38] = float("nan"), -float("nan"), -float("inf")
    logits[3, 4] = 88.0
    got = route_on_device(logits, 5, True)
    assert_routed(got, logits, 5, True)
    assert got.ids[:2, 0].tolist() == [3, 7] and got.weights[:2].isnan().all() and got.weights[2, 2] == 0


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(("num_experts", "top_k"), [(1, 1), (8, 8), (128, 8), (1000, 32)])
def test_other_sizes(monkeypatch, num_experts, top_k):
    monkeypatch.setattr(route_device.LIBRARY, "runner", Emulator())
    logits = logits_of(6, num_experts)
    assert_routed(route_on_device(logits, top_k, True), logits, top_k, True)
    assert differences(torch.device("cpu"), Case(num_experts, top_k)) is None


def test_operands_that_do_not_fit_are_refused():
    logits = logits_of(3, 40)
    for wrong in (logits.float(), logits[0], logits[:, :0], torch.zeros(1, 1025).bfloat16()):
        with pytest.raises(FormatError, match="route needs bfloat16 logits"):
            route(wrong, top_k=1, renormalizes=True)
    for top_k in (0, 33, 41):
        with pytest.raises(FormatError, match="top_k from 1 to E"):
            route(logits, top_k=top_k, renormalizes=True)
    with pytest.raises(BackendError, match="route cannot run CUDA here"):
        route(logits, top_k=2, renormalizes=True, backend=Backend.CUDA)


@pytest.mark.parametrize("architecture", ["sm_89", "sm_90a", "sm_100a", "sm_120a"])
def test_the_file_compiles_for(architecture):
    defines = {"EXPERTS": 128, "TOP_K": 8}
    built = nvrtc.build(route_device.LIBRARY.program.source, defines=defines, architecture=architecture)
    assert built.code[:4] == b"\x7fELF"

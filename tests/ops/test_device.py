"""Kernels run on a GPU only after a comparison of what they are specialised for, and nothing else is compiled for it.

A GPU is played by stand-ins for the binding; which variants a call and a comparison launch is seen in the emulation.
"""

import logging
import time
from contextlib import nullcontext
from types import SimpleNamespace

import cuda.core
import pytest
import torch
from tests.emulation.emulator import COMPILER, Emulator
from tests.ops.expert_cases import PRECISIONS
from tests.ops.expert_cases import case as layer_of

from tracefp4.coding import codec_by_name
from tracefp4.errors import BackendError
from tracefp4.formats.fragments import to_fragments
from tracefp4.formats.schemes import (
    MXFP4_FLOOR,
    NVFP4_KV,
    NVFP4_ROW_POW2,
    NVFP4_TENSOR_POW2,
)
from tracefp4.ops import backend as backend_module
from tracefp4.ops import device as module
from tracefp4.ops import launching
from tracefp4.ops.backend import Backend, choose
from tracefp4.ops.dequantize import device as dequantizing
from tracefp4.ops.device import DeviceLibrary, KernelFile, Launch, comparing
from tracefp4.ops.expert_layer import device as experts
from tracefp4.ops.guided_quantize import device as guided
from tracefp4.ops.guided_quantize import recording
from tracefp4.ops.guided_quantize.decisions import guide_of, kinds_for
from tracefp4.ops.guided_quantize.reference import guided_quantize_reference
from tracefp4.ops.kv_append import device as appending
from tracefp4.ops.kv_attention import device as attention
from tracefp4.ops.kv_attention.device import sample_pages
from tracefp4.ops.nearest import rows_case
from tracefp4.ops.quantize import device as quantizing
from tracefp4.ops.quantize.reference import quantize_reference
from tracefp4.ops.rms_norm import device as norming
from tracefp4.ops.rules import SchemeCase
from tracefp4.ops.swiglu import device as gating

CPU, GPU = torch.device("cpu"), torch.device("cuda:0")
SOURCE = quantizing.LIBRARY.program.source
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="the emulation needs g++")


@pytest.fixture
def gpu(monkeypatch):
    """A GPU that is there, whose kernels are names and whose launches are noted."""
    found = SimpleNamespace(is_capturing=False, loaded=[], launched=[], refuses=None)

    def build(source, **variant):
        found.loaded.append((source.name, dict(variant["defines"])))
        return SimpleNamespace(code=b"")

    def start(kernel, grid, block, values, how):
        if found.refuses:
            raise found.refuses
        assert how == (7, True)
        found.launched.append((kernel, grid, [value.value for value in values]))

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: found.is_capturing)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=7))
    monkeypatch.setattr(module, "architecture_of", lambda device: "sm_90a")
    monkeypatch.setattr(module, "_can_start_early", lambda device: True)
    monkeypatch.setattr(module.nvrtc, "build", build)
    monkeypatch.setattr(module.nvrtc, "is_installed", lambda: (True, "NVRTC"))
    monkeypatch.setattr(cuda.core, "Device", lambda index: SimpleNamespace(set_current=lambda: None))
    code = SimpleNamespace(get_kernel=lambda name: SimpleNamespace(handle=name))
    monkeypatch.setattr(cuda.core, "ObjectCode", SimpleNamespace(from_cubin=lambda cubin: code))
    monkeypatch.setattr(module, "start", start)
    return found


def library(check, usual=0):
    made = DeviceLibrary(SOURCE, check, usual)
    made.runner = module._GPU()
    return made


def test_a_case_is_compared_once_and_others_are_not(gpu):
    asked = []
    made = library(lambda device, case: asked.append((device, case)))
    assert made.status(GPU).is_usable and made.status(GPU, 1).is_usable
    assert made.status(GPU, 1).reason.startswith("NVRTC for sm_90a, ready after 0.0 s")
    assert asked == [(GPU, 0), (GPU, 1)]


def test_a_case_that_differs_is_refused_alone_and_logged_once(gpu, monkeypatch, caplog):
    made = library(lambda device, case: "packed codes" if case == "bad" else None, "good")
    monkeypatch.setitem(backend_module._LIBRARIES, ("quantize", Backend.CUDA), made)
    with caplog.at_level(logging.WARNING):
        assert choose("quantize", GPU, case="bad") is Backend.REFERENCE
        assert choose("quantize", GPU, case="bad") is Backend.REFERENCE
    assert [record.getMessage() for record in caplog.records] == [
        "the kernels of quantize for bad are not used: packed codes differ from the reference"
    ]
    assert choose("quantize", GPU, case="good") is Backend.CUDA
    assert choose("quantize", GPU) is Backend.CUDA
    with pytest.raises(
        BackendError, match="cannot run CUDA here: NVRTC for sm_90a, refused: packed codes differ"
    ):
        choose("quantize", GPU, Backend.CUDA, "bad")


@pytest.mark.parametrize(
    ("ending", "reason"),
    [
        (RuntimeError("an illegal instruction was encountered"), "RuntimeError: an illegal instruction"),
        (BackendError("NVRTC cannot compile it"), "refused: NVRTC cannot compile it"),
    ],
)
def test_a_check_that_the_gpu_ends_is_a_reason_and_no_crash(gpu, ending, reason):
    def ended(device, case):
        raise ending

    status = library(ended).status(GPU)
    assert not status.is_usable and reason in status.reason


def test_nothing_is_compared_during_capture(gpu, monkeypatch):
    made = library(lambda device, case: None)
    monkeypatch.setitem(backend_module._LIBRARIES, ("quantize", Backend.CUDA), made)
    made.status(GPU, "seen")
    gpu.is_capturing = True
    assert choose("quantize", GPU, case="seen") is Backend.CUDA
    for asked in (Backend.AUTO, Backend.CUDA):
        with pytest.raises(
            BackendError, match="got quantize for new for the first time during capture.*call once"
        ):
            choose("quantize", GPU, asked, "new")
    gpu.is_capturing = False
    assert choose("quantize", GPU, case="new") is Backend.CUDA


LAUNCH = Launch("kernel", (2, 3), 64, {"B": 1, "A": 2})


def test_a_kernel_that_was_not_compared_does_not_run(gpu):
    def check(device, case):
        made.launch(LAUNCH, None, device=device)

    made = library(check)
    with pytest.raises(
        BackendError, match=r"got kernel of quantize/kernel.cu with .*no comparison has launched"
    ):
        made.launch(LAUNCH, None, device=GPU)
    assert gpu.loaded == [] and made.status(GPU).is_usable
    x = torch.zeros(4)
    made.launch(LAUNCH, None, x, -5, 0.5, device=GPU)
    assert gpu.loaded == [("kernel.cu", {"B": 1, "A": 2})]
    assert gpu.launched == [("kernel", (2, 3), [None]), ("kernel", (2, 3), [None, x.data_ptr(), -5, 0.5])]
    with pytest.raises(BackendError, match="no comparison has launched"):
        made.launch(LAUNCH._replace(defines={"B": 1, "A": 3}), device=GPU)


def test_a_launch_that_the_gpu_refuses_says_what_was_asked(gpu):
    file = KernelFile(SOURCE)
    file.runner = module._GPU()
    gpu.refuses = RuntimeError("CUDA_ERROR_INVALID_VALUE")
    with (
        comparing(),
        pytest.raises(BackendError, match=r"refuses kernel of quantize/kernel.cu.*INVALID_VALUE.*\(2, 3\)"),
    ):
        file.launch(LAUNCH, device=GPU)


def test_shared_memory_is_asked_for_once(gpu, monkeypatch):
    asked = []
    monkeypatch.setattr(module, "_raise_shared", lambda kernel, num_bytes, device: asked.append(num_bytes))
    file = KernelFile(SOURCE)
    file.runner = module._GPU()
    with comparing():
        for num_bytes in (100, 60_000, 50_000, 70_000, 70_000):
            file.launch(LAUNCH._replace(shared_bytes=num_bytes), device=GPU)
    assert asked == [60_000, 70_000]


def test_a_launch_seen_before_costs_microseconds(gpu):
    """At most 15 of them on an idle machine; ten times as many fail here."""
    file, x = KernelFile(SOURCE), torch.zeros(4)
    file.runner = module._GPU()
    arguments = (x, x, None, 1, 2, 3, 0.5, x, x, x)

    def launched():
        begun = time.perf_counter()
        for _ in range(100):
            file.launch(LAUNCH, *arguments, device=GPU)
        return (time.perf_counter() - begun) / 100

    with comparing():
        file.launch(LAUNCH, *arguments, device=GPU)
    assert min(launched() for _ in range(5)) < 150e-6


FILES = (
    quantizing.LIBRARY,
    dequantizing.LIBRARY,
    guided.LIBRARY,
    recording.KERNELS,
    norming.LIBRARY,
    gating.LIBRARY,
    appending.LIBRARY,
    appending.QUANTIZING,
    attention.LIBRARY,
    *experts.FILES,
)


@pytest.fixture
def launched(monkeypatch):
    """Return the variants that a function launches."""

    def run(function):
        emulator = Emulator()
        for file in FILES:
            monkeypatch.setattr(file, "runner", emulator)
        function()
        return emulator.variants

    return run


def rows(width, dtype=torch.bfloat16):
    return torch.randn(3, width).to(dtype)


@needs_compiler
@pytest.mark.parametrize("scheme", [NVFP4_ROW_POW2, NVFP4_TENSOR_POW2, NVFP4_KV], ids=lambda s: s.name)
def test_a_check_launches_what_quantize_and_dequantize_launch(launched, scheme):
    x, exponent = rows(96), 2 if scheme.outer == "static" else None
    t = quantize_reference(x, scheme, exponent)

    def call():
        quantizing.quantize_on_device(x, scheme, exponent)
        quantizing.quantize_with_scales_on_device(x, t.block_scales, t.outer, scheme)

    case = SchemeCase(scheme, x.dtype)
    assert launched(call) <= launched(lambda: quantizing.differences(CPU, case))
    case = dequantizing.case_of(t, torch.bfloat16)
    called = launched(lambda: dequantizing.dequantize_on_device(t, torch.bfloat16))
    assert called and called == launched(lambda: dequantizing.differences(CPU, case))


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("kind", [None, *kinds_for(NVFP4_ROW_POW2)], ids=str)
def test_a_check_launches_what_guided_quantize_launches(launched, kind):
    x = rows(1120)
    guide = None
    if kind is not None:
        guide = guide_of(kind, guided_quantize_reference(x, NVFP4_ROW_POW2, None, None, True))
    called = launched(lambda: guided.guided_quantize_on_device(x, NVFP4_ROW_POW2, guide, None, True))
    case = guided.Case(SchemeCase(NVFP4_ROW_POW2, torch.bfloat16), kind)
    assert called and called == launched(lambda: guided.differences(CPU, case))


@needs_compiler
@pytest.mark.slow
def test_a_check_launches_what_recording_launches(launched):
    codec = codec_by_name("bch32_2+secded")

    def call():
        for width in (96, 1120):
            recording.recorded_quantize_on_device(rows(width), NVFP4_KV, codec, 2, True)

    called = launched(call)
    case = guided.Case(SchemeCase(NVFP4_KV, torch.bfloat16), codec)
    assert called and called == launched(lambda: guided.differences(CPU, case))


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("rule", [None, (MXFP4_FLOOR, None), (NVFP4_KV, 2)])
@pytest.mark.parametrize("width", [96, 8224, 16384])
def test_a_check_launches_what_norm_and_gate_launch(launched, width, rule):
    x, case = rows(width), rows_case(width, rule)
    called = launched(lambda: norming.rms_norm_on_device(x, x[0], 1e-6, None, rule))
    assert called and called == launched(lambda: norming.differences(CPU, case))
    called = launched(lambda: gating.swiglu_on_device(torch.cat([x, x], 1), rule))
    assert called and called == launched(lambda: gating.differences(CPU, case))


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("heads", [2, 6, 16, 24, 40])
@pytest.mark.parametrize("is_fp4", [True, False])
def test_a_check_launches_what_attention_launches(launched, is_fp4, heads):
    pages, _ = sample_pages(torch.Generator().manual_seed(0), is_fp4=is_fp4, head_dim=64, num_frames=3)
    queries = torch.randn(1, 2, heads, 64).bfloat16()
    where = {"page_table": torch.arange(3)[None], "positions": torch.tensor([[3, 40]])}
    called = launched(lambda: attention.attend_on_device(queries, pages, **where, rounds_probabilities=True))
    case = attention.case_of(queries, pages, True)
    assert called and called < launched(lambda: attention.differences(CPU, case))  # it combines splits, too


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("name", PRECISIONS)
@pytest.mark.parametrize(("tokens", "hidden", "inner"), [(2, 704, 96), (60, 320, 192)])
def test_a_check_launches_what_the_expert_layer_launches(launched, name, tokens, hidden, inner):
    given = layer_of(PRECISIONS[name], tokens=tokens, hidden=hidden, inner=inner)
    operands = (given.x, given.routing, given.experts, given.precision)
    called = launched(lambda: experts.expert_layer_on_device(*operands, False))
    case = experts.case_of(given.routing.ids.numel(), given.experts, given.precision.activation)
    assert called and called <= launched(lambda: experts.differences(CPU, case))  # it sorts many pairs, too
    called = launched(lambda: experts.refit_on_device(given.gate_up, given.experts.gate_up))
    scheme = given.experts.gate_up.scheme
    assert called and called == launched(lambda: experts.differences(CPU, scheme))


@needs_compiler
def test_a_check_launches_what_the_cache_launches(launched):
    k = torch.randn(3, 2, 64).bfloat16()
    slots = torch.tensor([3, 0, 31])
    plain = appending._empty_pages(CPU, NVFP4_KV)
    moved = launched(lambda: appending.differences(CPU, None))
    for pages in (plain, (to_fragments(plain[0], "k"), to_fragments(plain[1], "v"))):
        found = []
        called = launched(
            lambda p=pages, f=found: f.extend(appending.quantize_append_on_device(*p, k, k, slots))
        )
        assert called and called == launched(
            lambda: appending.differences(CPU, SchemeCase(NVFP4_KV, k.dtype))
        )
        called = launched(lambda p=pages, f=found: appending.append_on_device(p[0], f[0], slots))
        assert called and called <= moved


@pytest.mark.parametrize("is_early", [True, False])
def test_what_the_driver_is_told_of_a_launch(is_early):
    found = launching._config((5, 2, 1), (96, 1024), (7, is_early))
    assert (found.gridDimX, found.gridDimY, found.gridDimZ) == (5, 2, 1)
    assert (found.blockDimX, found.blockDimY, found.blockDimZ) == (96, 1, 1)
    assert (found.sharedMemBytes, int(found.hStream), found.numAttrs) == (1024, 7, int(is_early))
    assert [attribute.value.programmaticStreamSerializationAllowed for attribute in found.attrs] == [
        1
    ] * is_early

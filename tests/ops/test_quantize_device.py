"""The GPU kernels of quantize: run on the processor against the reference, and compiled for every architecture."""

from types import SimpleNamespace

import pytest
import torch
from tests.emulation.emulator import COMPILER, Emulator

from tracefp4.errors import BackendError
from tracefp4.formats.schemes import MXFP4_FLOOR, NVFP4_KV, NVFP4_ROW_POW2, NVFP4_TENSOR_POW2, SCHEMES
from tracefp4.ops import nvrtc
from tracefp4.ops.backend import Backend
from tracefp4.ops.device import Launch
from tracefp4.ops.quantize import device as quantize_device
from tracefp4.ops.quantize import quantize
from tracefp4.ops.quantize.device import (
    differences,
    quantize_on_device,
    quantize_with_scales_on_device,
)
from tracefp4.ops.quantize.reference import quantize_reference, quantize_with_scales_reference
from tracefp4.ops.rules import SchemeCase, case_of

OURS = (NVFP4_ROW_POW2, NVFP4_TENSOR_POW2, NVFP4_KV, MXFP4_FLOOR)
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="the emulation needs g++")


@pytest.fixture(params=[0, 1, 2, 3])
def emulator(request, monkeypatch):
    emulator = Emulator(request.param)
    monkeypatch.setattr(quantize_device.LIBRARY, "runner", emulator)
    return emulator


def assert_same(got, wanted):
    assert torch.equal(got.outer, wanted.outer)
    assert torch.equal(got.block_scales, wanted.block_scales)
    assert torch.equal(got.packed, wanted.packed)


@needs_compiler
@pytest.mark.parametrize("scheme", OURS, ids=lambda s: s.name)
@pytest.mark.parametrize("shape", [(3, 64), (2, 2, 544), (0, 32), (1, 8736), (1, 33_024)], ids=str)
def test_bytes_are_those_of_the_reference(emulator, scheme, shape):
    check_bytes(emulator, scheme, shape)


@needs_compiler
@pytest.mark.parametrize("shape", [(3, 64), (2, 1328), (1, 33_024)], ids=str)
def test_bytes_where_rows_are_many(emulator, monkeypatch, shape):
    """A thread holds several blocks; the widest row has more than all threads hold."""
    monkeypatch.setattr(quantize_device, "_MANY_WARPS", 0)
    for largest in (-20, 20):  # in the last block that a thread holds, and in the first
        check_bytes(emulator, NVFP4_ROW_POW2, shape, largest)
    assert emulator.launches["quantize_many"] == 2


def check_bytes(emulator, scheme, shape, largest=-20):
    torch.manual_seed(0)
    exponent = -3 if scheme.outer == "static" else None
    x = torch.randn(shape).bfloat16() * 2.0 ** torch.randint(-20, 20, (*shape[:-1], 1))
    if x.numel():
        x.view(-1, 16)[0, 3], x.view(-1, 16)[-1] = float("nan"), 0.0
        x[..., largest] *= 300.0  # by default the last warp of a row decides about its outer scale
    x = x.bfloat16()
    assert_same(quantize_on_device(x, scheme, exponent), quantize_reference(x, scheme, exponent))
    if x.numel():
        given = quantize_reference(x.flip(-1).contiguous(), scheme, exponent)
        operands = (x, given.block_scales, given.outer, scheme)
        assert_same(quantize_with_scales_on_device(*operands), quantize_with_scales_reference(*operands))
        assert sum(emulator.launches.values()) >= 2


@needs_compiler
@pytest.mark.parametrize(
    ("scheme", "scales", "exponents"),
    [(NVFP4_ROW_POW2, range(127), (-110, -3, 116)), (MXFP4_FLOOR, (0, 1, 2, 100, 127, 200, 253, 254), (0,))],
    ids=lambda value: getattr(value, "name", ""),
)
def test_every_bf16_number_under_every_scale(monkeypatch, scheme, scales, exponents):
    monkeypatch.setattr(quantize_device.LIBRARY, "runner", Emulator())
    magnitudes = torch.arange(0x7F80, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = torch.cat([magnitudes, -magnitudes]).repeat(len(scales), 1)
    block_scales = torch.tensor(scales, dtype=torch.uint8)[:, None].repeat(1, x.shape[1] // scheme.block_size)
    for exponent in exponents:
        outer = torch.full((len(scales),) if scheme.outer == "row" else (), exponent, dtype=torch.int8)
        if scheme.outer == "none":
            outer = quantize_reference(x[:1, :32], scheme, None).outer
        operands = (x, block_scales, outer, scheme)
        assert_same(quantize_with_scales_on_device(*operands), quantize_with_scales_reference(*operands))


@needs_compiler
def test_an_unaligned_or_strided_operand_is_read_right(emulator):
    x = torch.randn(4, 65).bfloat16()[:, 1:]
    one_off = torch.randn(129)[1:].view(2, 64)
    for operand in (x, one_off, x.float().T.contiguous().T):
        assert_same(
            quantize_on_device(operand, NVFP4_ROW_POW2, None),
            quantize_reference(operand, NVFP4_ROW_POW2, None),
        )


@needs_compiler
def test_nothing_is_written_beyond_the_end(emulator):
    x = torch.randn(3, 64).bfloat16()
    scales, packed = torch.full((64,), 0xEE, dtype=torch.uint8), torch.full((512,), 0xEE, dtype=torch.uint8)
    outer = torch.zeros((), dtype=torch.int8)
    launch = Launch("quantize_blocks", (1,), 32, case_of(x, NVFP4_KV).defines)
    poison = torch.cat([x.flatten(), torch.ones(20 * 64).bfloat16()])  # there is something to read
    quantize_device.LIBRARY.launch(launch, poison, 12, 12, outer, 0, scales, packed, device=x.device)
    assert scales[12:].unique().tolist() == [0xEE] and packed[96:].unique().tolist() == [0xEE]
    assert torch.equal(packed[:96].view(3, 32), quantize_reference(x, NVFP4_KV, 0).packed)


KINDS = {(s.order, s.scale_rule, s.candidates, s.outer): s for s in SCHEMES.values()}.values()


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("scheme", KINDS, ids=lambda s: s.name)
def test_every_kind_of_scheme(monkeypatch, scheme):
    monkeypatch.setattr(quantize_device.LIBRARY, "runner", Emulator())
    for dtype in (torch.float32, torch.bfloat16):
        assert differences(torch.device("cpu"), SchemeCase(scheme, dtype)) is None


ARCHITECTURES = ("sm_89", "sm_90a", "sm_100a", "sm_120a")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_file_compiles_for(architecture, tmp_path, monkeypatch):
    monkeypatch.setattr(nvrtc, "cache_folder", lambda: tmp_path)
    built = built_for(NVFP4_ROW_POW2, architecture)
    assert built.code[:4] == b"\x7fELF" and built.seconds > 0
    again = built_for(NVFP4_ROW_POW2, architecture)
    assert again.code == built.code and again.seconds == 0
    (kept,) = tmp_path.glob("*/*.cubin")
    kept.write_bytes(built.code[:-1])
    assert built_for(NVFP4_ROW_POW2, architecture).code == built.code


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("scheme", {s.order: s for s in SCHEMES.values()}.values(), ids=lambda s: s.name)
def test_every_kind_of_scheme_compiles(architecture, scheme):
    assert built_for(scheme, architecture).code[:4] == b"\x7fELF"


def built_for(scheme, architecture):
    defines = SchemeCase(scheme, torch.bfloat16).defines
    source = quantize_device.LIBRARY.program.source
    return nvrtc.build(source, defines=defines, architecture=architecture)


def test_a_file_that_does_not_compile_says_where(tmp_path):
    source = tmp_path / "kernel.cu"
    source.write_text('#include "device.cuh"\nKERNEL broken() { nothing(); }\n')
    with pytest.raises(BackendError, match=r"cannot compile .*kernel.cu for sm_90a: .*nothing"):
        nvrtc.build(source, defines={}, architecture="sm_90a")


def test_a_machine_without_a_gpu_says_so():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert quantize_device.LIBRARY.status(torch.device("cuda")) == (False, "this torch sees no NVIDIA GPU.")
    with pytest.raises(
        BackendError, match="quantize cannot run CUDA here: CUDA kernels read tensors on an NVIDIA"
    ):
        quantize(torch.zeros(1, 16), scheme=NVFP4_ROW_POW2, backend=Backend.CUDA)


def test_without_the_extra_the_reason_says_what_to_install(monkeypatch):
    def missing(name):
        raise BackendError(nvrtc._MISSING.format(problem=f"No module named {name!r}"))

    nvrtc._version.cache_clear()
    monkeypatch.setattr(nvrtc, "_binding", missing)
    is_installed, reason = nvrtc.is_installed()
    nvrtc._version.cache_clear()
    assert not is_installed and "pip install 'tracefp4[cuda]'" in reason


def test_an_old_binding_is_refused_and_not_tried(monkeypatch):
    monkeypatch.setattr(nvrtc, "_binding", lambda name: SimpleNamespace(__version__="0.3.2"))
    is_installed, reason = nvrtc.is_installed()
    assert not is_installed and "cuda-core 0.3.2, which is older than 1.0" in reason

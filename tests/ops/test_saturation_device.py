"""The GPU kernel of saturation: run on the processor against the definition, and compiled for architectures."""

import pytest
import torch
from tests.emulation.emulator import COMPILER, Emulator

from tracefp4.formats.schemes import SCHEMES
from tracefp4.ops import nvrtc
from tracefp4.ops.backend import Backend, choose
from tracefp4.ops.kernels import DTYPE
from tracefp4.ops.quantize import quantize
from tracefp4.ops.rules import SchemeCase
from tracefp4.ops.saturation import device as saturation_device
from tracefp4.ops.saturation.device import Case, differences, saturation_on_device
from tracefp4.ops.saturation.reference import saturation_reference

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="the emulation needs g++")
USUAL = ("NVFP4_ROW_POW2", "NVFP4_STATIC_POW2", "NVFP4_KV", "MXFP4_FLOOR")


@pytest.fixture(params=[0, 3])
def emulator(request, monkeypatch):
    emulator = Emulator(request.param)
    monkeypatch.setattr(saturation_device.LIBRARY, "runner", emulator)
    return emulator


def random_values(scheme, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.exp2(torch.randint(-18, 14, (37, 3, 1), generator=generator).float())
    return (torch.randn(37, 3, 64, generator=generator) * sizes).flatten(1).to(dtype)


@needs_compiler
@pytest.mark.parametrize("name", USUAL)
@pytest.mark.parametrize("dtype", list(DTYPE))
@pytest.mark.parametrize("is_recorded", [False, True])
def test_counts_are_those_of_the_definition(emulator, name, dtype, is_recorded, monkeypatch):
    # Mutations: rows that do not count are counted; a thread takes the blocks of one turn alone.
    monkeypatch.setattr(saturation_device, "_MOST_BLOCKS", 1)
    scheme = SCHEMES[name]
    x = random_values(scheme, dtype)
    exponent = 1 if scheme.outer == "static" else None
    t = quantize(x, scheme=scheme, exponent=exponent)
    now, rows = (x * 1.3 if is_recorded else x), torch.arange(len(x)) % 3 != 1
    total = 0
    for counted in (None, rows):
        operands = (now, t.block_scales, t.outer, scheme, is_recorded, counted)
        got, wanted = saturation_on_device(*operands), saturation_reference(*operands)
        found = [int(getattr(got, name)) for name in wanted.__slots__]
        assert found == [int(getattr(wanted, name)) for name in wanted.__slots__]
        total += sum(found)
    assert total > 0 and emulator.launches == {"count_ends": 2}


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SCHEMES))
def test_the_self_check_passes(emulator, name):
    for is_recorded in (False, True):
        case = Case(SchemeCase(SCHEMES[name], torch.bfloat16), is_recorded)
        assert differences(torch.device("cpu"), case) is None


@pytest.mark.parametrize("architecture", ["sm_89", "sm_90a", "sm_100a", "sm_120a"])
def test_the_file_compiles_for(architecture):
    source = saturation_device.LIBRARY.program.source
    defines = SchemeCase(SCHEMES["NVFP4_ROW_POW2"], torch.bfloat16).defines
    defines |= {"LOOKS_AT_ALL": 1, "IS_STATIC": 0}
    assert nvrtc.build(source, defines=defines, architecture=architecture).code[:4] == b"\x7fELF"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", sorted(SCHEMES))
def test_the_kernel_runs_on_a_gpu(name):
    for is_recorded in (False, True):
        case = Case(SchemeCase(SCHEMES[name], torch.bfloat16), is_recorded)
        assert choose("saturation", "cuda", Backend.CUDA, case) is Backend.CUDA

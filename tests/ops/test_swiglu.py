"""swiglu against float64; its GPU kernel against the definition, in any order of threads."""

import pytest
import torch
from tests.assertions import assert_bitwise
from tests.emulation.emulator import COMPILER, Emulator

from tracefp4.errors import BackendError, FormatError
from tracefp4.formats.schemes import MXFP4_FLOOR, NVFP4_KV, NVFP4_ROW_POW2, NVFP4_TENSOR_POW2
from tracefp4.ops import nvrtc
from tracefp4.ops.backend import Backend
from tracefp4.ops.nearest import rows_case
from tracefp4.ops.quantize import quantize
from tracefp4.ops.swiglu import device as swiglu_device
from tracefp4.ops.swiglu import swiglu
from tracefp4.ops.swiglu.device import differences, swiglu_on_device
from tracefp4.ops.swiglu.reference import outside, swiglu_reference

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="the emulation needs g++")
ROW = (NVFP4_ROW_POW2, None)


@pytest.fixture(params=[0, 1, 2, 3])
def emulator(request, monkeypatch):
    emulator = Emulator(request.param)
    monkeypatch.setattr(swiglu_device.LIBRARY, "runner", emulator)
    return emulator


def rows(num_rows, width):
    torch.manual_seed(0)
    x = torch.randn(num_rows, 2 * width) * 2.0 ** torch.randint(-6, 6, (num_rows, 1))
    x[..., -3] *= 300.0
    return x.bfloat16()


def assert_gated(got, x, rule):
    assert not bool(outside(got.values, x).any())
    assert (got.values != swiglu_reference(x, None).values).float().mean() < 1e-2 or x.numel() == 0
    if rule is None:
        assert got.block_tensor is None
        return
    wanted = quantize(got.values, scheme=rule[0], exponent=rule[1], backend=Backend.REFERENCE)
    for part in ("outer", "block_scales", "packed"):
        assert_bitwise(getattr(got.block_tensor, part), getattr(wanted, part))


def test_the_reference_is_the_engine_s_and_silu_lies_where_float64_says():
    x = rows(64, 256)
    gate, up = x.chunk(2, -1)
    assert_bitwise(swiglu(x).values, torch.nn.functional.silu(gate) * up)
    for rule in (None, ROW, (NVFP4_KV, -2), (MXFP4_FLOOR, None)):
        assert_gated(swiglu(x, rule=rule), x, rule)
    next_one = (swiglu(x).values.view(torch.int16) + 1).view(torch.bfloat16)
    assert outside(next_one, x).float().mean() > 0.9  # the bound is not a loose one


@needs_compiler
@pytest.mark.parametrize("shape", [(3, 1040), (2, 16), (0, 32)], ids=str)
def test_values_and_bytes(emulator, shape):
    x = rows(*shape)
    assert_gated(swiglu_on_device(x, ROW), x, ROW)


@needs_compiler
def test_without_quantizing_and_what_is_not_finite(emulator):
    x = rows(4, 64)
    x[0, 5], x[1, 70], x[2, 3], x[2, 4], x[3] = float("nan"), float("inf"), -200.0, float("-inf"), -0.0
    got, wanted = swiglu_on_device(x, None), swiglu_reference(x, None)
    assert_gated(got, x, None)
    assert_bitwise(got.values[2:].isnan(), wanted.values[2:].isnan())
    assert_bitwise(got.values[3], wanted.values[3])


@needs_compiler
def test_a_wide_row_takes_several_blocks_of_a_thread(monkeypatch):
    monkeypatch.setattr(swiglu_device.LIBRARY, "runner", Emulator())
    monkeypatch.setattr("tracefp4.ops.nearest._MAX_THREADS", 32)
    for x in (rows(2, 1040), rows(2, 1040).roll(100, 1)):
        assert_gated(swiglu_on_device(x, ROW), x, ROW)


@needs_compiler
def test_unaligned_and_strided_operands(emulator):
    x = rows(4, 40)[:, 1:65]
    assert_gated(swiglu_on_device(x, ROW), x, ROW)


@needs_compiler
@pytest.mark.slow
def test_the_check_at_first_use(emulator):
    for width, rule in ((64, None), (8208, ROW)):
        assert differences(torch.device("cpu"), rows_case(width, rule)) is None


def test_operands_that_do_not_fit_are_refused():
    x = rows(2, 32)
    for wrong in (x.float(), x[0], x[:, :48], x[:, :0]):
        with pytest.raises(FormatError, match="swiglu needs bfloat16 rows"):
            swiglu(wrong)
    with pytest.raises(FormatError, match="swiglu quantizes rows one by one"):
        swiglu(x, rule=(NVFP4_TENSOR_POW2, None))
    with pytest.raises(BackendError, match="swiglu cannot run CUDA here"):
        swiglu(x, backend=Backend.CUDA)


@pytest.mark.parametrize("architecture", ["sm_89", "sm_90a", "sm_100a", "sm_120a"])
def test_the_file_compiles_for(architecture):
    defines = rows_case(64, (NVFP4_ROW_POW2, None)).defines
    source = swiglu_device.LIBRARY.program.source
    assert nvrtc.build(source, defines=defines, architecture=architecture).code[:4] == b"\x7fELF"

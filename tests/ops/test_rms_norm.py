"""rms_norm against float64 and the engine's arithmetic; its GPU kernel, against the reference."""

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
from tracefp4.ops.rms_norm import device as norm_device
from tracefp4.ops.rms_norm import rms_norm
from tracefp4.ops.rms_norm.device import differences, rms_norm_on_device
from tracefp4.ops.rms_norm.reference import rms_norm_reference

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="the emulation needs g++")
ROW = (NVFP4_ROW_POW2, None)


@pytest.fixture(params=[0, 1, 2, 3])
def emulator(request, monkeypatch):
    emulator = Emulator(request.param)
    monkeypatch.setattr(norm_device.LIBRARY, "runner", emulator)
    return emulator


def rows(num_rows, width):
    torch.manual_seed(0)
    x = torch.randn(num_rows, width) * 2.0 ** torch.randint(-30, 30, (num_rows, 1))
    x[..., -3] *= 300.0  # the last warp of a row decides about its outer scale
    return x.bfloat16(), torch.randn(width).bfloat16()


def assert_same(got, wanted):
    assert_bitwise(got.values, wanted.values)
    assert (got.residual is None) == (wanted.residual is None)
    assert (got.block_tensor is None) == (wanted.block_tensor is None)
    if got.residual is not None:
        assert_bitwise(got.residual, wanted.residual)
    if got.block_tensor is not None:
        for part in ("outer", "block_scales", "packed"):
            assert_bitwise(getattr(got.block_tensor, part), getattr(wanted.block_tensor, part))


def test_the_reference_is_the_engine_s_norm_up_to_the_order_of_a_sum():
    x, weight = rows(64, 256)
    got = rms_norm(x, weight, epsilon=1e-6).values
    wide = x.float()
    engine = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).bfloat16() * weight
    differs = got != engine
    assert differs.float().mean() < 1e-3
    exact = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.double()
    # two roundings to bf16
    assert bool(((got.double() - exact).abs() <= exact.abs() * (2.0**-7 + 2.0**-15) + 1e-38).all())


def test_the_bytes_are_those_of_quantize_and_the_sum_is_the_stream():
    x, weight = rows(5, 64)
    residual = x.flip(0)
    for rule in (ROW, (NVFP4_KV, -2), (MXFP4_FLOOR, None)):
        found = rms_norm(x, weight, epsilon=1e-5, residual=residual, rule=rule)
        assert_bitwise(found.residual, residual + x)
        assert_bitwise(found.values, rms_norm(residual + x, weight, epsilon=1e-5).values)
        wanted = quantize(found.values, scheme=rule[0], exponent=rule[1], backend=Backend.REFERENCE)
        assert_bitwise(found.block_tensor.packed, wanted.packed)
        assert_bitwise(found.block_tensor.block_scales, wanted.block_scales)
        assert_bitwise(found.block_tensor.outer, wanted.outer)


@needs_compiler
@pytest.mark.parametrize("shape", [(3, 1040), (2, 16), (0, 32)], ids=str)
def test_bytes_are_those_of_the_reference(emulator, shape):
    x, weight = rows(*shape)
    for residual in (None, x.flip(0)):
        operands = (x, weight, 1e-6, residual, ROW)
        assert_same(rms_norm_on_device(*operands), rms_norm_reference(*operands))


@needs_compiler
def test_without_quantizing_and_what_is_not_finite(emulator):
    x, weight = rows(6, 64)
    x[0, 5], x[1, 9], x[2], x[3] = float("nan"), float("inf"), 0.0, -0.0
    x[4] = 1e38
    operands = (x, weight, 1e-6, None, None)
    got, wanted = rms_norm_on_device(*operands), rms_norm_reference(*operands)
    assert got.block_tensor is None and got.residual is None
    assert torch.equal(got.values.isnan(), wanted.values.isnan()) and bool(got.values[0].isnan().all())
    assert_bitwise(got.values.nan_to_num(7.0), wanted.values.nan_to_num(7.0))


@needs_compiler
def test_a_wide_row_takes_several_blocks_of_a_thread(monkeypatch):
    monkeypatch.setattr(norm_device.LIBRARY, "runner", Emulator())
    monkeypatch.setattr("tracefp4.ops.nearest._MAX_THREADS", 32)
    x, weight = rows(2, 1040)
    for operand in (
        x,
        x.roll(100, 1),
    ):  # the largest element lies in the last part of a thread, and in the first
        operands = (operand, weight, 1e-6, x.flip(0) * 0.0, ROW)
        assert_same(rms_norm_on_device(*operands), rms_norm_reference(*operands))


@needs_compiler
def test_under_a_float32_weight_a_value_is_rounded_once(emulator):
    x, weight = rows(4, 96)
    stored = 0.01 * weight
    wide = x.double()
    exact = wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * (1.0 + stored.double())
    for residual, rule in ((None, None), (x.flip(0) * 0.0, ROW)):
        operands = (x, 1.0 + stored.float(), 1e-6, residual, rule)
        wanted = rms_norm_reference(*operands)
        assert_same(rms_norm_on_device(*operands), wanted)
        assert (
            wanted.values != exact.bfloat16()
        ).float().mean() < 1e-2  # next to the middle between two numbers
    twice = rms_norm_reference(x, (1.0 + stored.float()).bfloat16(), 1e-6, None, None)
    assert (twice.values != exact.bfloat16()).float().mean() > 0.05


@needs_compiler
def test_unaligned_and_strided_operands(emulator):
    x, weight = rows(4, 65)
    operands = (x[:, 1:], weight[1:], 1e-6, x.flip(0)[:, :-1], ROW)
    assert_same(rms_norm_on_device(*operands), rms_norm_reference(*operands))


@needs_compiler
@pytest.mark.slow
def test_the_check_at_first_use_and_other_schemes(emulator):
    for width, rule in ((64, None), (8208, (NVFP4_KV, -2)), (64, (MXFP4_FLOOR, None))):
        assert differences(torch.device("cpu"), rows_case(width, rule)) is None
    x, weight = rows(3, 96)
    for rule in ((NVFP4_KV, -2), (MXFP4_FLOOR, None)):
        operands = (x, weight, 1e-6, None, rule)
        assert_same(rms_norm_on_device(*operands), rms_norm_reference(*operands))


def test_operands_that_do_not_fit_are_refused():
    x, weight = rows(2, 32)
    for wrong in ((x.float(), weight), (x, weight[:16]), (x[0], weight[0]), (x[:, :24], weight[:24])):
        with pytest.raises(FormatError, match="rms_norm needs bfloat16 rows"):
            rms_norm(*wrong, epsilon=1e-6)
    with pytest.raises(FormatError, match="a residual"):
        rms_norm(x, weight, epsilon=1e-6, residual=x[:1])
    for rule in ((NVFP4_TENSOR_POW2, None), (NVFP4_KV, None), (NVFP4_ROW_POW2, 3)):
        with pytest.raises(FormatError, match="quantizes rows one by one"):
            rms_norm(x, weight, epsilon=1e-6, rule=rule)
    with pytest.raises(BackendError, match="rms_norm cannot run CUDA here"):
        rms_norm(x, weight, epsilon=1e-6, backend=Backend.CUDA)


@pytest.mark.parametrize("architecture", ["sm_89", "sm_90a", "sm_100a", "sm_120a"])
def test_the_file_compiles_for(architecture):
    defines = rows_case(64, (NVFP4_ROW_POW2, None)).defines
    source = norm_device.LIBRARY.program.source
    assert nvrtc.build(source, defines=defines, architecture=architecture).code[:4] == b"\x7fELF"

"""recorded_quantize: what every backend keeps is what guidance keeps of the same rounding."""

import pytest
import torch
from tests.assertions import assert_bitwise
from tests.emulation.emulator import COMPILER, Emulator
from tests.ops.guides import EVERY_CODEC
from tests.ops.scheme_inputs import exponent_of
from tests.ops.test_compiled import assert_equal
from tests.ops.test_compiled_guides import noisy_rows

from tracefp4.coding import codec_by_name
from tracefp4.formats.schemes import MXFP4_FLOOR, NVFP4_KV, NVFP4_ROW_POW2, NVFP4_TENSOR_FP32
from tracefp4.guidance.payload import encode_block_scales, encode_codes
from tracefp4.ops import nvrtc
from tracefp4.ops.backend import Backend
from tracefp4.ops.guided_quantize import guided_quantize, recorded_quantize, recording
from tracefp4.ops.rules import SchemeCase

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="the emulation needs g++")
CASES = (
    (NVFP4_ROW_POW2, "full"),
    (NVFP4_ROW_POW2, "bch64_2+bch32_2"),
    (NVFP4_ROW_POW2, "secded+coset1"),
    (NVFP4_ROW_POW2, "bch64_3+coset1"),
    (NVFP4_ROW_POW2, "bch128_3+coset2"),
    (MXFP4_FLOOR, "bch64_4+coset1"),
    (NVFP4_KV, "low2+coset2"),
    (MXFP4_FLOOR, "mantissa+coset1"),
)


@pytest.fixture(params=[0, 1, 2, 3])
def emulator(request, monkeypatch):
    emulator = Emulator(request.param)
    monkeypatch.setattr(recording.KERNELS, "runner", emulator)
    return emulator


def assert_recorded(found, x, scheme, codec):
    """The bytes, against the ops that guidance encodes with."""
    operands = {"scheme": scheme, "exponent": exponent_of(scheme), "backend": Backend.REFERENCE}
    wanted = guided_quantize(x, **operands)
    if found.rounded.codes is None:
        wanted = guided_quantize(x, with_codes=False, **operands)
    assert_equal(found.rounded, wanted)
    codes = guided_quantize(x, **operands).codes
    assert_bitwise(found.payload, encode_codes(codes, codec=codec))
    assert_bitwise(found.scales, encode_block_scales(wanted.block_scales, codec=codec))


@pytest.mark.parametrize("backend", [Backend.AUTO, Backend.REFERENCE], ids=lambda b: b.value)
@pytest.mark.parametrize("name", EVERY_CODEC)
def test_what_is_kept_is_what_guidance_keeps(name, backend):
    codec, x = codec_by_name(name), noisy_rows()[1][:, :1072].bfloat16()
    found = recorded_quantize(x, scheme=NVFP4_ROW_POW2, codec=codec, backend=backend)
    assert_recorded(found, x, NVFP4_ROW_POW2, codec)


@needs_compiler
@pytest.mark.parametrize(("scheme", "name"), CASES, ids=lambda part: getattr(part, "name", part))
def test_one_pass_keeps_the_same_bytes(emulator, scheme, name):
    codec, x = codec_by_name(name), noisy_rows()[1].bfloat16()
    for rows, with_codes in ((x, True), (x[:3, :32], False), (x[:0, :64], True), (x[:5, :96], True)):
        operands = (rows, scheme, codec, exponent_of(scheme), with_codes)
        found = recording.recorded_quantize_on_device(*operands)
        assert (found.rounded.codes is None) != with_codes
        assert_recorded(found, rows, scheme, codec)
    assert emulator.launches == {"recorded_rows": 3}


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY_CODEC)
def test_one_pass_keeps_the_same_bytes_in_every_codec(monkeypatch, name):
    monkeypatch.setattr(recording.KERNELS, "runner", Emulator(len(name) % 3))
    codec, x = codec_by_name(name), noisy_rows()[1]
    for scheme, rows in ((NVFP4_ROW_POW2, x), (NVFP4_TENSOR_FP32, x[:, :64])):
        operands = (rows, scheme, codec, exponent_of(scheme), True)
        assert_recorded(recording.recorded_quantize_on_device(*operands), rows, scheme, codec)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "name"), CASES, ids=lambda part: getattr(part, "name", part))
def test_the_self_check_passes(emulator, scheme, name):
    for dtype in (torch.float32, torch.bfloat16):
        rows = SchemeCase(scheme, dtype)
        assert recording.differences(torch.device("cpu"), rows, codec_by_name(name)) is None


@pytest.mark.parametrize("architecture", ["sm_89", "sm_90a", "sm_100a", "sm_120a"])
@pytest.mark.parametrize(("scheme", "name"), CASES[:2], ids=lambda part: getattr(part, "name", part))
def test_the_file_compiles_for(architecture, scheme, name):
    x = torch.empty(1, 2048).bfloat16()
    shape = recording.shape_of(x, scheme)
    defines = {
        **recording.row_variant(x, scheme),
        **recording._variant(codec_by_name(name), scheme, shape),
    }
    source = recording.KERNELS.program.source
    assert nvrtc.build(source, defines=defines, architecture=architecture).code[:4] == b"\x7fELF"

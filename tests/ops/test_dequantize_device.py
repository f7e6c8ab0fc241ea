"""The GPU kernel of dequantize: run on the processor against the reference, and compiled for every architecture."""

import pytest
import torch
from tests.emulation.emulator import COMPILER, Emulator
from tests.ops.test_compiled import assert_same_numbers

from tracefp4.formats.packing import pack_codes
from tracefp4.formats.schemes import (
    MXFP4_FLOOR,
    NVFP4_KV,
    NVFP4_ROW_POW2,
    NVFP4_ROW_TRANSFORMER_ENGINE,
    NVFP4_TENSOR_POW2,
    SCHEMES,
)
from tracefp4.formats.tensor import BlockTensor
from tracefp4.ops import nvrtc
from tracefp4.ops.dequantize import device as dequantize_device
from tracefp4.ops.dequantize.device import case_of, dequantize_on_device, differences
from tracefp4.ops.dequantize.reference import dequantize_reference
from tracefp4.ops.rules import SchemeCase

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="the emulation needs g++")


@pytest.fixture(params=[0, 1, 2, 3])
def emulator(request, monkeypatch):
    emulator = Emulator(request.param)
    monkeypatch.setattr(dequantize_device.LIBRARY, "runner", emulator)
    return emulator


def stored(scheme, *lead, width):
    """Every byte as a scale and as two codes, in random places."""
    outer_shape = {"row": lead, "tensor": lead[:-1]}.get(scheme.outer, ())
    outer = torch.randint(-110, 117, outer_shape, dtype=torch.int8)
    return BlockTensor(
        packed=torch.randint(0, 256, (*lead, width // 2), dtype=torch.uint8),
        block_scales=torch.randint(0, 256, (*lead, width // scheme.block_size), dtype=torch.uint8),
        outer=outer if scheme.is_exact_in_bf16 else torch.exp2(outer.float() / 4),
        scheme=scheme,
    )


@needs_compiler
@pytest.mark.parametrize(
    "scheme",
    [NVFP4_ROW_POW2, NVFP4_TENSOR_POW2, NVFP4_KV, MXFP4_FLOOR, NVFP4_ROW_TRANSFORMER_ENGINE],
    ids=lambda scheme: scheme.name,
)
def test_values_are_those_of_the_reference(emulator, scheme):
    if scheme.outer != "none":
        kinds = (torch.bfloat16,) if scheme.is_exact_in_bf16 else (torch.float32,)
    else:
        kinds = (torch.bfloat16, torch.float32, torch.float64)
    for lead, width in (((3, 17), 96), ((2, 0), 32), ((1, 2), 8224)):
        t = stored(scheme, *lead, width=width)
        for dtype in kinds:
            assert_same_numbers(dequantize_on_device(t, dtype), dequantize_reference(t, dtype))
    assert emulator.launches["dequantize"] >= 2


@needs_compiler
def test_every_code_under_every_scale(emulator):
    t = BlockTensor(
        packed=pack_codes(torch.arange(16, dtype=torch.uint8) * 5 % 16).repeat(227 * 256, 1),
        block_scales=torch.arange(256, dtype=torch.uint8).repeat(227)[:, None],
        outer=torch.arange(-110, 117, dtype=torch.int8).repeat_interleave(256),
        scheme=NVFP4_ROW_POW2,
    )
    assert_same_numbers(dequantize_on_device(t, torch.bfloat16), dequantize_reference(t, torch.bfloat16))


@needs_compiler
def test_operands_and_results_at_any_address(emulator):
    t = stored(NVFP4_KV, 5, width=32)
    base = torch.full((1 + 5 * 32 + 64,), 7.0).bfloat16()
    out, wanted = base[1 : 1 + 5 * 32].view(5, 32), dequantize_reference(t, torch.bfloat16)
    assert dequantize_on_device(t, torch.bfloat16, out) is out
    assert_same_numbers(out, wanted)
    assert base[0] == 7.0 and bool((base[161:] == 7.0).all())
    whole = torch.full((8 * 5 * 32,), 7.0).bfloat16()
    assert dequantize_on_device(t, torch.bfloat16, whole[: 5 * 32].view(5, 32)).data_ptr() == whole.data_ptr()
    assert bool((whole[160:] == 7.0).all())
    one_off = torch.empty(1 + t.packed.numel(), dtype=torch.uint8)
    one_off[1:] = t.packed.flatten()
    strided = BlockTensor(
        packed=one_off[1:].view(t.packed.shape),
        block_scales=t.block_scales.T.contiguous().T,
        outer=t.outer,
        scheme=t.scheme,
    )
    assert_same_numbers(dequantize_on_device(strided, torch.bfloat16), wanted)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=lambda s: s.name)
def test_the_self_check_passes(emulator, scheme):
    for dtype in (torch.float32, torch.bfloat16)[: 1 + scheme.is_exact_in_bf16]:
        assert differences(torch.device("cpu"), SchemeCase(scheme, dtype)) is None


@pytest.mark.parametrize("architecture", ["sm_89", "sm_90a", "sm_100a", "sm_120a"])
def test_the_file_compiles_for(architecture):
    for scheme, dtype in ((NVFP4_ROW_POW2, torch.bfloat16), (NVFP4_ROW_TRANSFORMER_ENGINE, torch.float32)):
        t = stored(scheme, 1, width=32)
        defines = case_of(t, dtype).defines | {"WORDS_PER_THREAD": 4}
        built = nvrtc.build(
            dequantize_device.LIBRARY.program.source, defines=defines, architecture=architecture
        )
        assert built.code[:4] == b"\x7fELF"

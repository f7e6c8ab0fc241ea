"""The GPU kernels of guided_quantize: run on the processor against the reference, and compiled for architectures."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.emulation.emulator import COMPILER, Emulator
from tests.ops.guides import EVERY_CODEC, coded_guide, is_decodable, tied_flips
from tests.ops.scheme_inputs import GUIDED, by_name, exponent_of
from tests.ops.test_compiled import assert_equal
from tests.ops.test_compiled_guides import noisy_rows

from tracefp4.formats.schemes import MXFP4_FLOOR, NVFP4_KV, NVFP4_ROW_POW2, NVFP4_TENSOR_FP32
from tracefp4.ops import nvrtc
from tracefp4.ops.guided_quantize import device as guided_device
from tracefp4.ops.guided_quantize.decisions import kinds_for
from tracefp4.ops.guided_quantize.device import Case, differences, guided_quantize_on_device
from tracefp4.ops.guided_quantize.reference import guided_quantize_reference
from tracefp4.ops.guided_quantize.values import Guide
from tracefp4.ops.rules import SchemeCase

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="the emulation needs g++")
IN_CORE = ("full", "mantissa_lean", "low2", "secded", "parity7+coset1", "bch64_2+bch32_2")


@pytest.fixture(params=[0, 2, 3])
def emulator(request, monkeypatch):
    emulator = Emulator(request.param)
    monkeypatch.setattr(guided_device.LIBRARY, "runner", emulator)
    return emulator


def assert_guided(x, scheme, guide, *, with_codes=True):
    operands = (x, scheme, guide, exponent_of(scheme), with_codes)
    wanted = guided_quantize_reference(*operands)
    assert_equal(guided_quantize_on_device(*operands), wanted)
    return wanted


@needs_compiler
@pytest.mark.parametrize("scheme", [NVFP4_ROW_POW2, NVFP4_KV, MXFP4_FLOOR], ids=by_name)
def test_without_a_guide(emulator, scheme):
    x = noisy_rows()[1].bfloat16()
    for rows in (x, x[:3, :32], x[:0, :64], x[:5, :96]):
        assert_guided(rows, scheme, None, with_codes=len(rows) != 3)


@needs_compiler
@pytest.mark.parametrize("name", IN_CORE)
def test_guides_of_every_kind(emulator, name):
    """Long rows and short ones, with and without a gate; rows without a record; NaN and Inf on both sides."""
    torch.manual_seed(0)
    num_changed = num_undecoded = 0
    for width in (1120, 128):
        x_rollout, x = (rows[:, :width].bfloat16() for rows in noisy_rows())
        recorded = guided_quantize_reference(x_rollout, NVFP4_ROW_POW2, None, None, True)
        band = 0.04 if name in ("low2", "secded") else None
        guide = coded_guide(recorded, name, band=band, valid=torch.rand(len(x)) < 0.8)
        wanted = assert_guided(x, NVFP4_ROW_POW2, guide)
        num_changed += int(wanted.nearest_changed)
        num_undecoded += int(wanted.undecoded)
    assert num_changed > 10 and (num_undecoded > 0 or "bch" not in name)
    assert sum(emulator.launches.values()) > 0


@needs_compiler
@pytest.mark.parametrize(
    ("scheme", "scales", "exponents"),
    [(NVFP4_ROW_POW2, range(127), (-110, -3, 116)), (MXFP4_FLOOR, (0, 1, 2, 100, 127, 200, 253, 254), (0,))],
    ids=lambda value: getattr(value, "name", ""),
)
@pytest.mark.parametrize("what", ["codes", "bits"])
def test_every_bf16_number_follows(monkeypatch, scheme, scales, exponents, what):
    """Under every scale, after random decisions."""
    monkeypatch.setattr(guided_device.LIBRARY, "runner", Emulator())
    torch.manual_seed(0)
    magnitudes = torch.arange(0x7F80, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = torch.cat([magnitudes, -magnitudes]).repeat(len(scales), 1)
    decisions = torch.randint(0, 16 if what == "codes" else 2, x.shape, dtype=torch.uint8)
    num_blocks = x.shape[1] // scheme.block_size
    for exponent in exponents:
        is_row = scheme.outer == "row"
        guide = Guide(
            valid=torch.ones(len(x), dtype=torch.bool),
            outer=torch.full((len(x),), exponent, dtype=torch.int8) if is_row else None,
            block_scales=torch.tensor(scales, dtype=torch.uint8)[:, None].repeat(1, num_blocks),
            **{what: decisions},
        )
        wanted = assert_guided(x, scheme, guide)
        assert int(wanted.nearest_changed) > 0
        decisions = decisions.flip(0)


@needs_compiler
def test_the_cheapest_of_several_sets_of_flips(emulator):
    """Three flips in 32 values, explained by two or three sets each."""
    torch.manual_seed(1)
    x = torch.randn(8, 512)
    rollout = (x * (1 + 0.06 * torch.randn_like(x))).bfloat16()
    recorded = guided_quantize_reference(rollout, NVFP4_ROW_POW2, None, None, True)
    guide = coded_guide(recorded, "bch32_2+raw")
    assert int(assert_guided(x.bfloat16(), NVFP4_ROW_POW2, guide).nearest_changed) > 100


@needs_compiler
def test_of_two_sets_of_one_cost_the_smaller_one_and_then_the_first_is_flipped(emulator):
    x, guide, wanted = tied_flips()
    found = assert_guided(x, NVFP4_ROW_POW2, guide)
    assert [row.nonzero()[:, 0].tolist() for row in found.codes] == wanted


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("scheme", GUIDED, ids=by_name)
def test_every_scheme_and_codec(monkeypatch, scheme):
    """Each scheme with a third of the codecs, and each codec with a third of the schemes."""
    third = GUIDED.index(scheme) % 3
    monkeypatch.setattr(guided_device.LIBRARY, "runner", Emulator(third))
    for index, name in enumerate(EVERY_CODEC):
        if index % 3 != third or not is_decodable(name, scheme):
            continue
        x_rollout, x = noisy_rows()
        recorded = guided_quantize_reference(x_rollout, scheme, None, exponent_of(scheme), True)
        guide = coded_guide(
            recorded,
            name,
            band=(None, 0.04, 0.0, 0.6)[(index + GUIDED.index(scheme)) % 4],
            decoder=("nearest_cell", "bracket")[index // 2 % 2],
            valid=torch.rand(len(x)) < 0.8,
        )
        dtype = (torch.bfloat16, torch.float32, torch.float16)[index // 3 % 3]
        assert_guided(x.to(dtype), scheme, guide, with_codes=index // 3 % 3 != 0)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("name", [*EVERY_CODEC, "bch32_4", "parity7+parity61", "bch512_2+bch512_1"])
def test_random_decisions_of_random_rows(monkeypatch, name):
    """What no rollout of x would give: searches among all candidates that find nothing."""
    monkeypatch.setattr(guided_device.LIBRARY, "runner", Emulator(len(name) % 3))
    x = torch.randn(3, 272) * torch.exp2(torch.randint(-12, 12, (3, 1)).float())
    guide = coded_guide(guided_quantize_reference(x, NVFP4_ROW_POW2, None, None, True), name)
    for part, end in (
        (guide.codes, 16),
        (guide.bits, 256),
        (guide.syndromes, 256),
        (guide.block_scales, 128),
    ):
        if part is not None:
            part.random_(0, end)
    assert guide.outer is not None
    guide.outer.random_(-20, 5)
    for band in (None, 0.1):
        assert_guided(x, NVFP4_ROW_POW2, replace(guide, band=band))


@needs_compiler
@pytest.mark.slow
def test_one_outer_scale_for_all(emulator):
    assert_guided(noisy_rows()[1], NVFP4_TENSOR_FP32, None)
    assert_guided(noisy_rows()[1][:0], NVFP4_TENSOR_FP32, None)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("scheme", [NVFP4_ROW_POW2, NVFP4_KV, MXFP4_FLOOR], ids=by_name)
def test_the_self_check_passes(monkeypatch, scheme):
    monkeypatch.setattr(guided_device.LIBRARY, "runner", Emulator())
    for index, kind in enumerate((None, *kinds_for(scheme))):
        case = Case(SchemeCase(scheme, (torch.bfloat16, torch.float32)[index % 2]), kind)
        assert differences(torch.device("cpu"), case) is None, kind


@needs_compiler
@pytest.mark.parametrize("part", ["outer", "block_scales"])
def test_a_damaged_record_ends_the_kernel(part):
    code = f"from tests.ops.test_guided_quantize_device import follow_damaged; follow_damaged({part!r})"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode != 0 and "breaks what its op promises" in done.stderr


def follow_damaged(part):
    guided_device.LIBRARY.runner = Emulator()
    x = torch.randn(4, 128).bfloat16()
    guide = coded_guide(guided_quantize_reference(x, NVFP4_ROW_POW2, None, None, True), "full")
    getattr(guide, part)[2] = {"outer": -128, "block_scales": 0x80}[part]
    guide.valid[2] = False
    guided_quantize_on_device(x, NVFP4_ROW_POW2, guide, None, True)
    guide.valid[2] = True
    guided_quantize_on_device(x, NVFP4_ROW_POW2, guide, None, True)


@pytest.mark.parametrize("architecture", ["sm_89", "sm_90a", "sm_100a", "sm_120a"])
@pytest.mark.parametrize("name", [None, "mantissa_lean", "bch128_3+bch64_2"])
def test_the_file_compiles_for(architecture, name):
    x = torch.randn(2, 256).bfloat16()
    guide = None
    if name is not None:
        guide = coded_guide(guided_quantize_reference(x, NVFP4_ROW_POW2, None, None, True), name, band=0.1)
    defines = {**guided_device.row_variant(x, NVFP4_ROW_POW2), **guided_device._variant(guide)}
    source = guided_device.LIBRARY.program.source
    assert nvrtc.build(source, defines=defines, architecture=architecture).code[:4] == b"\x7fELF"

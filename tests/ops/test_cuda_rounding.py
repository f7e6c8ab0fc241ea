"""The GPU kernels of dequantize, syndromes and guided_quantize on a real device, against the reference there."""

import pytest
import torch
from tests.assertions import assert_bitwise
from tests.ops.guides import EVERY_CODEC, coded_guide, held, is_decodable, tied_flips
from tests.ops.scheme_inputs import GUIDED, by_name, exponent_of
from tests.ops.test_compiled import assert_same_numbers
from tests.ops.test_compiled_guides import noisy_rows

from tracefp4.coding import codec_by_name, syndrome_code
from tracefp4.formats import SCHEMES
from tracefp4.ops.backend import Backend
from tracefp4.ops.dequantize import dequantize
from tracefp4.ops.guided_quantize import Guide, guided_quantize, recorded_quantize
from tracefp4.ops.quantize import quantize
from tracefp4.ops.syndromes import encode_syndromes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BOTH = (Backend.CUDA, Backend.REFERENCE)


def on_gpu(guide):
    return Guide(
        **{name: part.cuda() if torch.is_tensor(part) else part for name, part in held(guide).items()}
    )


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=by_name)
def test_dequantize(scheme):
    t = quantize(
        noisy_rows()[1].cuda(), scheme=scheme, exponent=exponent_of(scheme), backend=Backend.REFERENCE
    )
    for dtype in (torch.float32, torch.bfloat16)[: 1 + scheme.is_exact_in_bf16]:
        assert_same_numbers(*(dequantize(t, dtype=dtype, backend=backend).cpu() for backend in BOTH))


@pytest.mark.parametrize("name", ["parity3", "secded", "bch128_3", "bch512_6"])
def test_syndromes(name):
    codes = torch.randint(0, 256, (300, 2048), dtype=torch.uint8, device="cuda")
    assert_bitwise(*(encode_syndromes(codes, code=syndrome_code(name), backend=b).cpu() for b in BOTH))


@pytest.mark.parametrize("scheme", GUIDED, ids=by_name)
def test_guided_and_recorded(scheme):
    for index, name in enumerate(EVERY_CODEC):
        x_rollout, x = (rows.bfloat16().cuda() for rows in noisy_rows())
        codec = codec_by_name(name)
        rules = {"scheme": scheme, "exponent": exponent_of(scheme)}
        found, wanted = (recorded_quantize(x, codec=codec, backend=backend, **rules) for backend in BOTH)
        assert_bitwise(found.payload.cpu(), wanted.payload.cpu())
        assert_bitwise(found.scales.cpu(), wanted.scales.cpu())
        assert_all_same(found.rounded, wanted.rounded)
        if not is_decodable(name, scheme):
            continue
        rollout = guided_quantize(x_rollout.cpu(), backend=Backend.REFERENCE, **rules)
        band = (None, 0.04)[index % 2]
        guide = on_gpu(coded_guide(rollout, name, band=band, valid=torch.rand(len(x)) < 0.8))
        assert_all_same(*(guided_quantize(x, guide=guide, backend=backend, **rules) for backend in BOTH))


def test_of_two_sets_of_one_cost_the_smaller_one_and_then_the_first_is_flipped():
    x, guide, wanted = tied_flips()
    rules = {"scheme": SCHEMES["NVFP4_ROW_POW2"], "guide": on_gpu(guide)}
    found = guided_quantize(x.cuda(), backend=Backend.CUDA, **rules)
    assert [row.nonzero()[:, 0].tolist() for row in found.codes] == wanted


def test_a_guided_rounding_is_captured_in_a_graph():
    """Nothing is read back: a captured call gives the same bytes for other inputs."""
    scheme = SCHEMES["NVFP4_ROW_POW2"]
    x_rollout, x = (rows.bfloat16().cuda() for rows in noisy_rows())
    rollout = guided_quantize(x_rollout.cpu(), scheme=scheme, backend=Backend.REFERENCE)
    guide = on_gpu(coded_guide(rollout, "bch64_2+bch32_2"))
    given = torch.zeros_like(x)
    guided_quantize(given, scheme=scheme, guide=guide, backend=Backend.CUDA)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = guided_quantize(given, scheme=scheme, guide=guide, backend=Backend.CUDA)
    given.copy_(x)
    graph.replay()
    assert_all_same(found, guided_quantize(x, scheme=scheme, guide=guide, backend=Backend.REFERENCE))


def assert_all_same(found, wanted):
    for part in ("values", "codes", "block_scales", "outer", "nearest_changed", "in_band", "undecoded"):
        mine, theirs = getattr(found, part), getattr(wanted, part)
        if theirs is not None:
            assert_same_numbers(mine.cpu(), theirs.cpu())

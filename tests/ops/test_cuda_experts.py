"""The kernels of the expert layer on a real GPU: what the emulation showed, and what it cannot show."""

import pytest
import torch
from tests.ops.expert_cases import PRECISIONS, assert_right, case, moved, operands

from tracefp4.formats.schemes import MXFP4_FLOOR, NVFP4_TENSOR_POW2
from tracefp4.formats.tensor import BlockTensor
from tracefp4.formats.weight_fragments import empty_fragments, to_fragments
from tracefp4.ops.backend import Backend
from tracefp4.ops.dequantize import dequantize
from tracefp4.ops.device import comparing
from tracefp4.ops.expert_layer import device as kernels
from tracefp4.ops.expert_layer import expert_layer, refit
from tracefp4.ops.expert_layer.routes import sort_pairs
from tracefp4.ops.expert_layer.tilings import MOST, PIPED, TILINGS
from tracefp4.ops.quantize import quantize

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
HAS_WARPGROUPS = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
EVERY = (*(tiling for _, tiling in TILINGS), MOST, *((PIPED,) if HAS_WARPGROUPS else ()))
CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def _compares():
    """Kernels that no check has launched may run: these tests compare what they give."""
    with comparing():
        yield


def test_the_check_at_first_use_passes():
    assert kernels.LIBRARY.status(CUDA).is_usable, kernels.LIBRARY.status(CUDA).reason


@pytest.mark.parametrize("name", PRECISIONS)
def test_checks_of_other_cases_pass(name):
    given = moved(case(PRECISIONS[name], tokens=24, experts=8, hidden=2048, inner=768), CUDA)
    for num_pairs in (8, 64, 200, 2000):
        checked = kernels.case_of(num_pairs, given.experts, given.precision.activation)
        assert kernels.LIBRARY.status(CUDA, checked).is_usable, kernels.LIBRARY.status(CUDA, checked).reason


@pytest.mark.parametrize("name", PRECISIONS)
@pytest.mark.parametrize("tiling", EVERY, ids=str)
@pytest.mark.parametrize("tokens", [1, 40, 700])
def test_every_step_is_that_of_the_definition(name, tiling, tokens):
    given = moved(case(PRECISIONS[name], tokens=tokens, experts=8, hidden=672, inner=352), CUDA)
    first = assert_right(given, tiling)
    again = kernels.run_steps(*operands(given), (tiling, False))
    assert torch.equal(again.h, first.h) and torch.equal(again.y, first.y)


@pytest.mark.parametrize("scheme", [NVFP4_TENSOR_POW2, MXFP4_FLOOR], ids=lambda s: s.name)
@pytest.mark.parametrize("tiling", EVERY, ids=str)
def test_every_code_under_every_scale_is_exact(tiling, scheme):
    num_bytes = 128 if scheme is NVFP4_TENSOR_POW2 else 256
    codes = torch.arange(16, dtype=torch.uint8, device=CUDA).repeat(num_bytes, 4)
    scales = torch.arange(num_bytes, device=CUDA).to(torch.uint8)[:, None]
    t = BlockTensor(
        packed=(codes[:, 0::2] | codes[:, 1::2] << 4)[None],
        block_scales=scales.expand(num_bytes, 64 // scheme.block_size)[None].contiguous(),
        outer=torch.zeros(1 if scheme is NVFP4_TENSOR_POW2 else (), dtype=torch.int8, device=CUDA),
        scheme=scheme,
    )
    routes = sort_pairs(torch.zeros(64, 1, dtype=torch.int64, device=CUDA), 1, 8 * tiling.token_tiles)
    y = torch.empty(64, num_bytes, dtype=torch.bfloat16, device=CUDA)
    identity = torch.eye(64, device=CUDA)
    in_steps = tiling.in_steps
    rows = kernels._round_rows(identity.bfloat16(), PRECISIONS["bf16"], "x", False, in_steps=in_steps)
    kernels._multiply("down", (rows.operand, routes, to_fragments(t)), tiling, (num_bytes, y))
    wanted = (identity.double() @ dequantize(t)[0].double().T).float()
    is_number = ~wanted.isnan()
    assert torch.equal(y.float()[is_number], wanted[is_number]) and not y[~is_number].isfinite().any()


def test_a_captured_graph_reads_new_tokens_and_new_weights():
    given = moved(case(PRECISIONS["nvfp4"], tokens=24), CUDA)
    x, routing, experts, precision = operands(given)
    expert_layer(x, routing, experts, precision=precision, backend=Backend.CUDA)
    refit(given.gate_up, experts.gate_up)
    torch.cuda.synchronize()
    weights, graph = given.gate_up.clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        refit(weights, experts.gate_up)
        out = expert_layer(x, routing, experts, precision=precision, with_codes=True, backend=Backend.CUDA)
    for seed in (1, 2):
        torch.manual_seed(seed)
        x.copy_(torch.randn_like(x))
        weights.copy_(given.gate_up * seed)
        routing.ids.copy_(torch.randint(0, 4, routing.ids.shape, device=CUDA))
        graph.replay()
        wanted = expert_layer(x, routing, experts, precision=precision, with_codes=True, backend=Backend.CUDA)
        assert torch.equal(out.y, wanted.y) and torch.equal(out.w2.packed, wanted.w2.packed)


@pytest.mark.parametrize("scheme", [NVFP4_TENSOR_POW2, MXFP4_FLOOR], ids=lambda s: s.name)
def test_refit_gives_the_bytes_of_quantize(scheme):
    weights = torch.randn(8, 96, 224, device=CUDA).bfloat16()
    weights[1, 3, 7], weights[2] = float("inf"), 0.0
    fragments = empty_fragments(weights.shape, scheme, CUDA)
    refit(weights, fragments, backend=Backend.CUDA)
    wanted = to_fragments(quantize(weights, scheme=scheme, backend=Backend.REFERENCE))
    for part in ("words", "scales", "exponents"):
        assert torch.equal(getattr(fragments, part), getattr(wanted, part))

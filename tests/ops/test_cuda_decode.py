"""The kernels around the experts and the cache on a real GPU: norm, rotation, gate, routing, sampling.

The same comparisons as under the emulation, at the sizes of a model, and whether a CUDA graph may hold them.
"""

import pytest
import torch
from tests.assertions import assert_bitwise
from tests.ops.test_rotary import operands as heads
from tests.ops.test_sample_device import CUTS, assert_drawn, columns

from tracefp4.formats.schemes import MXFP4_FLOOR, NVFP4_KV, NVFP4_ROW_POW2
from tracefp4.ops.backend import Backend
from tracefp4.ops.device import comparing
from tracefp4.ops.rms_norm import rms_norm
from tracefp4.ops.rms_norm.reference import rms_norm_reference
from tracefp4.ops.rotary import Angles, HeadNorms, rotary
from tracefp4.ops.rotary.reference import rotary_reference
from tracefp4.ops.route import route
from tracefp4.ops.route.reference import outside as outside_of_route
from tracefp4.ops.route.reference import route_reference
from tracefp4.ops.sample import Draws, sample
from tracefp4.ops.sample.device import kind_of, logits_on_device, sample_on_device
from tracefp4.ops.swiglu import swiglu
from tracefp4.ops.swiglu.reference import outside as outside_of_swiglu

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
RULES = ((NVFP4_ROW_POW2, None), (NVFP4_KV, -2), (MXFP4_FLOOR, None))


@pytest.fixture(autouse=True)
def _compares():
    """Kernels that no check has launched may run: these tests compare what they give."""
    with comparing():
        yield


def each_column(draws, change):
    columns_of = {f: getattr(draws, f) for f in Draws.__dataclass_fields__}
    return Draws(**{f: None if c is None else change(c) for f, c in columns_of.items()})


def on_gpu(draws):
    return each_column(draws, lambda column: column.cuda())


@pytest.mark.parametrize("width", [2048, 16384])
@pytest.mark.parametrize("rule", RULES, ids=lambda r: r[0].name)
def test_rms_norm(width, rule):
    torch.manual_seed(0)
    x = (torch.randn(77, width) * torch.exp2(torch.randint(-20, 20, (77, 1)).float())).bfloat16()
    weight, residual = torch.randn(width).bfloat16(), x.flip(0)
    wanted = rms_norm_reference(x, weight, 1e-6, residual, rule)
    got = rms_norm(
        x.cuda(), weight.cuda(), epsilon=1e-6, residual=residual.cuda(), rule=rule, backend=Backend.CUDA
    )
    assert_bitwise(got.values.cpu(), wanted.values)
    assert_bitwise(got.residual.cpu(), wanted.residual)
    for part in ("packed", "block_scales", "outer"):
        assert_bitwise(getattr(got.block_tensor, part).cpu(), getattr(wanted.block_tensor, part))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_rotary(head_dim):
    q, k, norms, angles, positions = heads(33, 32, 4, head_dim)
    wanted = rotary_reference(q, k, norms, angles, positions)
    norms = HeadNorms(norms.q.cuda(), norms.k.cuda(), norms.epsilon)
    angles = Angles(*(table.cuda() for table in angles))
    got = rotary(
        q.cuda(), k.cuda(), norms=norms, angles=angles, positions=positions.cuda(), backend=Backend.CUDA
    )
    for one, other in zip(got, wanted, strict=True):
        assert_bitwise(one.cpu(), other)


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r[0].name)
def test_swiglu(rule):
    torch.manual_seed(0)
    x = (torch.randn(500, 2 * 768) * 4).bfloat16()
    got = swiglu(x.cuda(), rule=rule, backend=Backend.CUDA)
    assert not outside_of_swiglu(got.values.cpu(), x).any()
    wanted = swiglu(x, rule=rule)
    is_same = (got.values.cpu() == wanted.values).all(1)
    assert is_same.float().mean() > 0.5
    assert_bitwise(got.block_tensor.packed.cpu()[is_same], wanted.block_tensor.packed[is_same])


@pytest.mark.parametrize(("num_experts", "top_k"), [(128, 8), (256, 8), (512, 10)])
def test_route(num_experts, top_k):
    torch.manual_seed(0)
    logits = (torch.randn(500, num_experts) * 3).bfloat16()
    for renormalizes in (False, True):
        got = route(logits.cuda(), top_k=top_k, renormalizes=renormalizes, backend=Backend.CUDA)
        ids, weights = got.ids.cpu(), got.weights.cpu()
        assert torch.equal(ids, route_reference(logits, top_k, renormalizes).ids)
        assert not outside_of_route(weights, logits, ids, renormalizes).any()


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("num_rows", [1, 17, 64, 200])
def test_sample(num_rows, cut):
    torch.manual_seed(0)
    hidden, head = (
        torch.randn(num_rows, 2048).cuda().bfloat16(),
        (torch.randn(151_936, 2048) / 8).cuda().bfloat16(),
    )
    num_calls = -(-64 // num_rows)  # so many draws that the few within the tolerance of an edge stay few
    num_draws = num_calls * num_rows
    given = {
        name: x.repeat(-(-num_draws // len(x)))[:num_draws] if isinstance(x, torch.Tensor) else x
        for name, x in CUTS[cut].items()
    }
    draws = on_gpu(columns(num_draws, **given))
    parts = [
        each_column(draws, lambda column, i=i: column[i * num_rows :][:num_rows]) for i in range(num_calls)
    ]
    found = [sample(hidden, head, part, backend=Backend.CUDA) for part in parts]
    again = sample(hidden, head, parts[0], backend=Backend.CUDA)
    assert torch.equal(found[0].tokens, again.tokens)
    assert_bitwise(found[0].logprobs.cpu(), again.logprobs.cpu())
    logits = logits_on_device(hidden, head, parts[0].temperature, kind_of(num_rows)).logits[
        :, : head.shape[0]
    ]
    exact = hidden[:4].double() @ head.double().T
    assert bool(((logits[:4].double() - exact).abs() <= exact.abs() * 2.0**-8 + 1e-3).all())
    got = type(found[0])(*map(torch.cat, zip(*found, strict=True)))
    # a vocabulary has edges everywhere: some tokens are within the tolerance of one
    assert_drawn(got, logits.repeat(num_calls, 1), draws, least_sure=0.7)


def test_a_row_of_few_does_not_depend_on_the_batch():
    torch.manual_seed(0)
    hidden, head = torch.randn(130, 512).cuda().bfloat16(), torch.randn(1000, 512).cuda().bfloat16()
    one = torch.ones(130, dtype=torch.float64, device="cuda")
    wide = logits_on_device(hidden, head, one, "few")
    for first, last in ((0, 1), (100, 116)):
        narrow = logits_on_device(hidden[first:last], head, one[first:last], "few")
        assert_bitwise(narrow.logits.cpu(), wide.logits[first:last].cpu())
        assert_bitwise(narrow.weights.cpu(), wide.weights[first:last].cpu())


def test_weights_do_not_depend_on_who_multiplied():
    torch.manual_seed(0)  # small integers: products are exact
    hidden, head = (torch.randint(-2, 3, (n, 64)).cuda().bfloat16() for n in (33, 20_003))
    temperature = torch.linspace(0, 2, 33, dtype=torch.float64, device="cuda")
    few, many = (logits_on_device(hidden, head, temperature, kind) for kind in ("few", "many"))
    for one, other in zip(few, many, strict=True):
        assert_bitwise(one.cpu(), other.cpu())


@pytest.mark.parametrize("num_rows", [8, 40])
def test_a_graph_samples_what_its_inputs_hold_when_it_runs(num_rows):
    torch.manual_seed(0)
    hidden, head = torch.randn(num_rows, 512).cuda().bfloat16(), torch.randn(1000, 512).cuda().bfloat16()
    draws = on_gpu(columns(num_rows, top_p=0.9, top_k=50))
    sample_on_device(hidden, head, draws)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = sample_on_device(hidden, head, draws)
    hidden.copy_(torch.randn(num_rows, 512))
    draws.positions.add_(1)
    graph.replay()
    wanted = sample_on_device(hidden, head, draws)
    assert torch.equal(held.tokens, wanted.tokens) and torch.equal(held.logprobs, wanted.logprobs)

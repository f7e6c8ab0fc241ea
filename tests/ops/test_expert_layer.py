"""The definition of the expert layer is the engine's arithmetic, and its operands are checked."""

import pytest
import torch
from tests.ops.expert_cases import PRECISIONS, case, operands

from tracefp4.errors import BackendError, FormatError
from tracefp4.formats.arithmetic import round_bf16
from tracefp4.formats.precision import LayerPrecision
from tracefp4.formats.schemes import NVFP4_ROW_FP32, NVFP4_TENSOR_POW2
from tracefp4.formats.weight_fragments import empty_fragments, from_fragments, to_fragments
from tracefp4.ops.backend import Backend
from tracefp4.ops.dequantize import dequantize
from tracefp4.ops.expert_layer import Experts, Routing, expert_layer, refit
from tracefp4.ops.grouped_matmul import grouped_matmul
from tracefp4.ops.guided_quantize import guided_quantize
from tracefp4.ops.quantize import quantize


def engine(given):
    """The experts of models/qwen3_moe.py in emulated bf16, over the same ops."""
    x, (ids, weights), experts, precision = operands(given)
    top_k = ids.shape[1]
    gate_up, down = (dequantize(from_fragments(w)) for w in experts)

    def rounded(x, part):
        if precision.activation is None:
            return x
        return guided_quantize(x, scheme=precision.activation, exponent=precision.exponent_of(part)).values

    sorted_ids, order = torch.sort(ids.reshape(-1), stable=True)
    sizes = torch.bincount(sorted_ids, minlength=gate_up.shape[0])
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.shape[0])
    sums = round_bf16(grouped_matmul(rounded(x.float(), "x")[order // top_k], gate_up, sizes))
    gate, up = sums[inverse].chunk(2, dim=-1)
    m = rounded(round_bf16(round_bf16(torch.nn.functional.silu(gate)) * up), "w2")
    y = round_bf16(grouped_matmul(m[order], down, sizes))[inverse].view(x.shape[0], top_k, -1)
    return round_bf16((y * weights.float()[..., None]).sum(1)), m


def assert_near(got, wanted, magnitude=0.0):
    """float32 sums in another order are off by some 2^-24 of their magnitudes, and few cross a boundary of bf16.

    Those that do are off by one bf16 step of what was rounded first.
    """
    differs = got != wanted
    assert float(differs.double().mean()) < 0.01
    near = (got - wanted).abs() <= wanted.abs() * 2.0**-5 + magnitude * 2.0**-20
    assert bool((near | ~differs).all())


@pytest.mark.parametrize("name", PRECISIONS)
def test_it_is_the_arithmetic_of_the_engine(name):
    given = case(PRECISIONS[name], tokens=9, hidden=96, inner=64)
    got = expert_layer(*operands(given)[:3], precision=given.precision, with_codes=True)
    wanted, m = engine(given)
    assert got.y.dtype == torch.bfloat16
    assert_near(got.y.float(), wanted, wanted.abs().max())
    if given.precision.activation is not None:
        exponent = given.precision.exponent_of("x")
        x = quantize(given.x, scheme=given.precision.activation, exponent=exponent)
        assert torch.equal(got.x.packed, x.packed) and torch.equal(got.x.outer, x.outer)
        assert_near(dequantize(got.w2), m)
        silent = expert_layer(*operands(given)[:3], precision=given.precision)
        assert silent.x is silent.w2 is None and torch.equal(silent.y, got.y)
    else:
        assert got.x is got.w2 is None


def test_impossible_ids_and_damaged_numbers_show():
    given = case(PRECISIONS["nvfp4"])
    given.routing.ids[1, 0], given.routing.ids[2, 1], given.x[3, 7] = 4, -1, float("inf")
    y = expert_layer(*operands(given)[:3], precision=given.precision).y
    assert y.isnan().all(1).tolist() == [False, True, True, True, False]


def test_refit_is_quantize_in_fragment_order():
    given = case(PRECISIONS["nvfp4"])
    fragments = empty_fragments(given.gate_up.shape, NVFP4_TENSOR_POW2, torch.device("cpu"))
    address = fragments.words.data_ptr()
    refit(given.gate_up, fragments)
    wanted = to_fragments(quantize(given.gate_up, scheme=NVFP4_TENSOR_POW2))
    for part in ("words", "scales", "exponents"):
        assert torch.equal(getattr(fragments, part), getattr(wanted, part))
    assert fragments.words.data_ptr() == address
    with pytest.raises(FormatError, match=r"refit needs bfloat16 weights \(4, 128, 128\)"):
        refit(given.down, fragments)


def test_no_tokens():
    given = case(PRECISIONS["nvfp4"], tokens=0)
    got = expert_layer(*operands(given)[:3], precision=given.precision, with_codes=True)
    assert got.y.shape == (0, 128) and got.w2.shape == (0, 64)


def test_operands_that_do_not_fit_are_refused():
    given = case(PRECISIONS["nvfp4"])
    x, routing, experts, precision = operands(given)
    for bad in (
        (x.float(), routing, experts),
        (x[:, :64], routing, experts),
        (x, Routing(routing.ids.int(), routing.weights), experts),
        (x, Routing(routing.ids, routing.weights[:, :1]), experts),
        (x, Routing(routing.ids[:, :0], routing.weights[:, :0]), experts),
        (x, routing, Experts(experts.down, experts.gate_up)),
    ):
        with pytest.raises(FormatError, match=r"expert_layer needs bfloat16 x \[T, H\]"):
            expert_layer(*bad, precision=precision)
    for activation, weight, message in (
        (None, None, "has experts under NVFP4_TENSOR_POW2 where the precision says bf16"),
        (NVFP4_ROW_FP32, NVFP4_TENSOR_POW2, "got activation NVFP4_ROW_FP32"),
        (NVFP4_TENSOR_POW2, NVFP4_TENSOR_POW2, "got activation NVFP4_TENSOR_POW2"),
    ):
        wrong = LayerPrecision(activation=activation, weight=weight, kv=None)
        with pytest.raises(FormatError, match=message):
            expert_layer(x, routing, experts, precision=wrong)
    elsewhere = Routing(routing.ids.to("meta"), routing.weights)
    with pytest.raises(FormatError, match="all operands on one device; got x on cpu, ids on meta"):
        expert_layer(x, elsewhere, experts, precision=precision)
    odd = case(PRECISIONS["bf16"], hidden=80)
    precision = LayerPrecision(activation=PRECISIONS["mxfp4"].activation, weight=NVFP4_TENSOR_POW2, kv=None)
    with pytest.raises(FormatError, match=r"blocks of 32 under MXFP4_FLOOR; got H, I = \(80, 64\)"):
        expert_layer(*operands(odd)[:3], precision=precision)


def test_kernels_for_gpus_do_not_run_on_the_cpu():
    given = case(PRECISIONS["nvfp4"])
    with pytest.raises(BackendError, match="expert_layer cannot run CUDA here"):
        expert_layer(*operands(given)[:3], precision=given.precision, backend=Backend.CUDA)

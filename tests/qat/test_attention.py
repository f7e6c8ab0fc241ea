"""Trainer attention over rounded keys and values: what it computes, what it passes back, what it refuses."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from tests.assertions import assert_bitwise
from tests.qat.expert_modules import EXACT64
from tests.qat.expert_modules import FP4 as FP4_EXPERTS

from tracefp4.errors import ConfigError
from tracefp4.formats import BF16_LAYER, NVFP4_KV
from tracefp4.formats.arithmetic import EMULATED, NATIVE
from tracefp4.guidance import Site
from tracefp4.guidance.session import record
from tracefp4.ops.guided_quantize import guided_quantize
from tracefp4.qat.attention import SiteSettings, attention_forward

# float64 softmax and products in another order
CLOSE = 1e-12
V_EXPONENT = -9
FP4 = replace(FP4_EXPERTS, v_exponent=V_EXPONENT)
B, HEADS, KV_HEADS, T, D = 2, 4, 2, 5, 16


class Observer:
    def __init__(self):
        self.seen = {}

    def observe(self, site, rounded):
        self.seen[site] = rounded

    def observe_routing(self, layer, expert_ids):
        raise AssertionError("attention does not route")


def module(precision=FP4, arithmetic=EXACT64, **options):
    return SimpleNamespace(tracefp4=SiteSettings(3, precision, arithmetic, **options))


def tensors(dtype=torch.float64):
    """q, k, v; v so small that only its own exponent (not k's) keeps its block scales normal."""
    shapes = ((B, HEADS, T, D), (B, KV_HEADS, T, D), (B, KV_HEADS, T, D))
    sizes = (1.0, 1.0, 2.0**-9)
    return [
        (torch.randn(shape, dtype=dtype) * size).requires_grad_()
        for shape, size in zip(shapes, sizes, strict=True)
    ]


def nearest(x, exponent):
    """K or V [B, C, T, D] rounded token by token, head by head."""
    rows = x.detach().transpose(1, 2).reshape(B * T, KV_HEADS * D)
    values = guided_quantize(rows, scheme=NVFP4_KV, exponent=exponent).values
    return values.view(B, T, KV_HEADS, D).transpose(1, 2)


def plain_attention(q, k, v):
    """[B, T, H, D] of causal attention, one query head after the other."""
    out = []
    for head in range(HEADS):
        keys, values = (x[:, head // (HEADS // KV_HEADS)] for x in (k, v))
        scores = q[:, head] @ keys.transpose(1, 2) / D**0.5
        scores = scores.masked_fill(torch.ones(T, T).triu(1).bool(), float("-inf"))
        out.append(scores.softmax(-1) @ values)
    return torch.stack(out, dim=2)


def test_attends_to_rounded_keys_and_values_with_straight_through_gradients():
    # Mutations: rounding v with k's exponent, gradients that stop at the rounding, heads grouped wrongly.
    q, k, v = tensors()
    out, _ = attention_forward(module(), q, k, v, None)
    k_hat, v_hat = nearest(k, 0).requires_grad_(), nearest(v, V_EXPONENT).requires_grad_()
    expected = plain_attention(q, k_hat, v_hat)
    assert (out - expected).abs().max() < CLOSE
    incoming = torch.randn_like(out)
    found = torch.autograd.grad(out, (q, k, v), incoming)
    wanted = torch.autograd.grad(expected, (q, k_hat, v_hat), incoming)
    for got, want in zip(found, wanted, strict=True):
        assert (got - want).abs().max() < CLOSE
    assert (k_hat - k).abs().max() > 0.05 and (v_hat - v).abs().max() > 0.05 * 2**-9
    assert (nearest(v, 0) - v_hat).abs().max() > 0.05 * 2**-9  # the other exponent would show


def test_bf16_layers_attend_to_what_they_were_given():
    q, k, v = tensors()
    out, _ = attention_forward(module(BF16_LAYER), q, k, v, None)
    assert (out - plain_attention(q, k, v)).abs().max() < CLOSE


def test_an_additive_mask_is_the_causal_one():
    q, k, v = tensors()
    mask = torch.zeros(1, 1, T, T, dtype=torch.float64)
    mask.masked_fill_(torch.ones(T, T).triu(1).bool(), torch.finfo(torch.float64).min)
    given, _ = attention_forward(module(), q, k, v, mask, scaling=D**-0.5)
    assert_bitwise(given, attention_forward(module(), q, k, v, None)[0])


def test_a_row_of_a_site_is_one_token_with_all_its_heads():
    q, k, v = tensors()
    observer = Observer()
    with record(observer):
        attention_forward(module(), q, k, v, None)
    assert set(observer.seen) == {Site("k", 3), Site("v", 3)}
    values = observer.seen[Site("v", 3)].values
    assert values.shape == (B * T, KV_HEADS * D)
    assert_bitwise(values[T + 2].view(KV_HEADS, D), nearest(v, V_EXPONENT)[1, :, 2])


def test_calibration_sees_unrounded_rows_also_in_bf16_layers():
    seen = {}
    q, k, v = tensors()
    attention_forward(module(BF16_LAYER, observer=seen.__setitem__), q, k, v, None)
    assert_bitwise(seen[Site("k", 3)].view(B, T, KV_HEADS, D), k.detach().transpose(1, 2).contiguous())


def test_emulated_outputs_are_bf16_values_and_gradients_flow():
    q, k, v = tensors(torch.float32)
    inputs = [x.clone() for x in (q, k, v)]  # rounding in place must not reach a leaf
    out, _ = attention_forward(module(arithmetic=EMULATED), *inputs, None)
    assert_bitwise(out.detach().bfloat16().float(), out.detach())
    out.sum().backward()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in (q, k, v))


def test_dropout_is_refused():
    with pytest.raises(ConfigError, match=r"dropout 0\.1 is refused.*attention_dropout to 0"):
        attention_forward(module(), *tensors(), None, dropout=0.1)


def test_scores_of_bf16_tensors_are_float32():
    # Mutation: scores in the dtype of the queries. All scores lie near 100, where bf16 has steps of .5.
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 8, 16).to(torch.bfloat16) for _ in range(3))
    q[..., 0], k[..., 0] = 20.0, 20.0
    module = torch.nn.Module()
    module.tracefp4 = SiteSettings(0, BF16_LAYER, NATIVE)
    out, _ = attention_forward(module, q, k, v, None)
    exact, _ = attention_forward(module, q.double(), k.double(), v.double(), None)
    assert out.dtype == torch.bfloat16
    # probabilities and output are rounded to bf16 once each: 2^-8 relative, of values up to about 3
    assert (out.double() - exact).abs().max() < 3 * 2**-7


def test_pad_3_segments_attend_within_themselves():
    # Mutation: segments that are passed on and not used.
    inputs = tensors()
    out, _ = attention_forward(module(), *inputs, None, segment_lengths=(2, 3))
    incoming = torch.randn_like(out)
    found = torch.autograd.grad(out, inputs, incoming)
    for begin, end in ((0, 2), (2, 5)):
        alone = [x[:, :, begin:end].detach().requires_grad_() for x in inputs]
        expected, _ = attention_forward(module(), *alone, None)
        assert_bitwise(out[:, begin:end].contiguous(), expected)
        wanted = torch.autograd.grad(expected, alone, incoming[:, begin:end])
        for got, want in zip(found, wanted, strict=True):
            assert (got[:, :, begin:end] - want).abs().max() < CLOSE
    whole, _ = attention_forward(module(), *inputs, None)
    assert not torch.equal(out[:, 2:], whole[:, 2:])


@pytest.mark.parametrize("lengths", [(2, 2), (5, 0), ()], ids=str)
def test_segments_that_do_not_fill_the_row_are_refused(lengths):
    with pytest.raises(ConfigError, match="refused for 5 columns.*Pass the lengths of the packed samples"):
        attention_forward(module(), *tensors(), None, segment_lengths=lengths)


def test_segments_of_a_sequence_on_several_ranks_are_refused():
    with pytest.raises(ConfigError, match="split over ranks"):
        attention_forward(module(sequence=object()), *tensors(), None, segment_lengths=(2, 3))


def test_native_attention_is_the_emulated_one_with_the_roundings_of_bf16():
    # Mutations: K and V that are not rounded; another scale; a mask that is not read.
    given = [t.detach().bfloat16() for t in tensors(torch.float32)]
    wanted = attention_forward(module(arithmetic=EMULATED), *[t.float() for t in given], None, scaling=0.5)[0]
    future = torch.ones(T, T, dtype=torch.bool).triu(1)
    mask = torch.zeros(B, 1, T, T).masked_fill(future, torch.finfo(torch.float32).min)
    for options in ({"attention_mask": None}, {"attention_mask": mask}, {"is_causal_row": True}):
        found = attention_forward(
            module(arithmetic=NATIVE),
            *given,
            options.pop("attention_mask", mask[:, :, :1, :1]),
            scaling=0.5,
            **options,
        )[0]
        assert found.dtype == torch.bfloat16
        assert (found.float() - wanted).abs().max() <= 2.0**-7 * wanted.abs().max()


@pytest.mark.parametrize("lengths", [(5, 2, 1, 16, 17, 3), (44,)])
def test_native_segments_are_their_own_rows_forward_and_backward(lengths):
    # Mutations: a padded column that is read; results in the order of the groups; a gradient counted twice.
    total = sum(lengths)
    given = [
        torch.randn(1, heads, total, D, dtype=torch.bfloat16, requires_grad=True)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]
    packed = attention_forward(module(arithmetic=NATIVE), *given, None, segment_lengths=lengths)[0]
    alone = torch.cat(
        [
            attention_forward(module(arithmetic=NATIVE), *parts, None)[0]
            for parts in zip(*(x.split(list(lengths), dim=2) for x in given), strict=True)
        ],
        dim=1,
    )
    assert (packed - alone).abs().max() <= 2.0**-7 * alone.abs().max()
    incoming = torch.randn_like(alone)
    found, wanted = (torch.autograd.grad(out, given, incoming) for out in (packed, alone))
    for ours, theirs in zip(found, wanted, strict=True):
        assert (ours - theirs).abs().max() <= 2.0**-5 * theirs.abs().max()

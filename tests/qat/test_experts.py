"""FP4 experts: forward and both backward modes against a loop that writes out every matrix product."""

from dataclasses import replace

import pytest
import torch
from tests.assertions import assert_bitwise
from tests.qat.expert_modules import FP4, Experts, bf16_experts, dense_reference, nearest
from torch.nn.functional import linear, silu

from tracefp4.errors import ConfigError
from tracefp4.formats import MXFP4_RCEIL, NVFP4_ROW_FP32, NVFP4_STATIC_POW2, NVFP4_TENSOR_POW2
from tracefp4.formats.arithmetic import CONTROL
from tracefp4.guidance import ReplayBatch, Site
from tracefp4.guidance.builder import SequenceRows, StepLog
from tracefp4.guidance.record import RecordIdentity
from tracefp4.guidance.session import record, replay
from tracefp4.ops.dequantize import dequantize
from tracefp4.ops.guided_quantize import guided_quantize
from tracefp4.ops.quantize import quantize
from tracefp4.qat.dispatch import dispatch
from tracefp4.qat.experts import ExpertWeights, steady_weights

# float64 sums of 16 or 32 terms in another order
CLOSE = 1e-12


class Observer:
    """A sink that keeps what every site rounded."""

    def __init__(self):
        self.seen = {}

    def observe(self, site, rounded):
        self.seen[site] = rounded

    def observe_routing(self, layer, expert_ids):
        raise AssertionError("experts do not route")


def inputs(num_tokens=6, width=32, top_k=2, num_experts=4):
    """Activations, expert ids (expert 3 gets no token) and combination weights."""
    x = torch.randn(num_tokens, width, dtype=torch.float64, requires_grad=True)
    ids = torch.stack([torch.randperm(num_experts - 1)[:top_k] for _ in range(num_tokens)])
    weights = torch.rand(num_tokens, top_k, dtype=torch.float64, requires_grad=True)
    return x, ids, weights


def gradients(module, x, weights, y, incoming):
    found = torch.autograd.grad(y, (x, weights, module.gate_up_proj, module.down_proj), incoming)
    return dict(zip(("x", "weights", "gate_up_proj", "down_proj"), found, strict=True))


@pytest.mark.parametrize("backward", ["dequantized", "high_precision"])
def test_forward_and_gradients_are_those_of_the_written_out_products(backward):
    # Mutations: gradients at the other operands, a missing straight-through, slots summed in expert order.
    module = Experts(backward=backward)
    x, ids, weights = inputs()
    y = module(x, ids, weights)
    expected = dense_reference(module, x, ids, weights, backward=backward)
    assert (y - expected).abs().max() < CLOSE
    incoming = torch.randn_like(y)
    found = gradients(module, x, weights, y, incoming)
    wanted = gradients(module, x, weights, expected, incoming)
    for name, gradient in wanted.items():
        assert (found[name] - gradient).abs().max() < CLOSE, name
        assert gradient.abs().max() > 0.01, name


def test_the_backward_option_changes_gradients_and_not_the_forward():
    one = Experts(backward="dequantized", arithmetic=CONTROL)
    other = Experts(backward="high_precision", arithmetic=CONTROL)
    other.load_state_dict(one.state_dict())
    x, ids, weights = inputs()
    y, z = one(x, ids, weights), other(x, ids, weights)
    assert_bitwise(y, z)
    incoming = torch.randn_like(y)
    found, others = gradients(one, x, weights, y, incoming), gradients(other, x, weights, z, incoming)
    for name in ("x", "gate_up_proj", "down_proj"):
        assert (found[name] - others[name]).abs().max() > 1e-3, name


def test_bf16_layers_are_the_plain_experts():
    module = bf16_experts(backward="high_precision")
    x, ids, weights = inputs()
    expected = []
    for t in range(len(x)):
        parts = []
        for slot, e in enumerate(ids[t].tolist()):
            gate, up = linear(x[t], module.gate_up_proj[e]).chunk(2)
            parts.append(weights[t, slot] * linear(silu(gate) * up, module.down_proj[e]))
        expected.append(sum(parts))
    expected = torch.stack(expected)
    y = module(x, ids, weights)
    assert (y - expected).abs().max() < CLOSE
    incoming = torch.randn_like(y)
    found, wanted = (gradients(module, x, weights, out, incoming) for out in (y, expected))
    assert all((found[name] - wanted[name]).abs().max() < CLOSE for name in wanted)
    assert module.tracefp4.num_quantizations == 0


def test_weights_are_quantized_once_per_version():
    # Mutation: a key without the version keeps training on the first step's FP4 weights.
    module = Experts()
    x, ids, weights = inputs()
    first = module(x, ids, weights)
    assert_bitwise(module(x, ids, weights), first)
    assert module.tracefp4.num_quantizations == 2
    with torch.no_grad():
        module.down_proj.mul_(3.0)
    assert not torch.equal(module(x, ids, weights), first)
    assert module.tracefp4.num_quantizations == 3  # the other matrix was not touched


def test_copies_that_are_not_kept_hold_no_memory_and_change_nothing():
    # For weights that FSDP frees. Mutation: a copy from before is served, or kept.
    module = Experts()
    x, ids, weights = inputs()
    first = module(x, ids, weights)
    module.tracefp4.keeps_copies = False
    for _ in range(2):
        assert_bitwise(module(x, ids, weights), first)
    assert module.tracefp4.num_quantizations == 6 and not module.tracefp4._copies
    with torch.no_grad():
        module.down_proj.mul_(3.0)
    assert not torch.equal(module(x, ids, weights), first)


def test_weights_given_new_memory_are_quantized_again():
    module = Experts()
    x, ids, weights = inputs()
    first = module(x, ids, weights)
    for factor in (2.0, 3.0):  # twice: the freed memory of the first must not be taken for the weight itself
        module.gate_up_proj.data = module.gate_up_proj.data * factor
    assert not torch.equal(module(x, ids, weights), first)
    assert module.tracefp4.num_quantizations == 3


def test_exp_7_a_merged_adapter_is_seen_and_unmerging_gives_the_bases_bytes():
    # PEFT merges through `.data`, which leaves version and address as they were. Mutations: the cache trusts the
    # version counter; a fingerprint that ignores order.
    module = Experts()
    base, state = module.down_proj.detach().clone(), module.tracefp4
    values = {"base": state.quantized("down_proj", module.down_proj).clone()}
    version = module.down_proj._version
    a, b = (torch.randn_like(base) / 8 for _ in "ab")
    for name, weight in (("a", base + a), ("unmerged", base), ("b", base + b), ("moved", (base + b).flip(0))):
        module.down_proj.data.copy_(weight)
        values[name] = state.quantized("down_proj", module.down_proj).clone()
        fresh = dequantize(quantize(weight, scheme=NVFP4_TENSOR_POW2), dtype=weight.dtype)
        assert_bitwise(values[name], fresh)
    assert_bitwise(values["unmerged"], values["base"])
    assert not torch.equal(values["a"], values["base"]) and not torch.equal(values["b"], values["a"])
    assert module.down_proj._version == version and state.num_quantizations == 5


@pytest.mark.parametrize("scheme", [NVFP4_STATIC_POW2, MXFP4_RCEIL, NVFP4_ROW_FP32], ids=lambda s: s.name)
def test_activations_are_rounded_under_the_layers_scheme_and_exponents(scheme):
    # Mutations: an exponent of the other site; one scheme's block size at another.
    precision = replace(FP4, activation=scheme, x_exponent=1, w2_exponent=-2)
    module = Experts(precision=precision, inner=32, arithmetic=CONTROL)
    observer = Observer()
    x, ids, weights = inputs()
    with record(observer):
        module(x, ids, weights)
    for kind, exponent in (("x", 1), ("w2", -2)):
        rounded = observer.seen[Site(kind, 0)]
        if scheme.outer == "static":
            assert rounded.outer.item() == exponent
        assert rounded.block_scales.shape[1] == 32 // scheme.block_size
    static = {"exponent": 1} if scheme.outer == "static" else {}
    assert_bitwise(observer.seen[Site("x", 0)].values, guided_quantize(x, scheme=scheme, **static).values)


@pytest.mark.parametrize("ste", ["clip", "identity"])
def test_ste_4_static_experts_block_the_gradient_of_what_saturates_only(ste):
    # OVF-1's block under k = 0, times 448. Mutation: the mask of a scale that was not clamped.
    precision = replace(FP4, activation=NVFP4_STATIC_POW2, weight=None)
    module = Experts(num_experts=1, width=16, inner=16, ste=ste, precision=precision)
    x = torch.tensor([[12.0, 6.0, 3.0, 1.5, *[0.0] * 12]], dtype=torch.float64) * 448
    x.requires_grad_()
    way = dispatch(torch.zeros(1, 1, dtype=torch.int64), num_experts=1, shard=None)
    y = module.tracefp4.project(x, way, module, "gate_up_proj")
    incoming = torch.randn_like(y)
    y.backward(incoming)
    full = incoming @ module.gate_up_proj[0].detach()
    expected = torch.where(torch.arange(16) == 0, 0.0 if ste == "clip" else full, full)
    assert (x.grad - expected).abs().max() < CLOSE and x.grad[0, 1:].abs().min() > 0


def recorded_and_replayed(module, x, ids, weights, *, recorded_x):
    """Output under a full record of the same experts at `recorded_x`; and the record."""
    sites = (Site("x", 0), Site("w2", 0))
    log = StepLog(sites=sites)
    first = log.begin_step(num_tokens=len(x))
    with record(log):
        module(recorded_x, ids, weights)
    log.end_step()
    identity = RecordIdentity(trajectory="t", weight_versions=0, scheme_digest="s", plan_digest="p")
    (made,) = log.build([SequenceRows(identity=identity, rows=range(first, first + len(x)))])
    batch = ReplayBatch(positions=torch.arange(len(x))[None], records=[made])
    with replay(batch):
        return module(x, ids, weights), made, batch.counters


def test_moe_5_experts_without_tokens():
    # Tokens per expert [3, 0, 5, 0], top-1, guided. Mutation: skipping empty experts leaves gradients None.
    module = Experts()
    x = torch.randn(8, 32, dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([2, 0, 2, 2, 0, 2, 0, 2])[:, None]
    weights = torch.ones(8, 1, dtype=torch.float64)
    y, made, counters = recorded_and_replayed(module, x, ids, weights, recorded_x=x.detach())
    assert (y - dense_reference(module, x, ids, weights, backward="dequantized")).abs().max() < CLOSE
    assert counters.total().positions_guided == 16 and counters.total().values_changed == 0
    assert {site.kind: tuple(part.payload.shape) for site, part in made.sites.items()} == {
        "x": (8, 16),
        "w2": (8, 8),
    }  # a row per (token, slot), none per expert
    y.sum().backward()
    for parameter in module.parameters():
        assert parameter.grad.shape == parameter.shape
        assert (parameter.grad[[1, 3]] == 0).all() and (parameter.grad[[0, 2]] != 0).any()


def grouped_pass(module, x, counts, incoming):
    """Output, what the sites rounded, and gradients, with counts[e] consecutive rows for expert e."""
    ids = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))[:, None]
    x, weights = x.clone().requires_grad_(), torch.ones(len(x), 1, dtype=x.dtype, requires_grad=True)
    sink = Observer()
    with record(sink):
        y = module(x, ids, weights)
    codes = {site.kind: (rounded.codes, rounded.block_scales) for site, rounded in sink.seen.items()}
    return {"y": y.detach(), "codes": codes, **gradients(module, x, weights, y, incoming)}


@pytest.mark.parametrize("backward", ["dequantized", "high_precision"])
def test_dst_4_an_expert_does_not_depend_on_the_tokens_of_the_next(backward):
    # The case: blocks of 32, and tokens per expert that are no multiple of it. Mutations: groups that end a row too
    # late; blocks along the tokens.
    counts, padded = [17, 5, 0, 32], [32, 32, 0, 32]
    scheme = replace(FP4, activation=MXFP4_RCEIL, weight=MXFP4_RCEIL)
    module = Experts(precision=scheme, inner=32, backward=backward)
    x = torch.randn(sum(counts), 32, dtype=torch.float64)
    incoming = torch.randn(sum(counts), 32, dtype=torch.float64)
    found = grouped_pass(module, x, counts, incoming)
    # every expert padded with zeros to a multiple of 32, and cut back
    places = torch.cat([32 * e + torch.arange(n) for e, n in enumerate((17, 5))] + [64 + torch.arange(32)])
    wide, wide_incoming = (torch.zeros(sum(padded), 32, dtype=torch.float64) for _ in range(2))
    wide[places], wide_incoming[places] = x, incoming
    expected = grouped_pass(module, wide, padded, wide_incoming)
    for kind, parts in found["codes"].items():
        for part, whole in zip(parts, expected["codes"][kind], strict=True):
            assert_bitwise(part, whole[places])
    for name in ("y", "x"):
        assert (found[name] - expected[name][places]).abs().max() < CLOSE
    for name in ("gate_up_proj", "down_proj"):
        assert (found[name] - expected[name]).abs().max() < CLOSE
    # every expert alone
    for e, (begin, end) in {0: (0, 17), 1: (17, 22), 3: (22, 54)}.items():
        own = [n if other == e else 0 for other, n in enumerate(counts)]
        alone = grouped_pass(module, x[begin:end], own, incoming[begin:end])
        for name in ("y", "x"):
            assert (found[name][begin:end] - alone[name]).abs().max() < CLOSE
        for name in ("gate_up_proj", "down_proj"):
            assert (found[name][e] - alone[name][e]).abs().max() < CLOSE
    # and nothing of experts 0 and 1 sees what expert 3 is given
    other = torch.cat([x[:22], 1000 * torch.randn(32, 32, dtype=torch.float64)])
    moved = grouped_pass(module, other, counts, incoming)
    for name, kept in (("y", 22), ("x", 22), ("gate_up_proj", 2), ("down_proj", 2)):
        assert_bitwise(moved[name][:kept], found[name][:kept])
        assert not torch.equal(moved[name], found[name])


def test_the_clipped_estimator_masks_by_the_recorded_scales_under_replay():
    # A rollout whose values were half as large has half the scales: the largest of every block saturates.
    # Mutation: the mask of the trainer's own scales, which would keep (nearly) everything.
    module = Experts(num_experts=1, ste="clip", precision=replace(FP4, weight=None))
    x = torch.rand(5, 32, dtype=torch.float64) * 0.8 + 0.05
    x[:, ::16] = 2.0
    x.requires_grad_()
    ids, weights = torch.zeros(5, 1, dtype=torch.int64), torch.ones(5, 1, dtype=torch.float64)
    y, _, _ = recorded_and_replayed(module, x, ids, weights, recorded_x=x.detach() / 2)
    y.sum().backward()
    assert (x.grad[:, ::16] == 0).all()
    assert (x.grad != 0).sum() == x.numel() - 10


@pytest.mark.parametrize("backward", ["dequantized", "high_precision"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_moe_5_a_batch_without_tokens(backward, dtype):
    module = Experts(dtype=dtype, backward=backward, ste="clip")
    x = torch.empty(0, 32, dtype=dtype, requires_grad=True)
    y = module(x, torch.empty(0, 2, dtype=torch.int64), torch.empty(0, 2, dtype=dtype))
    assert y.shape == (0, 32)
    y.sum().backward()
    assert x.grad.shape == (0, 32)
    for parameter in module.parameters():
        assert_bitwise(parameter.grad, torch.zeros_like(parameter))


@pytest.mark.parametrize("backward", ["dequantized", "high_precision"])
def test_the_clipped_estimator_masks_by_the_scales_in_use(backward):
    # One product is enough to see the mask: project, without the second matrix. Mutation: another scale's mask.
    module = Experts(num_experts=1, ste="clip", backward=backward)
    x = torch.randn(5, 32, dtype=torch.float64)
    x[:, 3] = 6 * 0.9375 * 4  # amax / 6 = 3.75 rounds to 3.75; a second one rounds down and saturates
    x[2, 3] = 23.2  # amax / 6 = 3.8667 -> 3.75, so 23.2 > 22.5 is out of range
    x.requires_grad_()
    way = dispatch(torch.zeros(5, 1, dtype=torch.int64), num_experts=1, shard=None)
    y = module.tracefp4.project(x, way, module, "gate_up_proj")
    y.sum().backward()
    assert x.grad[2, 3] == 0
    assert (x.grad == 0).sum() == (nearest(x).abs() < x.detach().abs()).logical_and(
        x.detach().abs() > 6 * _scales(x)
    ).sum()
    assert (x.grad[0] != 0).all()


def _scales(x):
    from tracefp4.formats import NVFP4_ROW_POW2
    from tracefp4.ops.quantize import quantize

    return quantize(x.detach(), scheme=NVFP4_ROW_POW2).scales(torch.float64).repeat_interleave(16, dim=-1)


def test_codes_are_made_only_when_somebody_asks():
    module, observer = Experts(), Observer()
    x, ids, weights = inputs()
    with record(observer):
        recorded = module(x, ids, weights)
    assert {site.kind: rounded.codes.shape for site, rounded in observer.seen.items()} == {
        "x": (6, 32),
        "w2": (12, 16),
    }
    assert_bitwise(module(x, ids, weights), recorded)


def test_unknown_options_are_refused():
    for name in ("backward", "ste"):
        with pytest.raises(ConfigError, match=f"unknown {name} 'smooth'; allowed"):
            ExpertWeights(**({"layer": 0, "precision": FP4, "arithmetic": CONTROL} | {name: "smooth"}))


def test_a_layer_may_quantize_weights_alone():
    module = Experts(precision=replace(FP4, activation=None), backward="high_precision")
    x, ids, weights = inputs()
    module(x, ids, weights).sum().backward()
    assert module.tracefp4.num_quantizations == 2 and module.gate_up_proj.grad is not None


def test_copies_of_steady_weights_live_inside_and_are_told_by_the_version():
    # Mutations: a copy from before is used, or one from inside afterwards; the version is not asked.
    module = Experts()
    x, ids, weights = inputs()
    first = module(x, ids, weights)
    module.down_proj.data.mul_(2.0)  # which only the bits tell
    with steady_weights(module):
        second = module(x, ids, weights)
        assert_bitwise(module(x, ids, weights), second)
        assert module.tracefp4.num_quantizations == 4 and not torch.equal(first, second)
        with torch.no_grad():
            module.down_proj.mul_(0.5)
        assert_bitwise(module(x, ids, weights), first)
        assert module.tracefp4.num_quantizations == 5
    module.down_proj.data.mul_(2.0)
    assert not module.tracefp4._copies and not module.tracefp4.is_steady
    assert_bitwise(module(x, ids, weights), second)


def test_steady_weights_are_not_read_to_be_sure(monkeypatch):
    monkeypatch.setattr("tracefp4.qat.experts.fingerprint", lambda weight: pytest.fail("bits were read"))
    module = Experts()
    x, ids, weights = inputs()
    with steady_weights(module):
        for _ in range(2):
            module(x, ids, weights)

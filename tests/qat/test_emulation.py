"""The router that replaces transformers' one, and bf16 rounding through hooks."""

from types import SimpleNamespace

import pytest
import torch
from tests.assertions import assert_bitwise
from tests.models.tiny_models import tiny_model
from tests.qat.expert_modules import EXACT64

from tracefp4.formats.arithmetic import CONTROL, EMULATED, NATIVE
from tracefp4.guidance import ReplayBatch
from tracefp4.guidance.record import Record, RecordIdentity
from tracefp4.guidance.session import replay
from tracefp4.qat.emulation import emulate_bf16, rms_norm_forward, router_forward

# float64 softmax in another order
CLOSE = 1e-14
E, K, N, WIDTH = 6, 2, 5, 16


def router(arithmetic=EXACT64, *, renormalizes=True):
    weight = torch.randn(E, WIDTH, dtype=arithmetic.torch_dtype, requires_grad=True)
    return SimpleNamespace(
        tracefp4=(0, arithmetic), weight=weight, hidden_dim=WIDTH, top_k=K, norm_topk_prob=renormalizes
    )


def routing_record(routed):
    identity = RecordIdentity(trajectory="t", weight_versions=0, scheme_digest="s", plan_digest="p")
    return Record(
        identity=identity, start=0, length=len(routed), sites={}, routed=routed, valid=torch.ones(len(routed)).bool()
    )  # fmt: skip


def combination_weights(logits, ids, renormalizes):
    chosen = torch.stack([row.softmax(-1)[chosen] for row, chosen in zip(logits, ids, strict=True)])
    return chosen / chosen.sum(-1, keepdim=True) if renormalizes else chosen


@pytest.mark.parametrize("renormalizes", [True, False], ids=["norm_topk_prob", "plain"])
@pytest.mark.parametrize("is_replayed", [True, False], ids=["replayed", "live"])
def test_weights_are_softmax_over_all_experts_at_the_chosen_ids(renormalizes, is_replayed):
    # Mutations: softmax over the chosen experts alone, renormalising against the option, detached weights.
    found = router(renormalizes=renormalizes)
    x = torch.randn(1, N, WIDTH, dtype=torch.float64, requires_grad=True)
    recorded = torch.stack([torch.randperm(E)[:K] for _ in range(N)])
    batch = ReplayBatch(
        positions=torch.arange(N)[None],
        records=[routing_record(recorded.to(torch.int16)[:, None]) if is_replayed else None],
    )
    with replay(batch):
        logits, weights, ids = router_forward(found, x)
    expected_logits = x.reshape(N, WIDTH) @ found.weight.T
    expected_ids = recorded if is_replayed else expected_logits.sort(descending=True).indices[:, :K]
    assert torch.equal(ids, expected_ids)
    expected = combination_weights(expected_logits, expected_ids, renormalizes)
    assert (weights - expected).abs().max() < CLOSE and (logits - expected_logits).abs().max() < CLOSE
    incoming = torch.randn_like(weights)
    got = torch.autograd.grad(weights, (x, found.weight), incoming)
    want = torch.autograd.grad(expected, (x, found.weight), incoming)
    assert all((a - b).abs().max() < CLOSE and b.abs().max() > 1e-3 for a, b in zip(got, want, strict=True))


def test_equal_logits_go_to_the_lowest_expert_ids():
    found = router(EMULATED)
    x = torch.zeros(N, WIDTH)
    assert router_forward(found, x)[2].tolist() == [[0, 1]] * N


def test_emulated_logits_and_weights_are_bf16_values():
    logits, weights, _ = router_forward(router(EMULATED), torch.randn(N, WIDTH))
    for x in (logits.detach(), weights.detach()):
        assert_bitwise(x.bfloat16().float(), x)


def test_norm_is_one_rounding_in_the_storage_dtype():
    norm = SimpleNamespace(variance_epsilon=1e-6, weight=torch.rand(WIDTH, dtype=torch.float64))
    x = torch.randn(N, WIDTH, dtype=torch.float64)
    expected = torch.nn.functional.rms_norm(x, (WIDTH,), norm.weight, 1e-6)
    assert (rms_norm_forward(norm, x) - expected).abs().max() < CLOSE


@pytest.mark.parametrize("arithmetic", [EMULATED, CONTROL], ids=lambda a: a.name)
def test_every_output_of_a_linear_norm_layer_and_rotary_table_is_a_bf16_value(arithmetic):
    # Mutation: a hook that is left out leaves a wider value behind.
    model = tiny_model(mlp_only_layers=[0]).to(arithmetic.torch_dtype)
    model.set_experts_implementation("eager")  # the default has no float64 product
    undo = emulate_bf16(model, arithmetic=arithmetic)
    seen = {}

    def keep(name):
        def hook(module, args, output):
            parts = output if isinstance(output, tuple) else (output,)
            seen[name] = [x for x in parts if isinstance(x, torch.Tensor) and x.is_floating_point()]

        return hook

    handles = [module.register_forward_hook(keep(name)) for name, module in model.named_modules()]
    with torch.no_grad():
        model(input_ids=torch.randint(0, 40, (2, 7)), use_cache=False)
    names = [
        n
        for n in seen
        if n.endswith(("proj", "norm", "rotary_emb", "lm_head", "gate")) or n[-2:] in (".0", ".1")
    ]
    assert (
        len(names) == 2 * (1 + 4 + 2 + 2) + 3 + 1 + 3
    )  # layers; dense projections, router; norm, head, tables
    for name in names:
        for x in seen[name]:
            assert_bitwise(x.bfloat16().to(x.dtype), x)
    for handle in handles:
        handle.remove()
    for restore in reversed(undo):
        restore()
    assert all(
        not m._forward_hooks and not m._forward_pre_hooks and "forward" not in vars(m)
        for m in model.modules()
    )


def test_native_arithmetic_replaces_the_router_only():
    model = tiny_model()
    emulate_bf16(model, arithmetic=NATIVE)
    changed = [
        n
        for n, m in model.named_modules()
        if m._forward_hooks or m._forward_pre_hooks or "forward" in vars(m)
    ]
    assert changed == ["model.layers.0.mlp.gate", "model.layers.1.mlp.gate"]

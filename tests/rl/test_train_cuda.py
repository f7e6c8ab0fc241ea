"""Training on a GPU in native bf16: two steps of a whole run, its resumption, and the optimizers' three kinds."""

import math

import pytest
import torch
from tests.rl.tiny_runs import changed, make_checkpoint, make_config, make_prompts, metrics_of

from tracefp4.rl.loop import train
from tracefp4.rl.tiny import TinyShape

pytestmark = pytest.mark.gpu

SHAPE = TinyShape(
    num_layers=2,
    hidden_size=128,
    num_heads=2,
    num_kv_heads=1,
    head_dim=64,
    num_experts=8,
    top_k=2,
    expert_size=64,
    max_positions=128,
    init_std=0.3,
)


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """(checkpoint, prompts) of a shape that every kernel takes."""
    folder = tmp_path_factory.mktemp("native")
    return make_checkpoint(folder / "start", shape=SHAPE), make_prompts(folder / "prompts.jsonl")


def _config(start, path, **changes):
    # a reward that varies: groups of equal reward train nothing
    common = {"model__device": "cuda", "train__steps": 2, "task__reward": "tests.rl.tiny_runs:share_plain"}
    return make_config(*start, path, **(common | changes))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"train__packing": True, "train__activation_checkpointing": "full"},
        {
            "quantization__guidance": "bch64_3+coset1",
            "quantization__gate": "noise",
            "records__store": "directory",
        },
        {"quantization__mode": "bf16", "quantization__guidance": "none", "loss__kl_coef": 0.1},
        {"train__optimizer_steps_per_rollout": 2, "run__eval_items": 4},
        {"train__optimizer_states": "host"},
    ],
    ids=["padded", "packed_recomputed", "gated_stored", "bf16_kl", "two_steps", "host_states"],
)
def test_two_steps_on_a_gpu(start, tmp_path, changes):
    config = _config(start, tmp_path / "run", **changes)
    manifest = train(config)
    assert manifest["placement"] == {"device": "cuda", "arithmetic": "native"}
    rows = metrics_of(config)
    assert len(rows) == 2 and manifest["final"]["counters"]["optimizer_steps"] >= 2
    assert all(math.isfinite(row["loss"]) and math.isfinite(row["grad_norm"]) for row in rows)
    if config.quantization.mode == "fp4":
        # every position but the last of each sample, which the engine never computed, and those have several
        assert all(0.8 < row["guidance/followed_fraction"] < 1.0 for row in rows)


def test_a_run_on_a_gpu_resumes(start, tmp_path):
    config = _config(start, tmp_path / "run", train__steps=1)
    train(config)
    manifest = train(changed(config, train__steps=3), resume=True)
    assert manifest["final"]["steps"] == 3


@pytest.mark.parametrize("lengths", [(5, 9, 1, 16, 17), (32,)])
def test_segments_of_a_packed_row_attend_as_rows_of_their_own(lengths):
    # the flash kernels of a GPU, where `tests/qat/test_attention.py` has the CPU's
    from tracefp4.qat.attention import _attend_natively, _torch_attention

    torch.manual_seed(0)
    q, k, v = (
        torch.randn(1, heads, sum(lengths), 64, device="cuda", dtype=torch.bfloat16) for heads in (4, 2, 2)
    )
    found = _attend_natively(q, k, v, None, scale=0.125, segment_lengths=lengths)
    parts = zip(*(x.split(list(lengths), dim=2) for x in (q, k, v)), strict=True)
    wanted = torch.cat([_torch_attention(*part, None, 0.125) for part in parts], dim=2)
    assert (found - wanted).abs().max() <= 2**-7 * wanted.abs().max()


def test_an_expert_without_tokens_gets_a_zero_gradient():
    from tracefp4.ops.grouped_matmul import grouped_matmul

    torch.manual_seed(0)
    sizes = torch.tensor([3, 0, 14, 7], device="cuda")
    x = torch.randn(24, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(4, 32, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    y = grouped_matmul(x, w, sizes)
    y.backward(torch.ones_like(y).expand_as(y))
    wanted = torch.cat([rows.float() @ w[e].float().T for e, rows in enumerate(x.split([3, 0, 14, 7]))])
    assert torch.allclose(y.float(), wanted, atol=0.1, rtol=0.02)
    by_hand = torch.stack([rows.float().sum(0).expand(32, 64) for rows in x.split([3, 0, 14, 7])])
    assert torch.allclose(w.grad.float(), by_hand, atol=0.05, rtol=0.02) and not w.grad[1].any()

"""The KV cache's kernels on a GPU, compared as in the emulation (test_kv_*_device.py); and what only a device shows:
capture in a graph, and the same bits in every run."""

import pytest
import torch
from tests.assertions import assert_bitwise
from tests.ops.test_kv_append_device import SLOTS, pages, rows_of

from tracefp4.formats.fragments import to_fragments
from tracefp4.formats.schemes import NVFP4_KV
from tracefp4.ops.backend import Backend, explain
from tracefp4.ops.kv_append import device as append_device
from tracefp4.ops.kv_append import kv_append, kv_quantize_append
from tracefp4.ops.kv_attention import device as attention_device
from tracefp4.ops.kv_attention import kv_attention
from tracefp4.ops.kv_attention.device import ROUNDED, SPLIT_TOKENS, Where, error_of, sample_pages
from tracefp4.ops.pages import LayerPages
from tracefp4.ops.quantize import quantize
from tracefp4.ops.rules import SchemeCase

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")


def test_the_self_checks_pass():
    for dtype in (torch.bfloat16, torch.float32):
        status = append_device.LIBRARY.status(CUDA, SchemeCase(NVFP4_KV, dtype))
        assert status.is_usable, status.reason
        for is_fp4, rounds in ((True, True), (False, True), (True, False), (False, False)):
            status = attention_device.LIBRARY.status(
                CUDA, attention_device.Case(dtype, 128, is_fp4, rounds, 1)
            )
            assert status.is_usable, status.reason
    reasons = {row["op"]: row for row in explain(CUDA)}
    for op in ("kv_append", "kv_attention"):
        assert reasons[op]["backend"] == "cuda"
    assert "head dims 64, 128, 192, 256" in reasons["kv_attention"]["reason"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", ["plain", "fragments"])
def test_appended_bytes_are_those_of_the_cpu(kind, dtype):
    found = []
    for device in (torch.device("cpu"), CUDA):
        torch.manual_seed(0)
        parts = [pages(2), pages(-3)]
        parts = parts if kind == "plain" else [to_fragments(parts[0], "k"), to_fragments(parts[1], "v")]
        layer = attention_device._moved(LayerPages(keys=parts[0], values=parts[1]), device)
        k, v = (rows_of(7, dtype=dtype).to(device) for _ in range(2))
        rows = kv_quantize_append(layer, k, v, slots=SLOTS.to(device))
        again = quantize(k, scheme=NVFP4_KV, exponent=2)
        kv_append(layer.keys, again, slots=SLOTS.flip(0).to(device))
        found.append(
            [part.cpu() for p in (*rows, layer.keys, layer.values) for part in (p.packed, p.block_scales)]
        )
    for here, there in zip(*found, strict=True):
        assert_bitwise(there, here)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("group", [1, 4, 8, 16])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("is_fp4", [True, False], ids=["fp4", "bf16"])
def test_attention_equals_float64_and_repeats(is_fp4, head_dim, group, dtype):
    generator = torch.Generator().manual_seed(0)
    split = SPLIT_TOKENS[head_dim]
    num_pages = 3 * split // 16
    both = sample_pages(generator, is_fp4=is_fp4, head_dim=head_dim, num_frames=num_pages)
    both = tuple(attention_device._moved(part, CUDA) for part in both)
    table = torch.stack([torch.randperm(num_pages, generator=generator) for _ in range(4)]).to(CUDA)
    single = [[3 * split - 1], [0], [split], [700]]
    several = [list(range(first, first + 40)) for first in (0, split - 12, 3 * split - 46, 3)]
    for positions in (single, several):
        where = Where(page_table=table, positions=torch.tensor(positions, device=CUDA))
        queries = torch.randn(*where["positions"].shape, 2 * group, head_dim, generator=generator).to(
            CUDA, dtype
        )
        arguments = {**where, "rounds_probabilities": True, "backend": Backend.CUDA}
        found = kv_attention(queries, both[0], **arguments)
        assert error_of(found, queries, both, where) < ROUNDED
        for _ in range(3):
            assert_bitwise(kv_attention(queries, both[0], **arguments), found)
        one = {"page_table": table[2:3], "positions": where["positions"][2:3, :1]}
        assert_bitwise(kv_attention(queries[2:3, :1], both[0], **{**arguments, **one}), found[2:3, :1])


def test_append_and_attention_are_captured_in_a_graph():
    generator = torch.Generator().manual_seed(0)
    layer, _ = sample_pages(generator, is_fp4=True, head_dim=128, num_frames=80)
    layer = attention_device._moved(layer, CUDA)
    queries = torch.randn(2, 1, 16, 128, generator=generator).to(CUDA, torch.bfloat16)
    k, v = (torch.randn(2, 2, 128, generator=generator).to(CUDA, torch.bfloat16) for _ in range(2))
    table = torch.arange(80, device=CUDA).view(2, 40)
    positions, slots = torch.tensor([[9], [600]], device=CUDA), torch.tensor([9, 640 + 600], device=CUDA)

    def step():
        kv_quantize_append(layer, k, v, slots=slots)
        return kv_attention(
            queries,
            layer,
            page_table=table,
            positions=positions,
            rounds_probabilities=True,
            backend=Backend.CUDA,
        )

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    positions += 5
    slots += 5
    k.mul_(2.0)
    graph.replay()
    replayed = out.clone()
    assert_bitwise(step(), replayed)

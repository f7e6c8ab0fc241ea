"""The GPU kernels of kv_append leave every layout of pages as the reference does, in any order of threads."""

from dataclasses import replace

import pytest
import torch
from tests.assertions import assert_bitwise
from tests.emulation.emulator import COMPILER, Emulator

from tracefp4.errors import FormatError
from tracefp4.formats.fragments import FragmentPages, from_fragments, to_fragments
from tracefp4.formats.schemes import MXFP4_FLOOR, NVFP4_KV
from tracefp4.formats.tensor import BlockTensor
from tracefp4.ops import nvrtc
from tracefp4.ops.backend import Backend
from tracefp4.ops.kv_append import device as append_device
from tracefp4.ops.kv_append import kv_append, kv_quantize_append
from tracefp4.ops.kv_append.device import append_on_device, differences, quantize_append_on_device
from tracefp4.ops.kv_append.reference import append_reference, quantize_append_reference
from tracefp4.ops.pages import LayerPages
from tracefp4.ops.quantize import quantize
from tracefp4.ops.rules import SchemeCase

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="the emulation needs g++")
SLOTS = torch.tensor([40, 0, 31, 15, 16, 8, 47])


@pytest.fixture(params=[0, 1, 2, 3])
def emulator(request, monkeypatch):
    emulator = Emulator(request.param)
    monkeypatch.setattr(append_device.LIBRARY, "runner", emulator)
    monkeypatch.setattr(append_device.QUANTIZING, "runner", emulator)
    return emulator


def pages(exponent=0, *, scheme=NVFP4_KV, heads=2, frames=3, page_size=16, head_dim=64):
    """Pages full of bytes that must stay where nothing is written."""
    size = (heads, frames, page_size)
    return BlockTensor(
        packed=torch.randint(0, 256, (*size, head_dim // 2), dtype=torch.uint8),
        block_scales=torch.randint(0, 127, (*size, head_dim // scheme.block_size), dtype=torch.uint8),
        outer=torch.tensor(exponent, dtype=torch.int8),
        scheme=scheme,
    )


def layer(**sizes):
    return LayerPages(keys=pages(**sizes), values=pages(**sizes))


def copied(found):
    if isinstance(found, torch.Tensor):
        return found.clone()
    return replace(found, packed=found.packed.clone(), block_scales=found.block_scales.clone())


def assert_same(got, wanted):
    if isinstance(got, torch.Tensor):
        assert_bitwise(got, wanted)
        return
    assert_bitwise(got.packed, wanted.packed)
    assert_bitwise(got.block_scales, wanted.block_scales)


def rows_of(num_tokens, *, head_dim=64, dtype=torch.bfloat16, heads=2):
    x = torch.randn(num_tokens, heads, head_dim) * 2.0 ** torch.randint(-6, 6, (num_tokens, heads, 1))
    if num_tokens:
        x[0, 0, 5], x[-1, -1, :16], x[0, 1, 17] = float("nan"), 0.0, float("-inf")
    return x.to(dtype)


@pytest.mark.parametrize("kind", ["k", "v"])
@pytest.mark.parametrize("head_dim", [64, 256])
def test_the_reference_appends_to_fragments_what_it_appends_to_plain_pages(kind, head_dim):
    plain = pages(head_dim=head_dim, page_size=32)
    moved = to_fragments(plain, kind)
    rows = quantize(rows_of(7, head_dim=head_dim), scheme=NVFP4_KV, exponent=0)
    kv_append(plain, rows, slots=SLOTS)
    kv_append(moved, rows, slots=SLOTS)
    assert_same(from_fragments(moved), plain)


@needs_compiler
@pytest.mark.parametrize("num_tokens", [0, 1, 7])
@pytest.mark.parametrize("kind", ["k", "v", "plain", "mx", "bf16", "odd"])
def test_appended_bytes_are_those_of_the_reference(emulator, kind, num_tokens):
    slots = SLOTS[:num_tokens]
    if kind in ("bf16", "odd"):
        here = torch.randn(2, 3, 16, 64 if kind == "bf16" else 20).bfloat16()
        rows = torch.randn(num_tokens, 2, here.shape[-1] + 1)[..., 1:]  # float32, unaligned
    else:
        scheme = MXFP4_FLOOR if kind == "mx" else NVFP4_KV
        here = pages(scheme=scheme, head_dim=128)
        rows = quantize(
            rows_of(num_tokens, head_dim=128), scheme=scheme, exponent=0 if scheme is NVFP4_KV else None
        )
        here = to_fragments(here, kind) if kind in ("k", "v") else here
    there = copied(here)
    append_on_device(there, rows, slots)
    append_reference(here, rows, slots)
    assert_same(there, here)


@needs_compiler
@pytest.mark.parametrize("is_plain", [True, False], ids=["plain", "fragments"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_quantized_and_appended_in_one_launch(emulator, monkeypatch, dtype, is_plain):
    here = pages(2, head_dim=64), pages(-3, head_dim=64)
    here = here if is_plain else (to_fragments(here[0], "k"), to_fragments(here[1], "v"))
    there = tuple(copied(part) for part in here)
    k, v = rows_of(7, dtype=dtype), rows_of(7, dtype=dtype)
    chosen = {Backend.CUDA: quantize_append_on_device}
    monkeypatch.setattr("tracefp4.ops.kv_append._QUANTIZE_APPEND", chosen)
    monkeypatch.setattr("tracefp4.ops.kv_append.choose", lambda *asked: Backend.CUDA)
    found = kv_quantize_append(LayerPages(keys=there[0], values=there[1]), k, v, slots=SLOTS)
    wanted = quantize_append_reference(*here, k, v, SLOTS)
    for got, right, x, exponent in zip(found, wanted, (k, v), (2, -3), strict=True):
        assert_same(got, right)
        assert_same(right, quantize(x, scheme=NVFP4_KV, exponent=exponent))
    for got, right in zip(there, here, strict=True):
        assert_same(got, right)
    assert emulator.launches == {"quantize_append": 1}


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_rows_are_read_where_a_projection_left_them(emulator, dtype):
    heads = torch.randn(5, 9, 64).to(dtype)
    k, v = heads[:, 4:6], heads[:, 7:]
    here = to_fragments(pages(2), "k"), to_fragments(pages(-3), "v")
    there = tuple(copied(part) for part in here)
    found = quantize_append_on_device(*there, k, v, SLOTS[:5])
    wanted = quantize_append_reference(*here, k.contiguous(), v.contiguous(), SLOTS[:5])
    for got, right in zip((*found, *there), (*wanted, *here), strict=True):
        assert_same(got, right)


@pytest.mark.parametrize("kind", ["k", "v", "plain", "bf16"])
def test_a_token_without_a_slot_leaves_no_trace(emulator, kind):
    # what fills a batch of fixed size up; torch would take -1 for the last slot
    here = torch.randn(2, 3, 16, 64).bfloat16() if kind == "bf16" else pages()
    here = to_fragments(here, kind) if kind in ("k", "v") else here
    rows = (
        torch.randn(3, 2, 64)
        if kind == "bf16"
        else quantize(torch.randn(3, 2, 64), scheme=NVFP4_KV, exponent=0)
    )
    kept = (
        rows[1:2]
        if kind == "bf16"
        else replace(rows, packed=rows.packed[1:2], block_scales=rows.block_scales[1:2])
    )
    wanted = copied(here)
    append_reference(wanted, kept, torch.tensor([20]))
    appends = (append_reference, append_on_device) if COMPILER else (append_reference,)
    for append in appends:
        found = copied(here)
        append(found, rows, torch.tensor([-1, 20, -7]))
        assert_same(found, wanted)


@pytest.mark.parametrize("is_plain", [True, False], ids=["plain", "fragments"])
def test_a_token_without_a_slot_is_quantized_and_not_stored(emulator, is_plain):
    here = (pages(2), pages(-3))
    here = here if is_plain else (to_fragments(here[0], "k"), to_fragments(here[1], "v"))
    k, v = rows_of(3), rows_of(3)
    quantizes = (
        (quantize_append_reference, quantize_append_on_device) if COMPILER else (quantize_append_reference,)
    )
    for append in quantizes:
        found = tuple(copied(part) for part in here)
        rows = append(*found, k, v, torch.tensor([-1, -1, -1]))
        for got, right, x, exponent in zip(found, here, (k, v), (2, -3), strict=True):
            assert_same(got, right)
            assert_same(rows[0] if x is k else rows[1], quantize(x, scheme=NVFP4_KV, exponent=exponent))


@needs_compiler
@pytest.mark.slow
def test_the_self_check_passes(emulator):
    for case in (None, *(SchemeCase(NVFP4_KV, dtype) for dtype in (torch.bfloat16, torch.float32))):
        assert differences(torch.device("cpu"), case) is None


def test_operands_that_do_not_fit_are_refused():
    k = torch.zeros(1, 2, 64)
    with pytest.raises(FormatError, match="MXFP4_FLOOR"):
        kv_quantize_append(layer(scheme=MXFP4_FLOOR), k, k, slots=SLOTS[:1])
    with pytest.raises(FormatError, match=r"got shape \(1, 2, 32\) for 2 slots"):
        kv_quantize_append(layer(), k, k, slots=SLOTS[:2])
    with pytest.raises(FormatError, match="one dtype"):
        kv_quantize_append(layer(), k, k.double(), slots=SLOTS[:1])
    with pytest.raises(FormatError, match="contiguous"):
        kv_append(torch.zeros(3, 2, 16, 64).transpose(0, 1), k, slots=SLOTS[:1])
    with pytest.raises(FormatError, match="one kind of storage"):
        kv_append(to_fragments(pages(), "k"), k, slots=SLOTS[:1], backend=Backend.REFERENCE)
    assert isinstance(to_fragments(pages(), "k"), FragmentPages)


@pytest.mark.parametrize("architecture", ["sm_89", "sm_90a", "sm_100a", "sm_120a"])
def test_the_files_compile_for(architecture):
    for library, defines in (
        (append_device.LIBRARY, {}),
        (append_device.QUANTIZING, {"SCHEME": "16,0,0,0,0,0,0,2688,0,1,0", "DTYPE": 1}),
    ):
        built = nvrtc.build(library.program.source, defines=defines, architecture=architecture)
        assert built.code[:4] == b"\x7fELF"

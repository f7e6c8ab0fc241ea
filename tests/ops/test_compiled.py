"""COMPILED against REFERENCE, bit for bit: every scheme, dtype, rule and shape; any number of threads.

NaN equals NaN (its payload is torch's business); everything else is compared as bytes. Outputs are poisoned before
they are written, by tests/conftest.py.
"""

import contextlib
import gc
import itertools
import os
import sys
import weakref
from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
import torch
from tests.assertions import assert_bitwise
from tests.formats.test_grid import ALL_BF16
from tests.ops.guides import CODECS, coded_guide, guide_from
from tests.ops.scheme_inputs import ALL, GUIDED, by_name, exponent_of, hard_matrices

from tracefp4.errors import FormatError
from tracefp4.formats.order import ErrorSum
from tracefp4.formats.packing import pack_codes, unpack_codes
from tracefp4.formats.scheme import Scheme
from tracefp4.formats.schemes import (
    MXFP4_RCEIL,
    NVFP4_ROW_FP32,
    NVFP4_ROW_POW2,
    NVFP4_ROW_TRANSFORMER_ENGINE,
    NVFP4_TENSOR_POW2,
    SCHEMES,
)
from tracefp4.formats.tensor import BlockTensor
from tracefp4.ops import kernels
from tracefp4.ops.backend import Backend, choose
from tracefp4.ops.dequantize import dequantize
from tracefp4.ops.dequantize.compiled import unpack_codes_compiled
from tracefp4.ops.guided_quantize import Guide, guided_quantize
from tracefp4.ops.quantize import quantize, quantize_with_scales
from tracefp4.ops.quantize.compiled import LIBRARY, pack_codes_compiled
from tracefp4.ops.search_scales import search_scales

pytestmark = pytest.mark.skipif(
    choose("quantize", "cpu") is not Backend.COMPILED, reason="needs a C compiler; `tracefp4 doctor` says why"
)
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
ONE_OF_EACH_KIND = [NVFP4_ROW_POW2, NVFP4_ROW_FP32, MXFP4_RCEIL]


def assert_equal(got: object, wanted: object) -> None:
    """Equal parts of two results of one op."""
    for field in fields(wanted):
        left, right = getattr(got, field.name), getattr(wanted, field.name)
        if isinstance(right, torch.Tensor):
            assert_same_numbers(left, right)
        else:
            assert left == right


def assert_same_numbers(got: torch.Tensor, wanted: torch.Tensor) -> None:
    if wanted.is_floating_point():
        assert_bitwise(got.isnan(), wanted.isnan())
        got, wanted = got.nan_to_num(0.0), wanted.nan_to_num(0.0)
    assert_bitwise(got, wanted)


def matrices() -> list[torch.Tensor]:
    """Hard matrices, all bf16 numbers shuffled among each other, and random bit patterns."""
    bits = torch.randint(-(2**31), 2**31, (16, 640), dtype=torch.int64).to(torch.int32)
    shuffled = ALL_BF16.float().flatten()[torch.randperm(65536)].view(-1, 1024)
    return [*hard_matrices(), shuffled, bits.view(torch.float32)]


def assert_same_bytes(x: torch.Tensor, scheme: Scheme) -> None:
    got, wanted = (
        quantize(x, scheme=scheme, exponent=exponent_of(scheme), backend=backend)
        for backend in (Backend.COMPILED, Backend.REFERENCE)
    )
    assert_equal(got, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scheme", ALL, ids=by_name)
def test_quantize(scheme, dtype):
    for x in matrices():
        assert_same_bytes(x.to(dtype), scheme)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("scheme", ONE_OF_EACH_KIND, ids=by_name)
def test_quantize_reads_other_dtypes(scheme, dtype):
    for x in matrices():
        assert_same_bytes(x.to(dtype), scheme)


@pytest.fixture
def flushed_subnormals():
    """float32 operations of this thread take subnormals as 0 and give none."""
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor has no such mode")
    yield
    torch.set_flush_denormal(False)


def test_subnormals_of_fp16_are_read_where_float32_flushes_its_own(flushed_subnormals):
    """fp16 below 2^-14 are normal float32 numbers; both backends must read every one of them."""
    positive = torch.arange(2048, dtype=torch.int16).view(-1, 64)
    x = torch.cat([positive, positive | -0x8000]).view(torch.float16)
    wanted = quantize(x.to(torch.float32), scheme=NVFP4_ROW_POW2, backend=Backend.REFERENCE)
    assert wanted.packed[1].any()
    assert_equal(quantize(x, scheme=NVFP4_ROW_POW2, backend=Backend.COMPILED), wanted)


@pytest.mark.parametrize("order", ErrorSum, ids=lambda order: order.name)
@pytest.mark.parametrize("rule", ["MSE", "MAE"])
def test_errors_are_added_in_the_order_of_the_scheme(rule, order):
    """Thirds of small integers: in one block of a thousand the two errors tie up to the rounding of their sums."""
    x = (torch.randn(512, 1024) * 3).round() / 3
    base = SCHEMES[f"NVFP4_ROW_POW2_4OVER6_{rule}"]
    found = [
        quantize(x, scheme=replace(base, error_sum=other), backend=Backend.REFERENCE).block_scales
        for other in ErrorSum
    ]
    assert not any(torch.equal(one, other) for one, other in itertools.combinations(found, 2))
    assert_same_bytes(x, replace(base, error_sum=order))


@pytest.mark.parametrize("scheme", ALL, ids=by_name)
def test_quantize_with_scales(scheme):
    """Scales of other values, so that elements saturate and vanish; also the bytes 0 and NaN."""
    for index, x in enumerate(matrices()):
        t = quantize(x.flip(0) * 1.3, scheme=scheme, exponent=exponent_of(scheme))
        t.block_scales[0, 0] = 0
        got, wanted = (
            quantize_with_scales(
                x.to(DTYPES[index % 4]),
                block_scales=t.block_scales,
                outer=t.outer,
                scheme=scheme,
                backend=backend,
            )
            for backend in (Backend.COMPILED, Backend.REFERENCE)
        )
        assert_equal(got, wanted)


def importances(rows: int, width: int) -> list[torch.Tensor | None]:
    """None, one a channel, one an element: over many binades, zeros, whole blocks of zeros, subnormals."""
    of_each = torch.rand(rows, width) * torch.exp2(torch.randint(-40, 40, (rows, width)).float())
    of_each[torch.rand(rows, width) < 0.2] = 0.0
    of_each[0, :16], of_each[-1, 16:32] = 0.0, 2.0**-149
    return [None, of_each[0], of_each]


@pytest.mark.parametrize("scheme", [s for s in ALL if s.block_size == 16], ids=by_name)
def test_search_scales(scheme):
    """Dtypes and importances in turn; the hand-made rows of ties have equal errors under several scales."""
    for index, w in enumerate(matrices()):
        w = w[:16, :512]
        for turn, importance in enumerate(importances(*w.shape)):
            got, wanted = (
                search_scales(
                    w.to(DTYPES[(index + turn) % 4]),
                    importance=importance,
                    scheme=scheme,
                    exponent=exponent_of(scheme),
                    backend=backend,
                )
                for backend in (Backend.COMPILED, Backend.REFERENCE)
            )
            assert_equal(got, wanted)


@pytest.mark.parametrize(
    "shape", [(64,), (1, 64), (5, 64), (3, 1, 64), (2, 1, 5, 64), (1, 3, 1, 64)], ids=str
)
def test_importances_of_stacked_matrices(shape):
    w, importance = torch.randn(2, 3, 5, 64), torch.rand(shape).square()
    for scheme in (NVFP4_ROW_POW2, NVFP4_TENSOR_POW2):
        got, wanted = (
            search_scales(w, importance=importance, scheme=scheme, backend=backend)
            for backend in (Backend.COMPILED, Backend.REFERENCE)
        )
        assert_equal(got, wanted)


def every_byte(scheme: Scheme) -> BlockTensor:
    """Every byte of codes under every scale byte, also the negative and NaN ones: [32, 8, 32 blocks]."""
    byte, bytes_per_block = torch.arange(256, dtype=torch.uint8), scheme.block_size // 2
    line = byte.repeat(bytes_per_block // 8)
    packed = torch.stack([line.roll(index * bytes_per_block) for index in range(32)])
    if scheme.is_exact_in_bf16:
        outer = torch.tensor([-110, -9, -1, 0, 1, 5, 60, 116], dtype=torch.int8)
    else:
        outer = torch.linspace(0.001, 5.0, 8)
    shapes = {"row": outer.expand(32, 8), "tensor": outer.repeat(4), "static": outer[3], "none": outer[3]}
    return BlockTensor(
        packed=packed.unsqueeze(1).repeat(1, 8, 1),
        block_scales=byte.view(1, 8, 32).repeat(32, 1, 1),
        outer=shapes[scheme.outer].contiguous(),
        scheme=scheme,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("scheme", ALL, ids=by_name)
def test_dequantize(scheme, dtype):
    if dtype is torch.bfloat16 and not scheme.is_exact_in_bf16:
        pytest.skip("refused: bf16 would round")
    t = every_byte(scheme)
    got = dequantize(t, dtype=dtype, backend=Backend.COMPILED)
    assert_same_numbers(got, dequantize(t, dtype=dtype, backend=Backend.REFERENCE))


def guide_for(x: torch.Tensor, scheme: Scheme, codec: str, valid: torch.Tensor) -> Guide:
    recorded = guided_quantize(
        x.flip(0) * 1.07, scheme=scheme, exponent=exponent_of(scheme), backend=Backend.REFERENCE
    )
    return guide_from(recorded, codec, valid)


@pytest.mark.parametrize("codec", [None, *CODECS])
@pytest.mark.parametrize("scheme", ALL, ids=by_name)
def test_guided_quantize(scheme, codec):
    """Dtypes, with and without codes, all rows recorded or some: in turn."""
    if codec is not None and scheme not in GUIDED:
        pytest.skip("refused: its outer scale depends on every row")
    for index, x in enumerate(hard_matrices()):
        valid = torch.rand(len(x)) < (0.7 if index % 2 else 1.1)
        guide = None if codec is None else guide_for(x, scheme, codec, valid)
        got, wanted = (
            guided_quantize(
                x.to(DTYPES[index % 4]),
                scheme=scheme,
                guide=guide,
                exponent=exponent_of(scheme),
                with_codes=index % 3 != 0,
                backend=backend,
            )
            for backend in (Backend.COMPILED, Backend.REFERENCE)
        )
        assert_equal(got, wanted)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(
    "scheme", [NVFP4_ROW_POW2, NVFP4_ROW_FP32, NVFP4_ROW_TRANSFORMER_ENGINE], ids=by_name
)
def test_random_guides_of_random_rows(scheme, codec):
    """Scales, codes and outer scales that no rollout of x would give: zero and NaN bytes, clipped and tiny z."""
    x = torch.randn(64, 1040) * torch.exp2(torch.randint(-12, 12, (64, 1)).float())
    codes = torch.randint(0, 16, x.shape, dtype=torch.uint8)
    exponents = torch.randint(-20, 5, (64,), dtype=torch.int8)
    guide = Guide(
        valid=torch.rand(64) < 0.8,
        outer=exponents if scheme.is_exact_in_bf16 else torch.exp2(exponents + torch.rand(64)),
        block_scales=torch.randint(0, 128, (64, 65), dtype=torch.uint8),
        codes=codes if codec == "full" else None,
        bits=None if codec == "full" else codes & 1,
        decoder="bracket" if codec == "full" else codec,
    )
    for dtype in (torch.float32, torch.bfloat16):
        both = [
            guided_quantize(x.to(dtype), scheme=scheme, guide=guide, backend=backend)
            for backend in (Backend.COMPILED, Backend.REFERENCE)
        ]
        assert_equal(*both)


@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 64), (1, 32), (64,), (3, 5, 544)], ids=str)
@pytest.mark.parametrize("scheme", [*ONE_OF_EACH_KIND, NVFP4_TENSOR_POW2], ids=by_name)
def test_shapes(scheme, shape):
    if scheme.outer == "tensor" and len(shape) < 2:
        pytest.skip("a tensor scheme needs two dimensions")
    x = torch.randn(shape)
    t = quantize(x, scheme=scheme, backend=Backend.COMPILED)
    assert_equal(t, quantize(x, scheme=scheme, backend=Backend.REFERENCE))
    assert_bitwise(dequantize(t, backend=Backend.COMPILED), dequantize(t, backend=Backend.REFERENCE))


def test_views_are_read_as_their_copies():
    wide = torch.randn(6, 128)
    for view in (wide[:, 32:96], wide[::2], wide.t().contiguous().t(), wide.expand(2, 6, 128)):
        got = quantize(view, scheme=NVFP4_ROW_POW2, backend=Backend.COMPILED)
        assert_equal(got, quantize(view.contiguous(), scheme=NVFP4_ROW_POW2, backend=Backend.REFERENCE))
    t = quantize(wide, scheme=NVFP4_ROW_POW2)
    parts = BlockTensor(
        packed=t.packed[::2], block_scales=t.block_scales[::2], outer=t.outer[::2], scheme=t.scheme
    )
    assert_bitwise(dequantize(parts, backend=Backend.COMPILED), dequantize(t)[::2])


def test_a_negative_recorded_scale_is_refused():
    x = torch.randn(2, 32)
    guide = guide_for(x, NVFP4_ROW_POW2, "full", torch.ones(2, dtype=torch.bool))
    guide.block_scales[1, 1] = 0x81
    with pytest.raises(FormatError, match="0x81, a negative scale"):
        guided_quantize(x, scheme=NVFP4_ROW_POW2, guide=guide, backend=Backend.COMPILED)


@pytest.mark.parametrize("scheme", ONE_OF_EACH_KIND, ids=by_name)
def test_threads_do_not_change_a_byte(scheme, monkeypatch):
    x = torch.randn(97, 4096)
    valid = torch.arange(97) % 5 != 0
    guide = guide_for(x, scheme, "nearest_cell", valid)
    recorded = guided_quantize(x + 0.01 * torch.randn_like(x), scheme=scheme, backend=Backend.REFERENCE)
    coded = coded_guide(recorded, "bch128_3", valid=valid, band=0.1)
    found = []
    for threads in (1, 2, 7):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        monkeypatch.setattr(kernels, "_LEAST_ELEMENTS", 4096)
        t = quantize(x, scheme=scheme, backend=Backend.COMPILED)
        values = dequantize(t, backend=Backend.COMPILED)
        followed = [
            guided_quantize(x, scheme=scheme, guide=held, backend=Backend.COMPILED) for held in (guide, coded)
        ]
        found.append((t, values, followed))
    for t, values, followed in found[1:]:
        assert_equal(t, found[0][0])
        assert_bitwise(values, found[0][1])
        for rounded, first in zip(followed, found[0][2], strict=True):
            assert_equal(rounded, first)
    assert int(found[0][2][1].undecoded) > 0


def test_packing():
    codes = torch.randint(0, 16, (5, 3, 1030), dtype=torch.uint8)
    packed = pack_codes_compiled(codes)
    assert_bitwise(packed, pack_codes(codes))
    assert_bitwise(unpack_codes_compiled(packed), unpack_codes(packed))


def test_a_helper_keeps_alive_what_it_writes_after_its_caller_was_interrupted(monkeypatch):
    submitted = []

    def interrupted(work):
        submitted.append(work)
        raise KeyboardInterrupt

    monkeypatch.setattr(kernels, "_pool", lambda: SimpleNamespace(submit=interrupted))
    monkeypatch.setattr(kernels, "_LEAST_ELEMENTS", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    codes, packed = torch.zeros(64, dtype=torch.uint8), torch.ones(32, dtype=torch.uint8)
    is_alive = weakref.ref(packed)
    with contextlib.suppress(KeyboardInterrupt):
        LIBRARY.call("pack_codes", 32, 64, codes, packed)
    del packed
    gc.collect()
    assert is_alive() is not None
    submitted.clear()
    gc.collect()
    assert is_alive() is None


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
def test_a_forked_child_starts_its_own_threads(monkeypatch):
    """Small enough that torch's own threads, which do not survive a fork, have nothing to do."""
    monkeypatch.setattr(kernels, "_LEAST_ELEMENTS", 1024)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    x = torch.randn(64, 512)
    expected = quantize(x, scheme=NVFP4_ROW_POW2, backend=Backend.COMPILED)  # the parent's threads run now
    assert kernels._the_pool is not None
    child = os.fork()
    if child == 0:
        again = quantize(x, scheme=NVFP4_ROW_POW2, backend=Backend.COMPILED)
        os._exit(0 if again.packed.tolist() == expected.packed.tolist() else 1)
    assert os.waitpid(child, 0)[1] == 0

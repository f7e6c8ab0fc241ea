"""quantize: golden bytes, exact arithmetic, exhaustive products, properties, refusals."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.assertions import assert_bitwise, assert_same_values, assert_sqnr
from tests.formats import rational
from tests.formats.test_grid import FINITE_BF16
from tests.golden.nvfp4_blocks import CASES, Golden

from tracefp4.errors import BackendError, FormatError
from tracefp4.formats.packing import pack_codes, unpack_codes
from tracefp4.formats.schemes import NVFP4_KV, NVFP4_ROW_POW2, NVFP4_TENSOR_POW2
from tracefp4.formats.tensor import BlockTensor
from tracefp4.ops.backend import Backend
from tracefp4.ops.dequantize import dequantize
from tracefp4.ops.quantize import quantize

# A Gaussian in 4.5 bits per value gives 20.6 dB (measured over 10 seeds: 20.5 to 20.7); a wrong nibble
# order gives < 0.
GAUSSIAN_SQNR_DB = 20.3

FLOAT32 = st.integers(0, 0x7F7FFFFF).map(
    lambda bits: torch.tensor(bits, dtype=torch.int32).view(torch.float32).item()
)
MODERATE = st.floats(2.0**-30, 2.0**30, width=32)
VALUE = st.tuples(st.one_of(MODERATE, FLOAT32, st.just(0.0)), st.sampled_from([1.0, -1.0])).map(
    lambda v: v[0] * v[1]
)
ROW = st.integers(1, 3).flatmap(lambda g: st.lists(VALUE, min_size=16 * g, max_size=16 * g))


def pad(blocks: list[list], fill) -> torch.Tensor:
    return torch.tensor([[*block, *[fill] * (16 - len(block))] for block in blocks]).reshape(1, -1)


def same_bytes(a: BlockTensor, b: BlockTensor) -> None:
    assert_bitwise(a.packed, b.packed)
    assert_bitwise(a.block_scales, b.block_scales)
    assert_bitwise(a.outer, b.outer)


def rows(t: BlockTensor, index) -> BlockTensor:
    return BlockTensor(
        packed=t.packed[index],
        block_scales=t.block_scales[index],
        outer=t.outer[index],
        scheme=t.scheme,
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_golden_bytes(case: Golden, dtype):
    x = pad(case.blocks, 0.0).to(dtype)
    scheme, exponent = (NVFP4_KV, case.exponent) if case.is_static else (NVFP4_ROW_POW2, None)
    t = quantize(x, scheme=scheme, exponent=exponent)
    assert t.outer.tolist() == (case.exponent if case.is_static else [case.exponent])
    assert t.block_scales.tolist() == [case.block_scales]
    assert_bitwise(t.codes(), pad(case.codes, 0).to(torch.uint8))
    assert_bitwise(dequantize(t), pad(case.values, 0.0).float())
    for index, packed in enumerate(case.packed):
        assert bytes(t.packed[0, 8 * index : 8 * index + 8].tolist()).hex() == packed


@given(ROW)
@settings(max_examples=150, deadline=None)
def test_rows_equal_exact_rational_arithmetic(row):
    t = quantize(torch.tensor([row]), scheme=NVFP4_ROW_POW2)
    k, block_scales, codes = rational.quantize_row(torch.tensor(row).tolist())
    assert (t.outer.tolist(), t.block_scales.tolist(), t.codes().tolist()) == (
        [k],
        [block_scales],
        [codes],
    )


@pytest.mark.parametrize("exponent", [-110, -7, 0, 6, 116])
def test_static_rows_equal_exact_rational_arithmetic(exponent):
    x = (torch.randn(6, 48) * 2.0 ** (exponent + 3)).clamp(-3e38, 3e38)
    t = quantize(x, scheme=NVFP4_KV, exponent=exponent)
    for row, block_scales, codes in zip(x.tolist(), t.block_scales.tolist(), t.codes().tolist(), strict=True):
        assert rational.quantize_row(row, exponent) == (exponent, block_scales, codes)


def test_every_bf16_number_under_every_scale_byte_of_two_binades():
    """All finite bf16 numbers as elements beside a block maximum that fixes the scale byte: one division,
    rounded once."""
    for byte in range(0x38, 0x48):
        decode_scale = float(rational.E4M3_GRID[byte])
        x = FINITE_BF16[(FINITE_BF16.abs() <= 6 * decode_scale) & (FINITE_BF16.abs() >= decode_scale / 8)]
        x = torch.nn.functional.pad(x, (0, -len(x) % 15)).view(-1, 15)
        x = torch.nn.functional.pad(x, (1, 0), value=6 * decode_scale)
        t = quantize(x, scheme=NVFP4_KV, exponent=0)
        assert t.block_scales.unique().tolist() == [byte]
        z = x.double() / decode_scale  # float64: exact enough that no tie is missed (7-bit products)
        ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], dtype=torch.float64)
        expected = torch.bucketize(z.abs(), ties)
        for tie in (0.75, 1.75, 3.5):
            expected += z.abs() == tie
        assert_bitwise(t.codes(), (expected + 8 * x.signbit()).to(torch.uint8))


@pytest.mark.parametrize("scheme", [NVFP4_ROW_POW2, NVFP4_TENSOR_POW2], ids=lambda s: s.name)
def test_requantizing_values_gives_the_values(scheme):
    """Block scales are normal here; with subnormal ones the maximum may read back as another code times
    another scale."""
    x = torch.randn(40, 64) * torch.exp2(torch.randint(-3, 4, (40, 1)).float())
    t = quantize(x, scheme=scheme)
    assert int(t.block_scales.min()) >= 0x08
    values = dequantize(t)
    assert_same_values(dequantize(quantize(values, scheme=scheme)), values)


@given(st.integers(-70, 70))
@settings(max_examples=30, deadline=None)
def test_powers_of_two_move_only_the_exponent(power):
    x = torch.linspace(-3, 5, 96).view(2, 48)
    t, moved = (quantize(v, scheme=NVFP4_ROW_POW2) for v in (x, x * 2.0**power))
    assert_bitwise(moved.packed, t.packed)
    assert_bitwise(moved.block_scales, t.block_scales)
    assert_bitwise(moved.outer, t.outer + power)


@given(ROW)
@settings(max_examples=40, deadline=None)
def test_odd_symmetry(row):
    x = torch.tensor([row])
    t, negated = quantize(x, scheme=NVFP4_ROW_POW2), quantize(-x, scheme=NVFP4_ROW_POW2)
    assert_bitwise(negated.codes(), t.codes() ^ 8)
    assert_bitwise(negated.block_scales, t.block_scales)


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=20, deadline=None)
def test_monotone_under_a_fixed_scale(seed):
    x = torch.randn(15, generator=torch.Generator().manual_seed(seed)).clamp(-5, 5).sort().values
    row = torch.cat([x, torch.tensor([6.0])])[None]
    values = dequantize(quantize(row, scheme=NVFP4_KV, exponent=0))[0, :15]
    assert bool((values.diff() >= 0).all())


def test_bat_1_rows_do_not_depend_on_their_batch():
    x = torch.randn(33, 64) * torch.exp2(torch.randint(-20, 20, (33, 1)).float())
    x[5] = 0.0
    x[6, 3] = float("nan")
    together = quantize(x, scheme=NVFP4_ROW_POW2)
    for index in range(33):
        same_bytes(
            rows(together, slice(index, index + 1)), quantize(x[index : index + 1], scheme=NVFP4_ROW_POW2)
        )
    case = torch.tensor([[1.0, 0.3, 0.7] + [0.0] * 13])
    loud = torch.full((1, 16), 100.0)
    alone = quantize(case, scheme=NVFP4_ROW_POW2)
    same_bytes(rows(quantize(torch.cat([case, loud]), scheme=NVFP4_ROW_POW2), slice(0, 1)), alone)
    # A tensor scheme does couple rows, which is why it serves weights only.
    assert quantize(torch.cat([case, loud]), scheme=NVFP4_TENSOR_POW2).outer != alone.outer[0]


def test_bat_3_stale_rows_do_not_reach_real_ones():
    x = torch.randn(8, 16)
    reference = quantize(x[:3], scheme=NVFP4_ROW_POW2)
    for stale in (0.0, 1e4, float("nan")):
        x[3:] = stale
        same_bytes(rows(quantize(x, scheme=NVFP4_ROW_POW2), slice(0, 3)), reference)


def test_tensor_scheme_has_one_exponent_per_matrix():
    x = torch.randn(3, 4, 32) * torch.tensor([1.0, 64.0, 2.0**-9])[:, None, None]
    t = quantize(x, scheme=NVFP4_TENSOR_POW2)
    assert t.outer.shape == (3,)
    for index in range(3):
        flat = quantize(x[index].reshape(1, -1), scheme=NVFP4_ROW_POW2)
        assert_bitwise(t.packed[index].reshape(1, -1), flat.packed)
        assert_bitwise(t.outer[index : index + 1], flat.outer)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_spc_1_a_block_that_is_not_finite_reads_back_nan(bad):
    x = torch.ones(2, 32)
    x[0, 3] = bad
    t = quantize(x, scheme=NVFP4_ROW_POW2)
    values = dequantize(t)
    assert t.block_scales[0, 0] == 0x7F and bool(values[0, :16].isnan().all())
    assert t.codes()[0, :16].tolist() == [0] * 16
    assert_bitwise(t.outer[:1], t.outer[1:])  # over the finite blocks
    assert_bitwise(values[0, 16:], values[1, 16:])
    assert values[1, 0] == pytest.approx(1.0, rel=1 / 16)


def test_spc_1_a_row_without_a_finite_block():
    t = quantize(torch.full((1, 16), float("nan")), scheme=NVFP4_ROW_POW2)
    assert (t.outer.tolist(), t.block_scales.tolist()) == ([0], [[0x7F]])


def test_zer_2_zero_rows_between_real_ones():
    x = torch.randn(3, 32)
    x[1] = 0.0
    t = quantize(x, scheme=NVFP4_ROW_POW2)
    same_bytes(rows(t, slice(0, 1)), quantize(x[:1], scheme=NVFP4_ROW_POW2))
    assert t.block_scales[1].tolist() == [0, 0] and t.codes()[1].tolist() == [0] * 32
    assert (dequantize(t)[1] @ torch.randn(32)).item() == 0.0


def test_zer_3_a_tiny_maximum_is_kept_near():
    t = quantize(torch.tensor([[1e-36] + [0.0] * 15]), scheme=NVFP4_ROW_POW2)
    values = dequantize(t)
    assert values[0, 0].item() == 0.5 * 2.0**-119 and values[0, 1:].tolist() == [0.0] * 15


def test_rnd_6_signed_zeros():
    x = torch.tensor([[0.0, -0.0] * 8, [6.0, -0.1] * 8])
    codes = quantize(x, scheme=NVFP4_ROW_POW2).codes()
    assert codes[0, :2].tolist() == [0, 8] and codes[1, :2].tolist() == [7, 8]


def test_dty_1_dtypes_give_the_bytes_of_their_float32_value():
    x = torch.randn(8, 64).bfloat16()
    reference = quantize(x.float(), scheme=NVFP4_ROW_POW2)
    same_bytes(quantize(x, scheme=NVFP4_ROW_POW2), reference)
    same_bytes(quantize(x.double(), scheme=NVFP4_ROW_POW2), reference)
    same_bytes(quantize(x.half(), scheme=NVFP4_ROW_POW2), quantize(x.half().float(), scheme=NVFP4_ROW_POW2))
    w = torch.tensor([[6.0, 1.2539] + [0.0] * 14])  # RND-7: float32 lies above the tie, bf16 on it
    assert quantize(w, scheme=NVFP4_KV, exponent=0).codes()[0, 1] == 3
    assert quantize(w.bfloat16(), scheme=NVFP4_KV, exponent=0).codes()[0, 1] == 2


def test_shp_2_views_equal_their_contiguous_copies():
    big = (64 * torch.arange(4)[:, None] + torch.arange(64)).float()
    for view in (big[:, 16:48], big.T[:32].reshape(2, 64)[:, ::2], big.T[16:32].T, big[::2], big[:, ::2]):
        kept = view.clone()
        same_bytes(quantize(view, scheme=NVFP4_ROW_POW2), quantize(view.contiguous(), scheme=NVFP4_ROW_POW2))
        assert_bitwise(view.contiguous(), kept)  # the input is never written
    wide = torch.randn(3, 16, 4).transpose(1, 2)
    same_bytes(
        quantize(wide, scheme=NVFP4_TENSOR_POW2), quantize(wide.contiguous(), scheme=NVFP4_TENSOR_POW2)
    )


@pytest.mark.parametrize("backend", [Backend.AUTO, Backend.REFERENCE], ids=lambda b: b.value)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_the_input_is_never_written(dtype, backend):
    x = torch.randn(4, 64).to(dtype)
    x[1, 3] = float("nan")
    kept = x.clone()
    quantize(x, scheme=NVFP4_ROW_POW2, backend=backend)
    assert_bitwise(x, kept)


def test_spc_1_rounding_sees_finite_values_only(monkeypatch):
    """A NaN cast to an integer is 0 on this processor and anything on another, so the bytes alone prove nothing."""
    from tracefp4.formats import encoding

    seen, round_magnitude_ = [], encoding.round_magnitude_

    def watched(magnitude, *rules):
        seen.append(bool(magnitude.isfinite().all()))
        return round_magnitude_(magnitude, *rules)

    monkeypatch.setattr(encoding, "round_magnitude_", watched)
    x = torch.randn(3, 64)
    x[0, 3], x[1, 20], x[1, 40], x[2] = float("nan"), float("inf"), -float("inf"), 0.0
    quantize(x, scheme=NVFP4_ROW_POW2, backend=Backend.REFERENCE)
    assert seen == [True]


@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 64), (1, 16)])
@pytest.mark.parametrize("scheme", [NVFP4_ROW_POW2, NVFP4_TENSOR_POW2], ids=lambda s: s.name)
def test_shp_4_empty_and_single_row_inputs(shape, scheme):
    t = quantize(torch.ones(shape, dtype=torch.bfloat16, requires_grad=True), scheme=scheme)
    assert t.shape == shape and t.block_scales.shape == (*shape[:-1], shape[-1] // 16)
    assert dequantize(t).shape == shape and not dequantize(t).requires_grad


def test_gaussian_noise_level():
    x = torch.randn(256, 256)
    t = quantize(x, scheme=NVFP4_ROW_POW2)
    assert_sqnr(dequantize(t), x, GAUSSIAN_SQNR_DB)
    assert_bitwise(pack_codes(unpack_codes(t.packed)), t.packed)


@pytest.mark.parametrize(
    ("x", "arguments", "message"),
    [
        (torch.ones(3, 60), {"scheme": NVFP4_ROW_POW2}, r"positive multiple of 16; got x of shape \(3, 60\)"),
        (torch.ones(3, 0), {"scheme": NVFP4_ROW_POW2}, "positive multiple of 16"),
        (torch.ones(16), {"scheme": NVFP4_TENSOR_POW2}, "at least 2 dimension"),
        (torch.ones(2, 16, dtype=torch.int32), {"scheme": NVFP4_ROW_POW2}, "float tensor of 16 bits"),
        (torch.ones(2, 16), {"scheme": "NVFP4_ROW_POW2"}, "under a Scheme; got Tensor and str"),
        (np.ones((2, 16), dtype=np.float32), {"scheme": NVFP4_ROW_POW2}, "got ndarray and Scheme"),
        (torch.ones(2, 16), {"scheme": NVFP4_KV}, "needs an exponent"),
        (torch.ones(2, 16), {"scheme": NVFP4_ROW_POW2, "exponent": 0}, "finds its own scale"),
        (torch.ones(2, 16), {"scheme": NVFP4_KV, "exponent": 117}, r"\[-110, 116\], an int; got 117"),
    ],
)
def test_shp_1_refusals(x, arguments, message):
    with pytest.raises(FormatError, match=message):
        quantize(x, **arguments)


def test_a_backend_by_string_is_refused():
    with pytest.raises(BackendError, match="must be a Backend"):
        quantize(torch.ones(1, 16), scheme=NVFP4_ROW_POW2, backend="reference")
    same_bytes(
        quantize(torch.ones(1, 16), scheme=NVFP4_ROW_POW2, backend=Backend.REFERENCE),
        quantize(torch.ones(1, 16), scheme=NVFP4_ROW_POW2),
    )

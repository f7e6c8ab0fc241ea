"""What other libraries do that our schemes of their names do not copy, with the input that shows it: each row of
"Faults that we do not copy" in docs/schemes.md. A test that fails after an upgrade says that the fault is gone."""

import pytest
import torch
from tests.formats.test_grid import FINITE_BF16
from tests.peers import oracles

from tracefp4.formats import scheme_by_name
from tracefp4.formats.e8m0 import encode_e8m0_scales
from tracefp4.formats.order import ScaleRule
from tracefp4.ops.dequantize import dequantize
from tracefp4.ops.quantize import quantize

pytestmark = pytest.mark.slow

ZEROS = torch.zeros(2, 64)
NAN_BYTES = {0x7F, 0xFF}


def ours(x: torch.Tensor, name: str):
    return quantize(x, scheme=scheme_by_name(name))


def row(*values: float, width: int) -> torch.Tensor:
    return torch.tensor([[*values, *[0.0] * (width - len(values))]])


def maximum_beside(*small: float) -> torch.Tensor:
    """2688 in block 0, so that the outer scale is neutral, and a block to look at."""
    return torch.cat([row(2688.0, width=16), row(*small, width=16)], dim=1)


@pytest.mark.parametrize(
    ("name", "oracle"),
    [("NVFP4_TORCHAO", oracles.torchao_nvfp4), ("NVFP4_MODELOPT", oracles.modelopt_nvfp4)],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_zer_2_a_tensor_of_zeros_gives_nan_bytes(name, oracle):
    theirs = oracle(ZEROS)
    assert set(theirs.scale_bytes.unique().tolist()) <= NAN_BYTES
    t = ours(ZEROS, name)
    assert not set(t.block_scales.unique().tolist()) & NAN_BYTES
    assert (dequantize(t) == 0).all()


def test_und_1_transformer_engine_stores_codes_of_6_under_a_scale_of_0():
    x = maximum_beside(6 * 2.0**-11, -3 * 2.0**-11)
    theirs = oracles.transformer_engine_nvfp4(x)
    assert theirs.scale_bytes.tolist() == [[0x7E, 0x00]]
    assert theirs.codes[0, 16:18].tolist() == [7, 15] and (theirs.decoded[0, 16:] == 0).all()
    t = ours(x, "NVFP4_TRANSFORMER_ENGINE")
    assert t.block_scales.tolist() == [[0x7E, 0x00]] and t.codes()[0, 16:18].tolist() == [0, 8]


def test_ovf_2_fouroversix_stores_minus_zero_for_values_above_seven():
    # 1.25 * 2^-9 is rounded to the scale 2^-9: the maximum becomes 7.5
    x = maximum_beside(7.5 * 2.0**-9)
    theirs = oracles.fouroversix_nvfp4(x)
    assert theirs.scale_bytes.tolist() == [[0x7E, 0x01]]
    assert theirs.codes[0, 16].item() == 8 and theirs.decoded[0, 16].item() == 0
    t = ours(x, "NVFP4_FOUROVERSIX")
    assert t.block_scales.tolist() == [[0x7E, 0x01]] and t.codes()[0, 16].item() == 7


def test_zer_1_fouroversix_divides_zero_by_zero_in_mxfp4():
    theirs = oracles.fouroversix_mxfp4(ZEROS)
    assert set((theirs.codes & 7).unique().tolist()) != {0}
    assert (ours(ZEROS, "MXFP4_FOUROVERSIX").codes() & 7).count_nonzero() == 0


def test_ovf_6_torchao_does_not_divide_by_2_to_the_minus_127():
    x = row(2.0**-126, width=32)
    for mode in ("floor", "even", "rceil", "ceil"):
        theirs, t = oracles.torchao_mxfp4(x, mode), ours(x, f"MXFP4_{mode.upper()}")
        assert theirs.scale_bytes.tolist() == t.block_scales.tolist() == [[0]]
        # floor, even, ceil divide by no less than 2^-126; rceil multiplies by 1 where the byte is 0
        assert theirs.codes[0, 0].item() == (0 if mode == "rceil" else 2)
        assert t.codes()[0, 0].item() == 4 and dequantize(t)[0, 0].item() == 2.0**-126


@pytest.mark.parametrize(
    "oracle", [oracles.torchao_mxfp4, oracles.modelopt_mxfp4], ids=["torchao", "modelopt"]
)
def test_rnd_3_a_floating_logarithm_is_wrong_next_to_powers_of_two(oracle):
    amax = 6.0 * torch.tensor(2.0**60).mul_(1 + 4 * 2.0**-23)  # amax / 6 a little above 2^60
    x = row(amax.item(), width=32)
    theirs = oracle(x, mode="rceil") if oracle is oracles.torchao_mxfp4 else oracle(x)
    assert theirs.scale_bytes.item() == 127 + 60
    assert encode_e8m0_scales(amax.reshape(1), ScaleRule.RCEIL).item() == 127 + 61
    coarse = FINITE_BF16[~FINITE_BF16.signbit()]  # no bf16 number lies that near to a power of two times 6
    x = torch.nn.functional.pad(coarse[:, None], (0, 31))
    theirs = oracle(x, mode="rceil") if oracle is oracles.torchao_mxfp4 else oracle(x)
    assert torch.equal(theirs.scale_bytes.view(-1), encode_e8m0_scales(coarse, ScaleRule.RCEIL))


def test_dty_1_compressed_tensors_rounds_the_scale_to_bf16():
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    theirs, wide = oracles.compressed_tensors_nvfp4(x), oracles.compressed_tensors_nvfp4(x.float())
    assert theirs.outer.item() != wide.outer.item()
    assert not torch.equal(theirs.scale_bytes, wide.scale_bytes)
    t = ours(x, "NVFP4_COMPRESSED_TENSORS")
    assert torch.equal(t.block_scales, wide.scale_bytes) and torch.equal(t.codes(), wide.codes)


@pytest.mark.parametrize(
    ("oracle", "name"),
    [(oracles.modelopt_mxfp4, "MXFP4_MODELOPT"), (oracles.fouroversix_mxfp4, "MXFP4_FOUROVERSIX")],
    ids=["modelopt", "fouroversix"],
)
def test_spc_1_a_nan_in_mxfp4_is_lost(oracle, name):
    x = torch.ones(1, 32)
    x[0, 3] = float("nan")
    theirs = oracle(x)
    assert theirs.scale_bytes.item() == 0
    t = ours(x, name)
    assert t.block_scales.item() == 0xFF and bool(dequantize(t).isnan().all())


@pytest.mark.parametrize(
    ("oracle", "name"),
    [
        (oracles.torchao_nvfp4, "NVFP4_TORCHAO"),
        (oracles.modelopt_nvfp4, "NVFP4_MODELOPT"),
        (oracles.transformer_engine_nvfp4, "NVFP4_TRANSFORMER_ENGINE"),
        (oracles.fouroversix_nvfp4, "NVFP4_FOUROVERSIX"),
    ],
    ids=["torchao", "modelopt", "transformer-engine", "fouroversix"],
)
def test_spc_1_one_nan_spoils_the_whole_tensor(oracle, name):
    x = torch.ones(2, 64)
    x[0, 3] = float("nan")
    assert set(oracle(x).scale_bytes.unique().tolist()) <= NAN_BYTES
    t = ours(x, name)
    assert t.block_scales[0, 0].item() == 0x7F and t.block_scales.eq(0x7F).sum() == 1
    assert torch.allclose(dequantize(t)[1], torch.ones(64), rtol=1 / 16)


def test_zer_3_torchao_loses_a_tensor_whose_outer_scale_has_no_reciprocal():
    x = row(1e-36, width=16)
    theirs = oracles.torchao_nvfp4(x)
    assert set((theirs.codes[0, 1:] & 7).tolist()) != {0}  # zeros became numbers: 0 * inf
    assert (dequantize(ours(x, "NVFP4_TORCHAO"))[0, 1:] == 0).all()


def test_zer_3_compressed_tensors_flushes_a_tensor_whose_divisor_overflows():
    x = row(1e-36, width=16)
    theirs = oracles.compressed_tensors_nvfp4(x)
    assert theirs.outer.item() == 1.0 and theirs.scale_bytes.tolist() == [[0x20]]
    t = ours(x, "NVFP4_COMPRESSED_TENSORS")
    assert t.outer.item() == 2.0**116 and dequantize(t)[0, 0].item() == pytest.approx(1e-36, rel=0.3)


def test_rnd_1_modelopt_rounds_mxfp4_ties_down_and_stores_code_8_for_zero():
    x = row(6.0, 0.75, 2.5, 3.5, 5.0, 0.0, width=32)
    assert oracles.modelopt_mxfp4(x).codes[0, :6].tolist() == [7, 1, 4, 5, 6, 8]
    assert ours(x, "MXFP4_MODELOPT").codes()[0, :6].tolist() == [
        7,
        1,
        4,
        5,
        6,
        8,
    ]  # this one is in the scheme
    assert ours(x, "MXFP4_RCEIL").codes()[0, :6].tolist() == [7, 2, 4, 6, 6, 0]

"""NVFP4 schemes that carry a library's name store that library's bytes: codes, block scales, outer scale."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from tests.golden.nvfp4_schemes import ERROR_SUM_MAXIMUM, ERROR_SUMS
from tests.peers import oracles
from tests.peers.inputs import INPUTS, normal, rows_of
from tests.peers.oracles import NVFP4_BLOCK, PeerBytes

from tracefp4.formats import scheme_by_name
from tracefp4.formats.tensor import BlockTensor
from tracefp4.ops.dequantize import dequantize
from tracefp4.ops.quantize import quantize

MATRICES = 512
"""Small ones, each with an outer scale of its own: a large matrix shows one."""
FEW_ROUNDINGS = 4 * 2.0**-24
"""Libraries that store amax decode as ((code * s) * amax) / 2688, or with amax / 2688 as one factor; we as
code * ((s * amax) / 2688). Each way rounds twice, half an ulp each."""

TRANSFORMER_ENGINE = oracles.transformer_engine_nvfp4
PEERS: dict[str, Callable[[torch.Tensor], PeerBytes]] = {
    "NVFP4_MODELOPT": oracles.modelopt_nvfp4,
    "NVFP4_TORCHAO": oracles.torchao_nvfp4,
    # fed with bf16 it would round amax / 6 and its outer scale to bf16; ours are float32 throughout
    "NVFP4_COMPRESSED_TENSORS": lambda x: oracles.compressed_tensors_nvfp4(x.float()),
    "NVFP4_VLLM": oracles.vllm_nvfp4,
    "NVFP4_TRANSFORMER_ENGINE": TRANSFORMER_ENGINE,
    "NVFP4_ROW_TRANSFORMER_ENGINE": partial(TRANSFORMER_ENGINE, by_row=True),
    "NVFP4_FOUROVERSIX": oracles.fouroversix_nvfp4,
    "NVFP4_TRANSFORMER_ENGINE_4OVER6_MSE": partial(TRANSFORMER_ENGINE, four_over_six="MSE"),
    "NVFP4_TRANSFORMER_ENGINE_256_4OVER6_MSE": partial(
        TRANSFORMER_ENGINE, four_over_six="MSE", scale_max=256
    ),
    "NVFP4_TRANSFORMER_ENGINE_4OVER6_MAE": partial(TRANSFORMER_ENGINE, four_over_six="MAE"),
    "NVFP4_TRANSFORMER_ENGINE_256_4OVER6_MAE": partial(
        TRANSFORMER_ENGINE, four_over_six="MAE", scale_max=256
    ),
    "NVFP4_FOUROVERSIX_4OVER6_MSE": partial(oracles.fouroversix_nvfp4, rule="mse"),
    "NVFP4_FOUROVERSIX_4OVER6_MAE": partial(oracles.fouroversix_nvfp4, rule="mae"),
    "NVFP4_FOUROVERSIX_4OVER6_ABSMAX": partial(oracles.fouroversix_nvfp4, rule="abs_max"),
}


def _least_byte(name: str) -> int:
    """The smallest scale byte whose block is compared.

    In a block whose scale is byte 0 every code decodes to 0; Transformer Engine stores the codes of 6 there and
    fouroversix drops the sign. Where fouroversix's scale for 6 is 2^-9 or 2^-8, rounding it down can leave
    elements above 7, which it takes for an 8 that E2M1 lacks and stores as the code of -0.0; we saturate at 6. Under
    four-over-six such a block may have taken the scale for 4 instead, up to byte 4.
    """
    if "FOUROVERSIX_4OVER6" in name:
        return 5
    return 3 if "FOUROVERSIX" in name else 1 if "TRANSFORMER_ENGINE" in name else 0


def _assert_bytes_equal(name: str, ours: BlockTensor, theirs: PeerBytes) -> None:
    assert torch.equal(ours.outer.reshape(-1), theirs.outer.reshape(-1))
    blocks = torch.maximum(theirs.scale_bytes, ours.block_scales) >= _least_byte(name)
    assert torch.equal(ours.block_scales[blocks], theirs.scale_bytes[blocks])
    if "FOUROVERSIX_4OVER6" not in name:
        assert torch.equal(ours.block_scales, theirs.scale_bytes)
    elements = blocks.repeat_interleave(NVFP4_BLOCK, dim=-1)
    assert torch.equal(ours.codes()[elements], theirs.codes[elements])
    decoded = dequantize(ours, dtype=torch.float32)[elements]
    rtol = FEW_ROUNDINGS if ours.scheme.outer_kind == "amax" else 0.0
    torch.testing.assert_close(decoded, theirs.decoded[elements], rtol=rtol, atol=0.0)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("make", INPUTS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("name", PEERS)
def test_bytes_equal_the_library(name: str, make: Callable[[int], torch.Tensor], dtype: torch.dtype) -> None:
    x = make(rows_of(make)).to(dtype)
    _assert_bytes_equal(name, quantize(x, scheme=scheme_by_name(name)), PEERS[name](x))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", PEERS)
def test_bytes_equal_under_many_outer_scales(name: str, dtype: torch.dtype) -> None:
    for part in normal(MATRICES * 4).mul(1.7).to(dtype).split(4):
        _assert_bytes_equal(name, quantize(part, scheme=scheme_by_name(name)), PEERS[name](part))


@pytest.mark.slow
@pytest.mark.parametrize("library", ["NVFP4_FOUROVERSIX", "NVFP4_TRANSFORMER_ENGINE_256"])
@pytest.mark.parametrize("rule", ERROR_SUMS)
def test_errors_are_added_in_the_order_of_the_library(library: str, rule: str) -> None:
    rows = [*ERROR_SUMS[rule], [8 * ERROR_SUM_MAXIMUM, *[0.0] * 15]]
    x, name = torch.tensor(rows) / 8.0, f"{library}_4OVER6_{rule}"
    _assert_bytes_equal(name, quantize(x, scheme=scheme_by_name(name)), PEERS[name](x))


@pytest.mark.slow
@pytest.mark.parametrize("name", PEERS)
def test_all_blocks_of_a_normal_matrix_are_compared(name: str) -> None:
    assert (PEERS[name](normal(64)).scale_bytes >= _least_byte(name)).all()

"""MXFP4 schemes store the bytes of the libraries that use their exponent rule."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from tests.peers import oracles
from tests.peers.inputs import INPUTS, rows_of, zeros
from tests.peers.oracles import MXFP4_BLOCK, PeerBytes

from tracefp4.formats import scheme_by_name
from tracefp4.ops.dequantize import dequantize
from tracefp4.ops.quantize import quantize

PEERS: dict[str, tuple[str, Callable[[torch.Tensor], PeerBytes]]] = {
    "torchao floor": ("MXFP4_FLOOR", partial(oracles.torchao_mxfp4, mode="floor")),
    "torchao even": ("MXFP4_EVEN", partial(oracles.torchao_mxfp4, mode="even")),
    "torchao rceil": ("MXFP4_RCEIL", partial(oracles.torchao_mxfp4, mode="rceil")),
    "torchao ceil": ("MXFP4_CEIL", partial(oracles.torchao_mxfp4, mode="ceil")),
    "compressed-tensors": ("MXFP4_COMPRESSED_TENSORS", oracles.compressed_tensors_mxfp4),
    "fouroversix": ("MXFP4_FOUROVERSIX", oracles.fouroversix_mxfp4),
    "modelopt": ("MXFP4_MODELOPT", oracles.modelopt_mxfp4),
}


def _assert_equal_outside_zero_blocks(x: torch.Tensor, ours: torch.Tensor, theirs: torch.Tensor) -> None:
    holds = x.unflatten(-1, (-1, MXFP4_BLOCK)).ne(0).any(-1).repeat_interleave(MXFP4_BLOCK, dim=-1)
    assert torch.equal(ours[holds], theirs[holds])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("make", INPUTS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("peer", PEERS)
def test_bytes_equal_the_library(peer: str, make: Callable[[int], torch.Tensor], dtype: torch.dtype) -> None:
    x = make(rows_of(make)).to(dtype)
    ours, theirs = quantize(x, scheme=scheme_by_name(PEERS[peer][0])), PEERS[peer][1](x)
    assert torch.equal(ours.block_scales, theirs.scale_bytes)
    if peer == "fouroversix":  # it divides an all-zero block by 2^-127 flushed to 0: codes of NaN
        _assert_equal_outside_zero_blocks(x, ours.codes(), theirs.codes)
        return
    assert torch.equal(ours.codes(), theirs.codes)
    assert torch.equal(dequantize(ours, dtype=torch.float32), theirs.decoded)


@pytest.mark.slow
def test_exponent_rules_differ_between_libraries() -> None:
    x = INPUTS[0](64)
    scale_bytes = {peer: oracle(x).scale_bytes for peer, (_, oracle) in PEERS.items()}
    assert not torch.equal(scale_bytes["torchao floor"], scale_bytes["torchao even"])
    assert not torch.equal(scale_bytes["torchao floor"], scale_bytes["torchao rceil"])
    assert (scale_bytes["torchao ceil"] > scale_bytes["torchao floor"]).all()


@pytest.mark.slow
def test_modelopt_stores_code_8_for_zeros() -> None:
    x = zeros(64)
    assert (oracles.modelopt_mxfp4(x).codes[x == 0] == 8).all()

"""The reference gives the same bytes on a CUDA device as on the CPU, under every scheme.

Not obvious: on CUDA torch multiplies by a reciprocal where a tensor is divided by a Python number, and its fp8 cast
of values above 448 changed between releases.
"""

import pytest
import torch
from tests.assertions import assert_bitwise
from tests.ops.guides import coded_guide, is_decodable
from tests.ops.guides import held as parts_of

from tracefp4.coding import syndrome_code
from tracefp4.formats import SCHEMES
from tracefp4.ops.backend import Backend
from tracefp4.ops.dequantize import dequantize
from tracefp4.ops.guided_quantize import Guide, guided_quantize
from tracefp4.ops.quantize import quantize
from tracefp4.ops.syndromes import encode_syndromes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def inputs():
    """Normal values, values on ties, a wide range, zero and tiny blocks, NaN, Inf and both zeros: [256, 256]."""
    torch.manual_seed(0)
    normal = torch.randn(64, 256)
    ties = torch.randint(-24, 25, (64, 256)) / 4.0
    wide = torch.randn(64, 256) * torch.exp2(torch.randint(-40, 40, (64, 16)).float()).repeat_interleave(
        16, 1
    )
    special = torch.randn(64, 256)
    special[0], special[1, :16], special[2, 3], special[3, 40] = 0.0, -0.0, float("nan"), float("-inf")
    special[4:] *= torch.exp2(-torch.arange(60).float() * 2)[:, None]
    return torch.cat([normal, ties, wide, special])


def one_nan(x):
    """One bit pattern for all NaN: which one an operation gives is the device's affair."""
    return x.masked_fill(x.isnan(), float("nan")) if x.is_floating_point() else x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=lambda s: s.name)
def test_bytes_on_cuda_are_those_on_the_cpu(scheme, dtype):
    x, exponent = inputs().to(dtype), 2 if scheme.outer == "static" else None
    if scheme.outer == "tensor":
        x = x.view(4, 64, 256)
    here = quantize(x, scheme=scheme, exponent=exponent, backend=Backend.REFERENCE)
    there = quantize(x.cuda(), scheme=scheme, exponent=exponent, backend=Backend.REFERENCE)
    for part in ("outer", "block_scales", "packed"):
        assert_bitwise(getattr(there, part).cpu(), getattr(here, part))
    values = [one_nan(dequantize(t, backend=Backend.REFERENCE).cpu()) for t in (there, here)]
    assert_bitwise(*values)


@pytest.mark.parametrize("decoder", ["full", "bracket", "nearest_cell"])
@pytest.mark.parametrize("name", ["NVFP4_ROW_POW2", "NVFP4_KV", "MXFP4_RCEIL", "NVFP4_ROW_FP32"])
def test_guided_rounding_on_cuda_is_that_on_the_cpu(name, decoder):
    scheme, x = SCHEMES[name], inputs()
    exponent = 2 if scheme.outer == "static" else None
    rollout = guided_quantize(x, scheme=scheme, exponent=exponent, backend=Backend.REFERENCE)
    moved = x * (1 + 2.0**-7)
    results = []
    for device in ("cpu", "cuda"):
        guide = Guide(
            valid=(torch.arange(x.shape[0]) % 7 != 0).to(device),
            outer=rollout.outer.to(device) if scheme.outer == "row" else None,
            block_scales=rollout.block_scales.to(device),
            codes=rollout.codes.to(device) if decoder == "full" else None,
            bits=None if decoder == "full" else (rollout.codes & 1).to(device),
            decoder="bracket" if decoder == "full" else decoder,
        )
        results.append(
            guided_quantize(
                moved.to(device), scheme=scheme, guide=guide, exponent=exponent, backend=Backend.REFERENCE
            )
        )
    here, there = results
    for part in ("values", "codes", "block_scales", "outer", "nearest_changed"):
        assert_bitwise(one_nan(getattr(there, part).cpu()), one_nan(getattr(here, part)))


@pytest.mark.parametrize("band", [None, 0.05])
@pytest.mark.parametrize("codec", ["full", "low2", "mantissa_lean", "secded", "bch128_3", "bch64_3+bch32_2"])
@pytest.mark.parametrize("name", ["NVFP4_ROW_POW2", "NVFP4_KV", "MXFP4_RCEIL", "NVFP4_ROW_FP32"])
def test_guides_that_hold_less_are_decoded_on_cuda_as_on_the_cpu(name, codec, band):
    scheme, x = SCHEMES[name], inputs()
    if not is_decodable(codec, scheme):
        pytest.skip("refused")
    exponent = 2 if scheme.outer == "static" else None
    rollout = guided_quantize(x, scheme=scheme, exponent=exponent, backend=Backend.REFERENCE)
    guide = coded_guide(rollout, codec, band=band, valid=torch.arange(x.shape[0]) % 7 != 0)
    moved = x * (1 + 2.0**-8 * torch.randn(x.shape))
    there_guide = Guide(
        **{
            part: held.cuda() if isinstance(held, torch.Tensor) else held
            for part, held in parts_of(guide).items()
        }
    )
    here, there = (
        guided_quantize(
            moved.to(device), scheme=scheme, guide=followed, exponent=exponent, backend=Backend.REFERENCE
        )
        for device, followed in (("cpu", guide), ("cuda", there_guide))
    )
    for part in ("values", "codes", "block_scales", "outer", "nearest_changed", "in_band", "undecoded"):
        assert_bitwise(one_nan(getattr(there, part).cpu()), one_nan(getattr(here, part)))


@pytest.mark.parametrize("name", ["parity3", "secded", "bch128_3", "bch512_6"])
def test_syndromes_on_cuda_are_those_on_the_cpu(name):
    codes, code = torch.randint(0, 256, (64, 1040), dtype=torch.uint8), syndrome_code(name)
    here, there = (encode_syndromes(c, code=code, backend=Backend.REFERENCE) for c in (codes, codes.cuda()))
    assert_bitwise(there.cpu(), here)

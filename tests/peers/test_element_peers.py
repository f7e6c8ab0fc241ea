"""Single numbers against ml_dtypes and gfloat: four million float32 and bf16 values each, normal and on ties."""

from collections.abc import Callable

import pytest
import torch
from tests.peers import oracles
from tests.peers.inputs import normal, rows_of, ties_times_scales

from tracefp4.formats.grid import encode_e4m3, round_e2m1

pytestmark = pytest.mark.slow
ELEMENTS = {
    "ml_dtypes e2m1": (round_e2m1, oracles.ml_dtypes_codes, "float4_e2m1fn"),
    "ml_dtypes e4m3": (encode_e4m3, oracles.ml_dtypes_codes, "float8_e4m3fn"),
    "gfloat e2m1": (round_e2m1, oracles.gfloat_codes, "ocp_e2m1"),
    "gfloat e4m3": (encode_e4m3, oracles.gfloat_codes, "ocp_e4m3"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("make", [normal, ties_times_scales], ids=lambda make: make.__name__)
@pytest.mark.parametrize("name", ELEMENTS)
def test_codes_equal_the_library(name: str, make: Callable[[int], torch.Tensor], dtype: torch.dtype) -> None:
    ours, theirs, layout = ELEMENTS[name]
    # up to 448, beyond which ml_dtypes gives NaN and we saturate (case OVF-2)
    x = make(rows_of(make)).to(dtype).clamp(-448.0, 448.0)
    assert torch.equal(ours(x), theirs(x, layout))

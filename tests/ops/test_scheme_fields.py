"""Every field of a scheme decides about bytes: changed alone, some input becomes other bytes."""

from dataclasses import fields, replace

import pytest
import torch
from tests.golden.nvfp4_schemes import ERROR_SUM_MAXIMUM, ERROR_SUMS

from tracefp4.formats.order import Candidates, ErrorSum, Order, ScaleRule, Sign, Tie
from tracefp4.formats.scheme import Scheme
from tracefp4.formats.schemes import MXFP4_FLOOR, NVFP4_ROW_FP32, NVFP4_ROW_POW2, SCHEMES
from tracefp4.ops.backend import Backend, choose
from tracefp4.ops.quantize import quantize

BACKENDS = [
    b for b in (Backend.REFERENCE, Backend.COMPILED) if b in {Backend.REFERENCE, choose("quantize", "cpu")}
]
FOLDED = SCHEMES["NVFP4_FOUROVERSIX_4OVER6_MSE"]
DRIVES = {
    "outer": (NVFP4_ROW_POW2, "tensor"),
    "order": (NVFP4_ROW_FP32, Order.TORCHAO),
    "scale_rule": (MXFP4_FLOOR, ScaleRule.RCEIL),
    "scale_max": (NVFP4_ROW_POW2, 256.0),
    "candidates": (NVFP4_ROW_POW2, Candidates.MSE),
    "error_sum": (FOLDED, ErrorSum.TREE),
    "zero_byte": (NVFP4_ROW_POW2, 0x38),
    "underflow_byte": (NVFP4_ROW_POW2, 0x00),
    "least_byte": (NVFP4_ROW_POW2, 0x08),
    "tie": (NVFP4_ROW_POW2, Tie.TOWARD_ZERO),
    "sign": (NVFP4_ROW_POW2, Sign.ORDERED),
}
ALONE = {"name", "block_format", "nonfinite_rule"}
"""A name decides nothing, a format comes with an order, and there is one rule for what is not finite."""


def _inputs() -> torch.Tensor:
    """Rows of 64: quarters and thirds, normal values, a tiny and an all-zero block, zeros of both signs."""
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 64)[:, None]
    x[:32] = (torch.arange(32 * 64).view(32, 64) * 7 % 25 / 4.0) * torch.arange(1, 33)[:, None] / 3.0
    x[1, 16:32], x[1, 32:48], x[1, 48:50] = 1e-9, 0.0, -0.0
    return x


def _near_ties() -> torch.Tensor:
    rows = [*ERROR_SUMS["MSE"], [8 * ERROR_SUM_MAXIMUM, *[0.0] * 15]]
    return torch.tensor(rows) / 8.0


def _bytes(x: torch.Tensor, scheme: Scheme, backend: Backend) -> tuple[bytes, ...]:
    t = quantize(x, scheme=scheme, backend=backend)
    return tuple(part.numpy().tobytes() for part in (t.packed, t.block_scales))


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.value)
@pytest.mark.parametrize("name", [field.name for field in fields(Scheme) if field.name not in ALONE])
def test_a_field_changed_alone_changes_bytes(name, backend):
    scheme, other = DRIVES[name]
    x = _near_ties() if name == "error_sum" else _inputs()
    assert _bytes(x, scheme, backend) != _bytes(x, replace(scheme, **{name: other}), backend)

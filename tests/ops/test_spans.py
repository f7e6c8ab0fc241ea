"""Spans cover all rows once, and an op that works in spans gives the bytes that it gives without."""

import pytest
import torch
from tests.assertions import assert_bitwise
from tests.ops.guides import guide_from

from tracefp4.formats import SCHEMES
from tracefp4.ops import spans
from tracefp4.ops.backend import Backend
from tracefp4.ops.guided_quantize import guided_quantize
from tracefp4.ops.quantize import quantize

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("num_rows", "width"), [(0, 16), (1, 1 << 20), (7, 3 << 18), (1000, 4096), (1024, 512)]
)
def test_spans_cover_every_row_once(num_rows, width):
    found = spans.row_spans(num_rows, width, CPU)
    assert [row for first, last in found for row in range(first, last)] == list(range(num_rows))
    assert all((last - first) * width <= max(spans.SPAN_ELEMENTS, width) for first, last in found)
    assert found and spans.row_spans(num_rows, width, torch.device("cuda")) == [(0, num_rows)]


def inputs():
    x = torch.randn(2, 9, 64) * torch.exp2(torch.randint(-6, 7, (2, 9, 1)).float())
    x[0, 0], x[0, 3, 20], x[1, 2, :16], x[1, 8, 5] = 0.0, float("nan"), 2.0**-40, float("inf")
    return x


@pytest.mark.parametrize("name", SCHEMES)
def test_spans_change_no_byte_of_quantize(name, monkeypatch):
    scheme, x = SCHEMES[name], inputs()
    exponent = 1 if scheme.outer == "static" else None
    whole = quantize(x, scheme=scheme, exponent=exponent, backend=Backend.REFERENCE)
    monkeypatch.setattr(
        spans, "SPAN_ELEMENTS", 4 * 64
    )  # spans of four rows, across the border of the matrices
    parts = quantize(x, scheme=scheme, exponent=exponent, backend=Backend.REFERENCE)
    for part in ("packed", "block_scales", "outer"):
        assert_bitwise(getattr(parts, part), getattr(whole, part))


@pytest.mark.parametrize("name", ["NVFP4_ROW_POW2", "NVFP4_KV", "MXFP4_RCEIL", "NVFP4_TENSOR_POW2"])
@pytest.mark.parametrize("codec", [None, "full", "nearest_cell"])
def test_spans_change_no_byte_of_guided_quantize(name, codec, monkeypatch):
    scheme, x = SCHEMES[name], inputs().flatten(0, 1)
    arguments = {"scheme": scheme, "backend": Backend.REFERENCE}
    arguments |= {"exponent": 1} if scheme.outer == "static" else {}
    if codec is not None and scheme.outer != "tensor":
        valid = torch.arange(len(x)) % 3 != 0
        arguments |= {"guide": guide_from(guided_quantize(x * 1.01, **arguments), codec, valid)}
    whole = guided_quantize(x, **arguments)
    monkeypatch.setattr(spans, "SPAN_ELEMENTS", 4 * 64)
    parts = guided_quantize(x, **arguments)
    for part in ("values", "codes", "block_scales", "outer", "nearest_changed"):
        assert_bitwise(getattr(parts, part), getattr(whole, part))

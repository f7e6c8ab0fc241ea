"""Backend choice: never silent, always explained."""

import pytest
import torch

from tracefp4.errors import BackendError
from tracefp4.formats.schemes import NVFP4_ROW_POW2
from tracefp4.ops.backend import IMPLEMENTED, Backend, choose, explain
from tracefp4.ops.quantize import quantize


@pytest.mark.parametrize("op", IMPLEMENTED)
def test_auto_resolves_and_a_name_is_kept(op):
    assert choose(op, "cpu") in IMPLEMENTED[op]
    assert choose(op, "cuda") is Backend.REFERENCE
    assert choose(op, torch.device("cpu"), Backend.REFERENCE) is Backend.REFERENCE


def test_unknown_ops_and_backends_are_refused():
    with pytest.raises(BackendError, match="Unknown op 'quantise'"):
        choose("quantise", "cpu")
    with pytest.raises(BackendError, match=r"must be a Backend; got 'auto'.*AUTO, CUDA, COMPILED, REFERENCE"):
        choose("quantize", "cpu", "auto")
    with pytest.raises(BackendError, match="'meta' device"):
        quantize(torch.ones(1, 16, device="meta"), scheme=NVFP4_ROW_POW2)


def test_a_backend_that_an_op_lacks_is_not_replaced(monkeypatch):
    monkeypatch.setitem(IMPLEMENTED, "quantize", ())
    with pytest.raises(BackendError, match="has no backend REFERENCE"):
        choose("quantize", "cpu", Backend.REFERENCE)


def test_every_op_is_explained():
    rows = explain()
    assert [row["op"] for row in rows] == list(IMPLEMENTED)
    assert all(row["backend"] == choose(row["op"], "cpu").value and row["reason"] for row in rows)
    assert {row["backend"] for row in explain("cuda")} == {"reference"}

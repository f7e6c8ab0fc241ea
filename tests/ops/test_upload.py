"""Tensors that go to a device by one copy: the buffer in between, and the call on the CPU."""

import pytest
import torch
from tests.assertions import assert_bitwise

from tracefp4.ops.upload import _joined, _split, upload_together

VALUES = [
    torch.arange(7, dtype=torch.uint8).view(1, 7),
    torch.arange(6, dtype=torch.int64).view(2, 3).T,
    torch.empty(0, 4, dtype=torch.int8),
    torch.tensor(2.5),
]


def test_what_was_joined_is_split_again():
    buffer = _joined(VALUES, pin_memory=False)
    for got, wanted in zip(_split(buffer.clone(), VALUES), VALUES, strict=True):
        assert_bitwise(got, wanted.contiguous())
        assert got.storage_offset() * got.itemsize % 256 == 0


def check(device):
    for got, wanted in zip(upload_together(VALUES, torch.device(device)), VALUES, strict=True):
        assert got.device.type == device
        assert_bitwise(got.cpu().contiguous(), wanted.contiguous())


def test_on_a_processor_they_stay_as_they_are():
    check("cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_together_they_arrive_on_a_gpu():
    check("cuda")

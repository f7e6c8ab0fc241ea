"""Host memory to a device, without a host that waits for what the device is computing."""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

_ALIGNED = 256
"""Bytes; an address that any load may use."""


def upload(values: Tensor, device: torch.device) -> Tensor:
    """Return values on a device; on a GPU the copy is queued behind its work and the call returns at once.

    An ordinary copy from pageable memory waits for everything that was launched before. This one goes through pinned
    memory, which torch gives to nobody else before the copy has run.

    Args:
        values: any tensor. One that is on a device already is moved as `Tensor.to` does it.
        device: where to.
    """
    if device.type != "cuda" or values.device.type != "cpu":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


def upload_together(values: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Return several tensors of host memory on a device, contiguous; on a GPU by one copy, as `upload`'s is."""
    if device.type != "cuda":
        return [upload(each, device) for each in values]
    return _split(_joined(values, pin_memory=True).to(device, non_blocking=True), values)


def _joined(values: Sequence[Tensor], *, pin_memory: bool) -> Tensor:
    buffer = torch.empty(_starts(values)[-1], dtype=torch.uint8, device="cpu", pin_memory=pin_memory)
    for each, place in zip(values, _split(buffer, values), strict=True):
        place.copy_(each)
    return buffer


def _split(buffer: Tensor, values: Sequence[Tensor]) -> list[Tensor]:
    """Views of a buffer, as the values are."""
    starts = _starts(values)[:-1]
    parts = [buffer[start : start + each.nbytes] for start, each in zip(starts, values, strict=True)]
    return [part.view(each.dtype).view(each.shape) for part, each in zip(parts, values, strict=True)]


def _starts(values: Sequence[Tensor]) -> list[int]:
    """Where each value begins in a buffer, and the end of all."""
    return list(accumulate((-(-each.nbytes // _ALIGNED) * _ALIGNED for each in values), initial=0))

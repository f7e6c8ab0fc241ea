"""swiglu by the kernel of kernel.cu: values as the reference's up to the last bits of an exponential."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from tracefp4.formats.scheme import Scheme
from tracefp4.ops.device import DeviceLibrary, Launch, aligned
from tracefp4.ops.kernels import check_values, first_difference
from tracefp4.ops.nearest import RowsCase, empty_rows, nearest_rows, rows_case
from tracefp4.ops.swiglu.operands import Gated
from tracefp4.ops.swiglu.reference import outside


def swiglu_on_device(gate_up: Tensor, rule: tuple[Scheme, int | None] | None) -> Gated:
    """Gate checked rows; see `swiglu`."""
    gate_up = aligned(gate_up.detach().resolve_neg())
    num_rows, width, device = gate_up.shape[0], gate_up.shape[1] // 2, gate_up.device
    values = torch.empty((num_rows, width), dtype=torch.bfloat16, device=device)
    block_tensor = None if rule is None else empty_rows(num_rows, width, *rule, device)
    parts: tuple[Tensor | None, ...] = (None, None, None)
    if block_tensor is not None:
        parts = (block_tensor.outer, block_tensor.block_scales, block_tensor.packed)
    case = rows_case(width, rule)
    launch = Launch("gate_rows", (num_rows,), case.threads(width), case.defines)
    LIBRARY.launch(launch, gate_up, width, values, *parts, device=device)
    return Gated(values, block_tensor)


def differences(device: torch.device, case: RowsCase) -> str | None:
    """Compare with the reference; return what differs, or None."""
    return first_difference(_pairs(device, case))


def _pairs(device: torch.device, case: RowsCase) -> Iterator[tuple[str, Tensor, Tensor]]:
    x, rule = case.widened(check_values()).to(device, torch.bfloat16), case.rule()
    gate_up = torch.cat([x, x.flip(0)], dim=-1)
    got = swiglu_on_device(gate_up, rule)
    is_wrong = outside(got.values, gate_up)
    yield "gated values", is_wrong, torch.zeros_like(is_wrong)
    wanted = nearest_rows(got.values, *rule)
    assert got.block_tensor is not None
    yield "outer scales", got.block_tensor.outer, wanted.outer
    yield "block scales", got.block_tensor.block_scales, wanted.block_scales
    yield "codes", got.block_tensor.packed, wanted.packed


LIBRARY = DeviceLibrary(Path(__file__).with_name("kernel.cu"), differences, rows_case(64, None))
"""The kernel of kernel.cu."""

"""rms_norm by the kernel of kernel.cu: the same bytes as `reference.py`, rows read once."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from tracefp4.formats.scheme import Scheme
from tracefp4.formats.schemes import NVFP4_ROW_POW2
from tracefp4.ops.device import DeviceLibrary, Launch, aligned
from tracefp4.ops.kernels import check_values, first_difference
from tracefp4.ops.nearest import RowsCase, empty_rows, rows_case
from tracefp4.ops.rms_norm.operands import Normed
from tracefp4.ops.rms_norm.reference import rms_norm_reference


def rms_norm_on_device(
    x: Tensor, weight: Tensor, epsilon: float, residual: Tensor | None, rule: tuple[Scheme, int | None] | None
) -> Normed:
    """Norm checked rows; see `rms_norm`."""
    x, weight = aligned(x.detach().resolve_neg()), aligned(weight.detach().resolve_neg())
    other = None if residual is None else aligned(residual.detach().resolve_neg())
    num_rows, width = x.shape
    values, sums = torch.empty_like(x), None if other is None else torch.empty_like(x)
    block_tensor = None if rule is None else empty_rows(num_rows, width, *rule, x.device)
    parts: tuple[Tensor | None, ...] = (None, None, None)
    if block_tensor is not None:
        parts = (block_tensor.outer, block_tensor.block_scales, block_tensor.packed)
    case = rows_case(width, rule)
    launch = Launch("normalize_rows", (num_rows,), case.threads(width), case.defines)
    sizes = (int(weight.dtype == torch.float32), width, float(epsilon))
    LIBRARY.launch(launch, x, other, weight, *sizes, sums, values, *parts, device=x.device)
    return Normed(values, sums, block_tensor)


def differences(device: torch.device, case: RowsCase) -> str | None:
    """Compare with the reference; return what differs, or None."""
    return first_difference(_pairs(device, case))


def _pairs(device: torch.device, case: RowsCase) -> Iterator[tuple[str, Tensor, Tensor]]:
    x = case.widened(check_values()).to(device, torch.bfloat16)
    weight = x[4].abs() + 0.5
    for residual, rule in ((None, None), (x.flip(0), case.rule())):
        if rule is None and case.scheme != NVFP4_ROW_POW2:
            continue  # without a copy in FP4 the kernel is that of the usual scheme
        weight = weight if rule is None else weight.to(torch.float32) + 2.0**-20  # which bf16 does not hold
        got = rms_norm_on_device(x, weight, 1e-6, residual, rule)
        wanted = rms_norm_reference(x, weight, 1e-6, residual, rule)
        yield "normed values", got.values, wanted.values
        if got.residual is not None and wanted.residual is not None:
            yield "sums", got.residual, wanted.residual
        if got.block_tensor is not None and wanted.block_tensor is not None:
            yield "outer scales", got.block_tensor.outer, wanted.block_tensor.outer
            yield "block scales", got.block_tensor.block_scales, wanted.block_tensor.block_scales
            yield "codes", got.block_tensor.packed, wanted.block_tensor.packed


LIBRARY = DeviceLibrary(Path(__file__).with_name("kernel.cu"), differences, rows_case(64, None))
"""The kernel of kernel.cu."""

"""saturation by the kernel of kernel.cu: the same counts as `reference.py`."""

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from tracefp4.formats.encoding import read_operand
from tracefp4.formats.order import ScaleRule
from tracefp4.formats.saturation import Saturation
from tracefp4.formats.scaling import outer_scale
from tracefp4.formats.scheme import Scheme
from tracefp4.formats.schemes import NVFP4_ROW_POW2
from tracefp4.formats.selection import select_block_scales
from tracefp4.ops.device import DeviceLibrary, Launch, aligned
from tracefp4.ops.kernels import check_values, first_difference, readable
from tracefp4.ops.rules import SchemeCase, case_of
from tracefp4.ops.saturation.reference import saturation_reference

_THREADS, _WARP = 256, 32
_MOST_BLOCKS = 1024
"""Thread blocks that a GPU holds at once, about; more blocks of a scheme take turns."""


class Case(NamedTuple):
    """What the kernel is specialised for."""

    values: SchemeCase
    """Scheme and dtype of x."""
    is_recorded: bool
    """Whether the scales came from somewhere else."""

    def __str__(self) -> str:
        return f"{self.values}, {'recorded' if self.is_recorded else 'own'} scales"


def saturation_on_device(
    x: Tensor, block_scales: Tensor, outer: Tensor, scheme: Scheme, is_recorded: bool, rows: Tensor | None
) -> Saturation:
    """Count in checked tensors; see `saturation`."""
    x = aligned(readable(x))
    num_blocks = block_scales.numel()
    num_thread_blocks = min(-(-num_blocks // _THREADS), _MOST_BLOCKS)
    num_warps = num_thread_blocks * _THREADS // _WARP
    counts = torch.empty((num_warps, 3), dtype=torch.int32, device=x.device)
    defines = case_of(x, scheme).defines | {
        "LOOKS_AT_ALL": int(is_recorded or scheme.scale_rule is ScaleRule.FLOOR),
        "IS_STATIC": int(scheme.outer == "static"),
    }
    launch = Launch("count_ends", (num_thread_blocks,), _THREADS, defines)
    operands = (
        x,
        block_scales.contiguous(),
        outer.contiguous(),
        None if rows is None else rows.contiguous(),
    )
    sizes = (num_blocks, block_scales.shape[-1], max(1, num_blocks // max(1, outer.numel())))
    LIBRARY.launch(launch, *operands, *sizes, counts, device=x.device)
    clipped, clamped, floored = counts.sum(0).unbind()
    return Saturation(values_clipped=clipped, blocks_clamped=clamped, blocks_floored=floored)


def differences(device: torch.device, case: Case) -> str | None:
    """Compare with the reference, for values and scales of every size; return what differs, or None."""
    return first_difference(_pairs(device, case))


def _pairs(device: torch.device, case: Case) -> Iterator[tuple[str, Tensor, Tensor]]:
    scheme = case.values.scheme
    x = check_values().to(device, case.values.dtype)
    exponent = 0 if scheme.outer == "static" else None
    operand = read_operand(x, scheme)
    outer = outer_scale(operand.amax, scheme, exponent)
    block_scales = select_block_scales(operand.magnitude, operand.amax, outer, scheme, operand.finite)
    rows = torch.arange(len(x), device=device) % 5 != 3
    for now in (x, x * 1.5) if case.is_recorded else (x,):
        for counted in (None, rows):
            operands = (now, block_scales, outer, scheme, case.is_recorded, counted)
            got, wanted = saturation_on_device(*operands), saturation_reference(*operands)
            for field in fields(wanted):
                yield field.name, getattr(got, field.name), getattr(wanted, field.name)


LIBRARY = DeviceLibrary(
    Path(__file__).with_name("kernel.cu"),
    differences,
    Case(SchemeCase(NVFP4_ROW_POW2, torch.bfloat16), is_recorded=False),
)
"""The kernel of kernel.cu."""

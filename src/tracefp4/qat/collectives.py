"""What ranks send each other in the middle of a forward pass, with the backward written down.

    merge_rows        forward: every row from the one rank that has it     backward: identity
    sum_gradients     forward: identity                                    backward: sum over ranks
    exchange_rows     forward: rows to the ranks that need them            backward: their gradients the way back
    gather_columns    forward: every rank's columns, joined                backward: sum over ranks of mine
    spread_columns    forward: given values of every rank's columns        backward: the same

Nothing here adds floating-point numbers in a forward pass: values arrive with the bits they were sent with, so what
is computed from them does not depend on the number of ranks. All ranks of a group must call in the same order. This
module never decides what is sent (`dispatch`, `context_parallel`) and never rounds.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

_WORD = {1: torch.uint8, 2: torch.int32, 4: torch.int32, 8: torch.int64}
"""Integers that carry the bits of a value; two bf16 values travel as one int32, which every backend can add."""


class _MergeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        merged = x.detach().clone(memory_format=torch.contiguous_format)
        # Added as integers: where all other ranks have zero bits the sum is the row itself, the sign of a zero too.
        dist.all_reduce(merged.view(_WORD[x.itemsize]), group=group)
        return merged

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _SumGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int], group: ProcessGroup) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _exchange(x.detach(), sent, received, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange(grads[0], ctx.received, ctx.sent, ctx.group), None, None, None


class _GatherColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        mine = x.detach().contiguous()
        parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, mine, group=group)
        return torch.cat(parts, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _sum_of_mine(grads[0], ctx.dim, ctx.group), None, None


class _SpreadColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, joined: Tensor, dim: int, group: ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return joined.view_as(joined)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _sum_of_mine(grads[0], ctx.dim, ctx.group), None, None, None


def _sum_of_mine(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Send every rank its part of x, and add what arrives, in the order of the ranks."""
    parts = torch.stack(x.chunk(dist.get_world_size(group), dim))
    arrived = torch.empty_like(parts)
    dist.all_to_all_single(arrived, parts, group=group)
    return arrived.sum(0)


def _exchange(x: Tensor, sent: list[int], received: list[int], group: ProcessGroup) -> Tensor:
    arrived = x.new_empty((sum(received), *x.shape[1:]))
    dist.all_to_all_single(arrived, x.contiguous(), received, sent, group=group)
    return arrived


def merge_rows(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return the rows of all ranks, bit for bit; each row is all zero bits on every rank but one.

    Args:
        x: float [N, M], the same shape on every rank; M even for 2-byte values.
        group: the ranks.

    Returns:
        A new tensor, equal on all ranks. The gradient passes unchanged: a rank's own rows keep theirs.
    """
    merged: Tensor = _MergeRows.apply(x, group)
    return merged


def sum_gradients(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return x; its gradient becomes the sum over the ranks, each of which knows a part of it."""
    same: Tensor = _SumGradients.apply(x, group)
    return same


def exchange_rows(x: Tensor, *, sent: list[int], received: list[int], group: ProcessGroup) -> Tensor:
    """Send consecutive rows to the ranks in order, and return what arrives, in the order of the ranks.

    Args:
        x: [sum(sent), ...]; no rows are fine.
        sent: rows for each rank.
        received: rows from each rank.
        group: the ranks.

    Returns:
        [sum(received), ...].
    """
    arrived: Tensor = _ExchangeRows.apply(x, sent, received, group)
    return arrived


def gather_columns(x: Tensor, *, dim: int, group: ProcessGroup) -> Tensor:
    """Return every rank's x along one dimension, in the order of the ranks.

    Args:
        x: the same shape and dtype (not bool) on every rank.
        dim: the dimension that is split.
        group: the ranks.

    Returns:
        Equal on all ranks; a rank's gradient is the sum of what all ranks have at its part.
    """
    joined: Tensor = _GatherColumns.apply(x, dim, group)
    return joined


def spread_columns(x: Tensor, joined: Tensor, *, dim: int, group: ProcessGroup) -> Tensor:
    """Return `joined`, which stands for every rank's x along one dimension, with the gradient of `gather_columns`.

    Args:
        x: this rank's part, differentiable, the same shape on every rank.
        joined: values of all parts in the order of the ranks, equal on all ranks, no gradient of their own.
        dim: the dimension that is split.
        group: the ranks.
    """
    spread: Tensor = _SpreadColumns.apply(x, joined.detach(), dim, group)
    return spread

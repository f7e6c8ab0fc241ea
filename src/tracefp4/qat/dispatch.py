"""How rows reach their experts and come back, where some experts may be on other ranks.

    send   rows as a site rounds them, by token [N, H] or by (token, slot) [N * k, I]  ->  rows sorted by expert
    back   rows sorted by expert  ->  [N * k, M], row t * k + j is slot j of token t

Rounding happens before `send` and after `back`, on the rank that has the token, so codes, records and counts are those
of an unsharded pass, and expert ids are global everywhere. Three ways: all experts here; tokens equal on all ranks,
each of which computes its experts' rows; tokens different on the ranks, rows travel. This module never rounds and never
multiplies.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tracefp4.qat.collectives import exchange_rows, merge_rows, sum_gradients


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertShard:
    """Which experts of a layer this rank holds, and how its tokens reach the others."""

    group: ProcessGroup
    """The ranks that hold the layer's experts between them, in the order of the experts."""
    rank: int
    """This rank in the group."""
    num_ranks: int
    """Ranks in the group."""
    num_experts: int
    """Experts of the layer, over all ranks; a multiple of num_ranks."""
    tokens_differ: bool
    """True: every rank has its own tokens (rows travel). False: all ranks have the same tokens."""

    @property
    def num_held(self) -> int:
        """Experts on each rank."""
        return self.num_experts // self.num_ranks


class Dispatch(Protocol):
    """One layer's way to its experts and back, for one batch."""

    group_sizes: Tensor
    """int64, rows of each expert that is here."""

    def send(self, x: Tensor) -> Tensor:
        """Return the rows for the experts that are here, sorted by expert."""

    def back(self, rows: Tensor) -> Tensor:
        """Return [N * k, M] in (token, slot) order from rows sorted by expert."""


def dispatch(ids: Tensor, *, num_experts: int, shard: ExpertShard | None) -> Dispatch:
    """Return the way to the experts for one batch.

    Args:
        ids: int64 [N, k], global expert ids.
        num_experts: experts here; not read with a shard.
        shard: where the experts are; None: all of them are here.
    """
    if shard is None:
        return HereDispatch(ids, num_experts)
    return ExchangedDispatch(ids, shard) if shard.tokens_differ else MergedDispatch(ids, shard)


class HereDispatch:
    """Every expert is on this rank."""

    def __init__(self, ids: Tensor, num_experts: int) -> None:
        sorted_ids, self.order = torch.sort(ids.reshape(-1), stable=True)
        self.top_k = ids.shape[1]
        self.group_sizes = _sizes(sorted_ids, num_experts)
        # The record's rows are token-major (token, slot); the GEMM's rows are sorted by expert.
        self.inverse = torch.empty_like(self.order)
        self.inverse[self.order] = torch.arange(self.order.numel(), device=ids.device)

    def rows_of(self, x: Tensor) -> Tensor:
        """Row of x behind every sorted row; x has one row per token or per (token, slot)."""
        return self.order if x.shape[0] == self.inverse.numel() else self.order // self.top_k

    def send(self, x: Tensor) -> Tensor:
        """Sort by expert."""
        return x.index_select(0, self.rows_of(x))

    def back(self, rows: Tensor) -> Tensor:
        """Sort by token and slot."""
        return rows.index_select(0, self.inverse)


def _sizes(sorted_ids: Tensor, num_experts: int) -> Tensor:
    """Rows of every expert, int64 [num_experts]; unlike `bincount` it does not make a GPU's host wait."""
    experts = torch.arange(num_experts, device=sorted_ids.device)
    ends = torch.searchsorted(sorted_ids, experts, right=True)
    return ends.diff(prepend=ends.new_zeros(1))


class MergedDispatch(HereDispatch):
    """All ranks have the same tokens: each computes the rows of its experts, and every row comes from its owner.

    A row of [N * k, M] is computed on one rank and sent as bits, so no sum over ranks enters the forward. It costs k
    times the bytes of adding up [N, M], which would depend on the number of ranks.
    """

    def __init__(self, ids: Tensor, shard: ExpertShard) -> None:
        super().__init__(ids, shard.num_experts)
        self.group = shard.group
        sizes = self.group_sizes.split(shard.num_held)
        first = sum(int(part.sum()) for part in sizes[: shard.rank])
        self.group_sizes = sizes[shard.rank]
        self.order = self.order[first : first + int(self.group_sizes.sum())]

    def send(self, x: Tensor) -> Tensor:
        """Sort the rows of this rank's experts; their gradients reach a token from every rank."""
        per_token = x.shape[0] != self.inverse.numel() or self.top_k == 1
        whole = sum_gradients(x, self.group) if per_token else x
        return whole.index_select(0, self.rows_of(x))

    def back(self, rows: Tensor) -> Tensor:
        """Put this rank's rows in their places and take the others from their owners."""
        places = rows.new_zeros(self.inverse.numel(), rows.shape[1]).index_copy(0, self.order, rows)
        return merge_rows(places, self.group)


class ExchangedDispatch(HereDispatch):
    """Ranks have different tokens: a row travels to its expert's rank and its result back."""

    def __init__(self, ids: Tensor, shard: ExpertShard) -> None:
        super().__init__(ids, shard.num_experts)
        self.group, num_held = shard.group, shard.num_held
        each = [num_held] * shard.num_ranks
        arriving = exchange_rows(self.group_sizes, sent=each, received=each, group=self.group)
        self._sent = self.group_sizes.view(shard.num_ranks, num_held).sum(1).tolist()
        self._received = arriving.view(shard.num_ranks, num_held).sum(1).tolist()
        # Rows arrive by rank and, within a rank, by expert; a stable sort keeps the ranks' order within an expert.
        experts = torch.arange(num_held, device=ids.device).repeat(shard.num_ranks)
        sorted_ids, self._arrival = torch.sort(experts.repeat_interleave(arriving), stable=True)
        self.group_sizes = _sizes(sorted_ids, num_held)
        self._departure = torch.empty_like(self._arrival)
        self._departure[self._arrival] = torch.arange(self._arrival.numel(), device=ids.device)

    def send(self, x: Tensor) -> Tensor:
        """Send every row to its expert's rank, and sort what arrives by expert."""
        mine = x.index_select(0, self.rows_of(x))
        arrived = exchange_rows(mine, sent=self._sent, received=self._received, group=self.group)
        return arrived.index_select(0, self._arrival)

    def back(self, rows: Tensor) -> Tensor:
        """Send every result to its token's rank, and sort by token and slot."""
        leaving = rows.index_select(0, self._departure)
        mine = exchange_rows(leaving, sent=self._received, received=self._sent, group=self.group)
        return mine.index_select(0, self.inverse)

"""One long sequence on several ranks: which columns of a batch a rank holds, and attention over the keys of all.

    contiguous   rank r of n holds the r-th of n equal parts of the columns
    zigzag       2n equal parts; rank r holds parts r and 2n - 1 - r, so that causal attention costs every rank the same

A SequenceShard is made from the whole batch's positions; it cuts every per-token tensor the same way, positions of a
ReplayBatch included, so records follow by themselves. Keys and values are rounded on the rank that has the token, under
its record, before they are exchanged: what crosses ranks are the bytes of the cache. A query then attends over all
columns in their order, under a causal mask made from the positions. This module never reads a record and never rounds.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from tracefp4.errors import ConfigError
from tracefp4.formats import BlockTensor, Scheme
from tracefp4.formats.packing import pack_codes
from tracefp4.ops.dequantize import dequantize
from tracefp4.ops.guided_quantize import Rounded
from tracefp4.qat.attention import SiteSettings
from tracefp4.qat.collectives import gather_columns, spread_columns
from tracefp4.qat.hybrid import DELTA

Layout = Literal["contiguous", "zigzag"]
"""How columns are dealt to ranks."""
LAYOUTS: tuple[Layout, ...] = ("contiguous", "zigzag")


def columns_of_ranks(num_columns: int, *, num_ranks: int, layout: Layout) -> Tensor:
    """Return the columns that every rank holds, int64 [num_ranks, num_columns / num_ranks], ascending in each row.

    Args:
        num_columns: columns of the batch, a multiple of num_ranks (contiguous) or of twice that (zigzag).
        num_ranks: ranks that share the sequence.
        layout: see above.

    Raises:
        ConfigError: an unknown layout, or columns that do not divide evenly.
    """
    if layout not in LAYOUTS:
        raise ConfigError(
            f"context parallelism knows the layouts {', '.join(LAYOUTS)}; got {layout!r}. Use one of them."
        )
    parts = num_ranks if layout == "contiguous" else 2 * num_ranks
    if num_columns % parts:
        wanted = -(-num_columns // parts) * parts
        raise ConfigError(
            f"{num_columns} columns do not divide into {parts} equal parts ({layout} over {num_ranks} ranks). "
            f"A multiple of {parts} is needed. Pad the batch to {wanted} columns, with position -1."
        )
    chunks = torch.arange(num_columns, device="cpu").view(parts, -1)
    if layout == "contiguous":
        return chunks
    return torch.cat([chunks[:num_ranks], chunks[num_ranks:].flip(0)], dim=1)


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class SequenceShard:
    """The columns of one batch that this rank holds, and where those of the others are."""

    positions: Tensor
    """int64 [B, T]: position of every token of the whole batch; -1 for padding."""
    columns: Tensor
    """int64 [T / ranks], this rank's columns, ascending."""
    order: Tensor
    """int64 [T]: where column t is when the parts of all ranks are joined."""
    group: ProcessGroup
    """The ranks that share the sequence."""

    def take(self, x: Tensor) -> Tensor:
        """Return this rank's columns of a per-token tensor [B, T, ...] of the whole batch."""
        return x.index_select(1, self.columns.to(x.device))

    def gather(self, x: Tensor, *, dim: int = 1) -> Tensor:
        """Return all columns, in their order, of a tensor whose dimension `dim` holds this rank's.

        Differentiable: a part's gradient is the sum of what all ranks have at its columns, so a loss that every rank
        computes from gathered values must be divided by the number of ranks.
        """
        return gather_columns(x, dim=dim, group=self.group).index_select(dim, self.order.to(x.device))

    def gather_rounded(self, x: Tensor, rounded: Rounded, scheme: Scheme) -> Tensor:
        """Return all columns of K or V [B, H, T / ranks, D] at their rounded values, exchanged as codes and scales.

        Args:
            x: this rank's part, which the gradient goes to (straight-through, summed over the ranks).
            rounded: its rounding, rows [B * T / ranks, H * D], with codes.
            scheme: static, so that one outer scale serves all ranks.
        """
        rows, num_heads, columns, head_dim = x.shape
        assert rounded.codes is not None and rounded.outer.dim() == 0
        bytes_of = (pack_codes(rounded.codes), rounded.block_scales)
        packed, block_scales = (
            gather_columns(part.view(rows, columns, -1), dim=1, group=self.group) for part in bytes_of
        )
        joined = BlockTensor(packed=packed, block_scales=block_scales, outer=rounded.outer, scheme=scheme)
        values = dequantize(joined, dtype=x.dtype).unflatten(-1, (num_heads, head_dim)).transpose(1, 2)
        return spread_columns(x, values, dim=2, group=self.group).index_select(2, self.order.to(x.device))

    def hidden_keys(self, device: torch.device) -> Tensor:
        """Return bool [B, 1, T / ranks, T], True where a query may not look: later positions and padding.

        The queries of padding see everything, so that their (unused) softmax is finite.
        """
        keys = self.positions.to(device)
        queries = self.take(keys)
        hidden = (keys[:, None, :] > queries[:, :, None]) | (keys < 0)[:, None, :]
        return (hidden & (queries >= 0)[:, :, None]).unsqueeze(1)


def split_sequence(
    positions: Tensor, *, group: ProcessGroup | None = None, layout: Layout = "zigzag"
) -> SequenceShard:
    """Split the columns of a batch over the ranks of a group.

    Args:
        positions: int64 [B, T], of the whole batch, equal on all ranks; -1 for padding, and within a row ascending.
        group: the ranks; None: all of them.
        layout: "zigzag" or "contiguous".

    Raises:
        ConfigError: an unknown layout; columns that do not divide evenly; several trajectories packed in a row.
    """
    following = positions[:, 1:], positions[:, :-1]
    is_restart = (following[0] >= 0) & (following[1] >= 0) & (following[0] != following[1] + 1)
    if bool(is_restart.any()):
        row, column = is_restart.nonzero()[0].tolist()
        raise ConfigError(
            "context parallelism needs one trajectory per row, positions that count up; got position "
            f"{int(positions[row, column + 1])} after {int(positions[row, column])} in row {row}. Give each trajectory "
            "a row of its own."
        )
    chosen = dist.group.WORLD if group is None else group
    assert chosen is not None, "torch.distributed is not initialized"
    every = columns_of_ranks(positions.shape[1], num_ranks=dist.get_world_size(chosen), layout=layout)
    order = torch.empty(positions.shape[1], dtype=torch.int64, device="cpu")
    order[every.reshape(-1)] = torch.arange(positions.shape[1], device="cpu")
    return SequenceShard(positions=positions, columns=every[dist.get_rank(chosen)], order=order, group=chosen)


@contextmanager
def context_parallel(model: nn.Module, shard: SequenceShard) -> Iterator[SequenceShard]:
    """Run passes over this rank's columns inside; forward and backward both belong here.

    Inside, give the model `shard.take` of input ids and position ids, and build the ReplayBatch from
    `shard.take(positions)`. The attention mask that the model makes is not read: the shard knows the whole batch.

    Raises:
        ConfigError: the model is not patched or has gated delta layers, or another split is in force.
    """
    if any(type(module).__name__ == DELTA for module in model.modules()):
        raise ConfigError(
            f"context_parallel cannot split sequences of {type(model).__name__}; got gated delta layers, whose states "
            "would have to travel from rank to rank. Models whose layers all attend are allowed. Give every sequence "
            "to one rank."
        )
    found = [m for m in model.modules() if isinstance(getattr(m, "tracefp4", None), SiteSettings)]
    before: list[SiteSettings] = [module.tracefp4 for module in found]  # type: ignore[misc]
    is_split = any(settings.sequence is not None for settings in before)
    if not found or is_split:
        raise ConfigError(
            f"context_parallel needs a patched model and one split at a time; got {len(found)} patched attention "
            f"modules, split already: {is_split}. Call patching.apply first, and leave the outer context."
        )
    try:
        for module, settings in zip(found, before, strict=True):
            module.tracefp4 = replace(settings, sequence=shard)  # type: ignore[assignment]
        yield shard
    finally:
        for module, settings in zip(found, before, strict=True):
            module.tracefp4 = settings  # type: ignore[assignment]

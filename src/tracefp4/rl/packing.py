"""Several samples in one row, for the model only: no padding is computed, and every result returns to its sample.

A packed row is the real tokens of a padded batch, one sample after another; each keeps its own positions, its own
record and its own causal attention, so codes and logits are those of the sample alone. Loss, metrics and log-probs
stay in the padded layout [B, T], whose entries are single numbers per token: labels, masks and denominators cannot
cross a border that they never see. This module knows no model and no loss.

Letters: B samples, T their padded length, N tokens in the packed row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tracefp4.errors import ConfigError
from tracefp4.ops.upload import upload
from tracefp4.rl.batching import Batch


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PackedRow:
    """The tokens of B samples in one row of N tokens, in the order of the batch."""

    input_ids: Tensor
    """int64 [1, N]."""
    positions: Tensor
    """int64 [1, N], index of the token within its sample: restarts at 0 with every sample."""
    record_index: Tensor
    """int64 [1, N], the sample, and so the record, that a token belongs to."""
    lengths: tuple[int, ...]
    """Tokens of each sample; they add up to N."""
    places: Tensor
    """int64 [N], where each token stands in the padded batch: b * T + t."""
    shape: tuple[int, int]
    """(B, T) of the padded batch."""

    def to(self, device: torch.device) -> PackedRow:
        """Return the row with its tensors on a device."""
        return replace(
            self,
            input_ids=upload(self.input_ids, device),
            positions=upload(self.positions, device),
            record_index=upload(self.record_index, device),
            places=upload(self.places, device),
        )

    def packed(self, values: Tensor) -> Tensor:
        """Take values [B, T] of the padded batch to the row: [1, N]."""
        return values.reshape(-1)[self.places][None]

    def unpacked(self, values: Tensor) -> Tensor:
        """Take values [1, N] of the row back to their samples: [B, T], 0 at padding; differentiable."""
        flat = values.new_zeros(self.shape[0] * self.shape[1])
        return flat.index_copy(0, self.places, values.reshape(-1)).view(self.shape)

    def labelled(self) -> Tensor:
        """Return bool [1, N]: True at tokens that another token of their sample precedes and predicts."""
        return self.positions > 0


def pack(batch: Batch) -> PackedRow:
    """Put the samples of a padded batch into one row, without their padding.

    Args:
        batch: padded on any side.

    Returns:
        The row, on the batch's device.
    """
    places = batch.attention_mask.reshape(-1).nonzero()[:, 0]
    rows, columns = batch.attention_mask.shape
    return PackedRow(
        input_ids=batch.input_ids.reshape(-1)[places][None],
        positions=batch.positions.reshape(-1)[places][None],
        record_index=torch.div(places, columns, rounding_mode="floor")[None],
        lengths=tuple(batch.attention_mask.sum(dim=-1).tolist()),
        places=places,
        shape=(rows, columns),
    )


def packed_micro_batches(lengths: Sequence[int], *, max_tokens: int) -> list[tuple[int, ...]]:
    """Split samples into micro-batches of at most `max_tokens` tokens in all: first fit, from long to short.

    First fit decreasing needs at most 11/9 of the fewest possible micro-batches, plus one.

    Args:
        lengths: tokens of each sample, >= 1.
        max_tokens: budget of one packed row.

    Returns:
        For each micro-batch the indices of its samples; every index exactly once; equal lengths keep their order.

    Raises:
        ConfigError: a sample longer than the budget.
    """
    batches: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        length = lengths[index]
        if length > max_tokens:
            raise ConfigError(
                f"packed_micro_batches cannot fit sample {index} of {length} tokens into max_tokens {max_tokens}. "
                "Raise the budget or truncate the sample."
            )
        chosen = next((place for place, left in enumerate(room) if left >= length), None)
        if chosen is None:
            batches.append([])
            room.append(max_tokens)
            chosen = len(room) - 1
        batches[chosen].append(index)
        room[chosen] -= length
    return [tuple(part) for part in batches]

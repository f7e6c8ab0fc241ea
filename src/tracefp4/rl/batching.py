"""Samples to padded tensors, micro-batches by token budget, and the log-prob of every token.

One alignment for everything per token: entry [b, t] belongs to the token *at* t. `loss_mask`,
`rollout_logprobs` and `token_logprobs` at t all speak about token t, whose probability came from the logits
at t - 1. Nothing is shifted by the caller, and the first token of a sample, which nothing predicts, has
log-prob 0 and is never trained. Rows are padded, one sample each; samples are not packed.

Positions count the tokens of the sample, cumsum(mask) - 1, and are -1 at padding, so a left-padded row gives
the model the same positions as the sample alone. Guidance is addressed by the same numbers.

Letters: B samples, T padded length, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tracefp4.errors import ConfigError
from tracefp4.ops.upload import upload
from tracefp4.rl.samples import TrainingSample

if TYPE_CHECKING:
    from tracefp4.guidance.record import Record


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """B samples padded to T tokens; `pad` makes it on the CPU."""

    input_ids: Tensor
    """int64 [B, T], prompt and completion; pad_id at padding."""
    attention_mask: Tensor
    """bool [B, T], True: a token of the sample, False: padding."""
    positions: Tensor
    """int64 [B, T], index of the token within its sample, 0-based; -1 at padding."""
    completion_mask: Tensor
    """bool [B, T], True: this entry's token belongs to the completion, whoever wrote it."""
    loss_mask: Tensor
    """bool [B, T], True: this entry's token was sampled by the policy and is trained."""
    rollout_logprobs: Tensor
    """float [B, T], log p of this entry's token when it was sampled; 0 where no policy sampled it."""
    weight_versions: Tensor
    """int64 [B, T], weight version this entry's token was sampled from; -1 where no policy sampled it."""
    advantages: Tensor
    """float [B], one for all tokens of the sample."""
    group_index: Tensor
    """int64 [B], the GRPO group of the sample."""
    records: tuple[Record | None, ...]
    """B guidance records. None: the sample has none."""

    @property
    def num_samples(self) -> int:
        """B."""
        return self.input_ids.shape[0]

    def to(self, device: torch.device) -> Batch:
        """Return the batch with its tensors on a device; the records stay where they are."""
        moved = {
            f.name: upload(value, device)
            for f in fields(self)
            if isinstance(value := getattr(self, f.name), Tensor)
        }
        return replace(self, **moved)  # type: ignore[arg-type]

    def model_positions(self) -> Tensor:
        """Return position ids for the model, int64 [B, T]: `positions` with 0 at padding."""
        return self.positions.clamp(min=0)


def pad(
    samples: Sequence[TrainingSample],
    *,
    pad_id: int,
    side: str = "right",
    left_extra: int = 0,
    dtype: torch.dtype = torch.float32,
    trains_truncated: bool = True,
) -> Batch:
    """Pad samples to one batch.

    Args:
        samples: B >= 1 samples, in the order of the rows.
        pad_id: token id at padding, >= 0; may equal a stop token, masks never look at ids.
        side: "right" puts padding after the sample, "left" before it.
        left_extra: further padding columns on the left of every row, >= 0. Results must not depend on it.
        dtype: of log-probs and advantages.
        trains_truncated: False takes the tokens of truncated samples out of the loss (overlong filtering).

    Returns:
        The batch, T = longest sample + left_extra.

    Raises:
        ConfigError: no samples, an unknown side, a negative pad id or left_extra.
    """
    _check_padding(len(samples), pad_id=pad_id, side=side, left_extra=left_extra)
    longest = max(sample.num_tokens for sample in samples)
    shape = (len(samples), left_extra + longest)
    input_ids = torch.full(shape, pad_id, dtype=torch.int64, device="cpu")
    attention_mask = torch.zeros(shape, dtype=torch.bool, device="cpu")
    completion_mask = torch.zeros(shape, dtype=torch.bool, device="cpu")
    loss_mask = torch.zeros(shape, dtype=torch.bool, device="cpu")
    rollout_logprobs = torch.zeros(shape, dtype=dtype, device="cpu")
    weight_versions = torch.full(shape, -1, dtype=torch.int64, device="cpu")
    for row, sample in enumerate(samples):
        first = left_extra + (longest - sample.num_tokens if side == "left" else 0)
        completion = slice(first + len(sample.prompt_ids), first + sample.num_tokens)
        input_ids[row, first : completion.stop] = torch.tensor(
            sample.input_ids, dtype=torch.int64, device="cpu"
        )
        attention_mask[row, first : completion.stop] = True
        completion_mask[row, completion] = True
        if trains_truncated or not sample.is_truncated:
            loss_mask[row, completion] = torch.tensor(sample.trained_flags, dtype=torch.bool, device="cpu")
        rollout_logprobs[row, completion] = torch.tensor(sample.rollout_logprobs, dtype=dtype, device="cpu")
        weight_versions[row, completion] = torch.tensor(
            sample.weight_versions, dtype=torch.int64, device="cpu"
        )
    return Batch(
        input_ids=input_ids,
        attention_mask=attention_mask,
        positions=token_positions(attention_mask),
        completion_mask=completion_mask,
        loss_mask=loss_mask,
        rollout_logprobs=rollout_logprobs,
        weight_versions=weight_versions,
        advantages=torch.tensor([sample.advantage for sample in samples], dtype=dtype, device="cpu"),
        group_index=torch.tensor([sample.group_index for sample in samples], dtype=torch.int64, device="cpu"),
        records=tuple(sample.record for sample in samples),
    )


def token_positions(attention_mask: Tensor) -> Tensor:
    """Number the tokens of each row: cumsum(mask) - 1, and -1 at padding.

    Args:
        attention_mask: bool [B, T], True at tokens.

    Returns:
        int64 [B, T].
    """
    counted = attention_mask.to(torch.int64).cumsum(dim=-1) - 1
    return torch.where(attention_mask, counted, -1)


def token_logprobs(
    logits: Tensor,
    *,
    input_ids: Tensor,
    temperature: float = 1.0,
    mask: Tensor | None = None,
    chunk_tokens: int = 1024,
) -> Tensor:
    """Compute log p(token t | tokens before t) under the temperature that it was sampled with.

        out[b, t] = log_softmax(logits[b, t - 1] / temperature)[input_ids[b, t]],   out[b, 0] = 0

    The temperature divides logits, never log-probs: log_softmax(z)/T is another number. Nucleus and top-k
    cuts of the sampler are not applied, so importance weights need rollouts at top-p 1 and top-k 0.

    Args:
        logits: [B, T, V] float; computed in float32 or, for float64, in float64, whatever the logits' dtype.
        input_ids: int64 [B, T], in [0, V) where `mask` is True.
        temperature: > 0.
        mask: bool [B, T], True where the log-prob is wanted; None wants all of t >= 1. Logits of other
            entries are not read, so NaN at padding reaches neither values nor gradients. On any device; if it is in
            host memory, nothing waits for the logits.
        chunk_tokens: tokens whose probabilities are held in memory at once, >= 1.

    Returns:
        [B, T] in the compute dtype, exactly 0 at t = 0 and where `mask` is False; differentiable in `logits`.

    Raises:
        ConfigError: temperature not above 0 (a greedy token has no importance weight), or shapes that differ.
    """
    if not temperature > 0.0:
        raise ConfigError(
            f"token_logprobs needs a temperature > 0; got {temperature}. Greedy tokens have no "
            "log-prob for importance weights: sample at temperature 1 for training."
        )
    if (
        logits.dim() != 3
        or input_ids.shape != logits.shape[:2]
        or (mask is not None and mask.shape != input_ids.shape)
    ):
        got = (tuple(logits.shape), tuple(input_ids.shape), None if mask is None else tuple(mask.shape))
        raise ConfigError(
            f"token_logprobs needs logits [B, T, V], input_ids and mask [B, T]; got {got}. "
            "Pass the whole padded batch, unshifted."
        )
    wanted = torch.ones(input_ids.shape, dtype=torch.bool, device="cpu") if mask is None else mask.clone()
    wanted[:, 0] = False
    places = upload(wanted.reshape(-1).nonzero()[:, 0], logits.device)
    predicting = logits.flatten(0, 1).index_select(
        0, places - 1
    )  # column 0 is not wanted: no row reaches into another
    labels = input_ids.reshape(-1).index_select(0, places)
    values = TokenLogprob.apply(predicting, labels, temperature, max(1, chunk_tokens))
    flat = torch.zeros(input_ids.numel(), dtype=values.dtype, device=logits.device)
    return flat.index_copy(0, places, values).view(input_ids.shape)


class TokenLogprob(torch.autograd.Function):
    """log_softmax(logits / temperature)[label], chunked; keeps only the logits, not the probabilities.

    Forward: y_n = z_n[label_n] - logsumexp(z_n), z = logits / temperature. Backward: dy_n/dlogits_n =
    (onehot(label_n) - softmax(z_n)) / temperature, recomputed chunk by chunk.
    """

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        logits: Tensor,
        labels: Tensor,
        temperature: float,
        chunk_tokens: int,
    ) -> Tensor:
        """Return [N] for logits [N, V] and labels [N]."""
        dtype = torch.promote_types(logits.dtype, torch.float32)
        out = torch.empty(labels.shape, dtype=dtype, device=logits.device)
        for start in range(0, labels.shape[0], chunk_tokens):
            part = slice(start, start + chunk_tokens)
            logprobs = torch.log_softmax(logits[part].to(dtype) / temperature, dim=-1)
            out[part] = logprobs.gather(-1, labels[part, None])[:, 0]
        ctx.save_for_backward(logits, labels)
        ctx.chunked = (temperature, chunk_tokens, dtype)  # type: ignore[attr-defined]
        return out

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        """Return the gradient of the logits, [N, V]."""
        logits, labels = ctx.saved_tensors  # type: ignore[attr-defined]
        temperature, step, dtype = ctx.chunked  # type: ignore[attr-defined]
        grad = torch.empty_like(logits)
        for start in range(0, labels.shape[0], step):
            part = slice(start, start + step)
            outer = grads[0][part, None] / temperature
            inner = torch.softmax(logits[part].to(dtype) / temperature, dim=-1).mul_(-outer)
            grad[part] = inner.scatter_add_(-1, labels[part, None], outer).to(logits.dtype)
        return grad, None, None, None


def micro_batches(
    lengths: Sequence[int], *, max_tokens: int, max_samples: int | None = None, sorts_by_length: bool = False
) -> list[tuple[int, ...]]:
    """Split samples into micro-batches whose padded size stays within a budget.

    Samples are taken in order (or from long to short), and a micro-batch is closed when
    (longest length in it) * (number of samples) would exceed max_tokens.

    Args:
        lengths: tokens of each sample, >= 1.
        max_tokens: budget of one padded micro-batch.
        max_samples: largest number of samples in one. None: no limit.
        sorts_by_length: True sorts by length first, which pads less; equal lengths keep their order.

    Returns:
        For each micro-batch the indices of its samples: the order map, every index exactly once.

    Raises:
        ConfigError: a sample longer than the budget, or max_samples below 1.
    """
    if max_samples is not None and max_samples < 1:
        raise ConfigError(f"micro_batches needs max_samples >= 1; got {max_samples}. Use None for no limit.")
    order = list(range(len(lengths)))
    if sorts_by_length:
        order.sort(key=lambda index: -lengths[index])
    batches: list[tuple[int, ...]] = []
    current: list[int] = []
    longest = 0
    for index in order:
        if lengths[index] > max_tokens:
            raise ConfigError(
                f"micro_batches cannot fit sample {index} of {lengths[index]} tokens into max_tokens "
                f"{max_tokens}. Raise the budget or truncate the sample."
            )
        grown = max(longest, lengths[index])
        if current and (grown * (len(current) + 1) > max_tokens or len(current) == max_samples):
            batches.append(tuple(current))
            current, grown = [], lengths[index]
        current.append(index)
        longest = grown
    return [*batches, tuple(current)] if current else batches


def _check_padding(num_samples: int, *, pad_id: int, side: str, left_extra: int) -> None:
    if num_samples == 0:
        raise ConfigError(
            "pad needs at least one sample; got 0. Skip the step when every sample was dropped."
        )
    if side not in ("left", "right"):
        raise ConfigError(f"pad needs side 'left' or 'right'; got {side!r}. Use 'right' for training.")
    if pad_id < 0 or left_extra < 0:
        raise ConfigError(
            f"pad needs pad_id >= 0 and left_extra >= 0; got {pad_id} and {left_extra}. "
            "Use the tokenizer's pad token, or its end token if it has none."
        )

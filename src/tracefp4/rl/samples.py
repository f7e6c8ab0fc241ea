"""One finished completion as the trainer sees it, and the one place where its parallel arrays are held to one
length.

A completion of several turns holds tokens that the policy never sampled (a tool's answer). They are inputs like
any other and have guidance rows; `trained_mask` keeps them out of loss, metrics and version lags.

Token ids are the ids that the engine sampled; text is never tokenized again on the way to training, because
decoding and encoding is not the identity on ids. For a prompt of P tokens and a completion of C tokens the
record has P+C-1 rows: row p describes the computation on input token p, and the last sampled token was never
fed through the model, so it has none. After a cut to M < P+C tokens every remaining token has a row, M in all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from tracefp4.errors import ConfigError, RecordError

if TYPE_CHECKING:
    from tracefp4.guidance.record import Record
    from tracefp4.store import Handle

# log p of a sampled token is <= 0; engines that sum in float32 or bf16 may return a rounding error above it
MAX_LOGPROB = 1e-2

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingSample:
    """A prompt, its completion, and everything about them that has one entry per completion token."""

    trajectory: str
    """Unique key of this completion; equal to the record's trajectory when there is a record."""
    prompt_ids: tuple[int, ...]
    """P >= 1 token ids. Not trained."""
    token_ids: tuple[int, ...]
    """C >= 0 sampled token ids, a sampled stop token included. 0 only after a cut inside the prompt."""
    rollout_logprobs: tuple[float, ...]
    """C natural log-probs, entry i of token_ids[i] under the distribution it was sampled from. Finite; at untrained
    tokens, which nobody sampled, whatever is given (None too) becomes 0 and is never read."""
    weight_versions: tuple[int, ...]
    """C weight versions, entry i: the version whose logits token i was sampled from; -1 at untrained tokens."""
    trained_mask: tuple[bool, ...] | None = None
    """C flags, True: the policy sampled this token and it is trained; False: the environment put it there (a tool's
    answer, the next turn's prompt). None: all are trained."""
    reward: float = 0.0
    """Score of the completion, finite."""
    advantage: float = 0.0
    """Advantage of every token of the completion, finite; 0 before `group_advantages` ran and in skipped
    groups."""
    group_index: int = 0
    """Which prompt of the step this belongs to; equal numbers are one GRPO group."""
    finish_reason: str = "stop"
    """`stop` (a stop token was sampled), `length` (a limit was reached) or `abort`."""
    is_truncated: bool = False
    """True: the completion was cut, by the engine's limit or by `truncate`, and has no natural end."""
    record: Record | None = None
    """Guidance of positions 0 .. P+C-2. None: it is in a store (see `handle`), or there is none, and every position is
    rounded to nearest."""
    handle: Handle | None = None
    """Where a store keeps the record; the trainer reads what it needs. None: in no store."""

    def __post_init__(self) -> None:
        for name in ("prompt_ids", "token_ids", "rollout_logprobs", "weight_versions"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if self.trained_mask is not None:
            object.__setattr__(self, "trained_mask", tuple(bool(flag) for flag in self.trained_mask))
        _check_lengths(self)
        self._clear_untrained()
        check_sample(self)

    @property
    def num_tokens(self) -> int:
        """P + C, prompt and completion together."""
        return len(self.prompt_ids) + len(self.token_ids)

    @property
    def input_ids(self) -> tuple[int, ...]:
        """Prompt and completion as one sequence of P + C ids."""
        return self.prompt_ids + self.token_ids

    @property
    def trained_flags(self) -> tuple[bool, ...]:
        """C flags, `trained_mask` with None written out."""
        return (True,) * len(self.token_ids) if self.trained_mask is None else self.trained_mask

    @property
    def num_trained(self) -> int:
        """Completion tokens that the policy sampled."""
        return sum(self.trained_flags)

    def version_lag(self, current_version: int) -> int:
        """Return how many versions the oldest trained token is behind; 0 without any. Tokens of partial rollouts only
        get newer, so that this is the age of the sample's oldest position."""
        sampled = zip(self.weight_versions, self.trained_flags, strict=True)
        return max((current_version - version for version, is_trained in sampled if is_trained), default=0)

    def truncate(self, max_tokens: int) -> TrainingSample:
        """Cut prompt and completion to max_tokens tokens in all: ids, log-probs, versions, flags and record
        together.

        For callers that hold samples to a limit of their own; the loop never cuts, its limit is the engine's.

        Args:
            max_tokens: >= 1. A limit inside the prompt leaves an empty completion, so no token is trained.

        Returns:
            This sample when it is short enough, else a shorter one with is_truncated True and finish_reason
            "length".

        Raises:
            ConfigError: max_tokens below 1.
        """
        if max_tokens < 1:
            raise ConfigError(f"truncate needs max_tokens >= 1; got {max_tokens}. Drop the sample instead.")
        if self.num_tokens <= max_tokens:
            return self
        num_completion = max(0, max_tokens - len(self.prompt_ids))
        record = self.record
        if record is not None and record.length > max_tokens:
            record = record.truncate(max_tokens)
        return replace(
            self,
            prompt_ids=self.prompt_ids[:max_tokens],
            token_ids=self.token_ids[:num_completion],
            rollout_logprobs=self.rollout_logprobs[:num_completion],
            weight_versions=self.weight_versions[:num_completion],
            trained_mask=None if self.trained_mask is None else self.trained_mask[:num_completion],
            record=record,
            finish_reason="length",
            is_truncated=True,
        )

    def _clear_untrained(self) -> None:
        """Give log-probs and versions at untrained tokens the values that nothing reads, 0 and -1."""
        if self.trained_mask is None or all(self.trained_mask):
            return
        for name, unread in (("rollout_logprobs", 0.0), ("weight_versions", -1)):
            values = zip(getattr(self, name), self.trained_mask, strict=True)
            cleared = tuple(value if is_trained else unread for value, is_trained in values)
            object.__setattr__(self, name, cleared)


def spread(items: Sequence[T], *, count: int) -> list[T]:
    """Choose up to `count` of the items, evenly over all of them: the places floor(i * n / count) of n."""
    chosen = min(count, len(items))
    return [items[i * len(items) // chosen] for i in range(chosen)]


def check_sample(sample: TrainingSample) -> None:
    """Hold every per-token array of a sample to the length of its tokens.

    Raises:
        RecordError: log-probs, versions, flags or record rows that do not fit the tokens; a log-prob of a trained
            token that is None, NaN, infinite or above 0; a reward or advantage that is not finite; a record of
            another trajectory.
        ConfigError: an empty prompt or an unknown finish reason.
    """
    name = sample.trajectory
    if not sample.prompt_ids:
        raise ConfigError(
            f"TrainingSample {name!r} has an empty prompt; allowed is at least one token. "
            "Start prompts with the tokenizer's first token."
        )
    if sample.finish_reason not in ("stop", "length", "abort"):
        raise ConfigError(
            f"TrainingSample {name!r} has finish_reason {sample.finish_reason!r}; allowed is 'stop', "
            "'length' or 'abort'. Map the engine's reason to one of them."
        )
    _check_lengths(sample)
    check_logprobs(sample.rollout_logprobs, sample=name)
    for field, value in (("reward", sample.reward), ("advantage", sample.advantage)):
        if not math.isfinite(value):
            raise RecordError(
                f"TrainingSample {name!r} has {field} {value}; allowed is a finite number. "
                "Score it with 0 or drop it."
            )
    if sample.record is not None:
        _check_record(sample.record, sample=sample)


def _check_lengths(sample: TrainingSample) -> None:
    num_completion = len(sample.token_ids)
    for field in ("rollout_logprobs", "weight_versions", "trained_mask"):
        values = getattr(sample, field)
        if values is not None and len(values) != num_completion:
            raise RecordError(
                f"TrainingSample {sample.trajectory!r} has {len(values)} {field} for {num_completion} completion "
                "tokens; allowed is one for each. Cut every array with TrainingSample.truncate."
            )


def check_logprobs(logprobs: Sequence[float | None], *, sample: str) -> None:
    """Refuse a log-prob that no softmax of finite logits can give.

    log_softmax of finite logits is finite and not above 0, so None, NaN, an infinity or a positive number (a
    sentinel) means a broken engine; dropping such positions would report a train/rollout difference of 0.

    Args:
        logprobs: natural log-probs of the sampled tokens.
        sample: name for the error.

    Raises:
        RecordError: with the sample, the position and the value.
    """
    for position, value in enumerate(logprobs):
        if value is None or not math.isfinite(value) or value > MAX_LOGPROB:
            raise RecordError(
                f"Sample {sample!r} has rollout log-prob {value} at completion position {position}; "
                "allowed is a finite number <= 0. Check the engine's logits, or drop and count it."
            )


def _check_record(record: Record, *, sample: TrainingSample) -> None:
    name, num_tokens = sample.trajectory, sample.num_tokens
    # a cut sample keeps a row for its last token; an uncut one has none, its last token was never an input
    allowed = (num_tokens - 1, num_tokens) if sample.is_truncated else (num_tokens - 1,)
    if record.start != 0 or record.length not in allowed:
        raise RecordError(
            f"TrainingSample {name!r} of {num_tokens} tokens has a record of rows {record.start} .. "
            f"{record.start + record.length - 1}; allowed is 0 .. {allowed[-1] - 1}. "
            "Record the prompt too, and cut with TrainingSample.truncate."
        )
    if record.identity.trajectory != name:
        raise RecordError(
            f"TrainingSample {name!r} has the record of trajectory {record.identity.trajectory!r}; "
            "allowed is its own. Look the record up by the sample's key."
        )

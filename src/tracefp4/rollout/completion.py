"""What goes into an engine and what comes out of it, and the protocol that any engine can satisfy."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from torch import Tensor

from tracefp4.errors import ConfigError
from tracefp4.formats.tensor import BlockTensor
from tracefp4.guidance.record import Record

FinishReason = Literal["stop", "length", "abort"]
DecodePass = Literal["graph", "eager"]
"""How the decoding sequences of a step were computed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How completions are drawn; one value for all samples of a request."""

    max_tokens: int
    """Most tokens of a completion, the stop token included; at least 1."""
    temperature: float = 1.0
    """Divides the logits; 0 is greedy."""
    top_p: float = 1.0
    """Keep the most probable tokens up to this cumulative probability; in (0, 1], 1 keeps all."""
    top_k: int = 0
    """Keep this many most probable tokens; 0 keeps all."""
    n: int = 1
    """Completions per prompt; the prompt is computed once for all of them."""
    seed: int = 0
    """With prompt index, sample index and position it determines every draw, whatever else is in the
    batch."""
    stop_token_ids: tuple[int, ...] = ()
    """Any of these ends a completion and is its last token."""
    stop: tuple[str, ...] = ()
    """Texts that end a completion as soon as its own text contains one; the engine needs `decode` for them."""
    keeps_stop: bool = False
    """What happens to the tokens of the stop text. False: the completion ends with the first token that completes
    everything before the stop text (a token that holds the end of the one and the beginning of the other stays
    whole). True: it ends with the token that completes the stop text."""

    def __post_init__(self) -> None:
        for name, is_valid, allowed in (
            ("max_tokens", self.max_tokens >= 1, "1 or more"),
            ("temperature", self.temperature >= 0, "0 (greedy) or more"),
            ("top_p", 0 < self.top_p <= 1, "above 0, at most 1"),
            ("top_k", self.top_k >= 0, "0 (off) or more"),
            ("n", self.n >= 1, "1 or more"),
            ("stop", isinstance(self.stop, tuple) and all(self.stop), "a tuple of texts, none empty"),
        ):
            if not is_valid:
                raise ConfigError(
                    f"SamplingParams.{name} cannot be {getattr(self, name)!r}. Allowed: {allowed}. Correct "
                    "the value."
                )

    @property
    def is_greedy(self) -> bool:
        """True if the most probable token is always taken; such log-probs are no sampling density."""
        return self.temperature == 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """One sampled continuation of one prompt; of several turns if the engine extended it.

    Every list [C] has one entry for every token of `token_ids`. In a completion of several turns some of these tokens
    were not sampled but given by the environment: `sampled_mask` tells which.
    """

    prompt_index: int
    """Index of the prompt in its generate call."""
    sample_index: int
    """0 .. n-1 among the samples of that prompt."""
    prompt_ids: list[int]
    """P token ids."""
    token_ids: list[int]
    """C token ids after the prompt, a stop token included: sampled, or given by the environment between turns."""
    logprobs: list[float]
    """[C], natural log of the probability with which each token was drawn: after temperature, top-k and
    top-p. Greedy: the log-probability at temperature 1, which is not a sampling density and must not enter
    an importance weight. NaN for tokens that nobody sampled."""
    finish_reason: FinishReason
    """`stop`: a stop token or stop text was sampled; `length`: max_tokens reached; `abort`: the request was
    aborted, and `extend` may go on from here."""
    weight_versions: list[int]
    """[C], version of the weights whose logits each token was drawn from; -1 for tokens that nobody sampled."""
    record: Record | None
    """Rounding decisions for the P + C - 1 positions that were inputs (abort: those computed), all turns in one; None
    means that the engine does not record, or that nothing was computed."""
    sampled_mask: list[bool] | None = None
    """[C], True where the token was sampled, False where the environment gave it; None: all were sampled."""

    @property
    def sampled_flags(self) -> list[bool]:
        """[C], `sampled_mask` with None written out."""
        return [True] * len(self.token_ids) if self.sampled_mask is None else list(self.sampled_mask)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineStats:
    """What an engine has done since it was made."""

    tokens_generated: int = 0
    """Sampled tokens."""
    prefill_tokens: int = 0
    """Prompt tokens computed; a prompt shared by n samples counts once."""
    num_steps: int = 0
    """Steps: a forward pass each, or two where decoding is captured and prompts are computed beside it."""
    seconds: float = 0.0
    """Wall time inside steps."""
    peak_pages: int = 0
    """Most KV pages in use at once."""
    preemptions: int = 0
    """Times a running sequence had to wait for pages."""
    pages_swapped_out: int = 0
    """KV pages moved to host memory; they come back with the same bytes."""
    pages_lost: int = 0
    """KV pages given up because host memory was full."""
    positions_restored: int = 0
    """Positions whose K and V came back from recorded codes, bit for bit."""
    states_swapped_out: int = 0
    """States of layers without pages moved to host memory; they come back with the same bytes."""
    positions_recomputed: int = 0
    """Positions that were computed again: their pages were lost and no record holds their codes, an update asked for
    it, or a trajectory goes on in a model whose states are in no record."""
    positions_recoded: int = 0
    """Recomputed positions whose recorded K or V came out as other codes or scales."""
    graph_passes: int = 0
    """Decode passes that ran as a captured graph."""
    eager_passes: int = 0
    """Decode passes that ran launch by launch; prompts always do, and are not counted here."""
    ahead_passes: int = 0
    """Captured passes that were started before the tokens of the pass before them were booked."""
    dropped_passes: int = 0
    """Passes started ahead whose draws were dropped, because something changed before they were taken; a model with
    states drops none, as they have moved on."""
    why_eager: str = ""
    """Why this engine captures no decode passes; empty if it does."""
    record_waits: int = 0
    """Times that a pass waited because what earlier ones recorded was still on its way to the log."""
    prefix_hits: int = 0
    """Pages that a request found in the prefix cache."""
    prefix_tokens: int = 0
    """Given tokens that were neither computed nor restored because of that."""

    def after_step(
        self,
        *,
        prefill_tokens: int,
        tokens_generated: int,
        decode_pass: DecodePass | None,
        is_ahead: bool,
        seconds: float,
    ) -> "EngineStats":
        """Return the counters after one more step; `is_ahead`: it has started the next pass."""
        return replace(
            self,
            tokens_generated=self.tokens_generated + tokens_generated,
            prefill_tokens=self.prefill_tokens + prefill_tokens,
            num_steps=self.num_steps + 1,
            graph_passes=self.graph_passes + (decode_pass == "graph"),
            eager_passes=self.eager_passes + (decode_pass == "eager"),
            ahead_passes=self.ahead_passes + is_ahead,
            seconds=self.seconds + seconds,
        )


class Engine(Protocol):
    """What the trainer needs of an engine; adapters of foreign engines satisfy it too."""

    @property
    def weight_version(self) -> int:
        """Version of the weights in use."""

    @property
    def stats(self) -> EngineStats:
        """Counters since the engine was made."""

    def generate(self, prompts: list[list[int]], params: SamplingParams) -> list[list[Completion]]:
        """Complete every prompt n times; the outer list follows the prompts, the inner one the sample
        index."""

    def update_weights(self, state: Mapping[str, Tensor | BlockTensor], *, version: int) -> None:
        """Replace all weights; `version` must be larger than the current one."""


class ExtendingEngine(Engine, Protocol):
    """An engine whose completions can go on: several turns with an environment, or a rollout in parts.

    A trajectory is a Completion. Give it back with the tokens that the environment adds, and it returns longer: one
    completion from the first prompt on, with one record for all of its positions.
    """

    def extend(
        self, completions: list[Completion], added: list[list[int]], params: SamplingParams
    ) -> list[Completion]:
        """Append `added[i]` to trajectory i and sample on; the results come in the order given.

        Args:
            completions: of this engine or of one with the same plan; aborted ones too.
            added: tokens of the environment (a tool's answer, the next turn's prompt); may be empty.
            params: for the new tokens; `n` must be 1, `max_tokens` counts the new tokens.

        Returns:
            The whole trajectories: the old `prompt_ids`; `token_ids` with old, added and new tokens.
        """

    def suspend(self) -> list[Completion]:
        """End everything that is unfinished, and hand it over for `extend`: the rest of a rollout in parts."""

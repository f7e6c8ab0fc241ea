"""One completion in the making: its tokens, how far it is computed, its pages, and where its decisions were
logged."""

from __future__ import annotations

from dataclasses import dataclass, field

from tracefp4.guidance.record import Record
from tracefp4.kvcache.tables import PageTable
from tracefp4.rollout.completion import Completion, FinishReason, SamplingParams
from tracefp4.rollout.noise import noise_key


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Request:
    """One prompt with n samples."""

    request_id: int
    """Counts up within an engine; older requests have smaller ids."""
    prompt_index: int
    """Index that the caller knows the prompt by; part of the noise."""
    prompt_ids: list[int]
    """P token ids, P at least 1."""
    params: SamplingParams
    """How to draw."""
    forced: tuple[tuple[int, ...], ...] | None = None
    """Tokens to take in place of drawn ones, one tuple per sample (teacher forcing); None draws."""


@dataclass(kw_only=True, eq=False, slots=True)
class Sequence:
    """One sample of a request. Sample 0 computes the prompt; the others fork from it when its last token is
    done."""

    request: Request
    """Prompt and parameters."""
    sample_index: int
    """0 .. n-1."""
    table: PageTable
    """Pages of the computed positions; resident while the sequence runs."""
    ids: list[int]
    """Prompt and sampled tokens."""
    num_computed: int = 0
    """Positions whose K and V are in pages; at least one token is always left to compute."""
    logprobs: list[float] = field(default_factory=list)
    """Of the sampled tokens."""
    log_rows: list[int] = field(default_factory=list)
    """Row of the step log for every computed position; empty when the engine does not record."""
    versions: list[int] = field(default_factory=list)
    """Weight version that computed each position."""
    finish_reason: FinishReason | None = None
    """None while unfinished."""
    noise_key: int = field(init=False)
    """Identity of this sequence's noise stream."""

    def __post_init__(self) -> None:
        request = self.request
        self.noise_key = noise_key(
            seed=request.params.seed, prompt_index=request.prompt_index, sample_index=self.sample_index
        )

    @property
    def order(self) -> tuple[int, int]:
        """Age: smaller is older and goes first."""
        return self.request.request_id, self.sample_index

    @property
    def num_prompt(self) -> int:
        """P."""
        return len(self.request.prompt_ids)

    @property
    def forced_token(self) -> int | None:
        """Token that must come next; None when it is drawn."""
        forced = self.request.forced
        return None if forced is None else forced[self.sample_index][len(self.logprobs)]

    @property
    def is_decoding(self) -> bool:
        """True once the whole prompt is computed."""
        return self.num_computed >= self.num_prompt

    @property
    def num_uncomputed(self) -> int:
        """Tokens that the next passes must compute before anything can be drawn; 1 while decoding."""
        return len(self.ids) - self.num_computed

    def fork(self, sample_index: int) -> Sequence:
        """Return a sibling with the same computed prompt, sharing its pages; it is not running."""
        return Sequence(
            request=self.request,
            sample_index=sample_index,
            table=self.table.fork(),
            ids=list(self.request.prompt_ids),
            num_computed=self.num_computed,
            log_rows=list(self.log_rows),
            versions=list(self.versions),
        )

    def advance(self, count: int, *, version: int, first_log_row: int | None) -> None:
        """Note that the next `count` tokens were computed, and which log rows describe them."""
        self.num_computed += count
        self.versions += [version] * count
        if first_log_row is not None:
            self.log_rows += range(first_log_row, first_log_row + count)

    def accept(self, token_id: int, logprob: float) -> None:
        """Append a sampled token and decide whether it was the last one."""
        self.ids.append(token_id)
        self.logprobs.append(logprob)
        forced = self.request.forced
        if forced is not None and len(self.logprobs) < len(forced[self.sample_index]):
            return
        if token_id in self.request.params.stop_token_ids:
            self.finish_reason = "stop"
        elif forced is not None or len(self.logprobs) == self.request.params.max_tokens:
            self.finish_reason = "length"

    def completion(self, record: Record | None) -> Completion:
        """What the caller gets, once finished."""
        assert self.finish_reason is not None
        return Completion(
            prompt_index=self.request.prompt_index,
            sample_index=self.sample_index,
            prompt_ids=list(self.request.prompt_ids),
            token_ids=self.ids[self.num_prompt :],
            logprobs=self.logprobs,
            finish_reason=self.finish_reason,
            weight_versions=self.versions[self.num_prompt - 1 :],  # token i is drawn from position P - 1 + i
            record=record,
        )


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Work:
    """What one pass computes of one sequence: its tokens start .. start+count-1."""

    sequence: Sequence
    """Resident, with writable pages for these positions."""
    start: int
    """First position; the sequence's num_computed."""
    count: int
    """Tokens; 1 while decoding, a chunk of the prompt before."""

    @property
    def draws(self) -> bool:
        """True if the last token of this work is the sequence's last: its logits are sampled from."""
        return self.start + self.count == len(self.sequence.ids)


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Draw:
    """One token to sample."""

    sequence: Sequence
    """Who receives the token."""
    logit_row: int
    """Row of the pass's logits; n samples of one prompt share the row of its last token."""

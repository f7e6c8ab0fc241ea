"""One completion in the making: its tokens, how far it is computed, its pages, and where its decisions were
logged.

Two counts tell how far it is. `num_computed` positions have gone through the model: their decisions are known and the
tokens drawn from them stand. `num_cached` of them have K and V in pages. The counts differ only while pages that were
given up, or made under other weights, are computed again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from itertools import takewhile

from tracefp4.guidance.record import Record
from tracefp4.kvcache.states import State
from tracefp4.kvcache.tables import PageTable
from tracefp4.rollout.completion import Completion, FinishReason, SamplingParams
from tracefp4.rollout.history import History
from tracefp4.rollout.noise import noise_key


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Request:
    """One prompt with n samples, or one trajectory that goes on."""

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
    earlier: Completion | None = None
    """The trajectory that goes on; None starts one."""
    added: tuple[int, ...] = ()
    """Tokens that the environment puts between it and the next sampled token."""
    recomputes: bool = False
    """True: K and V of the earlier positions are computed again under the weights in use; False: they come back from
    the record where it can give them."""

    @property
    def given(self) -> list[int]:
        """All tokens that are there before the first one is drawn."""
        earlier = [] if self.earlier is None else self.earlier.token_ids
        return [*self.prompt_ids, *earlier, *self.added]

    @property
    def first_sample(self) -> int:
        """Sample index of the sequence that computes the given tokens."""
        return 0 if self.earlier is None else self.earlier.sample_index


@dataclass(kw_only=True, eq=False, slots=True)
class Rebuild:
    """Positions whose K and V are being computed again."""

    begin: int
    """First of them; they end before the sequence's num_computed."""
    replaces: bool
    """True: the new K and V are those of the record from now on (other weights, on purpose). False: they should be
    the recorded ones, and later tokens are not followed if they are not."""
    is_of_state: bool = False
    """True: the pages hold the recorded K and V already, which nobody writes; the state alone is made again."""
    rows: list[int] = field(default_factory=list)
    """Log rows of the positions begin, begin + 1, ... done so far; empty when the engine does not record."""


@dataclass(kw_only=True, eq=False, slots=True)
class Sequence:
    """One sample of a request. The first sample computes the prompt; the others fork from it when its last token is
    done."""

    request: Request
    """Prompt and parameters."""
    sample_index: int
    """0 .. n-1."""
    table: PageTable
    """Pages of the cached positions; resident while the sequence runs."""
    ids: list[int]
    """Given and sampled tokens."""
    num_given: int
    """Tokens of `ids` that were given; the rest was sampled."""
    state: State | None = None
    """What layers without pages remember of the cached positions; None before it runs, or if all layers have pages."""
    num_computed: int = 0
    """Positions that have been computed; at least one token is always left to compute."""
    num_cached: int = 0
    """Positions whose K and V are in pages, at most num_computed."""
    logprobs: list[float] = field(default_factory=list)
    """Of the sampled tokens."""
    versions: list[int] = field(default_factory=list)
    """Weight version that computed each position."""
    history: History = field(default_factory=History)
    """Where each position's decisions are; empty when the engine does not record."""
    follows: bool = True
    """False while K or V in the pages differ from the record: what is computed from them is recorded as not valid."""
    num_unfollowed: int = 0
    """First positions whose decisions do not belong to the tokens drawn from them: an earlier turn without a record."""
    num_carried: int = 0
    """Last given tokens that were sampled in this very turn, before it was cut off: a stop text may begin in them."""
    rebuild: Rebuild | None = None
    """What is being computed again; None if nothing is."""
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
    def turn_ids(self) -> list[int]:
        """Tokens sampled since the prompt, or since the environment's last one; what stop texts are looked for in."""
        return self.ids[self.num_given - self.num_carried :]

    @property
    def state_slot(self) -> int:
        """Where its state is while it runs; negative if it has none."""
        return -1 if self.state is None or self.state.slot is None else self.state.slot

    @property
    def num_stored(self) -> int:
        """Positions whose K and V are in pages; more than num_cached while a state alone is made again."""
        is_of_state = self.rebuild is not None and self.rebuild.is_of_state
        return self.num_computed if is_of_state else self.num_cached

    @property
    def forced_token(self) -> int | None:
        """Token that must come next; None when it is drawn."""
        forced = self.request.forced
        return None if forced is None else forced[self.sample_index][len(self.logprobs)]

    @property
    def is_decoding(self) -> bool:
        """True if the newest sampled token is all that is left to compute."""
        return self.num_cached >= max(self.num_computed, self.num_given)

    @property
    def num_uncached(self) -> int:
        """Tokens that the next passes must compute before anything can be drawn; 1 while decoding."""
        return len(self.ids) - self.num_cached

    def fork(self, sample_index: int, *, state: State | None) -> Sequence:
        """Return a sibling with the same computed prompt, sharing its pages; it is not running."""
        return Sequence(
            request=self.request,
            sample_index=sample_index,
            table=self.table.fork(),
            ids=self.ids[: self.num_given],
            num_given=self.num_given,
            state=state,
            num_computed=self.num_computed,
            num_cached=self.num_cached,
            versions=list(self.versions),
            history=self.history.fork(),
            follows=self.follows,
        )

    def go_on(self, earlier: Completion) -> None:
        """Take over what an earlier turn has computed.

        Positions that led to a sampled token and have no record are computed again and not followed.
        """
        num_prompt = len(earlier.prompt_ids)
        if earlier.record is not None:
            # after a cut the last token may have a row; it is computed again, because something must be
            record = earlier.record.truncate(num_prompt + len(earlier.token_ids) - 1)
            self.history.past = [record]
            self.versions = record.versions().tolist()
            self.num_computed = record.length
        sampled = [i for i, is_sampled in enumerate(earlier.sampled_flags) if is_sampled]
        num_read = num_prompt + sampled[-1] if sampled else 0
        self.num_unfollowed = num_read if num_read > self.num_computed else 0
        if earlier.finish_reason == "abort" and not self.request.added:
            backwards = reversed(earlier.sampled_flags)
            self.num_carried = sum(1 for _ in takewhile(bool, backwards))

    def recompute(self, count: int, *, first_log_row: int | None) -> None:
        """Note that K and V of the next `count` positions were computed again, and which log rows describe them."""
        assert self.rebuild is not None
        self.num_cached += count
        if first_log_row is not None:
            self.rebuild.rows += range(first_log_row, first_log_row + count)

    def advance(self, count: int, *, version: int, first_log_row: int | None) -> None:
        """Note that the next `count` tokens were computed, and which log rows describe them."""
        start = self.num_computed
        self.num_cached += count
        self.num_computed += count
        self.versions += [version] * count
        if first_log_row is not None:
            valid = [self.follows and p >= self.num_unfollowed for p in range(start, start + count)]
            self.history.append(range(first_log_row, first_log_row + count), valid=valid)

    def advance_one(self, version: int, *, log_row: int | None) -> None:
        """`advance` of a decoding sequence by its newest token; called for every row of every step."""
        self.num_cached += 1
        self.num_computed += 1
        self.versions.append(version)
        if log_row is not None:
            self.history.rows.append(log_row)
            self.history.valid.append(self.follows)

    def lose(self, position: int) -> None:
        """Note that the positions from `position` on have no K and V in pages any more and must be computed again."""
        if position >= self.num_cached:
            return
        self.num_cached = position
        if self.rebuild is None:
            self.rebuild = Rebuild(begin=position, replaces=False)
        self.rebuild.begin = min(self.rebuild.begin, position)
        del self.rebuild.rows[position - self.rebuild.begin :]

    def accept(self, token_id: int, logprob: float) -> None:
        """Append a sampled token and decide whether it was the last one."""
        self.ids.append(token_id)
        self.logprobs.append(logprob)
        params, forced = self.request.params, self.request.forced
        if forced is not None and len(self.logprobs) < len(forced[self.sample_index]):
            return
        if token_id in params.stop_token_ids:
            self.finish_reason = "stop"
        elif forced is not None or len(self.logprobs) == params.max_tokens:
            self.finish_reason = "length"

    def stop_after(self, num_kept: int) -> None:
        """End here and keep the first `num_kept` tokens of `turn_ids`; what belonged to the others goes with them."""
        del self.ids[self.num_given - self.num_carried + num_kept :]
        del self.logprobs[max(0, num_kept - self.num_carried) :]
        self.finish_reason = "stop"

    def completion(self, record: Record | None) -> Completion:
        """What the caller gets, once finished; `record` covers the positions computed, or those of the kept tokens."""
        assert self.finish_reason is not None
        request, earlier = self.request, self.request.earlier
        num_drawn = len(self.logprobs)
        begin = self.num_given - 1  # token i of this request is drawn from position begin + i
        logprobs, versions, sampled_mask = list(self.logprobs), self.versions[begin : begin + num_drawn], None
        if earlier is not None:
            num_added, kept = len(request.added), len(self.ids) - len(request.prompt_ids)
            logprobs = [*earlier.logprobs, *[math.nan] * num_added, *logprobs][:kept]
            versions = [*earlier.weight_versions, *[-1] * num_added, *versions][:kept]
            sampled_mask = [*earlier.sampled_flags, *[False] * num_added, *[True] * num_drawn][:kept]
        return Completion(
            prompt_index=request.prompt_index,
            sample_index=self.sample_index,
            prompt_ids=list(request.prompt_ids),
            token_ids=self.ids[len(request.prompt_ids) :],
            logprobs=logprobs,
            finish_reason=self.finish_reason,
            weight_versions=versions,
            record=record,
            sampled_mask=sampled_mask,
        )


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Work:
    """What one pass computes of one sequence: its tokens start .. start+count-1."""

    sequence: Sequence
    """Resident, with writable pages for these positions."""
    start: int
    """First position; the sequence's num_cached."""
    count: int
    """Tokens; 1 while decoding, a chunk of the prompt or of what is computed again before."""

    @property
    def token_ids(self) -> Tokens[int]:
        """The tokens."""
        return self.sequence.ids[self.start : self.start + self.count]

    @property
    def stores_from(self) -> int:
        """First position whose K and V are written; those before it are in the pages."""
        return max(self.start, self.sequence.num_stored)

    @property
    def num_given_computed(self) -> int:
        """Given tokens that this work computes for the first time."""
        sequence = self.sequence
        end = min(self.start + self.count, sequence.num_given)
        return max(0, end - max(self.start, sequence.num_computed))

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

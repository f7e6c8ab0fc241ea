"""The local engine: continuous batching over FP4 pages, one small step at a time, recording what it rounds.

`step` is the whole story: choose what runs, run it, draw tokens, note what finished. Requests join and leave between
any two steps, and so do weights. The calls that run a list of prompts to the end are in `calls.py`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import KW_ONLY, InitVar, dataclass, replace
from typing import Any

from torch import Tensor

from tracefp4.errors import ConfigError
from tracefp4.formats.tensor import BlockTensor
from tracefp4.rollout.calls import CompletingCalls
from tracefp4.rollout.completion import Completion, EngineStats, SamplingParams
from tracefp4.rollout.jobs import Job, check_fits, check_job, extending_job
from tracefp4.rollout.options import EngineOptions
from tracefp4.rollout.parts import build_parts
from tracefp4.rollout.releasing import release_pool
from tracefp4.rollout.runner import Computed
from tracefp4.rollout.sequence import Sequence


@dataclass(eq=False)
class LocalEngine(EngineOptions, CompletingCalls):
    """Generates completions of a Qwen3-MoE, OLMoE or Qwen3.5-MoE model, in this process.

    Raises: ConfigError for a config, state dict, plan or size that does not fit.
    """

    config: InitVar[Any]
    """transformers config of the model (`models.build_engine_model`)."""
    state: InitVar[Mapping[str, Tensor | BlockTensor]]
    """State dict of transformers' model of that config, names as in memory; copied. Matrices may be BlockTensors."""
    _: KW_ONLY
    weight_version: int = 0
    """Version of the weights in use; changes only through `update_weights`."""

    def __post_init__(self, config: Any, state: Mapping[str, Tensor | BlockTensor]) -> None:
        self.check_limits()
        parts = build_parts(self, config, state, weight_version=self.weight_version)
        self.pool, self.num_pages = parts.pool, parts.pool.shape.num_pages
        self._model, self._runner, self._graphs = parts.model, parts.runner, parts.graphs
        self._allocator, self._residence, self._prefixes = parts.allocator, parts.residence, parts.prefixes
        self._scheduler, self._ledger, self._recorder = parts.scheduler, parts.ledger, parts.recorder
        if self._graphs is not None and self.captures_at_start:
            self._graphs.capture_all()
        self._max_length = parts.max_length
        self._num_requests = 0
        self._is_paused = False
        self._ahead: Computed | None = None
        self._settled: list[Sequence] = []  # that finished between two steps
        self._stats = EngineStats(why_eager=parts.why_eager)

    @property
    def stats(self) -> EngineStats:
        """Counters since the engine was made."""
        return replace(
            self._stats,
            preemptions=self._scheduler.num_preemptions,
            record_waits=0 if self._recorder is None else self._recorder.ring.num_waits,
            **self._residence.counts(),
        )

    @property
    def has_work(self) -> bool:
        """True while any request is unfinished, or has finished between two steps and `step` has not said so."""
        return self._scheduler.has_work or bool(self._unsaid)

    def submit(self, prompt: list[int], params: SamplingParams, *, prompt_index: int = 0) -> int:
        """Queue one prompt; it runs from the next step on. Returns its request id.

        A request that was aborted and is submitted again under the same prompt index and seed draws the same tokens.

        Raises: ConfigError for a prompt that is empty, has unknown ids, or can never fit.
        """
        return self._submit(Job(prompt, params), prompt_index=prompt_index)

    def resubmit(
        self, completion: Completion, added: list[int], params: SamplingParams, *, recompute: bool = False
    ) -> int:
        """Queue one trajectory that goes on, as `extend` does. Returns its request id."""
        return self._submit(extending_job(completion, added, params, recomputes=recompute), prompt_index=0)

    def _submit(self, job: Job, *, prompt_index: int) -> int:
        self._check(job)
        request = job.request(self._num_requests, prompt_index=prompt_index)
        self._scheduler.add(request)
        self._num_requests += 1
        return request.request_id

    def step(self) -> list[Sequence]:
        """Run one pass; returns the sequences that finished in it (`take_finished` gives their completions).

        Where the next pass is the same rows alone, it starts before the tokens of this one are known: it takes them on
        the device. A row whose token ends it is then computed once more, and nobody looks at that.

        Raises: ConfigError while the engine is paused.
        """
        if self._is_paused:
            raise ConfigError(
                "The engine is paused; got step. Nothing runs between pause and resume. Call resume first."
            )
        started = time.perf_counter()
        said, self._settled = self._unsaid, []
        if said and not self._scheduler.has_work:
            return said
        self.pool.make_again()
        try:
            computed = self._ahead or self._runner.run(self._scheduler.schedule())
            return said + self._book(computed, started, goes_on=True)
        except BaseException:
            if self.pool.states is not None:  # some may have moved on without their sequences
                self._drop_ahead()
                self._scheduler.flush()
            raise

    @property
    def _unsaid(self) -> list[Sequence]:
        """Sequences that finished between two steps, unless they have been taken."""
        return [sequence for sequence in self._settled if sequence in self._ledger.finished]

    def _book(self, computed: Computed, started: float, *, goes_on: bool) -> list[Sequence]:
        """Take what a pass has drawn, and start the next one where `goes_on` and it may be started already."""
        self._ahead = None
        # the device computes meanwhile
        draws = self._scheduler.advance(computed, version=self.weight_version)
        try:
            if goes_on and self._may_run_ahead and self._scheduler.place(computed):
                self._ahead = self._runner.follow()
        finally:
            drawn = self._runner.draw(computed, draws)
            num_drawn = drawn.num_wanted
            finished = self._scheduler.accept(drawn, ended=self._ledger.finished)
        self._stats = self._stats.after_step(
            prefill_tokens=computed.num_given,
            tokens_generated=num_drawn,
            decode_pass=computed.decode_pass,
            is_ahead=self._ahead is not None,
            seconds=time.perf_counter() - started,
        )
        if self._ahead is None:  # a pass under way names rows of the log
            self._ledger.seal_if_long()
        elif not self._scheduler.rows.sequences:
            self._drop_ahead()  # all of its rows have ended
        return finished

    def abort(self, request_id: int) -> None:
        """End a request now; its samples finish with reason `abort` and the records of what was computed.

        An unknown or finished request is left alone: it may have finished in the step before.
        """
        self._settle()
        self._ledger.finished += self._scheduler.abort(request_id)

    def pause(self) -> None:
        """Stop in place: unfinished sequences wait with their pages, which may move to host memory."""
        self._settle()
        self._scheduler.pause()
        self._is_paused = True

    def resume(self) -> None:
        """Run again after `pause`."""
        self._is_paused = False

    def release_pool(self) -> None:
        """Give the memory of the pages back until the next step, which makes it again (`releasing.release_pool`)."""
        self._settle()
        release_pool(self.pool, self._allocator, scheduler=self._scheduler, graphs=self._graphs)

    def update_weights(
        self,
        state: Mapping[str, Tensor | BlockTensor],
        *,
        version: int,
        recompute: bool = False,
        keep_prefixes: bool = False,
    ) -> None:
        """Replace all weights in place and quantize the experts, once; between any two steps, paused or not.

        Unfinished sequences go on, and each position keeps the version that computed it.

        Args:
            state: as at construction; names and shapes must be exactly the model's.
            version: larger than the current one.
            recompute: compute K and V of every unfinished sequence again under the new weights before it goes on. The
                record's K and V are then the new ones, which later tokens read; its expert inputs and routing stay
                those of the passes that tokens were drawn from. False: K and V stay.
            keep_prefixes: leave the prefix cache as it is; positions in it keep their versions. False: empty it.

        Raises: ConfigError for a version that does not increase, or a state dict that does not fit; nothing
            changed then.
        """
        if version <= self.weight_version:
            raise ConfigError(
                f"Weight versions only increase; got version {version} after {self.weight_version}. Allowed "
                f"is {self.weight_version + 1} or more. Count versions in one place, the trainer."
            )
        self._settle()
        self._model.weights.load(state)
        self.weight_version = version
        if self._prefixes is not None and not keep_prefixes:
            self._prefixes.clear(weight_version=version)
        if recompute:
            self._scheduler.flush()

    @property
    def _may_run_ahead(self) -> bool:
        return self._runner.captures and not self._ledger.is_long

    def _settle(self) -> None:
        """Drop a pass started ahead, before what it reads is changed; the next step computes its positions again.
        States have moved on with it, so that with these it counts."""
        if self._ahead is not None and self.pool.states is not None:
            self._settled += self._book(self._ahead, time.perf_counter(), goes_on=False)
        else:
            self._drop_ahead()

    def _drop_ahead(self) -> None:
        if self._ahead is not None:
            self._ahead.wait()
            self._ahead = None
            self._stats = replace(self._stats, dropped_passes=self._stats.dropped_passes + 1)

    def _check(self, job: Job) -> None:
        check_job(job, vocab_size=self._model.sizes.vocab_size, can_decode=self.decode is not None)
        check_fits(job, self.pool.shape, max_length=self._max_length)
        if job.earlier is not None and job.earlier.record is not None and self._recorder is not None:
            num_tokens = len(job.prompt_ids) + len(job.earlier.token_ids)
            self._recorder.check_earlier(job.earlier.record, num_tokens=num_tokens)

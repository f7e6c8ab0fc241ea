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
from tracefp4.formats.arithmetic import Arithmetic
from tracefp4.formats.precision import LayerPrecision, scheme_digest
from tracefp4.formats.tensor import BlockTensor
from tracefp4.guidance.record import Site
from tracefp4.kvcache import CacheShape, KVPool, PageAllocator
from tracefp4.models.qwen3_moe import Qwen3MoeEngineModel
from tracefp4.rollout.calls import CompletingCalls
from tracefp4.rollout.completion import Completion, EngineStats, SamplingParams
from tracefp4.rollout.jobs import Job, check_job, extending_job
from tracefp4.rollout.ledger import Ledger
from tracefp4.rollout.prefixes import build_prefixes
from tracefp4.rollout.recorder import build_recorder
from tracefp4.rollout.residence import build_residence
from tracefp4.rollout.runner import Runner
from tracefp4.rollout.sampler import sample
from tracefp4.rollout.scheduler import Scheduler
from tracefp4.rollout.sequence import Sequence
from tracefp4.rollout.stopping import Decode


@dataclass(eq=False)
class LocalEngine(CompletingCalls):
    """Generates completions of a Qwen3-MoE model, in this process.

    Raises: ConfigError for a config, state dict, plan or size that does not fit.
    """

    config: InitVar[Any]
    """transformers Qwen3MoeConfig."""
    state: InitVar[Mapping[str, Tensor | BlockTensor]]
    """State dict of transformers' Qwen3MoeForCausalLM, names as in memory; copied. Matrices may be BlockTensors."""
    _: KW_ONLY
    precision: tuple[LayerPrecision, ...]
    """One entry per decoder layer."""
    arithmetic: Arithmetic
    """Compute dtype and rounding points."""
    plan_digest: str
    """Digest of the plan that `precision` and `records` come from; part of every record."""
    num_pages: int
    """KV pages; may be fewer than all sequences at full length need."""
    max_batch: int
    """Most sequences that run at once."""
    max_tokens_per_step: int
    """Most tokens of one pass; longer prompts are computed in chunks. At least max_batch."""
    page_size: int = 16
    """Positions per page."""
    records: bool | tuple[Site, ...] = True
    """Sites to record, beside the routing of every layer; True: x, k and v wherever they are quantized;
    False: nothing."""
    prefix_cache: bool = False
    """Keep full pages of finished sequences for requests that begin with the same tokens. Off: a training loop flushes
    it with every update and shares the prompts of a group anyway, and kept pages and records take memory."""
    max_swapped_pages: int | None = None
    """Most KV pages in host memory; pages beyond come back from recorded codes or are computed again. None: no
    limit."""
    max_log_rows: int = 1 << 18
    """Positions that the running log may hold before it is turned into records."""
    decode: Decode | None = None
    """Token ids to text, needed for stop texts alone."""
    weight_version: int = 0
    """Version of the weights in use; changes only through `update_weights`."""

    def __post_init__(self, config: Any, state: Mapping[str, Tensor | BlockTensor]) -> None:
        self._model = Qwen3MoeEngineModel(config, state, precision=self.precision, arithmetic=self.arithmetic)
        sizes = self._model.sizes
        shape = CacheShape(
            num_kv_heads=sizes.num_kv_heads,
            head_dim=sizes.head_dim,
            num_pages=self.num_pages,
            page_size=self.page_size,
        )
        self.pool = KVPool(
            shape, precision=self.precision, arithmetic=self.arithmetic, device=self._model.device
        )
        self._allocator = PageAllocator(
            self.num_pages, save=self.pool.save, load=self.pool.load, max_saved=self.max_swapped_pages
        )
        self._recorder = build_recorder(
            self.records, sizes=sizes, precision=self.precision, plan_digest=self.plan_digest
        )
        rules = (self.plan_digest, scheme_digest(self.precision))
        self._prefixes = build_prefixes(
            self.prefix_cache, self._allocator, shape=shape, rules=rules, weight_version=self.weight_version
        )
        self._runner = Runner(self._model, self.pool, self._recorder)
        self._residence = build_residence(
            self._allocator, pool=self.pool, recorder=self._recorder, prefixes=self._prefixes
        )
        self._scheduler = Scheduler(
            self._residence,
            max_batch=self.max_batch,
            max_tokens_per_step=self.max_tokens_per_step,
            decode=self.decode,
        )
        self._ledger = Ledger(
            self._scheduler,
            recorder=self._recorder,
            prefixes=self._prefixes,
            max_log_rows=self.max_log_rows,
        )
        self._num_requests = 0
        self._is_paused = False
        self._stats = EngineStats()

    @property
    def stats(self) -> EngineStats:
        """Counters since the engine was made."""
        return replace(
            self._stats,
            preemptions=self._scheduler.num_preemptions,
            **self._residence.counts(),
        )

    @property
    def has_work(self) -> bool:
        """True while any request is unfinished."""
        return self._scheduler.has_work

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

        Raises: ConfigError while the engine is paused.
        """
        if self._is_paused:
            raise ConfigError(
                "The engine is paused; got step. Nothing runs between pause and resume. Call resume first."
            )
        started = time.perf_counter()
        works = self._scheduler.schedule()
        num_prefill = sum(work.num_given_computed for work in works)
        logits, log_row = self._runner.run(works)
        draws = self._scheduler.advance(works, version=self.weight_version, first_log_row=log_row)
        finished = self._scheduler.accept(draws, *sample(logits, draws), ended=self._ledger.finished)
        self._ledger.seal_if_long()
        self._stats = self._stats.after_step(
            prefill_tokens=num_prefill, tokens_generated=len(draws), seconds=time.perf_counter() - started
        )
        return finished

    def take_finished(self) -> list[Completion]:
        """Hand over every finished completion, oldest request first, and forget them."""
        ids = {sequence.request.request_id for sequence in self._ledger.finished}
        return [completion for _, completion in self._ledger.take(ids)]

    def abort(self, request_id: int) -> None:
        """End a request now; its samples finish with reason `abort` and the records of what was computed.

        An unknown or finished request is left alone: it may have finished in the step before.
        """
        self._ledger.finished += self._scheduler.abort(request_id)

    def suspend(self) -> list[Completion]:
        """Abort every unfinished request and hand its samples over, finished ones too; `extend` goes on with those
        whose reason is `abort`."""
        ids = self._scheduler.request_ids
        for request_id in ids:
            self.abort(request_id)
        return [completion for _, completion in self._ledger.take(ids)]

    def pause(self) -> None:
        """Stop in place: unfinished sequences wait with their pages, which may move to host memory."""
        self._scheduler.pause()
        self._is_paused = True

    def resume(self) -> None:
        """Run again after `pause`."""
        self._is_paused = False

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
            keep_prefixes: leave the prefix cache as it is; positions found there keep their older versions. False:
                it is emptied.

        Raises: ConfigError for a version that does not increase, or a state dict that does not fit; nothing
            changed then.
        """
        if version <= self.weight_version:
            raise ConfigError(
                f"Weight versions only increase; got version {version} after {self.weight_version}. Allowed "
                f"is {self.weight_version + 1} or more. Count versions in one place, the trainer."
            )
        self._model.weights.load(state)
        self.weight_version = version
        if self._prefixes is not None and not keep_prefixes:
            self._prefixes.clear(weight_version=version)
        if recompute:
            self._scheduler.flush()

    def _check(self, job: Job) -> None:
        check_job(job, vocab_size=self._model.sizes.vocab_size, can_decode=self.decode is not None)
        if job.earlier is not None and job.earlier.record is not None and self._recorder is not None:
            num_tokens = len(job.prompt_ids) + len(job.earlier.token_ids)
            self._recorder.check_earlier(job.earlier.record, num_tokens=num_tokens)

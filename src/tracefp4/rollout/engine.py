"""The local engine: continuous batching over FP4 pages, one small step at a time, recording what it rounds.

`step` is the whole story: choose what runs, run it, draw tokens, hand back what finished. Requests join and
leave between any two steps. `generate` submits a list of prompts and steps until all are done.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, InitVar, dataclass, replace
from itertools import chain
from typing import Any

from torch import Tensor

from tracefp4.errors import ConfigError
from tracefp4.formats.arithmetic import Arithmetic
from tracefp4.formats.precision import LayerPrecision
from tracefp4.guidance.record import Record, Site
from tracefp4.kvcache import CacheShape, KVPool, PageAllocator, PageTable
from tracefp4.models.qwen3_moe import Qwen3MoeEngineModel
from tracefp4.rollout.completion import Completion, EngineStats, SamplingParams
from tracefp4.rollout.jobs import Job, check_tokens, forced_jobs
from tracefp4.rollout.recorder import build_recorder
from tracefp4.rollout.runner import Runner
from tracefp4.rollout.sampler import sample
from tracefp4.rollout.scheduler import Scheduler
from tracefp4.rollout.sequence import Sequence


@dataclass(eq=False)
class LocalEngine:
    """Generates completions of a Qwen3-MoE model, in this process.

    Raises: ConfigError for a config, state dict, plan or size that does not fit.
    """

    config: InitVar[Any]
    """transformers Qwen3MoeConfig."""
    state: InitVar[Mapping[str, Tensor]]
    """State dict of transformers' Qwen3MoeForCausalLM, names as in memory; copied."""
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
    weight_version: int = 0
    """Version of the weights in use; changes only through `update_weights`."""

    def __post_init__(self, config: Any, state: Mapping[str, Tensor]) -> None:
        self._model = Qwen3MoeEngineModel(config, state, precision=self.precision, arithmetic=self.arithmetic)
        sizes = self._model.sizes
        shape = CacheShape(
            num_kv_heads=sizes.num_kv_heads,
            head_dim=sizes.head_dim,
            num_pages=self.num_pages,
            page_size=self.page_size,
        )
        self.pool = KVPool(shape, precision=self.precision, arithmetic=self.arithmetic)
        self._allocator = PageAllocator(self.num_pages, save=self.pool.save, load=self.pool.load)
        self._recorder = build_recorder(
            self.records, sizes=sizes, precision=self.precision, plan_digest=self.plan_digest
        )
        self._runner = Runner(self._model, self.pool, self._recorder)
        self._scheduler = self._new_scheduler()
        self._finished: list[Sequence] = []
        self._num_requests = 0
        self._stats = EngineStats()

    @property
    def stats(self) -> EngineStats:
        """Counters since the engine was made."""
        return replace(
            self._stats,
            peak_pages=self._allocator.peak_pages,
            preemptions=self._scheduler.num_preemptions,
            pages_swapped_out=self._allocator.num_swapped_out,
        )

    @property
    def has_work(self) -> bool:
        """True while any request is unfinished."""
        return self._scheduler.has_work

    def generate(self, prompts: list[list[int]], params: SamplingParams) -> list[list[Completion]]:
        """Complete every prompt n times.

        Args:
            prompts: token ids; none may be empty. An empty list gives an empty list.
            params: for all of them.

        Returns:
            [len(prompts)][n], in the order of prompts and sample indices.

        Raises: ConfigError for a prompt that is empty, has unknown ids, or can never fit; then nothing was
            queued.
        """
        return self._run([Job(prompt, params) for prompt in prompts])

    def force(
        self, prompts: list[list[int]], completions: list[list[list[int]]], *, temperature: float = 1.0
    ) -> list[list[Completion]]:
        """Decode given tokens instead of drawing them (teacher forcing): this engine's log-probs and records
        of somebody else's completions.

        Args:
            prompts: token ids.
            completions: for each prompt its completions, every one with at least one token.
            temperature: above 0, the one that the tokens were sampled with.

        Returns:
            As `generate`; a completion's log-probs are those that this engine gives to the forced tokens.

        Raises: ConfigError for a prompt without completions, an empty completion, or unknown ids.
        """
        for tokens in chain.from_iterable(completions):
            self._check_prompt(tokens)
        return self._run(forced_jobs(prompts, completions=completions, temperature=temperature))

    def _run(self, jobs: list[Job]) -> list[list[Completion]]:
        for job in jobs:
            self._check_prompt(job.prompt_ids)
        ids: list[int] = []
        try:
            ids += (self._submit(job, prompt_index=i) for i, job in enumerate(jobs))
            while self.has_work:
                self.step()
        except BaseException:
            self._drop(ids)
            raise
        by_request: dict[int, list[Completion]] = {request_id: [] for request_id in ids}
        for request_id, completion in self._complete(ids):
            by_request[request_id].append(completion)
        return [sorted(found, key=lambda c: c.sample_index) for found in by_request.values()]

    def submit(self, prompt: list[int], params: SamplingParams, *, prompt_index: int = 0) -> int:
        """Queue one prompt; it runs from the next step on. Returns its request id.

        Raises: ConfigError for a prompt that is empty, has unknown ids, or can never fit.
        """
        return self._submit(Job(prompt, params), prompt_index=prompt_index)

    def _submit(self, job: Job, *, prompt_index: int) -> int:
        self._check_prompt(job.prompt_ids)
        request = job.request(self._num_requests, prompt_index=prompt_index)
        self._scheduler.add(request)
        self._num_requests += 1
        return request.request_id

    def step(self) -> list[Sequence]:
        """Run one pass; returns the sequences that finished in it (`take_finished` gives their
        completions)."""
        started = time.perf_counter()
        works = self._scheduler.schedule()
        logits, log_row = self._runner.run(works)
        draws = self._scheduler.advance(works, version=self.weight_version, first_log_row=log_row)
        finished = self._scheduler.accept(draws, *sample(logits, draws))
        self._finished += finished
        num_prefill = sum(w.count for w in works if w.start < w.sequence.num_prompt)
        self._stats = self._stats.after_step(
            prefill_tokens=num_prefill, tokens_generated=len(draws), seconds=time.perf_counter() - started
        )
        return finished

    def take_finished(self) -> list[Completion]:
        """Hand over every finished completion, oldest request first, and forget them."""
        return [
            completion for _, completion in self._complete({s.request.request_id for s in self._finished})
        ]

    def abort(self, request_id: int) -> None:
        """End a request now; its samples finish with reason `abort` and the records of what was computed.

        An unknown or finished request is left alone: it may have finished in the step before.
        """
        self._finished += self._scheduler.abort(request_id)

    def update_weights(self, state: Mapping[str, Tensor], *, version: int) -> None:
        """Replace all weights in place and quantize the experts, once.

        Running sequences go on: their K and V stay, and each position keeps the version that computed it.

        Args:
            state: as at construction; names and shapes must be exactly the model's.
            version: larger than the current one.

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

    def _complete(self, request_ids: Iterable[int]) -> list[tuple[int, Completion]]:
        """Turn the finished sequences of some requests into completions, with their request ids."""
        wanted = set(request_ids)
        taken = sorted((s for s in self._finished if s.request.request_id in wanted), key=lambda s: s.order)
        self._finished = [s for s in self._finished if s.request.request_id not in wanted]
        records: list[Record | None] = [None] * len(taken)
        if self._recorder is not None:
            records = self._recorder.build(taken)
            if not self._finished and not self.has_work:
                self._recorder.forget()
        return [
            (sequence.request.request_id, sequence.completion(record))
            for sequence, record in zip(taken, records, strict=True)
        ]

    def _drop(self, request_ids: Iterable[int]) -> None:
        """Forget requests entirely, finished parts too; after an error in the middle of a pass."""
        for request_id in request_ids:
            self._scheduler.abort(request_id)
        self._finished = [s for s in self._finished if s.request.request_id not in set(request_ids)]
        if self._recorder is not None and not self._finished and not self.has_work:
            self._recorder.forget()

    def _check_prompt(self, prompt: list[int]) -> None:
        check_tokens(prompt, vocab_size=self._model.sizes.vocab_size)

    def _new_scheduler(self) -> Scheduler:
        return Scheduler(
            self._allocator,
            new_table=lambda: PageTable(
                self._allocator, page_size=self.page_size, copy=self.pool.copy, clear=self.pool.clear
            ),
            page_size=self.page_size,
            max_batch=self.max_batch,
            max_tokens_per_step=self.max_tokens_per_step,
        )

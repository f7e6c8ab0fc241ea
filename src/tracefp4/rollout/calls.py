"""Calls that give completions: submit a list, step until all of it is done, or take what there is.

`generate` draws, `force` decodes given tokens, `extend` goes on with trajectories, `suspend` cuts them short. They know
an engine that can be stepped and nothing of what a step does. Requests that others have submitted run along.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from itertools import chain

from tracefp4.rollout.completion import Completion, SamplingParams
from tracefp4.rollout.jobs import Job, extending_job, forced_jobs
from tracefp4.rollout.ledger import Ledger
from tracefp4.rollout.scheduler import Scheduler
from tracefp4.rollout.sequence import Sequence

Enough = Callable[[list[Completion]], bool]
"""Asked with a prompt's finished completions, without records: True if its other samples are no longer wanted."""


class CompletingCalls(ABC):
    """The calls, over an engine's own steps."""

    _ledger: Ledger
    _scheduler: Scheduler

    @property
    @abstractmethod
    def has_work(self) -> bool:
        """True while any request is unfinished."""

    @abstractmethod
    def step(self) -> list[Sequence]:
        """Run one pass; returns the sequences that finished in it."""

    @abstractmethod
    def abort(self, request_id: int) -> None:
        """End a request now."""

    @abstractmethod
    def _submit(self, job: Job, *, prompt_index: int) -> int:
        """Queue a job; returns its request id."""

    @abstractmethod
    def _check(self, job: Job) -> None:
        """Refuse a job that cannot be run."""

    def _drop(self, request_ids: Collection[int]) -> None:
        """Forget requests entirely, finished parts too; after an error in the middle of a pass."""
        for request_id in request_ids:
            self.abort(request_id)
        self._ledger.drop(set(request_ids))

    def generate(
        self, prompts: list[list[int]], params: SamplingParams, *, enough: Enough | None = None
    ) -> list[list[Completion]]:
        """Complete every prompt n times.

        Args:
            prompts: token ids; none may be empty. An empty list gives an empty list.
            params: for all of them.
            enough: asked whenever samples of a prompt have finished; True aborts the prompt's other samples, which
                come back with what they have.

        Returns:
            [len(prompts)][n], in the order of prompts and sample indices.

        Raises: ConfigError for a prompt that is empty, has unknown ids, or can never fit; then nothing was
            queued.
        """
        return self._run([Job(prompt, params) for prompt in prompts], enough=enough)

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
        jobs = forced_jobs(prompts, completions=completions, temperature=temperature)
        for tokens in chain.from_iterable(completions):
            self._check(Job(tokens, jobs[0].params))
        return self._run(jobs)

    def extend(
        self,
        completions: list[Completion],
        added: list[list[int]],
        params: SamplingParams,
        *,
        recompute: bool = False,
    ) -> list[Completion]:
        """Go on with trajectories: append tokens of the environment, then sample.

        Only new positions are computed: the last sampled token, the added ones, and those sampled now. K and V of the
        earlier positions are written from the record's codes; where it does not hold them they are computed again.

        Args:
            completions: trajectories of this engine, or of one with the same plan; aborted ones too. Not changed.
            added: for each its tokens; may be empty (a rollout in parts).
            params: for the new tokens; n must be 1. The position is part of the noise, so an aborted completion that
                goes on under its own seed draws what it would have drawn.
            recompute: compute K and V of the earlier positions again, under the weights in use; the record's K and V
                are then the new ones.

        Returns:
            The whole trajectories, one record each.

        Raises:
            ConfigError: n above 1, lists of unequal length, unknown ids, or a trajectory that can never fit.
            RecordError: a record of another plan, scheme or codec than this engine's.
        """
        pairs = zip(completions, added, strict=True)
        jobs = [extending_job(c, tokens, params, recomputes=recompute) for c, tokens in pairs]
        return [row[0] for row in self._run(jobs)]

    def take_finished(self) -> list[Completion]:
        """Hand over every finished completion, oldest request first, and forget them."""
        ids = {sequence.request.request_id for sequence in self._ledger.finished}
        return [completion for _, completion in self._ledger.take(ids)]

    def suspend(self) -> list[Completion]:
        """Abort every unfinished request and hand its samples over, finished ones too; `extend` goes on with those
        whose reason is `abort`."""
        ids = self._scheduler.request_ids
        for request_id in ids:
            self.abort(request_id)
        return [completion for _, completion in self._ledger.take(ids)]

    def _run(self, jobs: list[Job], *, enough: Enough | None = None) -> list[list[Completion]]:
        for job in jobs:
            self._check(job)
        ids: list[int] = []
        try:
            ids += (self._submit(job, prompt_index=i) for i, job in enumerate(jobs))
            while self.has_work:
                finished = {sequence.request.request_id for sequence in self.step()}
                for request_id in finished.intersection(ids):
                    if enough is not None and enough(self._ledger.peek(request_id)):
                        self.abort(request_id)
            taken = self._ledger.take(set(ids))
        except BaseException:
            self._drop(ids)
            raise
        by_request: dict[int, list[Completion]] = {request_id: [] for request_id in ids}
        for request_id, completion in taken:
            by_request[request_id].append(completion)
        return list(by_request.values())

"""What `generate`, `force` and `extend` queue: tokens to begin with, how to draw, and what is given beyond that."""

from collections.abc import Sequence
from dataclasses import dataclass

from tracefp4.errors import ConfigError
from tracefp4.kvcache.pool import CacheShape
from tracefp4.rollout.completion import Completion, SamplingParams
from tracefp4.rollout.sequence import Request


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt to run."""

    prompt_ids: list[int]
    """P token ids, P at least 1."""
    params: SamplingParams
    """How to draw."""
    forced: tuple[tuple[int, ...], ...] | None = None
    """Tokens to take in place of drawn ones, one tuple per sample; None draws."""
    earlier: Completion | None = None
    """The trajectory that goes on; None starts one."""
    added: tuple[int, ...] = ()
    """Tokens that follow it before the next one is drawn."""
    recomputes: bool = False
    """K and V of the earlier positions are computed again instead of restored."""

    def request(self, request_id: int, *, prompt_index: int) -> Request:
        """Return the queue entry of this job under an engine's own number; a trajectory keeps its prompt's index."""
        return Request(
            request_id=request_id,
            prompt_index=prompt_index if self.earlier is None else self.earlier.prompt_index,
            prompt_ids=list(self.prompt_ids),
            params=self.params,
            forced=self.forced,
            earlier=self.earlier,
            added=self.added,
            recomputes=self.recomputes,
        )


def extending_job(
    completion: Completion, added: Sequence[int], params: SamplingParams, *, recomputes: bool = False
) -> Job:
    """Queue entry that goes on from a trajectory.

    Raises: ConfigError for n above 1.
    """
    if params.n != 1:
        raise ConfigError(
            f"A trajectory goes on in one way; got n {params.n}. n must be 1. Extend the same completion several "
            "times under different seeds to branch."
        )
    return Job(
        completion.prompt_ids,
        params,
        earlier=completion,
        added=tuple(added),
        recomputes=recomputes,
    )


def forced_jobs(
    prompts: Sequence[list[int]], *, completions: Sequence[Sequence[Sequence[int]]], temperature: float
) -> list[Job]:
    """Queue entries that decode given completions.

    Raises: ConfigError for a prompt without completions, or a temperature not above 0.
    """
    jobs = []
    for prompt, group in zip(prompts, completions, strict=True):
        if not group or temperature <= 0:
            raise ConfigError(
                f"force needs completions for every prompt and a temperature above 0; got {len(group)} "
                f"completions at temperature {temperature}. Leave out prompts without completions."
            )
        params = SamplingParams(max_tokens=max(map(len, group)), temperature=temperature, n=len(group))
        jobs.append(Job(prompt, params, tuple(map(tuple, group))))
    return jobs


def check_tokens(tokens: Sequence[int], *, vocab_size: int) -> None:
    """Refuse a prompt that cannot be run.

    Raises: ConfigError for no tokens, or ids outside the vocabulary (up to eight are shown).
    """
    unknown = sorted({token for token in tokens if not 0 <= token < vocab_size})[:8]
    if not tokens or unknown:
        raise ConfigError(
            f"A prompt needs at least one token, all of the vocabulary; got {len(tokens)} tokens, unknown ids "
            f"{unknown}. Ids lie in 0..{vocab_size - 1}. Check the tokenizer, or add a start token."
        )


def check_job(job: Job, *, vocab_size: int, can_decode: bool) -> None:
    """Refuse what cannot be run.

    Raises: ConfigError as `check_tokens` for the prompt and what was added, or for stop texts without a decoder.
    """
    check_tokens(job.prompt_ids, vocab_size=vocab_size)
    for tokens in (job.added, [] if job.earlier is None else job.earlier.token_ids):
        if tokens:
            check_tokens(tokens, vocab_size=vocab_size)
    if job.params.stop and not can_decode:
        raise ConfigError(
            f"Stop texts need text; got stop {job.params.stop} for an engine without a decoder. Allowed are "
            "stop_token_ids, or an engine made with decode. Pass decode=tokenizer.decode."
        )


def check_fits(job: Job, shape: CacheShape, *, max_length: int) -> None:
    """Refuse what could not even run alone.

    Raises: ConfigError for a longest completion of more than `max_length` positions, or more pages than the pool has.
    """
    num_given = len(job.prompt_ids) + len(job.added)
    num_given += 0 if job.earlier is None else len(job.earlier.token_ids)
    params, length = job.params, num_given + job.params.max_tokens - 1
    asked = f"a prompt of {num_given} tokens with max_tokens {params.max_tokens} and n {params.n}"
    if length > max_length:
        raise ConfigError(
            f"A request is longer than a sequence may be; got {asked}, which has {length} positions. At most "
            f"{max_length} are allowed. Raise max_length, as far as the model goes, or lower max_tokens."
        )
    needed = -(-length // shape.page_size)
    needed += params.n > 1 and num_given % shape.page_size > 0  # its own copy of a shared page
    if needed > shape.num_pages:
        raise ConfigError(
            f"A request can never fit into the KV pool; got {asked}, which needs {needed} pages. The pool has "
            f"{shape.num_pages} pages of {shape.page_size} positions. Raise num_pages or lower max_tokens."
        )

"""What `generate` and `force` queue: a prompt, its parameters, and the tokens of each sample when they are given."""

from collections.abc import Sequence
from dataclasses import dataclass

from tracefp4.errors import ConfigError
from tracefp4.rollout.completion import SamplingParams
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

    def request(self, request_id: int, *, prompt_index: int) -> Request:
        """Return the queue entry of this job under an engine's own number."""
        return Request(
            request_id=request_id,
            prompt_index=prompt_index,
            prompt_ids=list(self.prompt_ids),
            params=self.params,
            forced=self.forced,
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

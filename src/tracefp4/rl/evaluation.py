"""Held-out accuracy of a policy as it would be deployed: rounding to nearest, no guidance."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tracefp4.errors import ConfigError
from tracefp4.rl.config import TaskConfig
from tracefp4.rl.episodes import build_episodes
from tracefp4.rl.prompts import build_scorer, encode
from tracefp4.rl.rewards import Scorer
from tracefp4.rl.tasks import Task, TaskSource
from tracefp4.rl.trajectories import Played
from tracefp4.rollout import Completion, Engine, LocalEngine, SamplingParams

# a completion is right when its reward is at least this
CORRECT_AT = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """Accuracy over held-out items."""

    accuracy: float
    """Mean over items of the share of its samples whose reward is at least 1 (pass@1)."""
    standard_error: float
    """Of that mean over items: sample standard deviation / sqrt(items)."""
    pass_at_k: dict[int, float]
    """k -> probability that at least one of k samples is right (unbiased estimate), for k up to the samples drawn."""
    num_items: int
    """Items scored."""
    mean_tokens: float
    """Mean length of a completion in sampled tokens."""
    outcomes: dict[str, int]
    """How often each verifier outcome occurred."""


def evaluate(
    engine: Engine,
    *,
    tokenizer: Any,
    source: TaskSource,
    scorer: Scorer,
    params: SamplingParams,
    num_items: int,
) -> Evaluation:
    """Complete `num_items` held-out prompts and score them.

    Args:
        engine: rounds to nearest, as deployed.
        tokenizer: encodes prompts and decodes completions.
        source: the held-out items 0 .. num_items - 1.
        scorer: the verifier; its counts are those of this evaluation.
        params: sampling; temperature 0 is greedy, n > 1 gives pass@k.
        num_items: at least 1.

    Raises:
        ConfigError: num_items below 1, or more items than the source has.
    """
    tasks = _items(source, num_items)
    prompts = [encode(task, tokenizer=tokenizer) for task in tasks]
    results = [
        [
            Played(completion=c, reward=score_completion(c, task, tokenizer=tokenizer, scorer=scorer))
            for c in group
        ]
        for task, group in zip(tasks, engine.generate(prompts, params), strict=True)
    ]
    return _evaluation(results, outcomes=scorer.counts)


def evaluate_task(
    task: TaskConfig,
    engine: LocalEngine,
    *,
    tokenizer: Any,
    source: TaskSource,
    params: SamplingParams,
    num_items: int,
) -> Evaluation:
    """Evaluate as a recipe's [task] table says: with its verifier, and with its environment if it names one.

    Args:
        task: the table.
        engine: rounds to nearest, as deployed; with an environment that has stop texts it needs `decode`.
        tokenizer, source, params, num_items: as for `evaluate`.

    Raises:
        ConfigError: as `evaluate` and `build_environment`.
        RecordError: a verifier or an environment that fails where the table says "raise".
    """
    scorer = build_scorer(task)
    try:
        episodes = build_episodes(task, engine=engine, tokenizer=tokenizer, scorer=scorer)
        if episodes is not None:
            results = episodes.play(_items(source, num_items), params)
            return _evaluation(results, outcomes=scorer.counts)
        return evaluate(
            engine,
            tokenizer=tokenizer,
            source=source,
            scorer=scorer,
            params=params,
            num_items=num_items,
        )
    finally:
        scorer.close()


def _items(source: TaskSource, num_items: int) -> list[Task]:
    if num_items < 1:
        raise ConfigError(
            f"evaluate needs at least 1 item; got {num_items}. Ask for some, or skip evaluation."
        )
    return [source.item(i) for i in range(num_items)]


def _evaluation(results: Sequence[Sequence[Played]], *, outcomes: Mapping[str, int]) -> Evaluation:
    """Accuracy of [items][samples]."""
    num_items, n = len(results), len(results[0])
    right = [sum(played.reward >= CORRECT_AT for played in group) for group in results]
    shares = [count / n for count in right]
    lengths = [sum(played.completion.sampled_flags) for group in results for played in group]
    return Evaluation(
        accuracy=math.fsum(shares) / num_items,
        standard_error=standard_error(shares),
        pass_at_k={k: math.fsum(pass_at_k(n, c, k) for c in right) / num_items for k in _powers(n)},
        num_items=num_items,
        mean_tokens=sum(lengths) / len(lengths),
        outcomes=dict(outcomes),
    )


def score_completion(completion: Completion, task: Task, *, tokenizer: Any, scorer: Scorer) -> float:
    """Decode one completion (stop tokens dropped) and return its reward."""
    text = tokenizer.decode(completion.token_ids, skip_special_tokens=True)
    return scorer.score(task, completion=text).value


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Return the unbiased estimate 1 - C(n - c, k) / C(n, k), 1 where n - c < k.

    Args:
        num_samples: n >= k.
        num_right: c, 0 .. n.
        k: at least 1.

    Source: Chen et al. 2021 (arXiv 2107.03374), section 2.1.
    """
    if num_samples - num_right < k:
        return 1.0
    return 1.0 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def standard_error(values: Sequence[float]) -> float:
    """Sample standard deviation over sqrt(n); 0 for fewer than two values."""
    n = len(values)
    if n < 2:
        return 0.0
    mean = math.fsum(values) / n
    return math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1) / n)


def _powers(n: int) -> list[int]:
    return [2**i for i in range(n.bit_length()) if 2**i <= n]
